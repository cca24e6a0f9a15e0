"""Finds who slows whom down, and what another schedule would change.

``crux sim advise`` asks about a scenario, ``crux explain`` about the jobs that run now.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from crux_torch.schedule.model import Cluster, Decision, Job, Link
from crux_torch.schedule.papers.intensity import burst_times_s, link_traffic
from crux_torch.sim.play import play

#: Connections of a job that is slower than its bytes explain reach this share of a link's rate at
#: least; what is missing then, the job waits without sending.
LEAST_REACHED = 0.8
#: Share up to which that share is found.
EXACT = 1e-3
#: Bytes on the wire for a byte that a job sends: TCP in frames of 1,514 bytes.
FRAMED = 1514 / 1448


@dataclass(frozen=True, slots=True)
class JobAdvice:
    """Iteration times of one job as it runs now, and without its rivals.

    A time is of the mean iteration; None: it ends none within the horizon.

    Attributes:
        alone_s: on the same paths, without any other job.
        without_s: without one other job, for each that it shares a link with on these paths.
        under_s: under each other decision.
    """

    iteration_s: float | None
    alone_s: float | None
    without_s: Mapping[str, float | None]
    under_s: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice to jobs by name, and the share of all GPUs that computes, now and under others."""

    jobs: Mapping[str, JobAdvice]
    busy: float
    busy_under: Mapping[str, float]


#: Mean iteration of each job, and the share of the GPUs that computes.
_Played = tuple[dict[str, float | None], float]


