"""Step times of jobs: now, and without other jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from crux_torch.agreement.records import JobRecord, StepTimes
    from crux_torch.measure.profile import JobProfile

#: ``measured``: the job's traffic went first; ``computed``: from its compute time, its bytes and
#: the topology; ``bound``: neither was possible, a step alone takes between two bounds.
AloneSource = Literal["measured", "computed", "bound"]


@dataclass(frozen=True, slots=True)
class JobSteps:
    """One job's steps; None: not known.

    Attributes:
        step_s, step_age_s: the mean step of late, and seconds since the last of these ended, when
            the job wrote it.
        alone_s, alone_source: a step without other jobs, at most, and where that is from.
        least_alone_s: at least; ``alone_s`` itself unless that is a bound.
        alone_age_s: seconds since the measurement that ``alone_s`` rests on, when the job wrote it.
        slowdown, most_slowdown: ``step_s`` over ``alone_s``, and over ``least_alone_s``.
    """

    step_s: float | None = None
    step_age_s: float | None = None
    alone_s: float | None = None
    least_alone_s: float | None = None
    alone_source: AloneSource | None = None
    alone_age_s: float | None = None
    slowdown: float | None = None
    most_slowdown: float | None = None


def steps_of(jobs: Sequence[JobRecord], told: Mapping[str, StepTimes]) -> dict[str, JobSteps]:
    """Returns the step times of each of ``jobs``, from its profile and its published times."""
    return {job.job: _steps(job.profile, told.get(job.job)) for job in jobs}


def _steps(profile: JobProfile | None, now: StepTimes | None) -> JobSteps:
    step_s = now.step_s if now is not None else None
    age_s = now.age_s if now is not None else None
    if profile is None:
        return JobSteps(step_s, age_s)
    alone_s, source = _alone(profile, now)
    least_s = min(alone_s, profile.compute_s) if source == "bound" else alone_s

    def times(alone_s: float) -> float | None:
        return step_s / alone_s if step_s is not None and alone_s > 0 else None

    return JobSteps(
        step_s=step_s,
        step_age_s=age_s,
        alone_s=alone_s,
        least_alone_s=least_s,
        alone_source=source,
        alone_age_s=now.profile_age_s if now is not None else None,
        slowdown=times(alone_s),
        most_slowdown=times(least_s),
    )


def _alone(profile: JobProfile, now: StepTimes | None) -> tuple[float, AloneSource]:
    # What was measured, or ended since, is not less than a step alone takes.
    most_s = profile.period_s
    if now is not None and now.fastest_s is not None:
        most_s = min(most_s, now.fastest_s)
    if profile.measured_alone:
        return most_s, "measured"
    if profile.t_source == "topology":
        return min(most_s, _computed_s(profile)), "computed"
    return most_s, "bound"


def _computed_s(profile: JobProfile) -> float:
    """An iteration of the profile that meets no other job, as schedules reckon with it."""
    from crux_torch.schedule.model import Burst, Job
    from crux_torch.schedule.papers.intensity import burst_times_s

    total = sum(burst.share for burst in profile.bursts) or 1.0
    bursts = tuple(Burst(b.at, b.share / total, b.least_s) for b in profile.bursts)
    job = Job("", gpus=1, flops=0.0, compute_s=profile.compute_s, flows=(), bursts=bursts)
    return max(profile.compute_s, burst_times_s(job, profile.t_s)[-1][1])
