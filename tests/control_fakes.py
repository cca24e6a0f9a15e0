"""What the tests of ``crux_torch.control`` share: a clock, faults, records, real processes."""

from __future__ import annotations

import multiprocessing
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from crux_torch.control.memory_store import MemoryStore
from crux_torch.control.records import JobRecord, PlanEntry
from crux_torch.errors import StoreError
from crux_torch.profile.job_profile import HostFlow, JobProfile, ProfileBurst

SPAWN = multiprocessing.get_context("spawn")


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FaultyStore:
    """A store that fails before or after the operation, or forgets everything, at random."""

    pushes_changes = False

    def __init__(self, inner: MemoryStore, rng: random.Random) -> None:
        self.inner, self.rng = inner, rng
        self.fail = 0.0
        self.lose = 0.0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.inner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.rng.random() < self.lose:
                self.inner._entries.clear()
            if self.rng.random() < self.fail:
                raise StoreError("injected: before")
            result = operation(*args, **kwargs)
            if self.rng.random() < self.fail:
                raise StoreError("injected: after")
            return result

        return faulty


def profile(
    flops: float = 1e15, t_s: float = 0.1, period_s: float = 1.0, **changes: Any
) -> JobProfile:
    values: dict[str, Any] = {
        "period_s": period_s,
        "period_source": "both",
        "compute_s": 0.8,
        "flops": flops,
        "flops_source": "counted",
        "gpus": 8,
        "flows": (HostFlow("h0", "h1", 1e9), HostFlow("h1", "h0", 1e9)),
        "bursts": (ProfileBurst(0.5, 1.0),),
        "t_s": t_s,
        "t_source": "measured",
        "t_measured_s": t_s,
        "overlap": 0.5,
        "exposed_s": 0.1,
        "iterations": 12,
        "measured_alone": True,
    }
    return JobProfile(**{**values, **changes})


def record(job: str, incarnation: str = "i0", **changes: Any) -> JobRecord:
    values: dict[str, Any] = {
        "hosts": ("h0", "h1"),
        "gpus": 8,
        "state": "running",
        "profile": profile(),
    }
    return JobRecord(job=job, incarnation=incarnation, **{**values, **changes})


def by_name(records: Sequence[JobRecord], _topology: bytes | None) -> tuple[PlanEntry, ...]:
    """A planner that needs no scheduler: levels in the order of the names."""
    named = sorted((r for r in records if r.profile is not None), key=lambda r: r.job)
    return tuple(
        PlanEntry(job=r.job, level=min(i, 7), priority=1.0, intensity=1.0, correction=1.0)
        for i, r in enumerate(named)
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], bool], seconds: float = 30.0, what: str = "condition") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def host_until_killed(endpoint: str, states: Any) -> None:
    """A process like ``cruxrun``: hosts the store if it can, and reports its state's changes."""
    import os

    from crux_torch.control.host import StoreHost

    host = StoreHost(endpoint, poll_s=0.1)
    host.start()
    last = ""
    while True:
        if host.state != last:
            last = host.state
            states.put((os.getpid(), last))
        time.sleep(0.02)