def advise(
    cluster: Cluster,
    now: Decision,
    horizon_s: float,
    *,
    starts_s: Sequence[Mapping[str, float]],
    under: Mapping[str, tuple[Cluster, Decision]],
    of: Collection[str] | None = None,
    without: Collection[str] | None = None,
    factors: Mapping[str, float] = MappingProxyType({}),
    slack_bytes: float | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Advice:
    """Plays the jobs as they are, without each one in turn, and under other decisions.

    Args:
        now: the decision that they run under.
        starts_s: sets of start times; every play is repeated from each, and the means count.
        under: what else to play: decisions by name, each with the cluster that it is about.
        of: the jobs that want advice; None: all.
        without: jobs that are left out in turn; None: all.
        factors: see :func:`by_level`.
        slack_bytes: see :func:`~crux_torch.sim.play.with_slack`.
        progress: called before each play with the number of those done, and of all at most.

    Raises:
        SpecError: a job or link that can't be simulated.
        ScenarioError: the clock can't resolve the shortest iteration at the horizon.
    """

    absentees = [job.name for job in cluster.jobs] if without is None else list(without)
    done = count()

    def played(jobs: Cluster, decision: Decision) -> _Played:
        progress(next(done), 2 + len(under) + len(absentees))
        jobs = by_level(jobs, decision, factors)
        reports = [
            play(jobs, decision, horizon_s, start_s=start_s, slack_bytes=slack_bytes)
            for start_s in starts_s
        ]
        means = {
            job.name: _mean([report.jobs[job.name].mean_iteration_s for report in reports])
            for job in jobs.jobs
        }
        return means, fmean(report.gpu_utilization for report in reports)

    links = {job.name: link_traffic(job, now.path[job.name]).keys() for job in cluster.jobs}
    asked = links.keys() if of is None else links.keys() & set(of)
    mean_s, busy = played(cluster, now)
    alone_s, _ = played(cluster, replace(now, isolated=True))
    others = {name: played(*what) for name, what in under.items()}
    costs: dict[str, dict[str, float | None]] = {name: {} for name in asked}
    for absent in absentees:
        met = [name for name in asked if name != absent and links[name] & links[absent]]
        if not met:
            continue
        left = tuple(job for job in cluster.jobs if job.name != absent)
        found, _ = played(Cluster(cluster.capacity_Bps, left), now)
        for name in met:
            costs[name][absent] = found[name]
    return Advice(
        {
            name: JobAdvice(
                mean_s[name],
                alone_s[name],
                costs[name],
                {key: means[name] for key, (means, _) in others.items()},
            )
            for name in links
            if name in asked
        },
        busy,
        {key: share for key, (_, share) in others.items()},
    )


def by_level(cluster: Cluster, decision: Decision, factors: Mapping[str, float]) -> Cluster:
    """Returns the cluster in which each level of a link is a link of its own.

    What connections do not reach of a link's rate is lost to others of their level, which wait in
    the same queue, but not to other levels. So a level has the link's rate for the jobs' bytes as
    they are, and all levels together have it for the bytes that are really sent.

    Args:
        factors: of jobs' bytes, by which they are more than what is sent (:class:`Fit`).
    """
    if all(factor <= FRAMED for factor in factors.values()):
        return cluster
    levels: dict[Link, set[int]] = defaultdict(set)
    bytes_: dict[Link, list[tuple[float, float]]] = defaultdict(list)
    for job in cluster.jobs:
        for link, moved in link_traffic(job, decision.path[job.name]).items():
            levels[link].add(decision.level[job.name])
            bytes_[link].append((moved, moved / max(1.0, factors.get(job.name, 1.0) / FRAMED)))
    capacity_Bps = dict(cluster.capacity_Bps)
    for link, used in levels.items():
        if len(used) > 1:
            played, sent = map(math.fsum, zip(*bytes_[link], strict=True))
            capacity_Bps |= {f"{link}@{level}": cluster.capacity_Bps[link] for level in used}
            capacity_Bps[link] *= played / sent if sent else 1.0

    def queued(job: Job) -> Job:
        flows = []
        for flow, chosen in zip(job.flows, decision.path[job.name], strict=True):
            links = flow.candidates[chosen]
            own = (f"{e}@{decision.level[job.name]}" for e in links if len(levels[e]) > 1)
            flows.append(replace(flow, candidates=((*links, *own),) * len(flow.candidates)))
        return replace(job, flows=tuple(flows))

    return Cluster(capacity_Bps, tuple(map(queued, cluster.jobs)))


def _mean(times_s: Sequence[float | None]) -> float | None:
    known = [time_s for time_s in times_s if time_s is not None]
    return fmean(known) if len(known) == len(times_s) else None


def iteration_s(job: Job, t_s: float) -> float:
    """Seconds of an iteration of a job that meets nobody and needs ``t_s`` on its slowest link."""
    times_s = burst_times_s(job, t_s)
    return max(job.compute_s, times_s[-1][1] if times_s else 0.0)


class Fit(NamedTuple):
    """Factors that make a job's iteration alone as long as it was measured.

    Attributes:
        factor: of its bytes.
        compute_s: its compute time.
    """

    factor: float
    compute_s: float

    def applied(self, job: Job) -> Job:
        """Returns ``job`` with these bytes and this compute time."""
        flows = tuple(replace(flow, bytes=self.factor * flow.bytes) for flow in job.flows)
        return replace(job, flows=flows, compute_s=self.compute_s)


def fitted(job: Job, t_s: float, alone_s: float) -> Fit:
    """Returns what makes an iteration of the job alone take ``alone_s``, as it was measured.

    A job that takes longer than its compute time and its bytes explain loses time on the network:
    its bytes are scaled by what its connections do not reach of a link's rate. The rest is taken
    for computation, as is the difference of a job that takes less.

    Args:
        t_s: seconds that its bytes need on its slowest link.
    """
    factor = 1.0
    if t_s > alone_s:
        factor = alone_s / t_s
    elif t_s > 0:
        factor = _largest(lambda x: iteration_s(job, x * t_s) <= alone_s, 1.0, 1.0 / LEAST_REACHED)

    def fits(compute_s: float) -> bool:
        return iteration_s(replace(job, compute_s=compute_s), factor * t_s) <= alone_s

    return Fit(factor, _largest(fits, 0.0, max(alone_s, job.compute_s)))


def _largest(fits: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number up to ``high`` that fits; ``low`` if none does."""
    while high - low > EXACT * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
