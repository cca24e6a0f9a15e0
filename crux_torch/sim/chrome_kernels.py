"""Kernels that communicate, and the records that tell what each of them moves."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from crux_torch.sim.chrome_file import Args, Event, Key, Launch, mostly_launched
from crux_torch.sim.chrome_records import op_of
from crux_torch.sim.workload import ImportFailed

#: What a kernel is named after, without underscores, and the collectives that it may run.
_RUNS = {
    "allreduce": {"allreduce"},
    "allgather": {"allgather"},
    "reducescatter": {"reduce_scatter"},
    "broadcast": {"broadcast"},
    "reduce": {"reduce"},
    "sendrecv": {"send", "recv", "alltoall", "gather", "scatter"},
}


@dataclass(slots=True)
class Told:
    """Returns the collective of each communication kernel.

    Attributes:
        records: of each kernel that is told, by its identity.
        why_not: of each other kernel, why nothing tells it.
    """

    records: dict[int, list[Args]] = field(default_factory=dict)
    why_not: dict[int, str] = field(default_factory=dict)


def tell(events: Sequence[Event], launches: Mapping[Key, Launch]) -> Told:
    """Finds the records of every kernel of a trace.

    A kernel has its own record, or that of the operation on the host that launched it. The kernel
    of a batch has neither: the records that the host wrote since its launch before, and which no
    other kernel has, are those of the batch.

    Args:
        events: of the whole trace, in the order of time.
    """
    told = Told()
    on_host: defaultdict[Key, list[Event]] = defaultdict(list)
    for e in events:
        if e.cat != "kernel" and "Collective name" in e.about and _moves(e):
            on_host[e.key("External id")].append(e)
    kernels = [e for e in events if e.cat == "kernel" and e.communicates]
    taken, batches = set(), []
    for kernel in kernels:
        about, launch = kernel.about, launches.get(kernel.key("correlation"))
        key = kernel.key("External id") or (launch.operation if launch else None)
        recorded = "Group size" in about or "Collective name" in about
        if recorded and _moves(kernel):
            told.records[id(kernel)] = [about]
        elif key is not None and key in on_host:
            told.records[id(kernel)] = [e.about for e in on_host[key]]
        elif recorded and not _is_whole(about) and _moves(kernel) is not None:
            told.records[id(kernel)] = []  # a barrier
        else:
            batches.append(kernel)
            continue
        taken.add(key)
    free = sorted(
        (e for key, held in on_host.items() if key is None or key not in taken for e in held),
        key=lambda event: event.begin,
    )
    launched = mostly_launched(kernels, launches)
    if launched:
        _since_launch_before(told, kernels, batches, free, launches)
    else:
        _in_order(told, batches, free)
    for kernel in batches:
        if id(kernel) not in told.records:
            told.why_not[id(kernel)] = _why_not(kernel, launches, launched)
    return told


def _moves(event: Event) -> bool | None:
    """True if a record is of a collective that moves something; None if it is not known."""
    try:
        return op_of(event, event.about) is not None
    except ImportFailed:
        return None


def _is_whole(about: Args) -> bool:
    """True for the record of a batch, whose parts have records of their own."""
    return bool(re.search("coalesced|group|batch|point", str(about.get("Collective name")), re.I))


def _since_launch_before(
    told: Told,
    kernels: Sequence[Event],
    batches: Sequence[Event],
    free: Sequence[Event],
    launches: Mapping[Key, Launch],
) -> None:
    """The records between a batch's launch and the launch before it, on the same thread."""
    calls: defaultdict[Key, set[float]] = defaultdict(set)
    for kernel in kernels:
        if launch := launches.get(kernel.key("correlation")):
            calls[launch.tid].add(launch.at)
    parts: defaultdict[tuple[Key, int], list[Event]] = defaultdict(list)
    at = {tid: sorted(times) for tid, times in calls.items()}
    for e in free:
        if e.tid in at:
            parts[e.tid, bisect_right(at[e.tid], e.begin)].append(e)
    for kernel in batches:
        launch = launches.get(kernel.key("correlation"))
        if launch is None or launch.graph or "graph node id" in kernel.about:
            continue
        place = bisect_right(at[launch.tid], launch.at) - 1
        _give(told, kernel, parts[launch.tid, place])


def _in_order(told: Told, batches: Sequence[Event], free: Sequence[Event]) -> None:
    """The records in their order, where no launch is recorded.

    Kernels of one kind have equally many, or else those since the kernel before began.
    """
    of_kind: defaultdict[str, list[Event]] = defaultdict(list)
    for kernel in batches:
        if "graph node id" not in kernel.about:
            of_kind[_kind(kernel)].append(kernel)
    for kind, kernels in of_kind.items():
        records = [e for e in free if kind not in _RUNS or op_of(e, e.about) in _RUNS[kind]]
        each, rest = divmod(len(records), len(kernels))
        parts = [records[i * each : (i + 1) * each] for i in range(len(kernels))]
        if rest or any(
            part[-1].begin > k.begin for part, k in zip(parts, kernels, strict=True) if part
        ):
            begins = [e.begin for e in records]
            ends = [bisect_right(begins, kernel.begin) for kernel in kernels]
            parts = [records[a:b] for a, b in pairwise([0, *ends])]
        for kernel, part in zip(kernels, parts, strict=True):
            _give(told, kernel, part)


def _give(told: Told, kernel: Event, records: Sequence[Event]) -> None:
    """Gives a kernel those of the records that are of collectives which it may run."""
    runs = _RUNS.get(_kind(kernel))
    fitting = [e.about for e in records if runs is None or op_of(e, e.about) in runs]
    if fitting:
        told.records[id(kernel)] = fitting


def _kind(kernel: Event) -> str:
    """The key of ``_RUNS`` that a kernel's name begins with; the name itself if there is none."""
    name = re.sub(r"^(void )?(nccl|rccl)(dev)?kernel|_", "", kernel.name.lower()).replace("_", "")
    return next((start for start in _RUNS if name.startswith(start)), name)


def _why_not(kernel: Event, launches: Mapping[Key, Launch], launched: bool) -> str:
    launch = launches.get(kernel.key("correlation"))
    if "graph node id" in kernel.about or (launch and launch.graph):
        return "replayed by a CUDA graph"
    if "Collective name" in kernel.about and not _is_whole(kernel.about):
        return f"of the unknown collective {kernel.about['Collective name']!r}"
    if "ccl" not in kernel.name.lower():
        return "of a library that records nothing"
    if launched and launch is None:
        return "launched before the recording began"
    return "without a record on the device or on the host"
