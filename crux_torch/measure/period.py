"""The duration of one iteration, from when the job communicates (Crux §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
        operations: ``heavy`` collectives of one iteration where their pattern repeats, else None.
    """

    period_s: float
    source: Literal["fourier", "marks", "both"]
    operations: int | None = None


def estimate_period(
    start_ns: Ints,
    end_ns: Ints,
    bytes: Ints,
    kinds: NDArray[np.generic],
    marks_ns: Ints,
) -> Period | None:
    """The period of a job from its collectives.

    The spectrum of the bytes in flight (:func:`spectral_period`) may mistake the distance of an
    iteration's equal bursts for the period, and jitter blurs it. So the order of the operations
    (:func:`pattern_length`) comes before it, and optimizer marks win over both (docs/recorder.md).

    Args:
        start_ns, end_ns: when each collective was in flight, in any order.
        bytes: payload of each.
        kinds: a number for each that is equal for equal operations (operation, size, group).
        marks_ns: ends of iterations, ascending, on the clock of ``start_ns``: a host that issues
            ahead of its device has marks of its own (:mod:`iteration_ends`). Empty if unknown.

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
    """Which operations carry the job's traffic, unlike a logged loss or a barrier."""
    return np.asarray(size >= LIGHT * size.max(initial=0.0))


def _fenced_mean(gaps: Floats) -> float:
    median = float(np.median(gaps))
    kept = gaps[(gaps >= FENCE[0] * median) & (gaps <= FENCE[1] * median)]
    return float(kept.mean()) if len(kept) else median


def _repeats(kind: NDArray[np.generic], length: int) -> NDArray[np.bool_]:
    """For which i the operations from i to i + length are one whole pattern, without a stray.

    The kinds around i must equal those one pattern later. If that is so nowhere, it is enough that
    the kind at i does.
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
