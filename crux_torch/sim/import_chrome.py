"""Chrome traces of ranks: those of torch's profiler (Kineto), and Crux's own (``CRUX_TRACE``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from crux_torch.sim.parallelism import Collective, Group
from crux_torch.sim.workload import ImportedJob, ImportFailed, collectives_of

#: Bytes of an element, by what record_param_comms calls its type.
TYPE_BYTES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    "ComplexDouble": 16,
}
#: What a collective's name begins with, without underscores, in the order in which it is tried.
OPS = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "reducescatter": "reduce_scatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
}
#: Names that move nothing of their own: the sender counts a receive, parts count a whole.
SILENT = re.compile(r"recv|barrier|wait|coalesced|init|start|end|pointtopoint")
Span = tuple[float, float]


class _Event(msgspec.Struct):
    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] | None = None


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    pg_config: Any = None


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]
    distributedInfo: _Distributed | None = None


class _Sent(NamedTuple):
    """One collective of a rank: its group, and where in the rank's compute it starts."""

    op: str
    bytes: float
    group: Group
    at: float


@dataclass(frozen=True, slots=True)
class _Rank:
    name: str
    rank: int
    world: int
    compute_us: float
    sent: tuple[_Sent, ...]


def read_chrome(files: Mapping[str, bytes]) -> ImportedJob:
    """The traces of one rank, or of all, as one iteration of their job.

    The iteration is the one of median length among those that ``ProfilerStep`` marks, or the whole
    trace. A rank computes all the time but when it only communicates. The job computes as long as
    its rank that computes longest, since the others' communication contains waiting for it. One
    trace alone stands for all ranks: its groups are repeated over them at equal distances.

    Args:
        files: what each file holds, one a rank.

    Raises:
        ImportFailed: names the file.
    """
    ranks: dict[int, _Rank] = {}
    for name, held in files.items():
        try:
            found = _rank(name, held)
        except ImportFailed as error:
            raise ImportFailed(f"{name}: {error}") from None
        if found.rank in ranks:
            raise ImportFailed(f"{name}: {ranks[found.rank].name} is of rank {found.rank}, too")
        ranks[found.rank] = found
    worlds = {one.world for one in ranks.values()}
    if len(worlds) != 1 or len(ranks) not in (1, *worlds):
        raise ImportFailed(
            f"got traces of {len(ranks)} ranks of {sorted(worlds)}, expected one or all of a job"
        )
    world, compute_us = worlds.pop(), max(one.compute_us for one in ranks.values())
    if not compute_us > 0:
        raise ImportFailed("no time is left for computation, expected some beside communication")
    collectives: list[Collective] = []
    for rank, one in sorted(ranks.items()):
        for op, moved, group, at in one.sent:
            # A rank's trace tells what it sends; all else is told by the group's first rank.
            if len(ranks) == 1:
                groups = _repeated(group, world, one.name)
            elif op == "send" or rank == min(group):
                groups = [group]
            else:
                continue
            collectives += collectives_of(op, moved, groups, at)
    return ImportedJob(world, compute_us * 1e-6, tuple(collectives))


def _repeated(group: Group, world: int, name: str) -> list[Group]:
    """The group at each place where it fits beside itself, so that each rank is in one.

    A pair of a send goes to every place that has both ranks.
    """
    if len(group) == 1:
        return []
    steps = {b - a for a, b in pairwise(group)}
    step = steps.pop() if len(steps) == 1 else 0
    if len(group) == 2 and (step < 0 or world % (2 * step)):  # a send, back or to a next stage
        return [(r, r + step) for r in range(world) if 0 <= r + step < world]
    block = step * len(group)
    if step <= 0 or world % block:
        raise ImportFailed(
            f"{name}: group {list(group)[:8]} does not repeat over {world} ranks, expected the "
            "traces of all ranks"
        )
    return [
        tuple(first + offset + step * i for i in range(len(group)))
        for first in range(0, world, block)
        for offset in range(step)
    ]


