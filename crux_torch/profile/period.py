"""The duration of one iteration, from when the job communicates (Crux §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Marks and signal tell the same period when they differ by less.
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
#: Payloads below this share of the largest say nothing of the period.
LIGHT = 1e-3


@dataclass(frozen=True, slots=True)
class Period:
    """One iteration's duration.

    Attributes:
        period_s: mean seconds of an iteration within the window, pauses left out.
        source: ``fourier`` (communication alone), ``marks`` (they contradict it, or it is not
            periodic) or ``both`` (they agree within ``AGREEMENT``).
        confidence: 0 to 1. From a pattern or marks: the share of iterations within a quarter of
            the period. From the spectrum alone: the signal's autocorrelation at the period.
        operations: ``heavy`` collectives of one iteration where their pattern repeats, else None.
    """

    period_s: float
    source: Literal["fourier", "marks", "both"]
    confidence: float
    operations: int | None = None


def estimate_period(
    start_ns: ArrayLike,
    end_ns: ArrayLike,
    *,
    marks_ns: ArrayLike | None = None,
    bytes: ArrayLike | None = None,
    kinds: ArrayLike | None = None,
) -> Period | None:
    """The period of a job from its collectives.

    The bytes in flight over time are transformed (:func:`spectral_period`). That alone can take
    the spacing of an iteration's equal bursts for the period, and jitter smears its peaks, so the
    order of the operations is asked as well (:func:`pattern_length`): it repeats exactly, whatever
    the time between them does. Optimizer marks, where there are any, define the iteration, so
    they win where the signal disagrees: a job that synchronises its gradients twice a step, or
    every other step, has another signal period. Bursts that are alike in operation, size and
    spacing can only be told apart by marks.

    Args:
        start_ns: when each collective began, in any order.
        end_ns: when it was complete.
        marks_ns: ends of iterations on the clock that ``start_ns`` is of, ascending: a host's marks
            of what it has issued are none for a device (:mod:`iteration_ends`).
        bytes: payload of each; default: every one counts the same.
        kinds: a number for each that is equal for equal operations (operation, size, group);
            default: made from ``bytes``.

    Returns:
        None where neither source has seen ``MIN_REPEATS`` iterations.
    """
    start, end = np.asarray(start_ns, dtype=np.int64), np.asarray(end_ns, dtype=np.int64)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    size = np.ones(len(start)) if bytes is None else np.asarray(bytes, dtype=float)[order]
    kind = np.asarray(size if kinds is None else np.asarray(kinds)[order])
    signal = _from_signal(start, end, size, kind)
    marks = _from_marks(marks_ns)
    if marks is None or signal is None:
        return marks or signal
    agree = abs(marks.period_s - signal.period_s) <= AGREEMENT * marks.period_s
    return Period(
        marks.period_s,
        "both" if agree else "marks",
        marks.confidence,
        signal.operations if agree else None,
    )


def _from_marks(marks_ns: ArrayLike | None) -> Period | None:
    marks = np.asarray([] if marks_ns is None else marks_ns, dtype=np.int64)
    if len(marks) <= MIN_REPEATS:
        return None
    gaps = np.diff(marks) / 1e9
    period_s = _fenced_mean(gaps)
    return Period(period_s, "marks", _regularity(gaps, period_s))


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
            return Period(period_s, "fourier", _regularity(gaps, period_s), length)
    found = spectral_period(start, end, size)
    return None if found is None else Period(found[0], "fourier", found[1])


def heavy(size: Floats) -> NDArray[np.bool_]:
    """Which operations carry the job's traffic: not a logged loss or a barrier now and then."""
    return np.asarray(size >= LIGHT * size.max(initial=0.0))


def _fenced_mean(gaps: Floats) -> float:
    median = float(np.median(gaps))
    kept = gaps[(gaps >= FENCE[0] * median) & (gaps <= FENCE[1] * median)]
    return float(kept.mean()) if len(kept) else median


def _regularity(gaps: Floats, period_s: float) -> float:
    return float(np.mean(np.abs(gaps - period_s) <= 0.25 * period_s))


def _repeats(kind: NDArray[np.generic], length: int) -> NDArray[np.bool_]:
    """Where the operations from i to i + length are those of a whole pattern: no stray among them.

    An index i qualifies if the window of kinds that begins there equals the one a pattern later,
    or, at the end of the record, earlier.
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
    and only their spacing says that it takes three to make an iteration.

    Args:
        start: when each operation began, ascending.
        kind: what it was.
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


def spectral_period(start: Ints, end: Ints, size: Floats) -> tuple[float, float] | None:
    """The fundamental of the bytes in flight, in seconds, and its autocorrelation.

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
    return (lag + float(np.clip(shift, -0.5, 0.5))) * step_s, float(np.clip(middle, 0.0, 1.0))


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
