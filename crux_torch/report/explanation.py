"""Explains how long a job's steps take: what it waits for, with whom, and what would help.

Times are measured where the store has them. Who costs whom what is played: the jobs as their
records describe them, on the paths and levels in force, with and without each other.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from crux_torch import _fluid
from crux_torch.agreement.audit import AuditEntry, about_trial
from crux_torch.agreement.inputs import agreed
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import JobRecord, PathCounts, Plan, TriedPlan
from crux_torch.errors import CruxError
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import ClusterStatus
from crux_torch.report.live_cluster import LinkLoad, LiveCluster, link_loads, live_cluster
from crux_torch.report.step_times import JobSteps
from crux_torch.schedule.model import Cluster, Job, Link, SchedulerOptions
from crux_torch.schedule.papers.intensity import link_traffic
from crux_torch.schedule.schedulers import SCHEDULERS
from crux_torch.settings import PATH_POLICIES
from crux_torch.sim.advice import Advice, JobAdvice, advise, fitted, iteration_s

#: Iterations of all jobs together that one play lasts for, and of the slowest job at least.
ITERATIONS, ROUNDS = 20_000, 40
#: Sets of start times that a play is repeated from: they decide how jobs fall into step.
PHASES = 2
#: Jobs of which each is left out in a play: those that send most over the job's links.
RIVALS = 24
#: Jobs that are played at most.
NEAR = 128
#: A link of less planned load is not one on which jobs wait for each other.
IDLE = 0.02
#: Errors of the engine in the contest (docs/research/contest.md): median, and 90th percentile.
MEDIAN_ERROR, LARGE_ERROR = 0.037, 0.122
#: Stands for a job whose name the reader may not see.
OTHERS = "another tenant's job"


@dataclass(frozen=True, slots=True)
class Rival:
    """Another job on a job's links.

    Attributes:
        job: its name; empty if the reader may not see it.
        links: that both use.
        level: of its traffic.
        without_s: the job's step without it, as played; None: not played.
        costs_s, costs_share: what it costs, in seconds and as a share of the job's step; negative
            if the job would be slower without it. See ``Explanation.scale``.
        since_s: seconds since 1970 at which the audit log says that it came; None: before the log.
    """

    job: str
    links: tuple[Link, ...]
    level: int
    without_s: float | None
    costs_s: float | None
    costs_share: float | None
    since_s: float | None


@dataclass(frozen=True, slots=True)
class Remedy:
    """Another schedule of the same jobs.

    Attributes:
        step_s: the job's step under it, as played.
        change: of the step as it is now, as a share.
        busy: share of all these jobs' GPUs that computes.
    """

    scheduler: str
    step_s: float | None
    change: float | None
    busy: float


@dataclass(frozen=True, slots=True)
class InPlan:
    """Effect of the plan in force on a job.

    Attributes:
        epoch, policy, author: of the plan; the author is empty if the reader may not see it.
        since_s, why: from the audit log, if that still has the plan.
        level: of the job's traffic; None: its traffic has no level.
        paths: (start, routers, end) of each pair of hosts that has a choice.
        seen: the job's connections on these paths.
        changes: of the job, by this plan and by those before it that the log has, the last first:
            seconds since 1970, and what changed.
        verdict: of the trial of this plan, in words; empty without one.
    """

    epoch: int
    policy: str
    author: str
    since_s: float | None
    why: tuple[str, ...]
    level: int | None
    paths: tuple[tuple[str, tuple[str, ...], str], ...]
    seen: PathCounts | None
    changes: tuple[tuple[float, str], ...]
    verdict: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """One job's step, explained. Seconds are of one step; None: not known.

    Attributes:
        steps: measured, now and alone.
        waits_s, waits_alone_s: what of the step is not computation, now and alone.
        computes_s: as it was measured last.
        played_s, played_alone_s: the step as the engine plays it, now and alone.
        unexplained_s: measured less played, if the job is slower than it is played.
        scale: by which played costs were multiplied to be what was measured.
        rivals: on its links, the one that costs most first.
        links: that it shares, those with the highest planned load first.
        busy: share of the GPUs of the jobs that meet that computes, as played.
        doubts: what makes the figures less certain.
    """

    job: str
    state: str
    steps: JobSteps
    computes_s: float | None = None
    waits_s: float | None = None
    waits_alone_s: float | None = None
    played_s: float | None = None
    played_alone_s: float | None = None
    unexplained_s: float | None = None
    scale: float = 1.0
    rivals: tuple[Rival, ...] = ()
    links: tuple[tuple[Link, LinkLoad], ...] = ()
    plan: InPlan | None = None
    busy: float | None = None
    remedies: tuple[Remedy, ...] = ()
    doubts: tuple[str, ...] = ()


def explain(
    status: ClusterStatus,
    topology: Topology | None,
    audit: Sequence[AuditEntry],
    job: str,
    *,
    schedulers: Sequence[str] = (),
    all_names: bool = True,
) -> Explanation:
    """Returns what is known of the steps of ``job``.

    Args:
        status: with a record of ``job``.
        schedulers: that are played to see what would help.
        all_names: False: names of jobs of other tenants are left out, and what may contain them.
    """
    record = next(record for record in status.jobs if record.job == job)
    steps = status.steps.get(job, JobSteps())
    mine = _names(status.jobs, status.operator, job, all_names)
    found = Explanation(
        job, record.state, steps, plan=_in_plan(status.plan, record, status.jobs, audit, mine)
    )
    if record.profile is None:
        return found
    computes_s = record.profile.compute_s
    found = replace(
        found,
        computes_s=computes_s,
        waits_s=_less(steps.step_s, computes_s),
        waits_alone_s=_less(steps.alone_s, computes_s),
        doubts=tuple(_doubts(record, steps, topology)),
    )
    # What is in force; the guard may keep the default's plan from it.
    in_force = status.plan.policy if status.plan is not None else ""
    schedulers = [name for name in schedulers if name != in_force or name == "crux"]
    live, factors = near_as_alone(status, topology, job)
    if job in live.by_hash:
        doubt = "the network's hash chooses the paths of its connections, and nobody reads it: its "
        doubt += "bytes are spread evenly over all paths"
        found = replace(found, doubts=(*found.doubts, doubt))
    if status.plan is not None and status.plan.policy == "mlcc":
        doubt = "the rates that mlcc books are not played: jobs share links evenly instead"
        found = replace(found, doubts=(*found.doubts, doubt))
    loads = link_loads(live.taken, live.now, status.steps)
    traffic = {each.name: link_traffic(each, live.now.path[each.name]) for each in live.taken.jobs}
    links = [(link, loads[link]) for link in traffic[job] if len(loads[link].jobs) > 1]
    links = [(link, load) for link, load in links if load.planned_ratio >= IDLE]
    links.sort(key=lambda each: (-each[1].planned_ratio, each[0]))
    try:
        levels = agreed(status.jobs, topology).levels
        played = _played(live, job, levels, schedulers, links, factors)
    except (_fluid.SpecError, CruxError) as error:
        reason = error if all_names else type(error).__name__
        return replace(found, doubts=(*found.doubts, f"the jobs can't be played: {reason}"))
    own = played.jobs[job]
    scale, now_s = _scale(steps, own), steps.step_s or own.iteration_s
    rivals = [
        _rival(other, own, now_s, scale, live.now.level[other], links, audit)
        for other in dict.fromkeys(name for _, load in links for name in load.jobs)
        if other != job
    ]
    rivals.sort(key=lambda rival: -(rival.costs_s or 0.0))
    named = [replace(r, job=r.job if r.job in mine else "") for r in rivals]
    shown = [
        (link, replace(load, jobs=tuple(n if n in mine else "" for n in load.jobs)))
        for link, load in links
    ]
    return replace(
        found,
        played_s=own.iteration_s,
        played_alone_s=own.alone_s,
        unexplained_s=_less(steps.step_s, own.iteration_s),
        scale=scale,
        rivals=tuple(named),
        links=tuple(shown),
        busy=played.busy,
        remedies=tuple(
            Remedy(name, step_s, _change(now_s, step_s), played.busy_under[name])
            for name, step_s in own.under_s.items()
        ),
    )


def near_as_alone(
    status: ClusterStatus, topology: Topology | None, job: str
) -> tuple[LiveCluster, dict[str, float]]:
    """Returns the jobs that can meet ``job``, to be played, and the factors of their bytes.

    Their bytes and compute times explain their steps alone; for the factors see
    :func:`~crux_torch.sim.advice.by_level`.
    """
    live = live_cluster(status.jobs, status.plan, topology, status.operator)
    return _as_alone(_neighbourhood(live, job), status.steps)


def _less(whole_s: float | None, part_s: float | None) -> float | None:
    return None if whole_s is None or part_s is None else max(0.0, whole_s - part_s)


def _change(before_s: float | None, after_s: float | None) -> float | None:
    return after_s / before_s - 1.0 if before_s and after_s is not None else None


def _names(
    records: Sequence[JobRecord], operator: OperatorSettings, job: str, all_names: bool
) -> frozenset[str]:
    """The jobs whose names may be shown: all, or those of the tenant of ``job``."""
    names = frozenset(record.job for record in records)
    if all_names:
        return names
    tenants = tuple(prefix for prefix in operator.tenants if prefix and job.startswith(prefix))
    return frozenset(name for name in names if name == job or name.startswith(tenants or ("\0",)))


def _doubts(record: JobRecord, steps: JobSteps, topology: Topology | None) -> list[str]:
    profile = record.profile
    assert profile is not None
    doubts = []
    if topology is None:
        doubts.append(
            "there is no topology, so that nobody knows which links jobs share: all are played as "
            "if they shared one (docs/operate/topology.md)"
        )
    elif any(f.src not in topology.hosts or f.dst not in topology.hosts for f in profile.flows):
        doubts.append("the topology lacks some of its hosts: their traffic is on an unknown link")
    if steps.alone_source == "bound":
        doubts.append(
            "it was measured beside others, so that what it takes alone is known only as a range"
        )
    if record.paths is not None and record.paths.elsewhere:
        doubts.append(f"{record.paths.elsewhere} of its connections are not on their planned path")
    return doubts


def _as_alone(
    live: LiveCluster, steps: Mapping[str, JobSteps]
) -> tuple[LiveCluster, dict[str, float]]:
    """The jobs with the bytes and the compute time that explain their steps alone, and the factors
    of these bytes."""
    capacity_Bps = live.taken.capacity_Bps
    taken, choices, factors = [], [], {}
    for job, choice in zip(live.taken.jobs, live.choices.jobs, strict=True):
        own = steps.get(job.name, JobSteps())
        if own.alone_s and own.alone_source != "bound":
            fit = fitted(job, _transfer_s(job, live), own.alone_s)
            job, choice = fit.applied(job), fit.applied(choice)
            factors[job.name] = fit.factor
        taken.append(job)
        choices.append(choice)
    changed = replace(
        live,
        taken=Cluster(capacity_Bps, tuple(taken)),
        choices=Cluster(live.choices.capacity_Bps, tuple(choices)),
    )
    return changed, factors


def _transfer_s(job: Job, live: LiveCluster) -> float:
    """Seconds that the bytes of an iteration need on the job's slowest link."""
    traffic = link_traffic(job, live.now.path[job.name])
    times_s = (moved / live.taken.capacity_Bps[link] for link, moved in traffic.items())
    return max(times_s, default=0.0)


