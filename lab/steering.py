"""Jobs that start, wait and are looked after beside each other, and the store that they share."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from lab.fabric import Fabric, Host
from lab.job import ROOT, Job, JobError

STORE_PORT = 29410


class StoreWatch:
    """Follows the state of a cluster's store, through a process (:mod:`lab.watch`).

    Args:
        store: its endpoint.
        secret: the file with its secret; empty if it needs none.
        cluster: name in the store.
        fabric, host: the network and the host of the process; None: this machine.

    Attributes:
        status: the last state, as ``crux status --json`` prints it; empty before the first.
    """

    def __init__(
        self,
        store: str,
        secret: str,
        cluster: str,
        fabric: Fabric | None = None,
        host: Host | None = None,
    ) -> None:
        self.status: dict[str, Any] = {}
        argv = [sys.executable, "-m", "lab.watch", store, secret, cluster]
        options: dict[str, Any] = {
            "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT,
        }  # fmt: skip
        if fabric and host:
            self._process = fabric.popen(host, argv, **options)
        else:
            self._process = subprocess.Popen(argv, start_new_session=True, **options)
        threading.Thread(target=self._read, name="watch", daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.status = json.loads(line)

    def close(self) -> None:
        """End the process; ``status`` stays."""
        self._process.kill()
        self._process.wait()


def make_secret(folder: Path) -> str:
    """Returns the name of a file in ``folder`` with a new secret, which only this user may read."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(16))
    return str(file)


def look_after(
    jobs: Collection[Job], seconds: float, condition: Callable[[], bool] = lambda: False
) -> bool:
    """Returns True once ``condition`` holds, and False if it does not within so many seconds.

    Raises:
        JobError: a job has ended meanwhile.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        for job in jobs:
            job.check()
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def wait_until(
    condition: Callable[[], bool], jobs: Collection[Job], seconds: float, what: str
) -> None:
    """Wait for ``condition``, called ``what``, and look after the jobs meanwhile.

    Raises:
        JobError: a job has ended, or it takes more than so many seconds.
    """
    if not look_after(jobs, seconds, condition):
        raise JobError(f"{what} took over {seconds:g} s\n{next(iter(jobs)).tail()}")


def pause_after_first_steps(jobs: Collection[Job], seconds: float) -> None:
    """Let each of the jobs that start pause after its first steps.

    Raises:
        JobError: a job has ended, or that takes more than so many seconds.
    """
    starting = list(jobs)

    def started() -> bool:
        for job in [job for job in starting if job.steps()]:
            job.pause()
            starting.remove(job)
        return not starting

    wait_until(started, jobs, seconds, "the ranks' start")
