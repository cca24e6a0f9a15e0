"""The jobs that run now, as schedules and the simulator see jobs: what they send, and where.

:func:`link_loads` says what each link carries. It, ``crux explain`` and ``crux top`` read the paths
from one place, :func:`live_cluster`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from crux_torch.agreement.inputs import agreed, candidate_limit, plan_inputs
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import JobRecord, Plan, PlanEntry
from crux_torch.network.routes import candidate_of, routers
from crux_torch.network.topology import Topology
from crux_torch.report.step_times import JobSteps
from crux_torch.schedule.model import Cluster, Decision, Flow, Job, Link, Path
from crux_torch.schedule.papers.intensity import link_traffic


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """The profiled jobs that run now.

    Attributes:
        choices: the jobs with all paths that each flow may take, as a planner sees them.
        taken: the jobs on the paths that they take.
        now: the decision in force, about ``taken``.
        by_hash: jobs with flows whose paths are left to the network's hash, which nobody reads: in
            ``taken`` their bytes are spread evenly over the paths.
    """

    choices: Cluster
    taken: Cluster
    now: Decision
    by_hash: frozenset[str]


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Traffic of one link.

    Attributes:
        capacity_Bps: of the link.
        planned_Bps: if every job ran as it does alone.
        now_Bps: at the jobs' steps of late; None where those of a job are not known.
        jobs: that send over it, those that send most first.
    """

    capacity_Bps: float
    planned_Bps: float
    now_Bps: float | None
    jobs: tuple[str, ...]

    @property
    def planned_ratio(self) -> float:
        """Planned load over capacity; above 1 the jobs want more than the link has."""
        return self.planned_Bps / self.capacity_Bps


def live_cluster(
    records: Sequence[JobRecord],
    plan: Plan | None,
    topology: Topology | None,
    operator: OperatorSettings,
) -> LiveCluster:
    """Returns the jobs of ``records`` that were measured, under the plan in force."""
    choices = plan_inputs(records, topology, candidate_limit(records))
    by_name = {record.job: record for record in records}
    off = operator.observe or operator.disabled
    unmarked = agreed(records, topology).unmarked
    jobs, by_hash = [], set()
    level: dict[str, int] = {}
    shift_s: dict[str, float] = {}
    grid_s: dict[str, float] = {}
    for job in choices.jobs:
        record = by_name[job.name]
        entry = plan.entry(job.name) if plan is not None else None
        if off or record.dry_run:
            entry = None
        level[job.name] = unmarked.get(job.name, 0)
        if entry is not None and record.marks and job.name not in unmarked:
            level[job.name] = entry.level
        if entry is not None and entry.grid:
            shift_s[job.name], grid_s[job.name] = entry.grid.shift_s, entry.grid.period_s
        paths, is_sure = _taken(job, record, entry, topology)
        by_hash |= set() if is_sure else {job.name}
        flows = (
            Flow(flow.bytes / len(ways), (way,))
            for flow, ways in zip(job.flows, paths, strict=True)
            for way in ways
        )
        jobs.append(replace(job, flows=tuple(flows)))
    now = Decision(
        path={job.name: (0,) * len(job.flows) for job in jobs},
        level=level,
        shift_s=shift_s,
        grid_s=grid_s,
    )
    return LiveCluster(choices, Cluster(choices.capacity_Bps, tuple(jobs)), now, frozenset(by_hash))


def _taken(
    job: Job, record: JobRecord, entry: PlanEntry | None, topology: Topology | None
) -> tuple[list[tuple[Path, ...]], bool]:
    """The paths that each flow may take now, and True if that is one for each."""
    ways: list[tuple[Path, ...]] = [flow.candidates for flow in job.flows]
    profile = record.profile
    if topology is None or profile is None:
        return [candidates[:1] for candidates in ways], True
    planned = {
        (topology.host_of(path.src), topology.host_of(path.dst)): path
        for path in (entry.paths if entry is not None else ())
        if {path.src, path.dst} <= topology.nodes.keys()
    }
    is_sure = True
    # A job whose flows are too many to be planned one by one has a single one.
    each = profile.flows if len(job.flows) >= len(profile.flows) else ()
    for number, flow in enumerate(each):
        path = planned.get((flow.src, flow.dst))
        found = candidate_of(path, ways[number], topology) if path is not None else None
        if found is not None:
            ways[number] = ways[number][found : found + 1]
        elif len({_routers(way, topology) for way in ways[number]}) == 1:
            ways[number] = ways[number][:1]
        else:
            is_sure = False
    return ways, is_sure


def _routers(path: Path, topology: Topology) -> tuple[str, ...]:
    """The routers on a path; none on one whose place in the network is not known."""
    return routers(path, topology) if topology.capacity_Bps.keys() >= set(path) else ()


def link_loads(
    cluster: Cluster, now: Decision, steps: Mapping[str, JobSteps] = MappingProxyType({})
) -> dict[Link, LinkLoad]:
    """Returns the load of each link that a job sends over.

    Args:
        cluster, now: the jobs, and the paths that they take.
        steps: of the jobs; without them planned loads take the steps that jobs were measured with.
    """
    sent: dict[Link, dict[str, tuple[float, float | None]]] = {}
    for job in cluster.jobs:
        own = steps.get(job.name, JobSteps())
        alone_s = own.alone_s or job.period_s
        for link, moved in link_traffic(job, now.path[job.name]).items():
            planned = moved / alone_s if alone_s > 0 else math.inf
            late_Bps = moved / own.step_s if own.step_s else None
            sent.setdefault(link, {})[job.name] = planned, late_Bps
    loads = {}
    for link, by_job in sent.items():
        seen = [now_Bps for _, now_Bps in by_job.values() if now_Bps is not None]
        loads[link] = LinkLoad(
            capacity_Bps=cluster.capacity_Bps[link],
            planned_Bps=math.fsum(planned for planned, _ in by_job.values()),
            now_Bps=math.fsum(seen) if len(seen) == len(by_job) else None,
            jobs=tuple(sorted(by_job, key=lambda name: (-by_job[name][0], name))),
        )
    return loads