def _neighbourhood(live: LiveCluster, job: str) -> LiveCluster:
    """The jobs that can meet ``job``, directly or through others, on any of their paths.

    If these are more than ``NEAR``: those that it meets on the paths in use, the nearest first.
    """
    near = _near(live.choices, job)
    if len(near) > NEAR:
        near = _near(live.taken, job)[:NEAR]
    names = frozenset(near)

    def part(cluster: Cluster) -> Cluster:
        return replace(cluster, jobs=tuple(each for each in cluster.jobs if each.name in names))

    return replace(live, choices=part(live.choices), taken=part(live.taken))


def _near(cluster: Cluster, job: str) -> list[str]:
    """The jobs that share links with ``job``, directly or through others, the nearest first."""
    users: dict[Link, list[str]] = defaultdict(list)
    links: dict[str, set[Link]] = {}
    for each in cluster.jobs:
        links[each.name] = set().union(*(path for f in each.flows for path in f.candidates))
        for link in links[each.name]:
            users[link].append(each.name)
    found = {job: None}
    waiting = deque([job])
    while waiting:
        for link in sorted(links[waiting.popleft()]):
            # Once is enough.
            for other in users.pop(link, ()):
                if other not in found:
                    found[other] = None
                    waiting.append(other)
    return list(found)


