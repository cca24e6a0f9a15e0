"""A Dask cluster on loopback: a scheduler and its workers, processes that are killed at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from control_fakes import until
from loopback import free_port
from places import ROOT, SUPPORT

BOUND_S = 300.0


class DaskCluster:
    """Its workers run until the context ends, or until one of their tasks kills them.

    ``LocalCluster`` would fail where a busy machine needs more than some seconds to end a worker.

    Args:
        folder: for what the processes print.
        workers: number of processes.
        threads: of each worker.

    Attributes:
        address: as ``--workers`` takes it.
        pids: of the workers.
    """

    def __init__(self, folder: Path, workers: int = 2, threads: int = 1) -> None:
        self._distributed = pytest.importorskip("distributed", reason="Dask is not installed")
        self._folder, self._workers, self._threads = folder, workers, threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port = free_port()
        self.address = f"dask://127.0.0.1:{self._port}"

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._processes[1:]}

    @property
    def scheduler(self) -> str:
        """The address as Dask takes it."""
        return self.address.replace("dask://", "tcp://")

    def __enter__(self) -> DaskCluster:
        try:
            self._start("scheduler", "--host", "127.0.0.1", "--port", str(self._port))
            alone = ("--no-nanny", "--nthreads", str(self._threads))
            for _ in range(self._workers):
                self._start("worker", self.scheduler, *alone)
            until(self._has_workers, BOUND_S, "the workers")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _has_workers(self) -> bool:
        assert all(process.poll() is None for process in self._processes), self._said()
        try:
            with self._distributed.Client(
                self.scheduler, timeout=5.0, set_as_default=False
            ) as client:
                return len(client.nthreads()) == self._workers
        except OSError:
            return False

    def _start(self, what: str, *arguments: str) -> None:
        path = os.pathsep.join([str(ROOT), str(SUPPORT), *sys.path])
        # One killed worker is enough for a task to fail.
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
        }
        with (self._folder / f"dask-{what}-{len(self._processes)}").open("wb") as said:
            command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments]
            self._processes.append(
                subprocess.Popen(
                    [*command, "--no-dashboard"],
                    cwd=self._folder,
                    env=env,
                    stdout=said,
                    stderr=said,
                )
            )

    def _said(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self._folder.glob("dask-*")))
