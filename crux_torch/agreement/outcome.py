"""The part of an agreed plan that a job's ranks need: small, whatever the cluster holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.problems import Network, network_of
from crux_torch.agreement.records import Grid, JobRecord, Moved, Plan, PlanEntry
from crux_torch.network.routes import HostFlowLinks, PlannedPath, Routes, flow_links, routes_of
from crux_torch.network.topology import Topology
from crux_torch.schedule.papers.cassini_grid import RATIOS

NO_ROUTES = Routes((), ())


class Routed(NamedTuple):
    """The routes of a plan's paths; ``wrong``: why the paths are not this job's, or empty."""

    found: Routes = NO_ROUTES
    wrong: str = ""


class Booked(NamedTuple):
    """The flows whose rates hosts book.

    Attributes:
        unsure: True if flows are missing: their links or addresses are not known.
        address: of the service of the load tables; empty if there is none.
    """

    flows: tuple[HostFlowLinks, ...] = ()
    unsure: bool = False
    address: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """The part of the plan and of the operator's settings that concerns one job.

    Attributes:
        epoch: of the plan in force; 0 if there is none.
        entry: the job's, if the plan has one.
        moved: moves of the jobs whose grids move with this one's.
        keeps_level: True if the job may not leave its level even to be measured.
        observes: True if the operator made a dry run of all jobs.
        is_alone: True if the store knows no other job.
        network: of the last look.
        routed: of the entry's paths; None: not known while the topology is being parsed.
        booked: of the job's flows, where the policy paces them.
        author, jobs: job that wrote the plan, and the number of its jobs.
        lost: links of the network as this job saw it that others see no longer.
    """

    epoch: int = 0
    entry: PlanEntry | None = None
    moved: tuple[Moved, ...] = ()
    keeps_level: bool = False
    observes: bool = False
    is_alone: bool = False
    network: Network = Network()
    routed: Routed | None = Routed()
    booked: Booked = Booked()
    author: str = ""
    jobs: int = 0
    lost: frozenset[tuple[str, ...]] = frozenset()


class Outcomes:
    """Makes one leader's outcomes; what has not changed is not computed again.

    Args:
        books: True if the policy paces flows.
    """

    def __init__(self, *, books: bool) -> None:
        self._books = books
        self._routed_of: object = None
        self._routed = Routed()
        self._booked_of: object = None
        self._booked = Booked()

    def of(
        self,
        plan: Plan | None,
        record: JobRecord,
        jobs: Iterable[JobRecord],
        operator: OperatorSettings,
        topology: Topology | None,
        is_alone: bool,
    ) -> Outcome:
        """Return the outcome for ``record``'s job, from the plan in force and the last look."""
        seen = Outcome(
            epoch=plan.epoch if plan is not None else 0,
            keeps_level=operator.keeps_level(record.job),
            observes=operator.observe,
            is_alone=is_alone,
            network=network_of(topology),
        )
        entry = plan.entry(record.job) if plan is not None else None
        if plan is None or entry is None:
            return seen
        if topology is not None:
            topology = topology.as_seen_by(record.job)
        moved = tuple(moved_with(entry.grid, plan, jobs)) if entry.grid else ()
        key: object = entry.paths, record.hosts, topology
        if key != self._routed_of:
            self._routed_of = key
            self._routed = routed(entry.paths, record.hosts, topology)
        key = record.profile, topology
        if self._books and key != self._booked_of:
            self._booked_of, self._booked = key, booked(record, topology)
        return msgspec.structs.replace(
            seen,
            entry=entry,
            moved=moved,
            routed=self._routed,
            booked=self._booked,
            author=plan.author,
            jobs=len(plan.entries),
        )


def routed(
    paths: tuple[PlannedPath, ...], hosts: Collection[str], topology: Topology | None
) -> Routed:
    """Return the routes of ``paths``, which a plan has for a job on ``hosts``."""
    if not paths or topology is None:
        return Routed()
    try:
        return Routed(routes_of(paths, hosts, topology))
    except ValueError as error:
        return Routed(Routes((), (str(error),)), str(error))


def booked(record: JobRecord, topology: Topology | None) -> Booked:
    """Return the flows of a job between places that the topology knows."""
    if topology is None or record.profile is None:
        return Booked()
    sent = [f for f in record.profile.flows if {f.src, f.dst} <= topology.nodes.keys()]
    pairs = {(topology.host_of(f.src), topology.host_of(f.dst)): None for f in sent}
    found = [flow_links(topology, a, b) for a, b in pairs if a and b and a != b]
    address = topology.addresses[topology.tables][0] if topology.tables else ""
    return Booked(tuple(flow for flow in found if flow is not None), not all(found), address)


def moved_with(grid: Grid, plan: Plan, jobs: Iterable[JobRecord]) -> list[Moved]:
    """Return the moves that jobs published for grids which the plan shifts with ``grid``.

    They share one unit, of which each grid has a small whole number.
    """
    moves = [(job.job, job.moved) for job in jobs if job.moved]
    if not moves:
        return []
    grids = {entry.job: entry.grid for entry in plan.entries}
    return [m for name, m in moves if grids.get(name) == m.grid and _share_a_unit(grid, m.grid)]


def _share_a_unit(one: Grid, other: Grid) -> bool:
    return any(
        abs(float(a / b) * one.period_s - other.period_s) <= 1e-9 * other.period_s
        for a in RATIOS
        for b in RATIOS
    )