def _rank(name: str, held: bytes) -> _Rank:
    try:
        trace = msgspec.json.decode(held, type=_Trace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImportFailed(f"expected a trace with traceEvents: {error}") from None
    about = trace.distributedInfo or _Distributed()
    if about.rank is None or about.world_size is None or not 0 <= about.rank < about.world_size:
        raise ImportFailed("distributedInfo: expected rank and world_size of a distributed job")
    if about.world_size == 1:
        raise ImportFailed("distributedInfo: world_size is 1, expected a job of several ranks")
    events = [e for e in trace.traceEvents if e.ph == "X" and e.dur >= 0]
    begin, end = _iteration(events)
    inside = [e for e in events if begin <= e.ts < end]
    sent, busy = _communication(inside, events)
    computing = _union(
        (e.ts, e.ts + e.dur)
        for e in inside
        if e.cat in ("kernel", "gpu_memcpy", "gpu_memset") and not _is_communication(e)
    )
    exposed = _without(_union((e.ts, min(e.ts + e.dur, end)) for e in busy), computing)
    compute_us = end - begin - sum(b - a for a, b in exposed)

    def share(time: float) -> float:
        waited = sum(min(b, time) - a for a, b in exposed if a < time)
        return min(max((time - begin - waited) / compute_us, 0.0), 1.0) if compute_us > 0 else 1.0

    found = []
    for event, args in sent:
        if (op := _op(event, args)) is not None:
            moved = _payload(event, args, op)
            group = _group(args, about, op)
            found.append(_Sent(op, moved, group, share(event.ts)))
    return _Rank(name, about.rank, about.world_size, compute_us, tuple(found))


def _iteration(events: Sequence[_Event]) -> Span:
    """Begin and end of the iteration of median length, in microseconds."""
    for category in ("gpu_user_annotation", "user_annotation"):
        steps = sorted(
            (e.ts, e.ts + e.dur)
            for e in events
            if e.cat == category and e.name.startswith("ProfilerStep")
        )
        if steps:
            # An iteration lasts until the next one begins; nothing tells that of the last.
            spans = [(a[0], b[0]) for a, b in pairwise(steps)] or steps
            spans.sort(key=lambda span: span[1] - span[0])
            return spans[len(spans) // 2]
    if not events:
        raise ImportFailed("expected events with a duration")
    return min(e.ts for e in events), max(e.ts + e.dur for e in events)


def _is_communication(event: _Event) -> bool:
    return event.name.startswith("nccl") or "Collective name" in (event.args or {})


def _communication(
    events: Sequence[_Event], recorded: Sequence[_Event]
) -> tuple[list[tuple[_Event, Mapping[str, Any]]], list[_Event]]:
    """Each collective with what is known of it, and the events in which it runs.

    Args:
        events: those of the iteration.
        recorded: those of the whole trace, since the host may launch a kernel an iteration before.
    """
    told = {
        (e.args or {}).get("External id"): e.args or {}
        for e in recorded
        if e.cat != "kernel" and "Collective name" in (e.args or {})
    }
    kernels = [e for e in events if e.cat == "kernel" and _is_communication(e)]
    if kernels:
        # Before torch 2.3 only the operation on the host has the details.
        known = [
            (e, e.args or {} if "Group size" in (e.args or {}) else told.get(key))
            for e in kernels
            if (key := (e.args or {}).get("External id")) is not None or e.args
        ]
        for event, args in known:
            if args is None:
                raise ImportFailed(
                    f"{event.name}: nothing tells its bytes and its group, expected a trace that "
                    "torch 2.3 or newer recorded"
                )
        return [(e, args) for e, args in known if args is not None], kernels
    own = [e for e in events if e.cat == "cpu_op" and "Sequence" in (e.args or {})]
    # Crux's operations on a CPU, or torch's.
    found = own or [e for e in events if "Collective name" in (e.args or {})]
    untold = next((e.name for e in events if re.match(r"(nccl|gloo|mpi|ucc):", e.name)), None)
    if untold and not found:
        raise ImportFailed(
            f"{untold}: nothing tells its bytes; torch's profiler tells those of NCCL's "
            "collectives, CRUX_TRACE those of gloo's, too"
        )
    return [(e, e.args or {}) for e in found], found


def _op(event: _Event, args: Mapping[str, Any]) -> str | None:
    given = str(args.get("Collective name", event.name))
    name = re.sub(r"^(\w+:|ncclDevKernel_?)|_", "", given).replace("_", "").lower()
    for start, op in OPS.items():
        if name.startswith(start):
            return op
    if SILENT.match(name):
        return None
    raise ImportFailed(f"collective {given!r} is unknown, expected one of {', '.join(OPS)}")


def _payload(event: _Event, args: Mapping[str, Any], op: str) -> float:
    key = "Out msg nelems" if op == "allgather" else "In msg nelems"
    try:
        if "dtype" in args:
            moved = float(args[key]) * TYPE_BYTES[args["dtype"]]
        else:  # Crux's own: the payload as a tensor of bytes
            moved = float(args["Input Dims"][0][0])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ImportFailed(f"{event.name}: expected dtype and {key}, or Input Dims") from None
    if not 0 <= moved < float("inf"):
        raise ImportFailed(f"{event.name}: got {moved} bytes, expected 0 or more")
    return moved


def _group(args: Mapping[str, Any], about: _Distributed, op: str) -> Group:
    """Global ranks of the group; of a send the sender and the receiver."""
    assert about.rank is not None
    assert about.world_size is not None
    ranks = _ranks(args.get("Process Group Ranks"))
    if ranks is None:
        name = str(args.get("Process Group Name"))
        for entry in about.pg_config if isinstance(about.pg_config, list) else ():
            if isinstance(entry, dict) and str(entry.get("pg_name")) == name:
                ranks = _ranks(entry.get("ranks"))
    if ranks is None and args.get("Group size") == about.world_size:
        ranks = tuple(range(about.world_size))
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks):
        raise ImportFailed(f"group {args.get('Process Group Name')!r}: nothing tells its ranks")
    if max(ranks) >= about.world_size or about.rank not in ranks:
        raise ImportFailed(f"group {list(ranks)[:8]}: expected ranks of the job, with this one")
    if op != "send":
        return ranks
    # Kineto has the receiver's global rank, Crux its rank in the group.
    peer, known = args.get("Dst Rank"), ranks
    if peer is None:
        peer, known = args.get("Peer"), tuple(range(len(ranks)))
    if not isinstance(peer, int) or peer not in known:
        raise ImportFailed(f"send: got receiver {peer!r}, expected one of the group")
    return about.rank, peer if "Dst Rank" in args else ranks[peer]


def _ranks(given: Any) -> Group | None:
    """The ranks in a list or its text; None where it is cut short, or is neither."""
    if isinstance(given, str):
        if "..." in given:
            return None
        given = [int(number) for number in re.findall(r"[0-9]{1,7}", given)]
    if isinstance(given, list) and given and all(isinstance(rank, int) for rank in given):
        return tuple(given)
    return None


def _union(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What is in ``spans`` and not in ``others``; both are sorted, and each is apart."""

    def parts() -> Iterator[Span]:
        first = 0
        for begin, end in spans:
            while first < len(others) and others[first][1] <= begin:
                first += 1
            at, i = begin, first
            while i < len(others) and others[i][0] < end:
                if others[i][0] > at:
                    yield at, others[i][0]
                at, i = max(at, others[i][1]), i + 1
            if at < end:
                yield at, end

    return list(parts())
