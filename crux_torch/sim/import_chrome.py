"""Chrome traces of ranks: those of torch's profiler (Kineto), and Crux's own (``CRUX_TRACE``)."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from crux_torch.sim.chrome_file import ON_DEVICE, Args, Event, Origin, launches_of, read_trace
from crux_torch.sim.chrome_iterations import Iteration, iteration_of
from crux_torch.sim.chrome_kernels import Told, tell
from crux_torch.sim.chrome_records import ends_of, group_of, op_of, payload_of, root_of
from crux_torch.sim.parallelism import Collective, Group
from crux_torch.sim.workload import ImportedJob, ImportFailed, collectives_of

#: Share of an iteration's communication time that may be untold; with more, a trace is refused.
MOST_UNTOLD = 0.5
#: Notes that a job keeps, since each of its ranks may have the same.
MOST_NOTES = 4
Span = tuple[float, float]


class _Sent(NamedTuple):
    """One collective of a rank: its group, and where in the rank's compute it starts.

    Attributes:
        ends: of a message, the sender and the receiver.
        root: the root's place in the group.
    """

    op: str
    bytes: float
    group: Group
    ends: Group
    root: int
    at: float


@dataclass(frozen=True, slots=True)
class _Rank:
    name: str
    rank: int
    world: int
    compute_us: float
    sent: tuple[_Sent, ...]
    notes: tuple[str, ...]


def read_chrome(files: Mapping[str, bytes]) -> ImportedJob:
    """The traces of one rank, or of all, as one iteration of their job.

    The iteration is the one of median length among those that the profiler's and the optimizer's
    steps mark, or the whole trace. A rank computes all the time but when it only communicates. The
    job computes as long as its rank that computes longest, since the others' communication contains
    waiting for it. One trace alone stands for all ranks: its groups are repeated over them, and a
    send goes to every place that has both ranks. Kernels that nothing tells count as communication
    without bytes, and the job's notes say their share.

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
    if len(ranks) == 1:
        (only,) = ranks.values()
        collectives = _of_all_ranks(only)
    else:
        # A rank's trace tells what it sends; all else is told by the group's first rank.
        collectives = [
            found
            for rank, one in sorted(ranks.items())
            for sent in one.sent
            if sent.op == "send" or (sent.op != "recv" and rank == min(sent.group))
            for found in _collectives(sent, [sent.ends if sent.op == "send" else sent.group])
        ]
    notes = [
        note if len(ranks) == 1 else f"rank {rank}: {note}"
        for rank, one in sorted(ranks.items())
        for note in one.notes
    ]
    if len(notes) > MOST_NOTES:
        notes[MOST_NOTES:] = [f"{len(notes) - MOST_NOTES} more notes on other ranks"]
    return ImportedJob(world, compute_us * 1e-6, tuple(collectives), tuple(notes))


def _rank(name: str, held: bytes) -> _Rank:
    origin, events = read_trace(held)
    launches = launches_of(events)
    told = tell(events, launches)
    iteration = iteration_of(events, launches)
    kernels = [e for e in iteration.own if e.cat == "kernel" and e.communicates]
    notes = iteration.notes
    if kernels:
        notes += _untold(kernels, told)
        records = [(e, args) for e in kernels for args in told.records.get(id(e), ())]
        busy = [e for e in events if e.cat == "kernel" and e.communicates]
    else:
        begin, end = iteration.host
        busy = _operations([e for e in events if begin <= e.begin < end])
        if any("Collective name" in e.about for e in busy):
            notes += (
                "no kernel of its communication is in the trace, so waiting for it counts as "
                "computation; record with ProfilerActivity.CUDA, too",
            )
        records = [(e, e.about) for e in busy]
    compute = _Compute(_exposed(events, busy, iteration), iteration)
    sent = []
    for event, args in records:
        if (op := op_of(event, args)) is not None:
            sent.append(_sent(event, args, op, origin, compute.share_at(event.begin)))
    return _Rank(name, origin.rank, origin.world, compute.length_us, tuple(sent), notes)


def _sent(event: Event, args: Args, op: str, origin: Origin, at: float) -> _Sent:
    group = group_of(args, origin)
    ends = ends_of(args, group, origin.rank, op) if op in ("send", "recv") else ()
    return _Sent(op, payload_of(event, args, op), group, ends, root_of(args, group), at)


def _operations(events: Sequence[Event]) -> list[Event]:
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


