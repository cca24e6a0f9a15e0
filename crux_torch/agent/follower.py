"""One rank carries out its leader's orders: class, paths, links, pace and rates.

Paths: the transport gets the plan's routes, groups get new connections, and what is on the wire is
looked at. Without the transport, or if it refuses, connections go where the network sends them.
Whatever could take long runs in threads of its own, and is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from crux_torch.agent.orders import Order, PathReport
from crux_torch.agent.pace import PaceKeeper
from crux_torch.agent.path_watch import PathWatch
from crux_torch.agent.rates import RateScheduler
from crux_torch.agreement.records import PathCounts
from crux_torch.apply import nccl
from crux_torch.apply.dscp import TrafficClass
from crux_torch.apply.paths import PathState, Routed, Tracer, counts, observe, routed, routes_from
from crux_torch.apply.semaphores import make_semaphores
from crux_torch.apply.transport import Connection, Route, Transport
from crux_torch.apply.wire import QueuePairs, Wire
from crux_torch.backend import tcp_sockets
from crux_torch.backend.handover import GROUPS, Groups
from crux_torch.backend.handover.attempt import UNDER_WAY
from crux_torch.backend.tcp_sockets import Endpoint, Ownership
from crux_torch.errors import CruxError
from crux_torch.host.activity import OwnDevice
from crux_torch.logs import WarnOnce
from crux_torch.measure.iterations import IterationMarks
from crux_torch.measure.profile import JobProfile
from crux_torch.measure.records import GroupInfo
from crux_torch.network.probe.live_trace import ConnectionTrace, trace_connection
from crux_torch.network.probe.packets import Transport as IpProtocol
from crux_torch.network.probe.prober import PortSearch
from crux_torch.network.routes import HostRoute
from crux_torch.settings import Settings
from crux_torch.store.endpoint import server_addresses

_log = logging.getLogger(__name__)

#: Seconds between two looks at connections that did not change, and after a change.
LOOK_S = 30.0
SETTLE_S = 1.0
#: Connections that one look asks about, and the seconds that it may take.
MAX_LOOKED_AT = 64
LOOK_LIMIT_S = 20.0


class Follower:
    """Carries out the newest order in this process.

    Thread safety: one background thread owns it; any thread may read ``order``, ``profile``,
    ``qp_dscp`` and ``status()``.

    Args:
        rank, host: of this process; ``host`` as the topology calls it.
        ownership: the inner backends' sockets.
        store: the job's; connections to it are left alone.
        pace: holds this rank's iterations.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        host: str,
        ownership: Ownership,
        store: Any,
        device: OwnDevice,
        marks: IterationMarks,
        pace: PaceKeeper,
    ) -> None:
        self._traffic_class = TrafficClass(ownership)
        skipped_ports = tcp_sockets.store_ports(store)
        skipped_ports.update(port for _, port in server_addresses(settings.store))
        self._steering = Steering(
            host,
            ownership,
            ports=(settings.ports.first, settings.ports.last),
            skipped_ports=sorted(skipped_ports),
            marks_pairs=settings.override_ib_tc or not nccl.has_users_class(os.environ),
            overrides=settings.override_ib_tc,
        )
        self._watch = PathWatch(host, ownership) if settings.discovery else None
        self._links = make_semaphores(settings, device)
        self._pace = pace
        wire = Wire(ownership, self._traffic_class)
        self._rates = RateScheduler.from_settings(settings, rank, host, marks, wire)
        self._warn = WarnOnce(_log)
        #: What is in force; None before the first order, and after the leader fell silent.
        self.order: Order | None = None
        #: The job's profile, as the leader told it last.
        self.profile: JobProfile | None = None
        self._heard = ("", 0)
        self._heard_at_s = float("-inf")

    @property
    def qp_dscp(self) -> int | None:
        """DSCP that the plan gives this job's queue pairs; None if they are not marked.

        None also before the first plan and while measuring: what keeps its class for life must not
        keep that of a measurement.
        """
        order = self.order
        return None if order is None or order.measuring else order.qp_dscp

    def hear(self, raw: bytes) -> Order | None:
        """Returns the order in ``raw`` if it is new, and sets all of it but its paths."""
        try:
            order = Order.from_json(raw)
        except ValueError as error:
            self._warn("malformed", f"ignoring what the job's leader says: {error}")
            return None
        heard = order.incarnation, order.number
        # An order that has ended may still lie in the store.
        if heard == self._heard or order.number < self._heard[1]:
            return None
        before, self.order = self.order, order
        self._heard, self._heard_at_s = heard, time.monotonic()
        self.profile = order.profile or self.profile
        if before is None or (order.level, order.marks) != (before.level, before.marks):
            if order.dscp is None or order.marks is None:
                self._traffic_class.revert()
            else:
                self._traffic_class.apply_level(order.level, order.marks.tcp)
        priority = order.entry.priority if order.entry is not None else 0.0
        self._links.follow(order.incarnation, order.level, priority)
        self._pace.follow(order.pace)
        self._rates.follow(order.flows, order.tables)
        return order

    def steer(self, order: Order) -> None:
        """Follows the paths of ``order``; raises what :meth:`Steering.follow` does."""
        self._steering.follow(order)

    def check(self) -> None:
        """Goes back to the network's defaults if the leader was silent for too long."""
        order = self.order
        if order is not None and time.monotonic() - self._heard_at_s >= order.valid_s:
            _log.warning("nothing heard from the job's leader: back to the network's default class")
            self.order = None
            self._traffic_class.revert()
            self._steering.revert()
            self._links.revert()
            self._pace.follow(None)
            self._rates.revert()
        self._rates.check()
        nccl.LABELS.set_dscp(self.qp_dscp or 0)

    def refresh(self) -> PathReport:
        """Applies the order to new connections; returns which paths connections take."""
        self._traffic_class.refresh()
        self._steering.tick()
        if self._watch is None:
            return PathReport(self._steering.counts())
        self._watch.tick(self._steering.destinations)
        return PathReport(self._steering.counts(), self._watch.seen)

    def gate(self, groups: Sequence[GroupInfo]) -> None:
        """Lets the operations of ``groups`` give way on links that other jobs use, too."""
        self._links.tick(groups)

    def revert(self) -> None:
        """Takes everything back. Raises an error after it has tried the rest."""
        self._pace.remove()
        with contextlib.ExitStack() as stack:
            # The last one comes first: rates are limits on what the class has marked.
            for part in (self._links, self._steering, self._traffic_class, self._rates):
                stack.callback(part.revert)

    def status(self) -> dict[str, Any]:
        """Returns plain values for :func:`crux_torch.status`."""
        report = self._traffic_class.status()
        return {
            "applied": {
                "level": report.level,
                "dscp": report.dscp,
                "marked": report.applied,
                "refused": report.refused,
                "error": report.error or None,
                "sockets": [
                    {
                        "local": mark.local,
                        "peer": mark.peer,
                        "dscp": None if mark.tos is None else mark.tos >> 2,
                        "applied": mark.applied,
                        "error": os.strerror(mark.errno) if mark.errno else None,
                    }
                    for mark in report.marks
                ],
            },
            "paths": self._steering.status() | self._seen(),
            "links": self._links.status(),
            "pace": self._pace.status(),
            "rates": self._rates.status(),
        }

    def _seen(self) -> dict[str, Any]:
        """Returns the paths that the network gave to connections."""
        watch = self._watch
        if watch is None:
            return {"seen": [], "unseen": "CRUX_DISCOVERY is off"}
        return {"seen": msgspec.to_builtins(watch.seen), "unseen": watch.why_not or None}


