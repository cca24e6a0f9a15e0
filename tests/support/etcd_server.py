"""An etcd of one or more members on loopback, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from control_fakes import until
from loopback import free_port

needs_etcd = pytest.mark.skipif(
    not (shutil.which("etcd") and shutil.which("etcdctl") and find_spec("pyetcd")),
    reason="it takes etcd and etcdctl (`make apt-lab`) and etcd-sdk-python",
)


class Etcd:
    """``members`` processes. ``tls`` are flags about certificates, ``flags`` are others.

    ``syncs``: each waits until the disk has what it writes. ``address``: where they listen.
    ``under``: a command that starts them, and what asks them, with its arguments.
    """

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        tls: Sequence[str] = (),
        flags: Sequence[str] = (),
        syncs: bool = False,
        address: str = "127.0.0.1",
        under: Sequence[str] = (),
    ) -> None:
        self._folder, self._address, self._under = folder, address, tuple(under)
        self._flags = (*tls, *flags, *(() if syncs else ("--unsafe-no-fsync",)))
        scheme = "https" if tls else "http"
        self.ports = [free_port() for _ in range(members)]
        peers = [free_port() for _ in range(members)]
        self._urls = [f"{scheme}://{address}:{port}" for port in self.ports]
        self._peers = [f"http://127.0.0.1:{port}" for port in peers]
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Etcd:
        for n in range(len(self.ports)):
            self.processes.append(self._start(n))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def _start(self, n: int) -> subprocess.Popen[bytes]:
        cluster = ",".join(f"m{i}={peer}" for i, peer in enumerate(self._peers))
        url, peer = self._urls[n], self._peers[n]
        with (self._folder / f"etcd{n}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(
                        *self._under,
                        "etcd",
                        "--name",
                        f"m{n}",
                        "--data-dir",
                        str(self._folder / f"m{n}"),
                    ),
                    *("--listen-client-urls", url, "--advertise-client-urls", url),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", cluster, *self._flags),
                ],
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("ETCD")},
            )

    @property
    def endpoints(self) -> str:
        return ",".join(f"{self._address}:{port}" for port in self.ports)

    def restart(self, n: int) -> None:
        self.processes[n].kill()
        self.processes[n].wait()
        self.processes[n] = self._start(n)

    def wipe(self, n: int) -> None:
        """Forget what a member that has ended had on its disk."""
        shutil.rmtree(self._folder / f"m{n}")

    def ctl(self, *arguments: str, **env: Any) -> str:
        """What etcdctl says; asked again for a minute while the members elect a leader."""
        deadline_s = time.monotonic() + 60.0
        while True:
            done = subprocess.run(
                [*self._under, "etcdctl", "--endpoints", ",".join(self._urls), *arguments],
                env={**os.environ, "ETCDCTL_API": "3", **env},
                capture_output=True,
                text=True,
                timeout=60,
            )
            if done.returncode == 0:
                return done.stdout
            assert any(said in done.stderr for said in ("timed out", "leader")), done.stderr
            assert time.monotonic() < deadline_s, done.stderr


def certificates(folder: Path, authority: str) -> dict[str, str]:
    """A certificate authority of that name, and a server's and a client's certificate by it."""
    made = {name: str(folder / f"{authority}.{name}") for name in ("ca", "ca-key", "cert", "key")}
    request, extra = folder / f"{authority}.csr", folder / f"{authority}.ext"
    extra.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    ca, ca_key, cert, key = made.values()
    new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    commands = [
        f"{new} -x509 -keyout {ca_key} -out {ca} -days 2 -subj /CN={authority}",
        f"{new} -keyout {key} -out {request} -subj /CN=member",
        f"x509 -req -in {request} -CA {ca} -CAkey {ca_key} -CAcreateserial -out {cert} -days 2 "
        f"-extfile {extra}",
    ]
    for command in commands:
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    return made


def wait_ready(etcd: Etcd, *flags: str) -> None:
    def works() -> bool:
        try:
            etcd.ctl(*flags, "endpoint", "health")
        except AssertionError:
            return False
        return True

    until(works, what="etcd to answer")
