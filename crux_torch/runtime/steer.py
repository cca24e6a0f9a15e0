"""One rank takes the planned paths: routes to the transport, new connections, a look at the wire.

Without the transport, or if it refuses, connections go where the network sends them. Whatever could
take long runs in threads of its own, and is bounded.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from crux_torch.apply import nccl
from crux_torch.apply.paths import PathState, Routed, Tracer, counts, observe, routed, routes_from
from crux_torch.apply.queue_pairs import QueuePairs
from crux_torch.apply.transport import Connection, Route, Transport
from crux_torch.c10d import gloo_rendezvous
from crux_torch.c10d.ownership import Ownership
from crux_torch.c10d.sockets import Endpoint
from crux_torch.c10d.switch import GROUPS, Groups
from crux_torch.c10d.switch_attempt import UNDER_WAY
from crux_torch.control.records import PathCounts
from crux_torch.errors import CruxError
from crux_torch.fabric.route import HostRoute
from crux_torch.probe.path_map import Transport as IpProtocol
from crux_torch.probe.port_search import PortSearch
from crux_torch.probe.prober import ConnectionTrace, trace_connection
from crux_torch.runtime.order import Order
from crux_torch.settings import Settings
from crux_torch.store.endpoint import server_addresses
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

#: Seconds between two looks at connections that did not change, and after a change.
LOOK_S = 30.0
SETTLE_S = 1.0
#: Connections that one look asks about, and the seconds that it may take.
MAX_LOOKED_AT = 64
LOOK_LIMIT_S = 20.0


class Steering:
    """Follows the leader's routes. One background thread owns it; any may call :meth:`status`.

    Args:
        host: where this process runs, as the topology calls it.
        ownership: knows the inner backends' connections.
        load, pairs: give the transport, and what changes live queue pairs; they may raise a
            CruxError with the remedy.
        switch: makes the inner backends' connections anew.
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
        load: Callable[[], Transport],
        switch: Groups,
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
        self._switch = switch
        self._trace = trace
        self._search = search or PortSearch()
        self._pairs = pairs
        self._ports, self._skipped_ports = ports, tuple(skipped_ports)
        self._clock = clock
        self._warn = WarnOnce(_log)
        self._transport: Transport | None = None
        self._why_not = ""
        self._routes: tuple[HostRoute, ...] = ()
        self._told: tuple[Route, ...] = ()
        self._marks_pairs, self._overrides = marks_pairs, overrides
        self._dscp: int | None = None
        self._qp_dscp: int | None = None
        self._incarnation = ""
        self._generation = self._requested = 0
        self._searching: threading.Thread | None = None
        self._telling = threading.Lock()
        self._seen: frozenset[int] = frozenset()
        self._look_at_s = float("inf")
        self._looking: threading.Thread | None = None
        self._states: tuple[PathState, ...] = ()
        self._sprayed = False

    def follow(self, order: Order) -> None:
        """Have new connections take the order's routes; replace the present ones if it says so.

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
        self._tell()
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
        """Steer no more connections; existing ones stay where they are."""
        self._routes = ()
        self._states = ()
        self._sprayed = False
        self._tell()

    def tick(self) -> None:
        """Start a look at the connections if one is due; returns at once."""
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
        """Plain values; see :func:`crux_torch.status`."""
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
            "groups": [asdict(group) for group in self._switch.status()],
            **msgspec.structs.asdict(counts(states)),
            "connections": [state.told() for state in states],
        }

    def counts(self) -> PathCounts | None:
        """How many connections take the planned path; None if none is planned or can be taken.

        During a switch none counts as missed, because the connections are about to be replaced.
        """
        if not self._routes or self._sprayed:
            return None
        found = counts(self._states)
        if found.missed and any(group.state in UNDER_WAY for group in self._switch.status()):
            return msgspec.structs.replace(found, missed=0)
        return found

    def _available(self, wanted: bool) -> bool:
        """Whether there is a transport that sees connections being made; looks once."""
        if self._transport is not None:
            return True
        if not wanted or self._why_not:
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

    def _tell(self, anew: bool = False) -> None:
        if self._transport is None:
            return
        with self._telling:
            ports = self._search.found(self._routes)
            routes = routes_from(
                self._routes,
                self._dscp,
                ports,
                qp_dscp=self._qp_dscp,
                overrides=self._overrides,
                any_path=self._sprayed,
            )
            if anew or routes != self._told:
                self._transport.set_routes(routes)
                self._told = routes

    def _notice_spraying(self, known: Sequence[Connection]) -> None:
        """Leave paths to a network on which one TCP port led to several."""
        if self._sprayed or not any(c.kind == "tcp" and c.error == errno.ENOTUNIQ for c in known):
            return
        self._sprayed = True
        self._warn(
            "sprayed",
            "the plan's paths are not taken by TCP connections: probes from one source port were "
            "answered on several paths, so the network sprays packets",
        )
        self._tell()

    def _prepare(self, routes: tuple[HostRoute, ...]) -> None:
        """Find the queue pairs' source ports, then ask for the switch that is due."""
        try:
            self._search.run(routes)
            self._tell()
            self._request(pairs_moved=self._move_pairs(routes))
        except Exception as error:
            self._warn("ports", f"queue pairs take the network's paths: {error}")
            _log.debug("details", exc_info=True)

    def _move_pairs(self, routes: tuple[HostRoute, ...]) -> bool:
        """Whether all live queue pairs take their paths without new connections."""
        if self._generation <= self._requested or self._transport is None:
            return False
        try:
            return self._pairs().move(self._search.found(routes))
        except CruxError as error:
            self._warn("pairs", f"live queue pairs are not changed: {error}")
            return False

    def _request(self, *, pairs_moved: bool = False) -> None:
        # A switch needs every rank of a group, also one whose connections have a single path.
        if self._generation > self._requested:
            # If told again, the transport repeats searches that have just failed.
            self._tell(anew=True)
            self._requested = self._generation
            self._switch.request(self._generation, pairs_moved=pairs_moved)

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


def _too_late(
    local: Endpoint, peer: Endpoint, protocol: IpProtocol, /, *, ttls: Sequence[int]
) -> ConnectionTrace:
    return ConnectionTrace(local, peer, protocol, reason="no time was left to ask")


def make_steering(settings: Settings, host: str, ownership: Ownership, store: object) -> Steering:
    """The steering of this process; connections to ``store``, the job's, are never steered."""
    skipped = gloo_rendezvous.store_ports(store)
    skipped.update(port for _, port in server_addresses(settings.store))
    return Steering(
        host,
        ownership,
        load=Transport.load,
        switch=GROUPS,
        ports=(settings.ports.first, settings.ports.last),
        skipped_ports=sorted(skipped),
        marks_pairs=settings.override_ib_tc or not nccl.has_users_class(os.environ),
        overrides=settings.override_ib_tc,
    )