def _played(
    live: LiveCluster,
    job: str,
    levels: Sequence[int],
    schedulers: Sequence[str],
    links: Sequence[tuple[Link, LinkLoad]],
    factors: Mapping[str, float],
) -> Advice:
    jobs = live.taken.jobs
    alone_s = {each.name: iteration_s(each, _transfer_s(each, live)) for each in jobs}
    longest_s, per_s = max(alone_s.values()), sum(1.0 / alone for alone in alone_s.values())
    horizon_s = max(ROUNDS * longest_s, min(ITERATIONS / per_s, 10 * ROUNDS * longest_s))
    rng = random.Random(0)
    starts_s = [
        {name: rng.random() * alone for name, alone in sorted(alone_s.items())}
        for _ in range(PHASES)
    ]
    options = SchedulerOptions(tuple(levels))
    weights: dict[str, float] = defaultdict(float)
    for _, load in links:
        for name in load.jobs:
            weights[name] += load.planned_ratio
    # A policy that leaves paths to the hash finds those that connections have.
    clusters = {name: live.choices if name in PATH_POLICIES else live.taken for name in schedulers}
    return advise(
        live.taken,
        live.now,
        horizon_s,
        starts_s=starts_s,
        under={name: (each, SCHEDULERS[name](each, options)) for name, each in clusters.items()},
        of=(job,),
        factors=factors,
        without=sorted(weights.keys() - {job}, key=lambda name: -weights[name])[:RIVALS],
    )


