"""Chrome traces of ranks: those of torch's profiler (Kineto), and Crux's own (``CRUX_TRACE``)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from crux_torch.sim.catalogue import Collective, Group
from crux_torch.sim.importers.chrome_records import (
    ON_DEVICE,
    Event,
    Key,
    Launch,
    ends_of,
    group_of,
    launches_of,
    match_records,
    mostly_launched,
    op_of,
    operations_of,
    payload_of,
    read_trace,
    root_of,
    unknown_bytes,
)
from crux_torch.sim.importers.workload import (
    ImportedJob,
    ImportFailed,
    collectives_of,
    naming,
    places_of_pair,
    repeated,
)

#: Notes that a job keeps, since each of its ranks may have the same.
MOST_NOTES = 4
#: An iteration with less than this part of the mean iteration's communication is not like the rest.
UNLIKE = 0.5
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
    """The traces of one rank, or of all, one file a rank, as one iteration of their job.

    The iteration is the one of median length among those that the profiler's and the optimizer's
    steps mark, or the whole trace. A rank computes all the time but when it only communicates. The
    job computes as long as its rank that computes longest, since the others' communication contains
    waiting for it. One trace alone stands for all ranks: its groups are repeated over them, and a
    send goes to every place that has both ranks. Kernels that nothing tells count as communication
    without bytes, and the job's notes say their share.

    Raises:
        ImportFailed: names the file.
    """
    ranks: dict[int, _Rank] = {}
    for name, held in files.items():
        with naming(name):
            found = _rank(name, held)
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
        # A rank's trace tells what it sends; all else counts where the group's first rank has it.
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
    known = match_records(events, launches)
    iteration = iteration_of(events, launches)
    kernels = [e for e in iteration.own if e.cat == "kernel" and e.communicates]
    notes = iteration.notes
    if kernels:
        notes += unknown_bytes(kernels, known)
        records = [(e, args) for e in kernels for args in known.records.get(id(e), ())]
        busy = [e for e in events if e.cat == "kernel" and e.communicates]
    else:
        begin, end = iteration.host
        busy = operations_of([e for e in events if begin <= e.begin < end])
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
            group = group_of(args, origin)
            ends = ends_of(args, group, origin.rank, op) if op in ("send", "recv") else ()
            moved, root = payload_of(event, args, op), root_of(args, group)
            sent.append(_Sent(op, moved, group, ends, root, compute.share_at(event.begin)))
    return _Rank(name, origin.rank, origin.world, compute.length_us, tuple(sent), notes)


def _of_all_ranks(one: _Rank) -> list[Collective]:
    """Returns the collectives of all ranks, from the trace of one.

    A message that it receives stands for those of other ranks only where it sends none as far.
    """
    far = {sent.ends[1] - sent.ends[0] for sent in one.sent if sent.op == "send"}
    found: list[Collective] = []
    for sent in one.sent:
        if sent.op == "recv" and sent.ends[1] - sent.ends[0] in far:
            continue
        with naming(one.name):
            if sent.ends:
                groups = places_of_pair(sent.group, sent.ends, one.world)
            else:
                groups = repeated(sent.group, one.world)
        found += _collectives(sent, groups)
    return found


def _collectives(sent: _Sent, groups: Sequence[Group]) -> list[Collective]:
    op = "send" if sent.op == "recv" else sent.op
    return collectives_of(op, sent.bytes, groups, sent.at, root=sent.root)


def _exposed(events: Sequence[Event], busy: Sequence[Event], iteration: Iteration) -> list[Span]:
    """Spans of the iteration in which the rank only communicates."""
    # Time, change of the running communication, change of the running computation.
    changes: list[tuple[float, int, int]] = []
    for e in busy:
        begin, end = max(e.begin, iteration.begin), min(e.end, iteration.end)
        if begin < end:
            changes += [(begin, 1, 0), (end, -1, 0)]
    for e in events:
        if e.cat in ON_DEVICE and not e.communicates:
            changes += [(e.begin, 0, 1), (e.end, 0, -1)]
    found: list[Span] = []
    communicating = computing = 0
    since: float | None = None
    for time, group in groupby(sorted(changes), key=lambda change: change[0]):
        for _, communication, computation in group:
            communicating += communication
            computing += computation
        exposed = communicating > 0 and not computing
        if exposed and since is None:
            since = time
        elif not exposed and since is not None:
            found.append((since, time))
            since = None
    return found


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


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a rank.

    Attributes:
        begin, end: on the device where there is one, in microseconds.
        own: events of the device that it launched.
        host: its span on the host.
    """

    begin: float
    end: float
    own: tuple[Event, ...]
    host: Span
    notes: tuple[str, ...] = ()


