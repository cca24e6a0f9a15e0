"""Contents of the operator's page at one moment."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from crux_torch.agreement.audit import AuditEntry
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import ClusterStatus, table_rows
from crux_torch.report.live_cluster import LinkLoad, LiveCluster, link_loads, live_cluster
from crux_torch.report.page.cluster_map import ClusterMap, MapLayout
from crux_torch.report.tables import json_text
from crux_torch.words import si

#: Colours of jobs; a page's style has as many.
JOB_COLOURS = 8
#: Lines of a detail: links of a job, hosts of a job, cables of a switch.
LINES = 40

Row = dict[str, str]


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment.

    Attributes:
        at_s: seconds since 1970.
        topology, layout: None without a topology.
        audit: the audit log, the oldest entry first.
    """

    status: ClusterStatus
    audit: tuple[AuditEntry, ...]
    at_s: float
    topology: Topology | None = None
    layout: MapLayout | None = field(default=None, compare=False)

    @cached_property
    def live(self) -> LiveCluster | None:
        """The jobs on the paths that they take; None without a topology."""
        if self.topology is None:
            return None
        status = self.status
        return live_cluster(status.jobs, status.plan, self.topology, status.operator)

    @cached_property
    def loads(self) -> Mapping[str, LinkLoad] | None:
        """The links that a job sends over, by name; None without a topology."""
        if self.topology is None or self.live is None:
            return None
        found = link_loads(self.live.taken, self.live.now, self.status.steps)
        return {name: load for name, load in found.items() if name in self.topology.capacity_Bps}

    @cached_property
    def jobs_at(self) -> Mapping[str, tuple[str, ...]]:
        """The jobs on each host."""
        found: dict[str, list[str]] = defaultdict(list)
        for job in self.status.jobs:
            for host in job.hosts:
                found[host].append(job.job)
        return {host: tuple(jobs) for host, jobs in found.items()}

    @cached_property
    def links_of(self) -> Mapping[str, tuple[str, ...]]:
        """The links of each job, the one with the highest planned load first."""
        loads = self.loads or {}
        found: dict[str, list[str]] = defaultdict(list)
        for name in sorted(loads, key=lambda name: (-loads[name].planned_ratio, name)):
            for job in loads[name].jobs:
                found[job].append(name)
        return {job: tuple(links) for job, links in found.items()}

    @cached_property
    def shared(self) -> tuple[tuple[str, LinkLoad], ...]:
        """The links that two jobs or more send over, the one with the highest load first."""
        found = [(name, load) for name, load in (self.loads or {}).items() if len(load.jobs) > 1]
        return tuple(sorted(found, key=lambda each: (-each[1].planned_ratio, each[0])))

    @cached_property
    def drawn(self) -> ClusterMap | None:
        """The map; None without a topology."""
        return self.layout.draw(self.loads or {}) if self.layout is not None else None

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """Each job's cells, as in ``crux status``, the most slowed first."""
        steps = self.status.steps

        def slowdown(name: str) -> float:
            return (steps[name].slowdown if name in steps else None) or 0.0

        names = [job.job for job in self.status.jobs]
        found = dict(zip(names, table_rows(self.status), strict=True))
        return {name: found[name] for name in sorted(names, key=slowdown, reverse=True)}

    def as_json_text(self) -> str:
        """The state as JSON: that of ``crux status``, the links' loads, and the audit log."""
        loads = self.loads
        value: dict[str, Any] = {
            "at_s": self.at_s,
            "status": msgspec.to_builtins(self.status),
            "links": None
            if loads is None
            else {n: msgspec.to_builtins(v) for n, v in loads.items()},
            "audit": msgspec.to_builtins(self.audit),
        }
        return json_text(value)


def colour_of(job: str) -> int:
    """Returns the number of a job's colour, the same on every page."""
    return zlib.crc32(job.encode()) % JOB_COLOURS


@dataclass(frozen=True, slots=True)
class Detail:
    """Details of one job, link or host.

    Attributes:
        kind: ``job``, ``link`` or ``place`` (a host or a switch).
        facts: names and values.
        links: names of links, what they carry, and jobs on them other than the one in question.
        jobs, hosts: that belong to it.
        more: links and hosts that there is no room for.
        marked: links that the map marks.
    """

    kind: str
    name: str
    facts: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    jobs: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    more: int = 0
    marked: frozenset[str] = frozenset()


def detail_of(snapshot: Snapshot, query: Mapping[str, str]) -> Detail | None:
    """Returns the detail that a page's address asks for; None if for none.

    Args:
        query: a name under ``job``, ``link`` or ``place``.
    """
    for kind, about in (("job", _of_job), ("link", _of_link), ("place", _of_place)):
        if name := query.get(kind, ""):
            return about(snapshot, name) or Detail(kind, name, (("", "not there now"),))
    return None


def _of_job(snapshot: Snapshot, name: str) -> Detail | None:
    whole = snapshot.rows.get(name)
    if whole is None:
        return None
    record = next(job for job in snapshot.status.jobs if job.job == name)
    links = snapshot.links_of.get(name, ())
    return Detail(
        "job",
        name,
        tuple(
            (head, cell) for head, cell in whole.items() if cell and head not in ("job", "hosts")
        ),
        _lines(snapshot, links[:LINES], name),
        hosts=record.hosts[:LINES],
        more=max(0, len(links) - LINES) + max(0, len(record.hosts) - LINES),
        marked=frozenset(links),
    )


def _of_link(snapshot: Snapshot, name: str) -> Detail | None:
    topology, load = snapshot.topology, (snapshot.loads or {}).get(name)
    if topology is None or name not in topology.capacity_Bps:
        return None
    start, end = topology.ends(name)
    facts = [("from", start), ("to", end), ("capacity", rate(topology.capacity_Bps[name]))]
    if load is not None:
        facts.append(("planned", f"{rate(load.planned_Bps)}, {load.planned_ratio:.0%}"))
        facts.append(("now", "not known" if load.now_Bps is None else rate(load.now_Bps)))
    jobs = load.jobs if load is not None else ()
    return Detail("link", name, tuple(facts), jobs=jobs, marked=frozenset({name}))


def _of_place(snapshot: Snapshot, name: str) -> Detail | None:
    if snapshot.topology is None or name not in snapshot.topology.nodes:
        return None
    node = snapshot.topology.nodes[name]
    layout = snapshot.layout
    links = layout.links_at(name) if layout is not None else ()
    loads = snapshot.loads or {}
    loaded = sorted(links, key=lambda link: -loads[link].planned_ratio if link in loads else 0.0)
    return Detail(
        "place",
        name,
        (("kind", node.kind),),
        _lines(snapshot, loaded[:LINES]),
        jobs=snapshot.jobs_at.get(name, ()),
        more=max(0, len(links) - LINES),
        marked=frozenset(links),
    )


def _lines(
    snapshot: Snapshot, links: tuple[str, ...] | list[str], without: str = ""
) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    loads = snapshot.loads or {}
    return tuple(
        (
            name,
            f"{loads[name].planned_ratio:.0%}" if name in loads else "0%",
            tuple(j for j in loads[name].jobs if j != without) if name in loads else (),
        )
        for name in links
    )


def rate(value_Bps: float) -> str:
    """Returns bytes a second as the bits a second by which links are named."""
    return f"{si(8 * value_Bps)}bit/s"
