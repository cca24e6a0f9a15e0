"""Who slows a job down, and what each policy would change: jobs played with and without others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from crux_torch.schedule.ecmp import ecmp
from crux_torch.schedule.intensity import link_traffic
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions
from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim.play import play


@dataclass(frozen=True, slots=True)
class JobAdvice:
    """What holds one job up, on the default paths with fair sharing, and what would help it.

    A time is of the mean iteration; None: it ends none within the horizon.

    Attributes:
        alone_s: on the same paths, without any other job.
        without_s: without one other job, for each that it shares a link with on these paths.
        under_s: under each scheduler asked for.
    """

    iteration_s: float | None
    alone_s: float | None
    without_s: Mapping[str, float | None]
    under_s: Mapping[str, float | None]


def advise(
    cluster: Cluster,
    options: SchedulerOptions,
    horizon_s: float,
    *,
    start_s: Mapping[str, float],
    schedulers: Sequence[str],
    slack_bytes: float | None = None,
) -> dict[str, JobAdvice]:
    """Plays the cluster as it is, without each job in turn, and under each scheduler.

    For ``slack_bytes`` see :func:`~crux_torch.sim.play.with_slack`.

    Raises:
        SpecError: a job or link that can't be simulated.
        ScenarioError: the clock can't resolve the shortest iteration at the horizon.
    """

    def mean_s(jobs: Cluster, decision: Decision) -> dict[str, float | None]:
        report = play(jobs, decision, horizon_s, start_s=start_s, slack_bytes=slack_bytes)
        return {name: job.mean_iteration_s for name, job in report.jobs.items()}

    shared = ecmp(cluster, options)
    now = mean_s(cluster, shared)
    alone = mean_s(cluster, replace(shared, isolated=True))
    under = {name: mean_s(cluster, SCHEDULERS[name](cluster, options)) for name in schedulers}
    links = {job.name: link_traffic(job, shared.path[job.name]).keys() for job in cluster.jobs}
    without: dict[str, dict[str, float | None]] = {name: {} for name in links}
    for absent in links:
        met = [name for name in links if name != absent and links[name] & links[absent]]
        if not met:
            continue
        left = tuple(job for job in cluster.jobs if job.name != absent)
        played = mean_s(Cluster(cluster.capacity_Bps, left), shared)
        for name in met:
            without[name][absent] = played[name]
    return {
        name: JobAdvice(
            now[name], alone[name], without[name], {s: found[name] for s, found in under.items()}
        )
        for name in links
    }