class _Marks(NamedTuple):
    """Begins of the iterations: on the host, or on the device if only that is marked.

    Attributes:
        starts: of each iteration.
        whole: of each, False if a part of it may be missing.
        end: of the last one's annotation.
        seen: when the device began each, where an annotation of the device says so.
        on_device: the starts are times of the device.
        steps: profiler steps of the longest iteration; 0 if optimizer steps divide the trace.
    """

    starts: list[float]
    whole: list[bool]
    end: float
    seen: list[float | None]
    on_device: bool
    steps: int

    @property
    def spans(self) -> list[Span]:
        """Begin and end of each iteration."""
        return list(zip(self.starts, [*self.starts[1:], self.end], strict=True))


def iteration_of(events: Sequence[Event], launches: Mapping[Key, Launch]) -> Iteration:
    """The iteration of median length, or the whole trace where nothing marks iterations.

    An iteration has the kernels that were launched in it, whenever they ran. It lasts on the device
    from its first computing kernel to that of the next iteration.

    Raises:
        ImportFailed: nothing tells which iteration launched what, and times do not fit.
    """
    device = [e for e in events if e.cat in ON_DEVICE]
    marks = _by_profiler_steps(events) or _by_optimizer_steps(events)
    if marks is None:
        whole = events[0].begin, max(e.end for e in events)
        note = "the trace marks no steps, so all of it is one iteration"
        return Iteration(*whole, tuple(device), (-math.inf, math.inf), (note,))
    kernels = [e for e in device if e.cat == "kernel"]
    exact = mostly_launched([e for e in kernels if not e.communicates] or kernels, launches)
    seen = sorted(at for at in marks.seen if at is not None)
    if not exact and seen == marks.seen:
        marks = marks._replace(starts=seen, on_device=True)
    owner = _owners(device, _launch_times(events, device, launches), marks, exact=exact)
    spans = _device_spans(device, owner, marks)
    chosen = _median(marks, spans)
    own = tuple(e for e, i in zip(device, owner, strict=True) if i == chosen)
    certain = exact or marks.on_device
    notes = _notes_on(marks, spans[chosen]) + _outside(device, owner, chosen, len(spans), certain)
    return Iteration(*spans[chosen], own, marks.spans[chosen], notes)


def _by_profiler_steps(events: Sequence[Event]) -> _Marks | None:
    """An iteration for each profiler step, or for those up to a step of the optimizer."""
    seen = _merged(events, "gpu_user_annotation", "ProfilerStep")
    on_host = _merged(events, "user_annotation", "ProfilerStep")
    steps = sorted((on_host or seen).items(), key=lambda step: step[1])
    if not steps:
        return None
    category = "user_annotation" if on_host else "gpu_user_annotation"
    starts = [span[0] for _, span in steps]
    updates = {
        bisect_right(starts, e.begin) - 1
        for e in events
        if e.cat == category and e.name.startswith("Optimizer.step#")
    } - {-1}
    ends = sorted(updates) if updates else range(len(steps))
    firsts = [0, *(i + 1 for i in ends if i + 1 < len(steps))]
    sizes = [b - a for a, b in zip(firsts, [*firsts[1:], len(steps)], strict=True)]
    # Recording may have begun in the middle of the first, and ended in that of the last.
    whole = [True] * len(firsts)
    whole[-1] = not updates or len(steps) - 1 in updates
    complete = [size for size, is_whole in zip(sizes, whole, strict=True) if is_whole]
    whole[0] = whole[0] and sizes[0] == max(complete)
    return _Marks(
        [starts[i] for i in firsts],
        whole,
        steps[-1][1][1],
        [seen[steps[i][0]][0] if steps[i][0] in seen else None for i in firsts],
        not on_host,
        max(complete, default=1),
    )


def _by_optimizer_steps(events: Sequence[Event]) -> _Marks | None:
    """An iteration from the end of a step of an optimizer to the next, where there are several."""
    for category in ("user_annotation", "gpu_user_annotation"):
        found = [e for e in events if e.cat == category and e.name.startswith("Optimizer.step#")]
        # A model may have several optimizers: the one that steps least often ends iterations.
        counts = {name: n for name, n in Counter(e.name for e in found).items() if n > 1}
        if counts:
            rarest = min(counts, key=lambda name: counts[name])
            ends = sorted(e.end for e in found if e.name == rarest)
            starts = [events[0].begin, *ends]
            whole = [False, *[True] * (len(ends) - 1), False]
            seen: list[float | None] = [None] * len(starts)
            last = max(e.end for e in events)
            return _Marks(starts, whole, last, seen, category != "user_annotation", 0)
    return None


def _merged(events: Sequence[Event], category: str, start: str) -> dict[str, Span]:
    """Begin and end of the annotations of each name, over all threads and streams."""
    found: dict[str, Span] = {}
    for e in events:
        if e.cat == category and e.name.startswith(start):
            begin, end = found.get(e.name, (math.inf, -math.inf))
            found[e.name] = min(begin, e.begin), max(end, e.end)
    return found


