"""Shared by the tests of ``crux_torch.agreement``: a clock, faults, records, real processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from loopback import free_port

from crux_torch.agreement.records import JobRecord, PlanEntry
from crux_torch.errors import StoreError
from crux_torch.measure.profile import HostFlow, JobProfile, ProfileBurst
from crux_torch.network.topology import Topology
from crux_torch.store import MAX_LEASE_S, check_write
from crux_torch.store.host import StoreHost

SPAWN = multiprocessing.get_context("spawn")


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class MemoryStore:
    """The shared store inside one process, with leases by a clock that the test moves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: Value and end of each key's lease.
        self.entries: dict[str, tuple[bytes, float]] = {}

    def get(self, key: str) -> bytes | None:
        return self.list(key).get(key)

    def put(self, key: str, value: bytes, lease_s: float = MAX_LEASE_S) -> None:
        check_write(key, value, lease_s)
        self.write(key, value, lease_s)

    def write(self, key: str, value: bytes, lease_s: float = MAX_LEASE_S) -> None:
        """Write also what :func:`check_write` refuses."""
        self.entries[key] = bytes(value), self._clock() + lease_s

    def delete(self, key: str) -> None:
        self.entries.pop(key, None)

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease_s: float = MAX_LEASE_S
    ) -> bool:
        with self._lock:
            if self.get(key) != expected:
                return False
            self.put(key, value, lease_s)
            return True

    def list(self, prefix: str) -> dict[str, bytes]:
        now, entries = self._clock(), dict(self.entries)
        return {k: v for k, (v, ends_s) in entries.items() if k.startswith(prefix) and now < ends_s}

    def origin(self, key: str) -> str:
        return "a test" if self.get(key) is not None else ""

    def clock_ns(self) -> int:
        return round(self._clock() * 1e9)

    def close(self) -> None:
        pass


class FaultyStore:
    """A store that fails before or after the operation, or forgets everything, at random."""

    def __init__(self, inner: MemoryStore, rng: random.Random) -> None:
        self.inner, self.rng = inner, rng
        self.fail = 0.0
        self.lose = 0.0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.inner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.rng.random() < self.lose:
                self.inner.entries.clear()
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


def by_name(
    records: Sequence[JobRecord],
    _topology: Topology | None,
    /,
    *,
    policy: str = "",
    weights: object = None,
) -> tuple[PlanEntry, ...]:
    """A planner that needs no scheduler: levels in the order of the names."""
    named = sorted((r for r in records if r.profile is not None), key=lambda r: r.job)
    return tuple(
        PlanEntry(job=r.job, level=min(i, 7), priority=1.0, intensity=1.0, correction=1.0)
        for i, r in enumerate(named)
    )


def until(condition: Callable[[], bool], seconds: float = 300.0, what: str = "condition") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@contextmanager
def hosted_store() -> Iterator[str]:
    """The endpoint of a store that this process hosts."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    host = StoreHost(endpoint, poll_s=0.05, linger_s=1.0)
    host.start()
    try:
        until(lambda: host.state == "hosting", what="the store")
        yield endpoint
    finally:
        host.stop()


def _host_until_killed(endpoint: str, states: Any) -> None:
    """A process like ``cruxrun``: hosts the store if it can, and says which is its server."""
    host = StoreHost(endpoint, poll_s=0.1, linger_s=1.0)
    host.start()
    last: tuple[str, int | None] = "", None
    while True:
        if (host.state, host.pid) != last:
            last = host.state, host.pid
            states.put((os.getpid(), *last))
        time.sleep(0.02)


class Hosts:
    """Processes on this machine of which one hosts the store; all of them end with the context."""

    def __init__(self, count: int) -> None:
        self.port = free_port()
        self._states = SPAWN.Queue()
        self._state: dict[int, str] = {}
        self._server: int | None = None
        args = (f"tcp://127.0.0.1:{self.port}", self._states)
        self._processes = [
            SPAWN.Process(target=_host_until_killed, args=args, daemon=True) for _ in range(count)
        ]

    def __enter__(self) -> Hosts:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(60)

    def wait_for_roles(self, count: int) -> None:
        """Wait until of ``count`` processes one hosts and the others stand by."""

        def as_wanted() -> bool:
            while not self._states.empty():
                pid, word, server = self._states.get()
                self._state[pid] = word
                if word == "hosting":
                    self._server = server
            return sorted(self._state.values()) == ["hosting"] + ["standby"] * (count - 1)

        until(as_wanted, what=f"one host of {count}")

    def server(self) -> int:
        """The process of the store."""
        assert self._server is not None
        return self._server

    def kill_hosting(self) -> None:
        """Kill the store, and who started it."""
        pid = next(pid for pid, word in self._state.items() if word == "hosting")
        process = next(p for p in self._processes if p.pid == pid)
        process.kill()
        process.join(60)
        os.kill(self.server(), signal.SIGKILL)
        del self._state[pid]