def _scale(steps: JobSteps, own: JobAdvice) -> float:
    """Returns by how much played costs are multiplied to be what was measured.

    That is the measured cost of all other jobs over the played one, if the steps now and alone
    differ by more than either may be wrong; and where more is played than was measured. It is 1
    where more was measured than the engine's usual error explains: that may have other reasons.
    """
    if None in (steps.step_s, steps.alone_s, own.iteration_s, own.alone_s):
        return 1.0
    step_s: float = steps.step_s  # type: ignore[assignment]
    measured_s = step_s - steps.alone_s  # type: ignore[operator]
    played_s = own.iteration_s - own.alone_s  # type: ignore[operator]
    error = own.iteration_s / step_s - 1.0  # type: ignore[operator]
    if steps.alone_source == "bound" or played_s <= 0 or error < -LARGE_ERROR:
        return 1.0
    if error <= LARGE_ERROR and measured_s <= LARGE_ERROR * step_s:
        return 1.0
    return max(0.0, measured_s / played_s)


def _rival(
    name: str,
    own: JobAdvice,
    now_s: float | None,
    scale: float,
    level: int,
    links: Sequence[tuple[Link, LinkLoad]],
    audit: Sequence[AuditEntry],
) -> Rival:
    without_s = own.without_s.get(name)
    known = own.iteration_s is not None and without_s is not None
    costs_s = scale * (own.iteration_s - without_s) if known else None  # type: ignore[operator]
    share = costs_s / now_s if costs_s is not None and now_s else None
    shared = tuple(link for link, load in links if name in load.jobs)
    return Rival(name, shared, level, without_s, costs_s, share, _since_s(name, audit))


def _since_s(job: str, audit: Sequence[AuditEntry]) -> float | None:
    """Returns when ``job`` started or changed its traffic, by the audit log."""
    says = {f"{job} started", f"{job} restarted", f"{job} has a new profile"}
    return next((entry.at_s for entry in reversed(audit) if says & set(entry.why)), None)


def _in_plan(
    plan: Plan | None,
    record: JobRecord,
    jobs: Sequence[JobRecord],
    audit: Sequence[AuditEntry],
    names: frozenset[str],
) -> InPlan | None:
    entry = plan.entry(record.job) if plan is not None else None
    if plan is None or entry is None:
        return None
    plans = [each for each in audit if each.kind == "plan"]
    current = next((each for each in reversed(plans) if each.after == plan.epoch), None)
    prefix = f"{record.job}: "
    changes = [
        (each.at_s, line.removeprefix(prefix))
        for each in reversed(plans)
        for line in each.changes
        if line.startswith(prefix)
    ]
    tried = [
        trial
        for judge in jobs
        for trial in judge.trials
        if entry.trial and judge.job == entry.trial.judge and trial.name == entry.trial.name
    ]
    everyone = {each.job for each in jobs} <= names
    verdict = about_trial(_of_own(tried[-1], names)) if tried else ""
    return InPlan(
        epoch=plan.epoch,
        policy=plan.policy,
        author=plan.author if plan.author in names else "",
        since_s=current.at_s if current else None,
        why=current.why if current and everyone else (),
        level=entry.level if record.marks and not record.dry_run else None,
        paths=tuple(
            (path.src, tuple(hop.router for hop in path.hops), path.dst) for path in entry.paths
        ),
        seen=record.paths,
        changes=tuple(changes),
        verdict=verdict,
    )


def _of_own(tried: TriedPlan, names: frozenset[str]) -> TriedPlan:
    """The trial with no other name than these."""
    others = sum(job not in names for job in tried.jobs)
    hidden = (f"{others} of other tenants",) if others else ()
    jobs = (*(job for job in tried.jobs if job in names), *hidden)
    slowed = tried.slowed if tried.slowed in names or not tried.slowed else OTHERS
    return msgspec.structs.replace(tried, jobs=jobs, slowed=slowed)