def _launch_times(
    events: Sequence[Event], device: Sequence[Event], launches: Mapping[Key, Launch]
) -> list[float | None]:
    """Times at which the host launched each event of the device; None where it is unknown."""
    operations: dict[Key, float] = {}
    for e in events:
        if e.cat == "cpu_op" and (number := e.key("External id")):
            operations.setdefault(number, e.begin)

    return [
        launch.at
        if (launch := launches.get(event.key("correlation")))
        else operations.get(event.key("External id"))
        for event in device
    ]


def _owners(
    device: Sequence[Event], launched: Sequence[float | None], marks: _Marks, *, exact: bool
) -> list[int]:
    """The iteration of each event of the device; -1: it was launched before the first.

    What no launch tells of belongs to the iteration that the device was at.

    Args:
        exact: few launches are unknown.
    """
    if marks.on_device:
        return [bisect_right(marks.starts, e.begin) - 1 for e in device]
    known = [None if at is None else bisect_right(marks.starts, at) - 1 for at in launched]
    count = len(marks.starts)
    first, last = [math.inf] * count, [-math.inf] * (count + 1)
    for e, i in zip(device, known, strict=True):
        if i is not None and e.cat == "kernel":
            last[i + 1] = max(last[i + 1], e.begin)
            if i >= 0:
                first[i] = min(first[i], e.begin)
    first = list(accumulate(reversed(first), min))[::-1]
    last = list(accumulate(last, max))
    begun = []
    for start, seen, earliest, before in zip(marks.starts, marks.seen, first, last, strict=False):
        if seen is not None and before < seen <= earliest:
            begun.append(seen)
        elif exact and earliest < math.inf:
            begun.append(earliest)
        else:
            # Nothing runs before it is launched, nor before what was launched earlier.
            begun.append(max(start, math.nextafter(before, math.inf)))
    begun = list(accumulate(begun, max))
    return [
        bisect_right(begun, e.begin) - 1 if i is None else i
        for e, i in zip(device, known, strict=True)
    ]


def _device_spans(device: Sequence[Event], owner: Sequence[int], marks: _Marks) -> list[Span]:
    """Begin and end of each iteration on the device; as on the host where it computes nothing."""
    count = len(marks.starts)
    first, last = [math.inf] * count, [-math.inf] * count
    for e, i in zip(device, owner, strict=True):
        if i >= 0:
            last[i] = max(last[i], e.end)
            if e.cat == "kernel" and not e.communicates:
                first[i] = min(first[i], e.begin)
    spans = marks.spans
    for i, (begin, end) in enumerate(spans):
        if i + 1 == count:
            begin = min(first[i], last[i]) if first[i] < math.inf else begin
            spans[i] = begin, max(last[i], end) if first[i] == math.inf else last[i]
        elif first[i] < first[i + 1] < math.inf:
            spans[i] = first[i], first[i + 1]
    return spans


def _median(marks: _Marks, spans: Sequence[Span]) -> int:
    """The iteration of median length; the last only where there is no other, as its end is open."""
    whole = [i for i, is_whole in enumerate(marks.whole) if is_whole]
    candidates = [i for i in whole if i + 1 < len(spans)] or whole or list(range(len(spans)))
    candidates.sort(key=lambda i: spans[i][1] - spans[i][0])
    return candidates[len(candidates) // 2]


def _notes_on(marks: _Marks, span: Span) -> tuple[str, ...]:
    if marks.steps < 2:
        return ()
    note = (
        f"an iteration of {(span[1] - span[0]) * 1e-6:.4g} s has {marks.steps} profiler steps and "
        "ends with a step of the optimizer"
    )
    if sum(marks.whole) == 1 and marks.whole[0]:
        note += "; it may have begun before the recording, which has no earlier one"
    return (note,)


def _outside(
    device: Sequence[Event], owner: Sequence[int], chosen: int, count: int, certain: bool
) -> tuple[str, ...]:
    """Notes on communication that the chosen iteration stands for badly.

    Raises:
        ImportFailed: it stands for little of it, and no launch told which kernels it has.
    """
    time_of: Counter[int] = Counter()
    for e, i in zip(device, owner, strict=True):
        if e.communicates:
            time_of[i] += e.end - e.begin  # type: ignore[assignment]
    total = sum(time_of.values())
    if not total:
        return ()
    notes = []
    if time_of[-1]:
        notes.append(
            f"{time_of[-1] / total:.1%} of the trace's communication time was launched before its "
            "first iteration, and is left out"
        )
    inside = (total - time_of[-1]) / count
    if inside and time_of[chosen] < UNLIKE * inside:
        share = time_of[chosen] / total
        what = (
            f"the iteration of median length has {share:.1%} of the trace's communication time, of "
            f"{count} iterations"
        )
        if not certain or not time_of[chosen]:
            raise ImportFailed(
                f"{what}, so kernels can't be told apart by iterations; record several whole "
                "iterations, with ProfilerActivity.CPU, too"
            )
        notes.append(f"{what}: these are not alike, so the result stands for few of them")
    return tuple(notes)
