"""Iterations of a rank in its Chrome trace: which kernels each launched, and how long it took."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from crux_torch.sim.chrome_file import ON_DEVICE, Event, Key, Launch, mostly_launched
from crux_torch.sim.workload import ImportFailed

#: An iteration with less than this part of the mean iteration's communication is not like the rest.
UNLIKE = 0.5


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a rank.

    Attributes:
        begin, end: on the device where there is one, in microseconds.
        own: what it launched on the device.
        host: when the host was in it.
        notes: what the reader of a result has to know.
    """

    begin: float
    end: float
    own: tuple[Event, ...]
    host: tuple[float, float]
    notes: tuple[str, ...] = ()


class _Marks(NamedTuple):
    """Where the iterations begin: on the host, or on the device if only that is marked.

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


def iteration_of(events: Sequence[Event], launches: Mapping[Key, Launch]) -> Iteration:
    """The iteration of median length, or the whole trace where nothing marks iterations.

    An iteration has the kernels that were launched in it, whenever they ran. It lasts on the device
    from its first computing kernel to that of the next iteration.

    Args:
        events: in the order of time.

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
    told = exact or marks.on_device
    notes = _notes_on(marks, spans[chosen]) + _outside(device, owner, chosen, len(spans), told)
    return Iteration(*spans[chosen], own, _host_spans(marks)[chosen], notes)


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


def _merged(events: Sequence[Event], category: str, start: str) -> dict[str, tuple[float, float]]:
    """Begin and end of the annotations of each name, over all threads and streams."""
    found: dict[str, tuple[float, float]] = {}
    for e in events:
        if e.cat == category and e.name.startswith(start):
            begin, end = found.get(e.name, (math.inf, -math.inf))
            found[e.name] = min(begin, e.begin), max(end, e.end)
    return found


def _launch_times(
    events: Sequence[Event], device: Sequence[Event], launches: Mapping[Key, Launch]
) -> list[float | None]:
    """When the host launched each event of the device; None where nothing tells."""
    operations: dict[Key, float] = {}
    for e in events:
        if e.cat == "cpu_op" and (number := e.key("External id")):
            operations.setdefault(number, e.begin)

    def launched(event: Event) -> float | None:
        launch = launches.get(event.key("correlation"))
        return launch.at if launch else operations.get(event.key("External id"))

    return [launched(event) for event in device]


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


def _host_spans(marks: _Marks) -> list[tuple[float, float]]:
    return list(zip(marks.starts, [*marks.starts[1:], marks.end], strict=True))


def _device_spans(
    device: Sequence[Event], owner: Sequence[int], marks: _Marks
) -> list[tuple[float, float]]:
    """Begin and end of each iteration on the device; as on the host where it computes nothing."""
    count = len(marks.starts)
    first, last = [math.inf] * count, [-math.inf] * count
    for e, i in zip(device, owner, strict=True):
        if i >= 0:
            last[i] = max(last[i], e.end)
            if e.cat == "kernel" and not e.communicates:
                first[i] = min(first[i], e.begin)
    spans = _host_spans(marks)
    for i, (begin, end) in enumerate(spans):
        if i + 1 == count:
            begin = min(first[i], last[i]) if first[i] < math.inf else begin
            spans[i] = begin, max(last[i], end) if first[i] == math.inf else last[i]
        elif first[i] < first[i + 1] < math.inf:
            spans[i] = first[i], first[i + 1]
    return spans


def _median(marks: _Marks, spans: Sequence[tuple[float, float]]) -> int:
    """The iteration of median length; the last only where there is no other, as its end is open."""
    whole = [i for i, is_whole in enumerate(marks.whole) if is_whole]
    candidates = [i for i in whole if i + 1 < len(spans)] or whole or list(range(len(spans)))
    candidates.sort(key=lambda i: spans[i][1] - spans[i][0])
    return candidates[len(candidates) // 2]


def _notes_on(marks: _Marks, span: tuple[float, float]) -> tuple[str, ...]:
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
    device: Sequence[Event], owner: Sequence[int], chosen: int, count: int, told: bool
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
        if not told or not time_of[chosen]:
            raise ImportFailed(
                f"{what}, so kernels can't be told apart by iterations; record several whole "
                "iterations, with ProfilerActivity.CPU, too"
            )
        notes.append(f"{what}: these are not alike, so the result stands for few of them")
    return tuple(notes)