def _untold(kernels: Sequence[Event], told: Told) -> tuple[str, ...]:
    """A note on the kernels of an iteration that nothing tells.

    Raises:
        ImportFailed: most of the iteration's communication is theirs.
    """
    missing = [e for e in kernels if id(e) in told.why_not]
    if not missing:
        return ()
    time_us = sum(e.end - e.begin for e in kernels)
    share = sum(e.end - e.begin for e in missing) / time_us if time_us else 1.0
    reasons = Counter(told.why_not[id(e)] for e in missing)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    what = (
        f"nothing tells the bytes of {len(missing)} of {len(kernels)} kernels that communicate "
        f"({why}), which are {share:.1%} of the communication time"
    )
    if share <= MOST_UNTOLD:
        return (f"{what}: they count as time without bytes",)
    if not told.records and any("without a record" in reason for reason in reasons):
        what += (
            "; no record of the trace tells any, as torch 2.3 and newer write them with "
            "ProfilerActivity.CPU"
        )
    raise ImportFailed(f"{missing[0].name[:80]}: {what}")


def _of_all_ranks(one: _Rank) -> list[Collective]:
    """Returns the collectives of all ranks, from the trace of one.

    A message that it receives stands for those of other ranks only where it sends none as far.
    """
    far = {sent.ends[1] - sent.ends[0] for sent in one.sent if sent.op == "send"}
    found: list[Collective] = []
    for sent in one.sent:
        if sent.op == "recv" and sent.ends[1] - sent.ends[0] in far:
            continue
        try:
            if sent.ends:
                groups = _places(sent.group, sent.ends, one.world)
            else:
                groups = _repeated(sent.group, one.world)
        except ImportFailed as error:
            raise ImportFailed(f"{one.name}: {error}") from None
        found += _collectives(sent, groups)
    return found


def _collectives(sent: _Sent, groups: Sequence[Group]) -> list[Collective]:
    op = "send" if sent.op == "recv" else sent.op
    return collectives_of(op, sent.bytes, groups, sent.at, root=sent.root)


@lru_cache(maxsize=1 << 12)
def _repeated(group: Group, world: int) -> tuple[Group, ...]:
    """The group at each place where it fits beside itself, so that each rank is in one.

    Only a pair may leave ranks out: a pipeline's first and last stages share embeddings so.
    """
    if len(group) == 1:
        return ()
    first, taken = min(group), bytearray(world)
    found: list[Group] = []
    for at in range(world - max(group) + first):
        if taken[at]:
            continue
        place = tuple(rank - first + at for rank in group)
        if not any(taken[rank] for rank in place):
            found.append(place)
            for rank in place:
                taken[rank] = 1
        elif len(group) > 2:
            break
    if group not in found or (len(group) > 2 and not all(taken)):
        raise ImportFailed(
            f"group {list(group)[:8]} does not repeat over {world} ranks, expected the traces of "
            "all ranks"
        )
    return tuple(found)


@lru_cache(maxsize=1 << 12)
def _places(group: Group, ends: Group, world: int) -> tuple[Group, ...]:
    """Sender and receiver at every place that has both: in each group of several, or in the job.

    A group of the two says nothing of the pipeline, as some make one for each pair of stages.
    """
    if ends[0] == ends[1]:
        return ()
    if len(group) == 2:
        far = ends[1] - ends[0]
        return tuple((r, r + far) for r in range(world) if 0 <= r + far < world)
    far = group.index(ends[1]) - group.index(ends[0])
    return tuple(
        (one[i], one[i + far])
        for one in _repeated(group, world)
        for i in range(len(one))
        if 0 <= i + far < len(one)
    )


def _exposed(events: Sequence[Event], busy: Sequence[Event], iteration: Iteration) -> list[Span]:
    """When the rank only communicates in the iteration."""
    begin, end = iteration.begin, iteration.end
    computing = _union(
        (e.begin, e.end) for e in events if e.cat in ON_DEVICE and not e.communicates
    )
    clipped = ((max(e.begin, begin), min(e.end, end)) for e in busy)
    return _without(_union(span for span in clipped if span[0] < span[1]), computing)


class _Compute:
    """The computation of an iteration: all of it but the time that is exposed."""

    def __init__(self, exposed: Sequence[Span], iteration: Iteration) -> None:
        self._begin = iteration.begin
        self._exposed = exposed
        self._begins = [begin for begin, _ in exposed]
        self._before = [0.0, *accumulate(end - begin for begin, end in exposed)]
        self.length_us = iteration.end - iteration.begin - self._before[-1]

    def share_at(self, time: float) -> float:
        """The share of it that is done at a time."""
        if self.length_us <= 0:
            return 1.0
        count = bisect_right(self._begins, time)
        waited = self._before[count]
        if count:
            waited -= max(self._exposed[count - 1][1] - time, 0.0)
        return min(max((time - self._begin - waited) / self.length_us, 0.0), 1.0)


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
