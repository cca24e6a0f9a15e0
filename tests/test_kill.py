"""SIGKILL to a job's leader, to a whole job, to the store's host: the other jobs must not care.

Jobs of two ranks under ``cruxrun`` on loopback. The one that stays has the same losses, bit for
bit, as under plain torchrun; it gets a plan again, and the dead ones leave it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_fakes import free_port, until

from crux_torch.control.records import Plan
from crux_torch.control.registry import Registry
from crux_torch.control.tcp_store import TcpStore
from crux_torch.errors import StoreError

JOB = str(Path(__file__).with_name("kill_job.py"))
ROOT = Path(__file__).parent.parent
BOUND_S = 60
LEASE_S = 2.0
#: Steps of the undisturbed run: more than the disturbed one gets to while the test looks.
STEPS = 4000
SEED = 3


class Job:
    """One launcher with its two workers."""

    def __init__(self, launcher: str, folder: Path, *arguments: str, **env: str) -> None:
        folder.mkdir()
        self.name, self.folder = folder.name, folder
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "PET_"))}
        paths = [str(ROOT), str(ROOT / "launcher"), inherited.pop("PYTHONPATH", "")]
        options = ["--standalone", "--nproc-per-node=2", "--monitor-interval=0.1", JOB, str(folder)]
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", launcher, *options, f"--seed={SEED}", *arguments],
                env={
                    **inherited,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def pid(self, rank: int) -> int:
        return int((self.folder / f"{rank}.pid").read_text())

    def status(self, rank: int = 0) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            read: dict[str, Any] = json.loads((self.folder / f"{rank}.status").read_text())
            return read
        return {}

    def leader(self) -> dict[str, Any]:
        return self.status().get("leader") or {}

    def follows(self, plan: Plan) -> bool:
        """Whether the sockets of both ranks carry this plan's class."""
        entry = plan.entry(self.name)
        for rank in (0, 1):
            status = self.status(rank)
            order, applied = status.get("order"), status.get("applied")
            if entry is None or not order or order["measuring"] or not applied["marked"]:
                return False
            if (order["plan_epoch"], applied["level"]) != (plan.epoch, entry.level):
                return False
        return True

    def losses(self) -> list[str]:
        return (self.folder / "losses").read_text().splitlines()

    def steps(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return len(self.losses())
        return 0

    def said(self) -> list[str]:
        return self.errors.read_text().splitlines()

    def end(self) -> None:
        """Let it end by itself."""
        (self.folder / "stop").touch()
        assert self.launcher.wait(BOUND_S) == 0, self.errors.read_text()

    def kill_everything(self) -> None:
        """SIGKILL to the launcher and its workers, which have sessions of their own."""
        pids = self.worker_pids() + [self.launcher.pid] * (self.launcher.poll() is None)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait(BOUND_S)
        until(lambda: not any(map(_alive, pids)), BOUND_S, "the processes to end")

    def worker_pids(self) -> list[int]:
        pids = []
        for rank in (0, 1):
            with contextlib.suppress(FileNotFoundError):
                pid = self.pid(rank)
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if str(self.folder).encode() in command:
                        pids.append(pid)
        return pids


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Cluster:
    """The plan and the jobs as an onlooker reads them from the shared store."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._store = TcpStore(host, int(port))
        self._registry = Registry(self._store, "default")

    def jobs(self) -> set[str]:
        with contextlib.suppress(StoreError):
            return {record.job for record in self._registry.jobs()}
        return set()

    def plan(self) -> Plan | None:
        with contextlib.suppress(StoreError):
            state = self._registry.plan()
            return state.stored.plan if state.stored is not None else None
        return None

    def close(self) -> None:
        self._store.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def launch(launcher: str, name: str, *arguments: str, **env: str) -> Job:
        jobs.append(Job(launcher, tmp_path / name, *arguments, **env))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.kill_everything()


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def cluster(endpoint: str) -> Iterator[Cluster]:
    cluster = Cluster(endpoint)
    yield cluster
    cluster.close()


def listens(endpoint: str) -> bool:
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


@pytest.mark.slow
def test_a_job_trains_on_and_is_planned_anew_whoever_dies(start, endpoint, cluster):
    crux = {
        "CRUX_STORE": endpoint,
        "CRUX_LEASE_S": str(LEASE_S),
        "CRUX_PLAN_VALID_S": "4",
        "CRUX_PROFILE_S": "3",
        "CRUX_PROFILE_ITERATIONS": "5",
        "CRUX_TICK_S": "0.05",
    }

    def launch(name: str) -> Job:
        return start("cruxrun", name, f"--steps={STEPS}", "--status", CRUX_JOB=name, **crux)

    host = launch("host")
    until(lambda: listens(endpoint), BOUND_S, "the first job to host the store")
    stays, headless, gone = launch("stays"), launch("headless"), launch("gone")
    jobs = {job.name: job for job in (host, stays, headless, gone)}

    def planned() -> bool:
        plan = cluster.plan()
        if plan is None or {entry.job for entry in plan.entries} != set(jobs):
            return False
        return all(job.follows(plan) for job in jobs.values())

    def still_trains() -> None:
        """The job that stays makes steps, and the plan in force is of those that live."""
        before = stays.steps()
        until(planned, BOUND_S, f"a plan for {sorted(jobs)}")
        until(lambda: stays.steps() > before + 20, BOUND_S, "more steps")
        assert stays.launcher.poll() is None
        # Every reader ends a lease by its own clock.
        until(lambda: cluster.jobs() == set(jobs), BOUND_S, f"records of {sorted(jobs)} only")
        epochs.append(stays.status()["order"]["plan_epoch"])

    epochs: list[int] = []
    still_trains()
    incarnation = stays.leader()["incarnation"]
    levels = {job.status(1)["applied"]["level"] for job in jobs.values()}
    assert len(levels) > 1

    # The leader rank alone: torchrun's agent ends the job, as it does for any dead worker.
    os.kill(headless.pid(0), signal.SIGKILL)
    assert headless.launcher.wait(BOUND_S) == 1
    del jobs["headless"]
    still_trains()

    gone.kill_everything()
    del jobs["gone"]
    still_trains()

    # With it the store: another cruxrun hosts an empty one, and the leaders write their records.
    host.kill_everything()
    del jobs["host"]
    still_trains()
    until(lambda: stays.leader()["store"] == "ok", BOUND_S, "the store to be back")

    assert epochs == sorted(set(epochs))
    assert stays.leader()["incarnation"] == incarnation
    assert stays.status()["errors"] == {}
    stays.end()
    undisturbed = start("torch.distributed.run", "undisturbed", f"--steps={STEPS}", "--sleep-s=0")
    until(lambda: undisturbed.steps() >= stays.steps(), BOUND_S, "the undisturbed losses")
    assert stays.steps() > 100
    assert undisturbed.losses()[: stays.steps()] == stays.losses()
    # That the store was away may be said, once; nothing else may.
    assert len([line for line in stays.said() if "store" not in line]) == 0, stays.said()
    assert len(stays.said()) <= 1
