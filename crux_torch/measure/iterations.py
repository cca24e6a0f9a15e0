"""The iterations of a training job: the optimizer's marks, their ends on a device, their period.

The period comes from when the job communicates (Crux §5) and from the marks, without the user.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from crux_torch.measure.records import Flag, Records

log = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Steps of other optimizers without one of the elected: it is out of use, elect another.
SILENT_STEPS = 64

#: The host is in step with a device that comes to every operation within this share of an
#: iteration from its issue, and has none left at a mark.
IN_STEP = 0.05
#: Iterations in which a group is used, and more than half of those up to then: it is in steady use.
MIN_USES = 3
#: What ended so long before the last that is known has been reported: watchdogs look every second.
REPORT_NS = 2 * 10**9
LATEST = np.iinfo(np.int64).max

#: Marks and signal agree on a period when they differ by less.
AGREEMENT = 0.05
#: A gap between two iterations outside these multiples of the median is a pause (a checkpoint, an
#: evaluation) or a missed mark, and no iteration.
FENCE = (0.4, 1.8)
MAX_SAMPLES = 1 << 16
#: Variance of the logarithm of a gap below which nothing is to be explained (1%).
NOISE_FLOOR = 1e-4
#: The same variance above which a pattern explains too little to be one (gaps vary by half).
MAX_RESIDUAL = 0.2
MAX_PATTERN = 4096
MIN_REPEATS = 3
#: Payloads below this share of the largest are ignored: a logged loss, a barrier.
LIGHT = 1e-3

MarkListener = Callable[[int], None]


class IterationMarks:
    """Marks the end of every optimizer step, by the hooks that torch keeps for all optimizers.

    One optimizer is elected, the first seen, and only its steps are marks
    (docs/understand/measuring.md). An optimizer that steps within another's step
    (ZeroRedundancyOptimizer's inner one) is not elected, since the outer pre-hook runs first. The
    elected one is replaced when it is collected, or when others have stepped ``SILENT_STEPS`` times
    without it. The newest ``capacity`` marks are kept.

    Thread safety: the training thread marks; any thread may install, remove and read.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._marks: deque[int] = deque(maxlen=capacity)
        #: Marks that were ever made; all ranks of a job count alike.
        self.total = 0
        self._elected: weakref.ref[Any] | None = None
        self._others = 0
        self._armed = False
        self._listeners: list[MarkListener] = []
        self._handles: list[Any] = []
        self._lock = threading.Lock()
        self._warned = False

    def install(self) -> None:
        """Register the hooks; twice is once."""
        from torch.optim import optimizer

        with self._lock:
            if not self._handles:
                self._handles = [
                    optimizer.register_optimizer_step_pre_hook(self._pre_hook),
                    optimizer.register_optimizer_step_post_hook(self._post_hook),
                ]

    def remove(self) -> None:
        """Take the hooks away; marks already made stay."""
        with self._lock:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def add_listener(self, listener: MarkListener) -> Callable[[], None]:
        """Call ``listener(mark_ns)`` in the training thread at every mark; return its remover."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    @property
    def count(self) -> int:
        """Marks kept."""
        return len(self._marks)

    def marks_ns(self, since_ns: int = 0) -> NDArray[np.int64]:
        """The marks since ``since_ns`` on CLOCK_MONOTONIC, ascending."""
        # list() of a deque is atomic under the GIL; the free-threaded build locks the deque.
        marks = np.array(list(self._marks), dtype=np.int64)
        return marks[marks >= since_ns]

    def _pre_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _compiling():
            return
        try:
            elected = self._elected() if self._elected is not None else None
            if elected is not optimizer:
                self._others += 1
                if elected is not None and self._others <= SILENT_STEPS:
                    return
                self._elected = weakref.ref(optimizer)
                self._marks.clear()
            self._others = 0
            self._armed = True
        except Exception:
            self._warn()

    def _post_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _compiling():
            return
        try:
            # A subclass's step calls its parent's, and both run the hooks: the inner one marks.
            if not self._armed or self._elected is None or self._elected() is not optimizer:
                return
            self._armed = False
            now_ns = time.monotonic_ns()
            self._marks.append(now_ns)
            self.total += 1
            for listener in tuple(self._listeners):
                listener(now_ns)
        except Exception:
            self._warn()

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("iteration marks failed; training goes on without them", exc_info=True)


def _compiling() -> bool:
    import torch

    # Dynamo folds this to True and drops the rest of the hook from its graph.
    return torch.compiler.is_compiling()


class IterationEnds(NamedTuple):
    """The ends of the iterations within a window.

    Attributes:
        marks_ns: when the host had issued each: they part operations by their issue.
        ends_ns: when the device was done with each: they part the times of operations.
    """

    marks_ns: Ints
    ends_ns: Ints


def iteration_ends(marks_ns: ArrayLike | None, records: Records) -> IterationEnds:
    """The ends of the iterations between which no record is missing.

    On a device an iteration ends with the last of its operations there
    (docs/understand/measuring.md). Marks stand for themselves where the host is in step with the
    device, as it always is on a CPU, and where no device times are recorded.

    Args:
        marks_ns: end of each iteration on the host, ascending.
        records: in any order.

    Returns:
        As many marks as ends, both ascending, the ends strictly. Iterations without an operation
        share the time between those around them equally.
    """
    marks = np.asarray([] if marks_ns is None else marks_ns, dtype=np.int64)
    # Those that have a record before and one after: no record is missing between two.
    issued = records["issue_ns"].astype(np.int64)
    marks = marks[(marks >= issued.min(initial=LATEST)) & (marks <= issued.max(initial=0))]
    # Timed by a device's clock from begin to end.
    placed = (records["flags"] & Flag.DEVICE_CLOCK) != 0
    timed = records[placed & (records["device_ns"] >= 0) & (records["end_ns"] >= 0)]
    timed = timed[np.argsort(timed["issue_ns"], kind="stable")]
    marks = marks[marks <= _complete_until(marks, timed)]
    issued = timed["issue_ns"].astype(np.int64)
    before = np.searchsorted(issued, marks, "left")
    done = np.concatenate(([0], np.maximum.accumulate(timed["end_ns"].astype(np.int64))))[before]
    seen = np.flatnonzero(np.diff(done, prepend=0) > 0)
    if len(seen) < 2:
        return IterationEnds(marks, marks)
    # Outside of those there is no operation on both sides to place an end by.
    within = np.arange(seen[0], seen[-1] + 1)
    ends = np.round(np.interp(within, seen, done[seen])).astype(np.int64)
    behind = (timed["start_ns"] - issued)[before[seen[0]] : before[seen[-1]]].max()
    if behind <= IN_STEP * float(np.median(np.diff(ends))) and (done[seen] <= marks[seen]).all():
        return IterationEnds(marks, marks)
    return IterationEnds(marks[within], ends)


def _complete_until(marks_ns: Ints, timed: Records) -> float:
    """Time of issue up to which no operation of a group in steady use is missing.

    A device's operations are recorded once they are known to have ended, each group's in order, but
    one group's behind another's.
    """
    until = float("inf")
    reported_ns = int(timed["end_ns"].max(initial=0)) - REPORT_NS
    for group in np.unique(timed["group"]):
        own = timed[timed["group"] == group]
        used = np.unique(np.searchsorted(marks_ns, own["issue_ns"], "right"))
        steady = len(used) >= MIN_USES and 2 * len(used) > used[-1]
        if steady and own["end_ns"].max() > reported_ns:
            until = min(until, float(own["issue_ns"][-1]))
    return until


@dataclass(frozen=True, slots=True)
class Period:
    """One iteration's duration.

    Attributes:
        period_s: mean seconds of an iteration within the window, pauses left out.
        source: ``fourier`` (communication alone), ``marks`` (they contradict it, or it is not
            periodic) or ``both`` (they agree within ``AGREEMENT``).
        operations: :func:`heavy` collectives of one iteration where their pattern repeats.
    """

    period_s: float
    source: Literal["fourier", "marks", "both"]
    operations: int | None = None


def estimate_period(
    start_ns: Ints, end_ns: Ints, bytes: Ints, kinds: NDArray[np.generic], marks_ns: Ints
) -> Period | None:
    """The period of a job from its collectives.

    The spectrum of the bytes in flight (:func:`spectral_period`) may mistake the distance of an
    iteration's equal bursts for the period, and jitter blurs it. So the order of the operations
    (:func:`pattern_length`) comes before it, and optimizer marks win over both
    (docs/understand/measuring.md).

    Args:
        start_ns, end_ns: when each collective was in flight, in any order.
        bytes: payload of each.
        kinds: a number for each that is equal for equal operations (operation, size, group).
        marks_ns: ends of iterations, ascending, on the clock of ``start_ns`` (see
            :func:`iteration_ends`). Empty if unknown.

    Returns:
        None where neither source has seen ``MIN_REPEATS`` iterations.
    """
    order = np.argsort(start_ns, kind="stable")
    size = bytes[order].astype(float)
    signal = _from_signal(start_ns[order], end_ns[order], size, kinds[order])
    if len(marks_ns) <= MIN_REPEATS:
        return signal
    period_s = _fenced_mean(np.diff(marks_ns) / 1e9)
    if signal is None or abs(period_s - signal.period_s) > AGREEMENT * period_s:
        return Period(period_s, "marks")
    return Period(period_s, "both", signal.operations)


def _from_signal(start: Ints, end: Ints, size: Floats, kind: NDArray[np.generic]) -> Period | None:
    if len(start) < MIN_REPEATS + 1:
        return None
    main = heavy(size)
    begin, what = start[main], kind[main]
    length = pattern_length(begin, what)
    if length is not None:
        gaps = (begin[length:] - begin[:-length])[_repeats(what, length)] / 1e9
        period_s = _fenced_mean(gaps)
        if period_s > 0:
            return Period(period_s, "fourier", length)
    found = spectral_period(start, end, size)
    return None if found is None else Period(found, "fourier")


def heavy(size: Floats) -> NDArray[np.bool_]:
    """True for operations that carry the job's traffic."""
    return np.asarray(size >= LIGHT * size.max(initial=0.0))


def _fenced_mean(gaps: Floats) -> float:
    median = float(np.median(gaps))
    kept = gaps[(gaps >= FENCE[0] * median) & (gaps <= FENCE[1] * median)]
    return float(kept.mean()) if len(kept) else median


def _repeats(kind: NDArray[np.generic], length: int) -> NDArray[np.bool_]:
    """True for each i where the operations from i to i + length are one whole pattern.

    The kinds around i must equal those one pattern later, so that no stray is among them. If that
    is so nowhere, it is enough that the kind at i does.
    """
    same = kind[length:] == kind[:-length]
    if np.all(same):
        return np.asarray(same)
    clean = np.convolve(same, np.ones(length), "same") >= length - 0.5
    return np.asarray(clean if clean.any() else same)


def pattern_length(start: Ints, kind: NDArray[np.generic]) -> int | None:
    """Operations of one iteration: the number after which kinds and spacing repeat.

    First the smallest lag at which the kinds repeat: a Fourier transform of each kind's indicator
    over the operation's index. Then the multiple of it whose fold explains the gaps between
    operations best, by the Bayesian information criterion: three equal bursts have equal kinds,
    and only their spacing says that it takes three to make an iteration. ``start`` is ascending.
    """
    start, kind = start[-MAX_PATTERN:], kind[-MAX_PATTERN:]
    lag = _kind_lag(kind)
    if lag is None:
        return None
    first, last = _longest_run(kind[lag:] == kind[:-lag])
    last += lag
    gaps = np.diff(start[first:last]).astype(float)
    count = len(gaps)
    if count < MIN_REPEATS * lag:
        return None
    # An iteration's longest gap recurs in every one: what is longer and rarer is a pause.
    gaps = np.minimum(gaps, np.sort(gaps)[-MIN_REPEATS])
    # Logarithms, so that no long gap outweighs all else; a floor, so that gaps of next to nothing
    # count as equal.
    gaps = np.log(gaps + 0.05 * gaps.mean() + 1.0)
    lengths = np.arange(lag, count // MIN_REPEATS + 1, lag)
    residuals = np.array([_residual(gaps, length) for length in lengths.tolist()]) + NOISE_FLOOR
    scores = count * np.log(residuals) + 2 * lengths * np.log(count)
    best = residuals[np.argmin(scores)]
    # Many lengths are tried and gaps within a burst carry no noise, so chance favours long ones:
    # hence twice the usual penalty, and a longer one must halve what is unexplained.
    if best > MAX_RESIDUAL:
        return None
    return int(lengths[np.flatnonzero(residuals <= 2 * best)[0]])


def _residual(gaps: Floats, length: int) -> float:
    """Variance of the gaps that their place in a pattern of ``length`` leaves unexplained."""
    place = np.arange(len(gaps)) % length
    means = np.bincount(place, gaps) / np.bincount(place)
    return float(np.mean((gaps - means[place]) ** 2))


def _kind_lag(kind: NDArray[np.generic]) -> int | None:
    """The smallest lag at which nearly all kinds equal those before."""
    count = len(kind)
    _, labels, totals = np.unique(kind, return_inverse=True, return_counts=True)
    if len(totals) > count // MIN_REPEATS:
        return None
    width = 1 << (2 * count - 1).bit_length()
    matches = np.zeros(width)
    for label in range(len(totals)):
        spectrum = np.fft.rfft(labels == label, width)
        matches += np.fft.irfft(np.abs(spectrum) ** 2, width)
    lags = np.arange(1, count // MIN_REPEATS + 1)
    share = matches[lags] / (count - lags)
    good = np.flatnonzero(share >= max(0.85, 0.97 * float(share.max(initial=0.0))))
    return int(lags[good[0]]) if len(good) else None


def _longest_run(same: NDArray[np.bool_]) -> tuple[int, int]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return 0, 0
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest])


def spectral_period(start: Ints, end: Ints, size: Floats) -> float | None:
    """The fundamental period of the bytes in flight, in seconds.

    The power spectrum's transform is the autocorrelation, whose first peak near its highest one is
    the period: the spectrum's own highest line may be any harmonic. A parabola through the peak
    gives the fraction of a sample.
    """
    signal, step_s = _in_flight(start, end, size)
    count = len(signal)
    signal = signal - signal.mean()
    power = np.abs(np.fft.rfft(signal, 2 * count)) ** 2
    correlation = np.fft.irfft(power)[:count]
    limit = count // MIN_REPEATS
    if correlation[0] <= 0 or limit < 3:
        return None
    # Unbiased: long lags overlap less.
    correlation = correlation / correlation[0] * count / (count - np.arange(count))
    inner = correlation[1:limit]
    peaks = 1 + np.flatnonzero(
        (inner >= correlation[: limit - 1]) & (inner > correlation[2 : limit + 1])
    )
    below = np.flatnonzero(correlation < 0)
    peaks = peaks[peaks > (below[0] if len(below) else limit)]
    if not len(peaks):
        return None
    height = correlation[peaks]
    if height.max() < 0.1:
        return None
    lag = int(peaks[np.flatnonzero(height >= 0.8 * height.max())[0]])
    left, middle, right = correlation[lag - 1 : lag + 2]
    bend = left - 2 * middle + right
    shift = 0.5 * (left - right) / bend if bend < 0 else 0.0
    return (lag + float(np.clip(shift, -0.5, 0.5))) * step_s


def _in_flight(start: Ints, end: Ints, size: Floats) -> tuple[Floats, float]:
    """Bytes in flight over time, sampled finer than half the shortest typical transfer."""
    origin, span = int(start.min()), int(end.max() - start.min())
    duration = np.maximum(end - start, 1)
    step = max(float(np.percentile(duration, 10)) / 4, span / MAX_SAMPLES, 1.0)
    count = int(span / step) + 2
    signal = np.zeros(count + 1)
    np.add.at(signal, ((start - origin) / step).astype(int), size)
    np.add.at(signal, ((end - origin) / step).astype(int) + 1, -size)
    return np.cumsum(signal)[:count], step / 1e9