class Steering:
    """Follows the leader's routes.

    Thread safety: one background thread owns it; any thread may call :meth:`status`. Its own
    threads search for ports and look at connections, one of each at a time; ``_setting`` guards the
    routes that the transport has.

    Args:
        host: where this process runs, as the topology calls it.
        ownership: the inner backends' sockets.
        load, pairs: give the transport, and what changes live queue pairs; they may raise a
            CruxError with the remedy.
        groups: hands the inner backends over to new connections.
        trace: asks the hops of a live connection.
        search: finds UDP source ports for queue pairs.
        ports: TCP source ports to choose from, first and last.
        skipped_ports: destination ports that are never steered.
        marks_pairs: whether queue pairs get a class.
        overrides: whether also those get it whose program chose another.
    """

    def __init__(
        self,
        host: str,
        ownership: Ownership,
        *,
        load: Callable[[], Transport] = Transport.load,
        groups: Groups = GROUPS,
        trace: Tracer = trace_connection,
        search: PortSearch | None = None,
        pairs: Callable[[], QueuePairs] = QueuePairs,
        ports: tuple[int, int],
        skipped_ports: Sequence[int] = (),
        marks_pairs: bool = True,
        overrides: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._ownership = ownership
        self._load = load
        self._groups = groups
        self._trace = trace
        self._search = search or PortSearch()
        self._pairs = pairs
        self._ports, self._skipped_ports = ports, tuple(skipped_ports)
        self._clock = clock
        self._warn = WarnOnce(_log)
        self._transport: Transport | None = None
        self._why_not = ""
        self._routes: tuple[HostRoute, ...] = ()
        self._routes_set: tuple[Route, ...] = ()
        self._marks_pairs, self._overrides = marks_pairs, overrides
        self._dscp: int | None = None
        self._qp_dscp: int | None = None
        self._incarnation = ""
        self._generation = self._requested = 0
        self._searching: threading.Thread | None = None
        self._setting = threading.Lock()
        self._seen: frozenset[int] = frozenset()
        self._look_at_s = float("inf")
        self._looking: threading.Thread | None = None
        self._states: tuple[PathState, ...] = ()
        self._sprayed = False
        #: Connections that the network sprayed before the last handover; it may have changed since.
        self._sprayed_before: frozenset[int] = frozenset()

    def follow(self, order: Order) -> None:
        """Has new connections take the order's routes; replaces the present ones if it says so.

        They carry the order's DSCP value, if it has one, from their first packet.

        Raises:
            OSError, CruxError: the transport refused; the next order tries again.
        """
        if not self._available(bool(order.routes)):
            return
        mine = tuple(route for route in order.routes if route.src == self._host)
        self._dscp = order.dscp
        self._qp_dscp = order.qp_dscp if self._marks_pairs else None
        if mine != self._routes:
            self._routes = mine
            self._look_soon()
        self._set_routes()
        if order.incarnation != self._incarnation:
            self._incarnation, self._requested = order.incarnation, 0
        self._generation = max(order.generation, self._requested)
        if self._searching is not None and self._searching.is_alive():
            return
        due = self._generation > self._requested
        sees_queue_pairs = self._transport is not None and self._transport.sees_queue_pairs
        if sees_queue_pairs and (due or not self._search.is_done(mine)):
            self._searching = threading.Thread(
                target=self._prepare, args=(mine,), name="crux-ports", daemon=True
            )
            self._searching.start()
        else:
            self._request()

    def revert(self) -> None:
        """Steers no more connections; existing ones stay where they are."""
        self._routes = ()
        self._states = ()
        self._sprayed = False
        self._set_routes()

    def tick(self) -> None:
        """Starts a look at the connections if one is due; returns at once."""
        if not self._routes or (self._looking is not None and self._looking.is_alive()):
            return
        assert self._transport is not None
        known = self._transport.connections()
        self._notice_spraying(known)
        connections = routed(
            self._ownership.owned(), self._ownership.own_listeners(), known, self._routes
        )[:MAX_LOOKED_AT]
        seen = frozenset(connection.id for connection in connections)
        if seen != self._seen:
            self._seen = seen
            self._look_soon()
        if self._clock() < self._look_at_s:
            return
        self._look_at_s = self._clock() + LOOK_S
        self._looking = threading.Thread(
            target=self._look, args=(connections,), name="crux-paths", daemon=True
        )
        self._looking.start()

    def status(self) -> dict[str, Any]:
        """Returns plain values for :func:`crux_torch.status`."""
        states = self._states
        return {
            "available": self._transport is not None,
            "why_not": self._why_not or None,
            "routes": [
                {"to": route.dst, "hops": [list(hop) for hop in route.hops]}
                for route in self._routes
            ],
            "sprayed": self._sprayed,
            "generation": self._requested,
            "groups": [asdict(group) for group in self._groups.status()],
            **msgspec.structs.asdict(counts(states)),
            "connections": [state.as_status() for state in states],
        }

    @property
    def destinations(self) -> frozenset[str]:
        """The addresses to which new connections are steered."""
        return frozenset(a for route in self._routes for a in route.destinations)

    def counts(self) -> PathCounts | None:
        """Counts connections that take the planned path; None if none is planned or can be taken.

        During a handover none counts as missed, because the connections are about to be replaced.
        """
        if not self._routes or self._sprayed:
            return None
        found = counts(self._states)
        if found.missed and any(group.state in UNDER_WAY for group in self._groups.status()):
            return msgspec.structs.replace(found, missed=0)
        return found

    def _available(self, has_routes: bool) -> bool:
        """Returns True if there is a transport that sees connections being made; looks once."""
        if self._transport is not None:
            return True
        if not has_routes or self._why_not:
            return False
        try:
            transport = self._load()
            if not transport.sees_sockets:
                raise CruxError("connect() does not go through it: start the job with cruxrun")
        except CruxError as error:
            self._why_not = f"paths need cruxrun's transport: {error}"
            self._warn("transport", f"the plan's paths are not taken, {self._why_not}")
            return False
        transport.set_port_range(*self._ports)
        transport.skip_ports(*self._skipped_ports)
        self._transport = transport
        return True

    def _set_routes(self, anew: bool = False) -> None:
        if self._transport is None:
            return
        with self._setting:
            ports = self._search.found(self._routes)
            routes = routes_from(
                self._routes,
                self._dscp,
                ports,
                qp_dscp=self._qp_dscp,
                overrides=self._overrides,
                any_path=self._sprayed,
            )
            if anew or routes != self._routes_set:
                self._transport.set_routes(routes)
                self._routes_set = routes

    def _notice_spraying(self, known: Sequence[Connection]) -> None:
        """Stop steering on a network that sprays: one TCP port led to several paths."""
        if self._sprayed or _sprayed(known) <= self._sprayed_before:
            return
        self._sprayed = True
        self._warn(
            "sprayed",
            "the plan's paths are not taken by TCP connections: probes from one source port were "
            "answered on several paths, so the network sprays packets",
        )
        self._set_routes()

    def _prepare(self, routes: tuple[HostRoute, ...]) -> None:
        """Find the queue pairs' source ports, then request the handover that is due."""
        try:
            self._search.run(routes)
            self._set_routes()
            self._request(pairs_moved=self._move_pairs(routes))
        except Exception as error:
            self._warn("ports", f"queue pairs take the network's paths: {error}")
            _log.debug("details", exc_info=True)

    def _move_pairs(self, routes: tuple[HostRoute, ...]) -> bool:
        """Move live queue pairs; returns True if all take their paths without new connections."""
        if self._generation <= self._requested or self._transport is None:
            return False
        try:
            return self._pairs().move(self._search.found(routes))
        except CruxError as error:
            self._warn("pairs", f"live queue pairs are not changed: {error}")
            return False

    def _request(self, *, pairs_moved: bool = False) -> None:
        # A handover needs every rank of a group, also one whose connections have a single path.
        if self._generation > self._requested:
            if self._sprayed and self._transport is not None:
                self._sprayed_before = _sprayed(self._transport.connections())
                self._sprayed = False
            # If the routes are set again, the transport repeats searches that have just failed.
            self._set_routes(anew=True)
            self._requested = self._generation
            self._groups.request(self._generation, pairs_moved=pairs_moved)

    def _look_soon(self) -> None:
        self._look_at_s = min(self._look_at_s, self._clock() + SETTLE_S)

    def _look(self, connections: Sequence[Routed]) -> None:
        until_s = time.monotonic() + LOOK_LIMIT_S
        states = []
        try:
            for connection in connections:
                if not self._routes:
                    return
                in_time = time.monotonic() < until_s
                states.append(observe(connection, self._trace if in_time else _too_late))
            self._states = tuple(states)
        except Exception as error:
            self._warn("look", f"Crux can't tell which paths are taken: {error}")
            _log.debug("details", exc_info=True)


def _sprayed(known: Sequence[Connection]) -> frozenset[int]:
    """The TCP connections whose source port led to several paths."""
    return frozenset(c.id for c in known if c.kind == "tcp" and c.error == errno.ENOTUNIQ)


def _too_late(
    local: Endpoint, peer: Endpoint, protocol: IpProtocol, /, *, ttls: Sequence[int]
) -> ConnectionTrace:
    return ConnectionTrace(local, peer, protocol, reason="no time was left to ask")
