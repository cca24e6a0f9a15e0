"""The judge of a plan on trial: measured iterations under it and under the plan before.

Each job of a component publishes its iteration times under the plan before and under the plan on
trial, as the mean and the variance of batches. The share of time in which a job's devices
compute is ``compute_s`` over its mean iteration, so the component's busy GPUs follow from the
means. Both may be read at any time: the bounds of the means are a confidence
sequence (the normal mixture of Robbins; Waudby-Smith et al., "Time-uniform central limit theory and
asymptotic confidence sequences", eq. 2). They hold for all jobs at once whatever the jobs' times
have to do with each other, because the error is divided among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

#: Chance at most that a plan which changes nothing is taken back before the end of its trial.
ERROR = 0.01
#: A loss of busy GPUs that is not worth taking a plan back.
TOLERANCE = 0.01
#: Least size of a batch: iterations, and seconds.
BATCH_ITERATIONS, BATCH_S = 5, 1.0
#: Batches before which a mean counts as unknown, and with which the plan before is known well
#: enough; fewer do if their mean is known to within ``WIDTH``.
MIN_BATCHES, ENOUGH_BATCHES, WIDTH = 8, 40, 0.02
#: Batches of every job after which a trial ends.
TRIAL_BATCHES = 200
#: An iteration longer than this many of the job's alone is a pause, like that of a checkpoint, and
#: left out. If the next one is, too, it counts as so many.
PAUSE = 8.0
#: A job whose iteration has not ended for so long waits: seconds, and mean iterations before.
WAITING_S, WAITING = 20.0, 10.0
#: Batches for which the confidence sequence is narrowest.
_TIGHT = 16

_Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Size = Annotated[float, Meta(ge=0.0, le=1e30)]


class Sample(NamedTuple):
    """Iteration times of a job under one plan.

    Attributes:
        batches: number of whole batches.
        iterations: number of iterations in them.
        mean_s: mean of the batches' means.
        variance: variance of the batches' means, s².
    """

    batches: _Count = 0
    iterations: _Count = 0
    mean_s: _Size = 0.0
    variance: _Size = 0.0


class Tally:
    """Collects one job's iterations under one plan.

    Args:
        alone_s: seconds of its iteration alone.
    """

    def __init__(self, alone_s: float) -> None:
        self._most_s = PAUSE * alone_s
        self._open: list[float] = []
        self._was_long = False
        self._batches = self._iterations = 0
        self._mean_s = self._squares = 0.0

    def add(self, iteration_s: float) -> None:
        """One more iteration."""
        is_long, was_long = iteration_s > self._most_s, self._was_long
        self._was_long = is_long
        if is_long and not was_long:
            return
        self._open.append(min(iteration_s, self._most_s))
        if len(self._open) < BATCH_ITERATIONS or math.fsum(self._open) < BATCH_S:
            return
        value = math.fsum(self._open) / len(self._open)
        self._batches += 1
        self._iterations += len(self._open)
        self._open = []
        before = value - self._mean_s
        self._mean_s += before / self._batches
        self._squares += before * (value - self._mean_s)

    def skip(self) -> None:
        """Iterations are left out here: a batch does not span the gap."""
        self._open = []

    @property
    def sample(self) -> Sample:
        """The batches so far."""
        variance = self._squares / (self._batches - 1) if self._batches > 1 else 0.0
        return Sample(self._batches, self._iterations, self._mean_s, variance)


@dataclass(frozen=True, slots=True)
class Member:
    """One job of a component on trial.

    Attributes:
        gpus, compute_s: of the job.
        alone_s: seconds of its iteration alone.
        before, after: under the plan before, and under the one on trial.
        waiting_s: seconds since its last iteration ended under the plan on trial, if that is long.
    """

    gpus: int
    compute_s: float
    alone_s: float
    before: Sample
    after: Sample
    waiting_s: float = 0.0


class Judgement(NamedTuple):
    """Verdict on a plan on trial.

    Attributes:
        verdict: ``worse``, ``kept``, or ``open`` until more batches are in.
        change: share by which the component's busy GPUs changed, as measured.
        low, high: bounds of that.
        slowed: a job that is slowed down beyond the cap; empty if none is.
    """

    verdict: Literal["open", "kept", "worse"]
    change: float
    low: float
    high: float
    slowed: str = ""


def enough(sample: Sample, patient: bool = True) -> bool:
    """True if the mean under the plan before is known well enough for a trial to begin.

    Args:
        patient: True if there is time to know it well.
    """
    if sample.batches < MIN_BATCHES or not patient:
        return sample.batches >= MIN_BATCHES
    return sample.batches >= ENOUGH_BATCHES or half_width_s(sample, ERROR) <= WIDTH * sample.mean_s


def half_width_s(sample: Sample, error: float) -> float:
    """The mean's distance from the truth, on one side, exceeds this with a chance of ``error``.

    However often it is asked while batches come in. Infinite while there are too few.
    """
    n = sample.batches
    if n < MIN_BATCHES:
        return math.inf
    # Only who judges needs it; records and the status, which name samples, load without it.
    from scipy.special import ndtri, stdtrit

    spread = -2.0 * math.log(2.0 * error)
    rho = (spread + math.log1p(spread)) / _TIGHT
    mixture = 2.0 * (n * rho + 1.0) / (n * n * rho) * math.log(math.sqrt(n * rho + 1) / (2 * error))
    # The variance is estimated: Student's quantile in place of the normal one.
    student = float(stdtrit(n - 1, 1.0 - error) / ndtri(1.0 - error))
    return student * math.sqrt(sample.variance * mixture)


def judge(members: Mapping[str, Member], max_slowdown: float, late: bool = False) -> Judgement:
    """Judges the plan on trial.

    Args:
        members: all jobs of the component.
        max_slowdown: a plan that makes a job's mean iteration longer than this many times its
            iteration alone, and longer than the plan before, is worse.
        late: the trial has to end as soon as all means are known, and what was measured decides
            even if it is not certain. So it does after ``TRIAL_BATCHES``.
    """
    error = ERROR / (2 * len(members))
    busy = dict.fromkeys(("before", "least before", "most before", "after", "least", "most"), 0.0)
    slowed, knows_all = "", True
    for name, member in sorted(members.items()):
        before, after = (_bounds_s(member, s, error) for s in (member.before, member.after))
        iterations = member.after.iterations
        if member.waiting_s >= max(WAITING_S, WAITING * member.before.mean_s):
            low_s = max(after.low_s, member.waiting_s / (1 + iterations))
            after = _Bounds(low_s, max(low_s, after.high_s))
        limit_s = max(max_slowdown * member.alone_s, (1 + TOLERANCE) * before.high_s)
        if after.low_s > limit_s:
            slowed = slowed or name
        knows_all &= member.after.batches >= MIN_BATCHES and member.after.mean_s <= limit_s
        work = member.gpus * member.compute_s
        busy["before"] += _over(work, max(member.before.mean_s, member.compute_s))
        busy["after"] += _over(work, max(member.after.mean_s or after.low_s, member.compute_s))
        busy["least before"] += _over(work, before.high_s)
        busy["most before"] += _over(work, before.low_s)
        busy["least"] += _over(work, after.high_s)
        busy["most"] += _over(work, after.low_s)
    change = _ratio(busy["after"], busy["before"])
    low = _ratio(busy["least"], busy["most before"])
    high = _ratio(busy["most"], busy["least before"])
    verdict: Literal["open", "kept", "worse"] = "open"
    least = min(member.after.batches for member in members.values())
    ended = least >= (MIN_BATCHES if late else TRIAL_BATCHES)
    if slowed or high < -TOLERANCE:
        verdict = "worse"
    elif ended:
        verdict = "kept" if change >= -TOLERANCE else "worse"
    elif knows_all and low > -TOLERANCE:
        verdict = "kept"
    return Judgement(verdict, change, low, high, slowed)


class _Bounds(NamedTuple):
    low_s: float
    high_s: float


def _bounds_s(member: Member, sample: Sample, error: float) -> _Bounds:
    """No iteration is shorter than its computation, so something is known without a sample."""
    width_s = half_width_s(sample, error)
    low_s = max(sample.mean_s - width_s, member.compute_s)
    return _Bounds(low_s, max(low_s, sample.mean_s + width_s))


def _over(work: float, seconds: float) -> float:
    return work / seconds if seconds > 0 else 0.0


def _ratio(after: float, before: float) -> float:
    return after / before - 1.0 if before > 0 else math.inf
