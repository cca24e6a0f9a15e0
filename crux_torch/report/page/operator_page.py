"""The operator's page: the cluster's map, its jobs, the last hour and the audit log.

A server mounts :meth:`OperatorPage.routes`; :mod:`crux_torch.report.page.server` is one.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import msgspec

from crux_torch.agreement.audit import AuditEntry
from crux_torch.errors import CruxError
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import (
    COLUMNS,
    LEGEND,
    ClusterStatus,
    foot_lines,
    head_lines,
    table_rows,
)
from crux_torch.report.live_cluster import LinkLoad, LiveCluster, link_loads, live_cluster
from crux_torch.report.page import FOLDER, render, stream
from crux_torch.report.page.cluster_map import LEAST_WIDTH, ClusterMap, MapLayout
from crux_torch.report.page.hour import Hour
from crux_torch.report.tables import json_text
from crux_torch.words import safe, si

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


#: Seconds between two readings of the store, and after which a silent stream says something.
PERIOD_S, ALIVE_S = 5.0, 15.0
#: Shared links in the table, and switches and hosts up to which the map has names.
SHARED, NAMED = 40, 64
#: Pages that are kept until the next reading: people look at the same ones.
RENDERED = 8

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request: its media type, and its body at once or piece by piece."""

    media_type: str
    body: bytes | Iterator[bytes]


class Reader(Protocol):
    """The part of a ``ClusterReader`` that a page needs."""

    @property
    def topology(self) -> Topology | None: ...
    def read(self) -> ClusterStatus: ...
    def audit(self) -> tuple[AuditEntry, ...]: ...


class OperatorPage:
    """The page of one cluster.

    Thread safety: one thread calls :meth:`refresh`; routes may be called by any.

    Args:
        reader: of the cluster.
        clock: seconds since 1970.
    """

    def __init__(self, reader: Reader, clock: Callable[[], float] = time.time) -> None:
        self._reader = reader
        self._clock = clock
        self._changed = threading.Condition()
        self._hour = Hour()
        self._since_s = clock()
        self._snapshot: Snapshot | None = None
        self._away = ""
        self._revision = 0
        #: Pages of this revision, by query.
        self._rendered: dict[tuple[tuple[str, str], ...], bytes] = {}
        self._ended = False

    @property
    def snapshot(self) -> Snapshot | None:
        """The cluster as it was read last; None before that."""
        return self._snapshot

    def refresh(self) -> None:
        """Reads the cluster; if that fails, the page keeps what it has and says so."""
        now_s = self._clock()
        try:
            status, audit = self._reader.read(), self._reader.audit()
        except CruxError as error:
            with self._changed:
                self._away, self._rendered = str(error), {}
                self._revision += 1
                self._changed.notify_all()
            return
        topology, before = self._reader.topology, self._snapshot
        layout = before.layout if before is not None and before.topology is topology else None
        if layout is None and topology is not None:
            layout = MapLayout(topology)
        snapshot = Snapshot(status, audit, now_s, topology, layout)
        # Made here, so that no visitor waits for it.
        self._hour.add(status, snapshot.loads, now_s)
        _ = snapshot.drawn, snapshot.rows, snapshot.shared, snapshot.links_of
        with self._changed:
            self._snapshot, self._away, self._rendered = snapshot, "", {}
            self._revision += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Ends all streams."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def routes(self) -> dict[str, Callable[[Query], Answer]]:
        """Returns what answers a request, by path: the arguments are those of the query."""
        script = (FOLDER / "page.js").read_bytes()
        return {
            "/": lambda query: Answer("text/html; charset=utf-8", self.pieces(query)),
            "/page.js": lambda _: Answer("text/javascript; charset=utf-8", script),
            "/api/state": lambda _: Answer("application/json", self.json_text().encode()),
            "/events": lambda _: Answer("text/event-stream", self.events()),
        }

    def json_text(self) -> str:
        """Returns the state as JSON."""
        return self._snapshot.as_json_text() if self._snapshot is not None else "null\n"

    def events(self) -> Iterator[bytes]:
        """Yields server-sent events: one for each change of the state, and signs of life."""
        seen = self._revision
        yield b": hello\n\n"
        while True:
            with self._changed:
                if self._revision == seen and not self._ended:
                    self._changed.wait(ALIVE_S)
                if self._ended:
                    return
                changed, seen = self._revision != seen, self._revision
            yield b"data: %d\n\n" % seen if changed else b": alive\n\n"

    def html(self, query: Query) -> str:
        """Returns the page.

        Args:
            query: ``q``, part of the names of the jobs wanted; and what ``detail_of`` takes.
        """
        return b"".join(self.pieces(query)).decode()

    def pieces(self, query: Query) -> Iterator[bytes]:
        """Returns the page of :meth:`html` piece by piece: its head is painted before its end is
        made."""
        with self._changed:
            snapshot, away, rendered = self._snapshot, self._away, self._rendered
        if snapshot is None:
            return iter((render("wait.html.jinja", title="Crux", why=away).encode(),))
        key = tuple(sorted(query.items()))
        if key in rendered:
            return iter((rendered[key],))
        made = render_page(snapshot, self._hour, query, away, self._since_s)

        def kept() -> Iterator[bytes]:
            pieces = []
            for piece in made:
                pieces.append(piece.encode())
                yield pieces[-1]
            if len(rendered) < RENDERED:
                rendered[key] = b"".join(pieces)

        return kept()


def render_page(
    snapshot: Snapshot, hour: Hour, query: Query, away: str = "", since_s: float = 0.0
) -> Iterator[str]:
    """Returns the page of one moment, piece by piece.

    Args:
        query: see :meth:`OperatorPage.html`.
        away: why the store can't be read; empty if it can.
        since_s: begin of what ``hour`` may have.
    """
    status, detail = snapshot.status, detail_of(snapshot, query)
    marked = detail.marked if detail is not None else frozenset()
    drawn, search = snapshot.drawn, query.get("q", "")
    cables = drawn.cables if drawn is not None else ()
    return stream(
        "operator.html.jinja",
        safe_text=safe,
        colour=colour_of,
        utc=_utc,
        on={cable.ends for cable in cables if not marked.isdisjoint(cable.links)},
        title=f"Crux: cluster {safe(status.cluster)}",
        head=head_lines(status),
        foot=foot_lines(status),
        at=_utc(snapshot.at_s),
        since=_utc(since_s),
        away=away,
        map=drawn,
        about_map=_about(drawn) if drawn is not None else "",
        least_width=min(drawn.width, LEAST_WIDTH) if drawn is not None else 0,
        named=drawn is not None and len(drawn.places) <= NAMED,
        jobs_at=snapshot.jobs_at,
        detail=detail,
        search=search,
        columns=COLUMNS,
        legend=LEGEND,
        rows=[(name, row) for name, row in snapshot.rows.items() if search in name],
        count=len(status.jobs),
        by_hash=len(snapshot.live.by_hash) if snapshot.live is not None else 0,
        shared=snapshot.shared[:SHARED],
        shared_count=len(snapshot.shared),
        multiples=list(hour.multiples()),
        busiest=hour.busiest_link(),
        audit=snapshot.audit[::-1],
    )


def _about(drawn: ClusterMap) -> str:
    """Returns the map in words."""
    hosts = sum(place.kind == "host" for place in drawn.places)
    full = sum(cable.ratio > 1 for cable in drawn.cables)
    return (
        f"Map of {hosts} hosts, {len(drawn.places) - hosts} switches and {len(drawn.cables)} links "
        f"between them; {full} have a higher planned load than they can carry"
    )


def _utc(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s))
