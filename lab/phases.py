"""Who runs when, and what follows from the steps that were done meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lab.job import Job, JobError, Step

#: Steps that pass after a change of who runs before the measurement begins.
SETTLE_STEPS = 2


@dataclass(frozen=True)
class Phase:
    """Some jobs run and the others wait; ``case`` names the condition in the results."""

    case: str
    running: tuple[str, ...]


@dataclass(frozen=True)
class Window:
    """Seconds of the monotonic clock in which a phase was measured."""

    case: str
    start: float
    end: float

    @property
    def length_s(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Spread:
    """Durations of steps, seconds: their number, median, and 10th and 90th percentile."""

    count: int
    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(
            len(ordered),
            statistics.median(ordered),
            ordered[round(0.1 * last)],
            ordered[round(0.9 * last)],
        )


def measure(
    phase: Phase,
    jobs: Mapping[str, Job],
    steps: int,
    timeout_s: float,
    tick: Callable[[], None] = lambda: None,
) -> Window:
    """Let the phase's jobs run until each has done ``steps`` whole steps; the others wait.

    Raises:
        JobError: a job ended, or did not do its steps within ``timeout_s``.
    """
    for name, job in jobs.items():
        if name not in phase.running:
            job.pause()
    for name in phase.running:
        jobs[name].resume()
    running = [jobs[name] for name in phase.running]
    deadline = time.monotonic() + timeout_s
    _wait_for(running, time.monotonic(), SETTLE_STEPS, jobs.values(), deadline, tick)
    start = time.monotonic()
    _wait_for(running, start, steps, jobs.values(), deadline, tick)
    return Window(phase.case, start, time.monotonic())


def _wait_for(
    running: Sequence[Job],
    since: float,
    steps: int,
    everyone: Iterable[Job],
    deadline: float,
    tick: Callable[[], None],
) -> None:
    everyone = list(everyone)
    while True:
        for job in everyone:
            job.check()
        missing = [j for j in running if sum(s.start >= since for s in j.steps()) < steps]
        if not missing:
            return
        if time.monotonic() > deadline:
            names = " and ".join(job.name for job in missing)
            raise JobError(f"{names} did not do {steps} steps in time\n{missing[0].tail()}")
        tick()
        time.sleep(0.05)


def durations(steps: Iterable[Step], windows: Iterable[Window]) -> list[float]:
    """Durations of the steps that lie wholly inside one of the windows."""
    windows = list(windows)
    return [
        step.duration_s
        for step in steps
        if any(w.start <= step.start and step.end <= w.end for w in windows)
    ]


def compute_seconds(steps: Iterable[Step], windows: Iterable[Window]) -> float:
    """Median seconds from the start of a step to its last gradient, in these windows."""
    windows = list(windows)
    return statistics.median(
        step.computed - step.start
        for step in steps
        if any(w.start <= step.start and step.end <= w.end for w in windows)
    )


def steps_within(steps: Iterable[Step], windows: Iterable[Window]) -> float:
    """How many steps were done within the windows; one that crosses an edge counts by its part."""
    windows = list(windows)
    return sum(
        max(0.0, min(step.end, w.end) - max(step.start, w.start)) / step.duration_s
        for step in steps
        for w in windows
        if step.duration_s > 0
    )


def utilisation(
    done: Mapping[str, float],
    compute_s: Mapping[str, float],
    gpus: Mapping[str, int],
    length_s: float,
    total_gpus: int,
) -> float:
    """Σ_j (compute time of j within T) × gpus_j / (T × GPUs), the paper's U_T as a ratio.

    Args:
        done: steps that each job did within T.
        compute_s: seconds that the job's devices compute in one step, measured while it was alone.
        gpus: devices of each job, all busy while it computes.
        length_s: T.
        total_gpus: devices of the cluster.
    """
    busy = sum(done[name] * compute_s[name] * gpus[name] for name in done)
    return busy / (length_s * total_gpus)
