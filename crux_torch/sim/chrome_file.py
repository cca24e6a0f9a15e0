"""The file of a Chrome trace: its events, and what launched them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from crux_torch.sim.input_text import decode_json
from crux_torch.sim.workload import ImportFailed

#: What begins the names of the kernels of communication libraries: NCCL and its relatives of other
#: vendors, NVSHMEM, DeepEP.
_LIBRARY = re.compile(
    r"(?:void )?(?:nccl|rccl|msccl|mscclpp|oneccl|hccl|cncl|mccl|bkcl|nvshmem|rocshmem)"
    r"|.{0,64}(?:\bdeep_?ep::|\bep::(?:internode|intranode))",
    re.I,
)
#: Kinds of events that run on a device.
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
#: Ranks of a job that is read; more is taken for a broken file.
MOST_RANKS = 1 << 20
#: Share of the kernels whose launches are in a trace that records launches.
MOSTLY = 0.5
Args = Mapping[str, Any]
Key = int | str | None


class Event(msgspec.Struct):
    """One event of a trace; times in microseconds."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float | None = 0.0
    dur: float | None = 0.0
    tid: int | str | None = None
    args: dict[str, Any] | None = None

    @property
    def about(self) -> Args:
        return self.args or {}

    def key(self, name: str) -> Key:
        """Returns the event's argument of that name, which links it to other events."""
        value = self.about.get(name)
        return value if isinstance(value, int | str) else None

    @property
    def begin(self) -> float:
        return self.ts or 0.0

    @property
    def end(self) -> float:
        return self.begin + (self.dur or 0.0)

    @property
    def communicates(self) -> bool:
        """True for a kernel of a communication library, and for what says that it is one."""
        return "Collective name" in self.about or bool(_LIBRARY.match(self.name))


class Origin(NamedTuple):
    """Whose trace it is: the rank, the ranks of its job, and what the job says of its groups."""

    rank: int
    world: int
    groups: Any


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    pg_config: Any = None


class _Trace(msgspec.Struct):
    traceEvents: list[Event]
    distributedInfo: _Distributed | None = None


class Launch(NamedTuple):
    """The call on the host that started a kernel.

    Attributes:
        at: when, in microseconds.
        tid: the thread that called.
        graph: it started a CUDA graph, in which the kernel is one of many.
        operation: the ``External id`` of the operation that called.
    """

    at: float
    tid: Key
    graph: bool
    operation: Key


def read_trace(held: bytes) -> tuple[Origin, list[Event]]:
    """Whose trace it is, and its events that have a duration, in the order of time.

    Raises:
        ImportFailed: it is no trace, or of no job of several ranks.
    """
    try:
        trace = decode_json(held, _Trace)
    except ValueError as error:
        raise ImportFailed(f"expected a trace with traceEvents: {error}") from None
    about = trace.distributedInfo or _Distributed()
    if about.rank is None or about.world_size is None or not 0 <= about.rank < about.world_size:
        raise ImportFailed(
            "distributedInfo: expected rank and world_size of a distributed job, which torch's "
            "profiler writes while there is a process group"
        )
    if about.world_size > MOST_RANKS:
        raise ImportFailed(
            f"distributedInfo: world_size is {about.world_size}, expected {MOST_RANKS} at most"
        )
    if about.world_size == 1:
        raise ImportFailed("distributedInfo: world_size is 1, expected a job of several ranks")
    events = [
        e for e in trace.traceEvents if e.ph == "X" and e.ts is not None and (e.dur or 0.0) >= 0
    ]
    if not events:
        raise ImportFailed("expected events with a duration")
    devices = {e.key("device") for e in events if e.cat == "kernel" and e.communicates}
    if len(devices) > 1:
        raise ImportFailed(
            f"kernels communicate on {len(devices)} devices, so the file has several ranks put "
            "together; expected a file for each rank"
        )
    origin = Origin(about.rank, about.world_size, about.pg_config)
    return origin, sorted(events, key=lambda event: event.begin)


def mostly_launched(kernels: Sequence[Event], launches: Mapping[Key, Launch]) -> bool:
    """True if the launches of these kernels are recorded, but for those before the recording."""
    known = sum(kernel.key("correlation") in launches for kernel in kernels)
    return known > MOSTLY * len(kernels)


def launches_of(events: Sequence[Event]) -> dict[Key, Launch]:
    """The call that launched what runs on the device, by its correlation."""
    return {
        number: Launch(e.begin, e.tid, "graph" in e.name.lower(), e.key("External id"))
        for e in events
        if e.cat not in ON_DEVICE and (number := e.key("correlation"))
    }
