"""A Slurm of two nodes on this machine, with its own munge, for tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from control_fakes import until
from loopback import free_port

NODES = ("node0", "node1")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "unshare")
#: Where Debian has daemons, which is not on every user's path.
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(name, path=_PATH) for name in _PROGRAMS),
    reason=f"it takes root, and {', '.join(_PROGRAMS)} (`make apt-lab`)",
)
BOUND_S = 120
#: No cgroups: they are the machine's. More CPUs than there are, so that two jobs run at once.
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
NodeName=node0 NodeHostname=node0 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=node1 NodeHostname=node1 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=node[0-1] Default=YES State=UP
"""


class SlurmCluster:
    """A controller and the nodes ``node0`` and ``node1``; each node has its own host name.

    A node's processes, and those that jobs leave there, are in a PID namespace that ends with it.

    Args:
        folder: gets the configuration, state and logs.
        topology: what ``topology.conf`` is to hold.
    """

    def __init__(self, folder: Path, topology: str) -> None:
        self.folder = folder
        munge, conf = folder / "munge", folder / "slurm.conf"
        for made in (folder, munge, folder / "state", *(folder / name for name in NODES)):
            made.mkdir(exist_ok=True)
        # munged wants folders that others can't write to, and that they can look into.
        munge.chmod(0o755)
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        ports = [free_port() for _ in range(1 + len(NODES))]
        host = socket.gethostname().partition(".")[0]
        conf.write_text(_CONF.format(host=host, ports=ports, munge=munge, folder=folder))
        (folder / "topology.conf").write_text(topology)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "CRUX_"))}
        self.env = {**inherited, "PATH": _PATH, "SLURM_CONF": str(conf)}
        self._munge = munge
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self._munge / file}" for option, file in files.items()]
        try:
            # A temporary folder's parents are others'.
            self._start("munged", "--foreground", "--force", "--num-threads=2", *options)
            until((self._munge / "socket").exists, BOUND_S, "munged")
            self._start("slurmctld", "-D")
            for name in NODES:
                own = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
                self._start(*own, "sh", "-c", f"hostname {name}; exec slurmd -D -N {name}")
            until(lambda: self._states() == ["idle"] * len(NODES), BOUND_S, "the nodes to be idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()

    def _start(self, *command: str) -> None:
        with (self.folder / f"{len(self._daemons)}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.env, stdout=log, stderr=subprocess.STDOUT)
            )

    def _states(self) -> list[str]:
        asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(asked, env=self.env, capture_output=True, text=True, timeout=BOUND_S)
        return done.stdout.split()

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=BOUND_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def srun(
        self, *options: str, command: Sequence[str], errors: Path, **env: str
    ) -> subprocess.Popen[bytes]:
        """Starts ``srun OPTIONS python COMMAND``."""
        with errors.open("wb") as log:
            return subprocess.Popen(
                ["srun", *options, sys.executable, *command],
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
