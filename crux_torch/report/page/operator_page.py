"""The operator's page: the cluster's map, its jobs, the last hour and the audit log.

A server mounts :meth:`OperatorPage.routes`; :mod:`crux_torch.report.page.server` is one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from crux_torch.agreement.audit import AuditEntry
from crux_torch.errors import CruxError
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import COLUMNS, LEGEND, ClusterStatus, foot_lines, head_lines
from crux_torch.report.page import FOLDER, render, stream
from crux_torch.report.page.cluster_map import LEAST_WIDTH, ClusterMap, MapLayout
from crux_torch.report.page.hour import Hour
from crux_torch.report.page.snapshot import Snapshot, colour_of, detail_of
from crux_torch.words import safe

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
