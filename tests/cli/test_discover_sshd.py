"""``crux topology discover --hosts`` over a real sshd, which listens on loopback."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_fakes import until
from loopback import free_port
from places import ROOT, SUPPORT

from crux_torch.network.loaders import load_topology

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        os.geteuid() != 0 or not SSHD or not shutil.which("ssh"),
        reason="it takes root, sshd and ssh (`make apt-lab`)",
    ),
]
HOSTS = ("h0", "h1", "h2", "h3")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """A command that reaches each of ``HOSTS``, all of them this machine, by a key."""
    assert SSHD is not None
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(make, check=True, timeout=60)
    port, config = free_port(), tmp_path / "sshd_config"
    lines = [f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {tmp_path}/host", "UsePAM no"]
    lines += [f"AuthorizedKeysFile {tmp_path}/user.pub", "StrictModes no", "AcceptEnv *"]
    lines += ["PermitRootLogin prohibit-password", "PidFile none", "PasswordAuthentication no"]
    config.write_text("\n".join(lines) + "\n")
    told = tmp_path / "ssh_config"
    common = f"HostName 127.0.0.1\nPort {port}\nIdentityFile {tmp_path}/user\n"
    common += f"UserKnownHostsFile {tmp_path}/known\nStrictHostKeyChecking accept-new\n"
    # The simulated network asks for the host's name in the environment.
    variables = f"PYTHONPATH={ROOT} SURVEY_LEAVES=0,0,1,1"
    told.write_text(
        "".join(f"Host {host}\n{common}SetEnv HOST={host} {variables}\n" for host in HOSTS)
    )
    # sshd wants it empty; its Debian package makes it when the service starts.
    empty = Path("/run/sshd")
    made = not empty.exists()
    empty.mkdir(exist_ok=True)
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=log)
    try:
        until(lambda: "listening" in (tmp_path / "log").read_text(), 60, "sshd")
        yield f"ssh -o BatchMode=yes -F {told}"
    finally:
        daemon.terminate()
        daemon.wait()
        if made:
            empty.rmdir()


def test_the_hosts_are_reached_over_ssh(ssh: str, tmp_path: Path) -> None:
    worker = shlex.join([sys.executable, str(SUPPORT / "survey_worker.py")])
    command = [*(sys.executable, "-m", "crux_torch.cli", "topology", "discover")]
    command += ["--hosts", ",".join(HOSTS), "--ssh", ssh, "--remote", worker]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cluster.yaml: 4 hosts, 4 switches, 16 directed links" in done.stdout
    assert set(load_topology(tmp_path / "cluster.yaml").hosts) == set(HOSTS)


def test_a_host_that_lets_nobody_in_is_named(ssh: str, tmp_path: Path) -> None:
    (tmp_path / "user.pub").write_text("")
    command = [sys.executable, "-m", "crux_torch.cli", "topology", "discover", "--wait", "10"]
    done = subprocess.run(
        [*command, "--hosts", "h0,h1", "--ssh", ssh],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    # Both are refused; the command may hear of the second before it ends.
    assert re.search(r"can't run on h[01](, h1)? \(h[01]: \S+: Permission denied", done.stderr)
