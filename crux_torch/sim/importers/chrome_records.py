"""Records of a Chrome trace: events, and the bytes and ranks of its kernels' collectives."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from crux_torch.sim.catalogue import Group
from crux_torch.sim.importers.workload import ImportFailed, decode_json, element_bytes

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
#: Share of an iteration's communication time without bytes; with more, a trace is refused.
MAX_UNKNOWN_SHARE = 0.5
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


#: What a collective's name begins with, without underscores, in the order in which it is tried.
OPS = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "reducescatter": "reduce_scatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
#: Names that move nothing of their own: parts count a whole.
_SILENT = re.compile(r"barrier|coalesced|pointtopoint|^(wait|groupend|init|start|end|batch)")


def op_of(event: Event, args: Args) -> str | None:
    """The collective, by a name of ``record.OPS``; None if the record moves nothing of its own.

    Raises:
        ImportFailed: the name is unknown.
    """
    given = str(args.get("Collective name", event.name))
    name = re.sub(r"^(\w+:|ncclDevKernel_?|ncclKernel_?)|_", "", given).replace("_", "").lower()
    for start, op in OPS.items():
        if name.startswith(start):
            return op
    if _SILENT.search(name):
        return None
    raise ImportFailed(f"collective {given!r} is unknown, expected one of {', '.join(OPS)}")


def payload_of(event: Event, args: Args, op: str) -> float:
    """Bytes of a collective as docs/understand/measuring.md counts them.

    Raises:
        ImportFailed: the record does not tell them, or its type of element is unknown.
    """
    # The root's tensor is that of a rank, times the ranks.
    key = "Out msg nelems" if op in ("allgather", "scatter") else "In msg nelems"
    try:
        if "dtype" in args:
            moved = float(args[key]) * element_bytes(str(args["dtype"]))
            if op in ("gather", "scatter"):
                moved *= int(args["Group size"])
        else:  # Crux's own: the payload as a tensor of bytes
            moved = float(args["Input Dims"][0][0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ImportFailed):
            raise ImportFailed(f"{event.name}: {error}") from None
        raise ImportFailed(f"{event.name}: expected dtype and {key}, or Input Dims") from None
    if not 0 <= moved < float("inf"):
        raise ImportFailed(f"{event.name}: got {moved} bytes, expected 0 or more")
    return moved


def group_of(args: Args, origin: Origin) -> Group:
    """Global ranks of the group.

    Raises:
        ImportFailed: nothing tells them, or this rank is not one of them.
    """
    ranks = (
        _ranks(args.get("Process Group Ranks"))
        or _configured(args.get("Process Group Name"), origin.groups)
        or _even(args)
    )
    if ranks is None and args.get("Group size") == origin.world:
        ranks = tuple(range(origin.world))
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks):
        raise ImportFailed(
            f"group {args.get('Process Group Name')!r}: nothing tells its ranks, expected Process "
            "Group Ranks in its record, or pg_config in distributedInfo"
        )
    if max(ranks) >= origin.world or origin.rank not in ranks:
        raise ImportFailed(f"group {list(ranks)[:8]}: expected ranks of the job, with this one")
    return ranks


def ends_of(args: Args, group: Group, rank: int, op: str) -> Group:
    """Global ranks of the sender and the receiver.

    Raises:
        ImportFailed: the record does not name the other end, or one outside of the group.
    """
    # Kineto has the other end's global rank, Crux its rank in the group.
    named = "Dst Rank" if op == "send" else "Src Rank"
    peer = args.get(named)
    if peer is None and isinstance(index := args.get("Peer"), int) and 0 <= index < len(group):
        peer = group[index]
    if not isinstance(peer, int) or peer not in group:
        what = "receiver" if op == "send" else "sender"
        raise ImportFailed(f"{op}: got {what} {peer!r}, expected {named} to be one of the group")
    return (rank, peer) if op == "send" else (peer, rank)


def root_of(args: Args, group: Group) -> int:
    """The root's place in the group; the first where nothing tells it, as is torch's default."""
    root = args.get("Rank", args.get("Peer"))
    return root if isinstance(root, int) and 0 <= root < len(group) else 0


def _configured(name: Any, config: Any) -> Group | None:
    for entry in config if isinstance(config, list) else ():
        if isinstance(entry, dict) and str(entry.get("pg_name")) == str(name):
            return _ranks(entry.get("ranks"))
    return None


def _even(args: Args) -> Group | None:
    """The ranks of a group that lie at equal distances, as Kineto describes one of many ranks."""
    start, stride, size = (
        args.get(key) for key in ("Global rank start", "Global rank stride", "Group size")
    )
    if not (isinstance(start, int) and isinstance(stride, int) and isinstance(size, int)):
        return None
    if start < 0 or stride < 1 or not 0 < size <= 1 << 20:
        return None
    return tuple(range(start, start + stride * size, stride))


def _ranks(given: Any) -> Group | None:
    """The ranks in a list or its text; None where it is cut short, or is neither."""
    if isinstance(given, str):
        return _ranks_in(given)
    if isinstance(given, list) and given and all(isinstance(rank, int) for rank in given):
        return tuple(given)
    return None


@lru_cache(maxsize=1 << 10)
def _ranks_in(text: str) -> Group | None:
    if "..." in text:
        return None
    return tuple(map(int, re.findall(r"[0-9]{1,7}", text))) or None


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
class KernelRecords:
    """Records of each communication kernel.

    Attributes:
        records: those of each kernel, by its identity.
        unknown: reason for each kernel without a record, by its identity.
    """

    records: dict[int, list[Args]] = field(default_factory=dict)
    unknown: dict[int, str] = field(default_factory=dict)


def match_records(events: Sequence[Event], launches: Mapping[Key, Launch]) -> KernelRecords:
    """Finds the records of every kernel of a trace.

    A kernel has its own record, or that of the operation on the host that launched it. The kernel
    of a batch has neither: the records that the host wrote since its launch before, and which no
    other kernel has, are those of the batch.

    Args:
        events: of the whole trace, in the order of time.
    """
    known = KernelRecords()
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
            known.records[id(kernel)] = [about]
        elif key is not None and key in on_host:
            known.records[id(kernel)] = [e.about for e in on_host[key]]
        elif recorded and not _is_whole(about) and _moves(kernel) is not None:
            known.records[id(kernel)] = []  # a barrier
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
        _since_launch_before(known, kernels, batches, free, launches)
    else:
        _in_order(known, batches, free)
    for kernel in batches:
        if id(kernel) not in known.records:
            known.unknown[id(kernel)] = _why_not(kernel, launches, launched)
    return known


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
    known: KernelRecords,
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
        _give(known, kernel, parts[launch.tid, place])


def _in_order(known: KernelRecords, batches: Sequence[Event], free: Sequence[Event]) -> None:
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
            _give(known, kernel, part)


def _give(known: KernelRecords, kernel: Event, records: Sequence[Event]) -> None:
    """Gives a kernel those of the records that are of collectives which it may run."""
    runs = _RUNS.get(_kind(kernel))
    fitting = [e.about for e in records if runs is None or op_of(e, e.about) in runs]
    if fitting:
        known.records[id(kernel)] = fitting


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


def unknown_bytes(kernels: Sequence[Event], known: KernelRecords) -> tuple[str, ...]:
    """A note on the kernels of an iteration that nothing tells.

    Raises:
        ImportFailed: most of the iteration's communication is theirs.
    """
    missing = [e for e in kernels if id(e) in known.unknown]
    if not missing:
        return ()
    time_us = sum(e.end - e.begin for e in kernels)
    share = sum(e.end - e.begin for e in missing) / time_us if time_us else 1.0
    reasons = Counter(known.unknown[id(e)] for e in missing)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    what = (
        f"nothing tells the bytes of {len(missing)} of {len(kernels)} kernels that communicate "
        f"({why}), which are {share:.1%} of the communication time"
    )
    if share <= MAX_UNKNOWN_SHARE:
        return (f"{what}: they count as time without bytes",)
    if not known.records and any("without a record" in reason for reason in reasons):
        what += (
            "; no record of the trace tells any, as torch 2.3 and newer write them with "
            "ProfilerActivity.CPU"
        )
    raise ImportFailed(f"{missing[0].name[:80]}: {what}")


def operations_of(events: Sequence[Event]) -> list[Event]:
    """The collectives of a trace without kernels that communicate: Crux's, or torch's.

    Raises:
        ImportFailed: there are some whose bytes nothing tells.
    """
    own = [e for e in events if e.cat == "cpu_op" and "Sequence" in e.about]
    found = own or [e for e in events if "Collective name" in e.about]
    untold = next((e.name for e in events if re.match(r"(nccl|gloo|mpi|ucc):", e.name)), None)
    if untold and not found:
        raise ImportFailed(
            f"{untold}: nothing tells its bytes; torch's profiler tells those of NCCL's "
            "collectives, CRUX_TRACE those of gloo's, too"
        )
    return found
