"""Compares the path that each connection was to take with the one that it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from crux_torch.apply.transport import Connection, Route
from crux_torch.c10d.sockets import Endpoint, TcpSocket
from crux_torch.control.records import PathCounts
from crux_torch.fabric.ecmp import ROCE_V2_PORT
from crux_torch.fabric.route import HostRoute
from crux_torch.probe.path_map import Transport as IpProtocol
from crux_torch.probe.prober import ConnectionTrace

#: ``connected``: by this process, whose source port it is; ``accepted``: the other end chose.
Side = Literal["connected", "accepted"]
#: ``live``: by packets of the connection itself, seen at the hops; ``connect``: by probes from its
#: port before it was made; ``no``: not at all.
Verified = Literal["live", "connect", "no"]

#: :func:`crux_torch.probe.prober.trace_connection`.
Tracer = Callable[..., ConnectionTrace]


@dataclass(frozen=True, slots=True)
class PathState:
    """One connection to a host for which the plan has a path.

    Attributes:
        wanted: at each TTL the addresses of which one answers on the path.
        taken: who answered at those TTLs; None if nobody did.
        verified: how that is known.
        steered: whether this process chose its source port for the path.
        probes: packets that were sent to choose it.
    """

    local: Endpoint
    peer: Endpoint
    side: Side
    wanted: tuple[tuple[int, tuple[str, ...]], ...]
    taken: tuple[tuple[int, str | None], ...] = ()
    verified: Verified = "no"
    steered: bool = False
    probes: int = 0
    error: str = ""

    @property
    def as_planned(self) -> bool | None:
        """Whether it takes the path; None if that is not known."""
        if self.verified == "connect":
            return self.steered
        answered = dict(self.taken)
        told = [answered[ttl] in addresses for ttl, addresses in self.wanted if answered.get(ttl)]
        if not all(told):
            return False
        return True if len(told) == len(self.wanted) else None

    def told(self) -> dict[str, Any]:
        """As ``crux_torch.status()`` shows it."""
        return asdict(self) | {"as_planned": self.as_planned, "error": self.error or None}


def routes_from(
    routes: Iterable[HostRoute],
    dscp: int | None,
    udp_ports: Mapping[str, tuple[int, ...]] | None = None,
    *,
    qp_dscp: int | None = None,
    overrides: bool = False,
    any_path: bool = False,
) -> tuple[Route, ...]:
    """The routes for the transport: one for each address.

    Args:
        dscp: that new TCP connections carry from their first packet; None: the network's default.
        udp_ports: by destination, source ports that lead over the path (RoCEv2).
        qp_dscp, overrides: of queue pairs, see :class:`Route`.
        any_path: TCP connections keep the network's paths.
    """
    return tuple(
        Route(
            destination,
            hops=tuple(
                (ttl, address)
                for ttl, addresses in (() if any_path else route.hops)
                for address in addresses
            ),
            dscp=dscp,
            qp_dscp=qp_dscp,
            overrides=overrides,
            udp_ports=(udp_ports or {}).get(destination, ()),
        )
        for route in routes
        for destination in route.destinations
    )


@dataclass(frozen=True, slots=True)
class Routed:
    """A live connection for which there is a route.

    Attributes:
        id: tells it from every other: a socket's inode, a queue pair's number.
        local, peer: its endpoints; the port of a queue pair is its UDP source port.
        known: what the transport knows of it; None if it was made unseen.
    """

    id: int
    local: Endpoint
    peer: Endpoint
    side: Side
    protocol: IpProtocol
    route: HostRoute
    known: Connection | None = None


def routed(
    sockets: Iterable[TcpSocket],
    listeners: Collection[Endpoint],
    known: Iterable[Connection],
    routes: Iterable[HostRoute],
) -> list[Routed]:
    """The connections that go to where there is a route.

    Args:
        sockets, listeners: the inner backends', and where they listen.
        known: the transport's connections. Those that it searched a path for count, too, and the
            queue pairs whose source port is known.
    """
    to = {address: route for route in routes for address in route.destinations}
    known = list(known)
    others = {c.id: c for c in known if c.kind == "tcp"}
    found = []
    for sock in sockets:
        if sock.peer is None or sock.peer[0] not in to:
            continue
        mine = others.pop(sock.inode, None)
        accepted = sock.local in listeners or (mine is not None and mine.accepted)
        side: Side = "accepted" if accepted else "connected"
        route = to[sock.peer[0]]
        found.append(Routed(sock.inode, sock.local, sock.peer, side, "tcp", route, mine))
    for c in (c for c in others.values() if c.probes and c.peer in to):
        local, peer = (c.local, c.local_port), (c.peer, c.peer_port)
        found.append(Routed(c.id, local, peer, "connected", "tcp", to[c.peer], c))
    for c in (c for c in known if c.kind == "qp" and c.peer in to and c.local_port):
        local, peer = (c.local, c.local_port), (c.peer, ROCE_V2_PORT)
        found.append(Routed(c.id, local, peer, "connected", "udp", to[c.peer]))
    return found


def observe(connection: Routed, trace: Tracer) -> PathState:
    """Look which path one connection takes; ``trace`` asks the hops."""
    side, route, known = connection.side, connection.route, connection.known
    state = PathState(connection.local, connection.peer, side, route.hops)
    if side == "connected" and known is not None:
        # A search ends at a port that has passed every hop, the last one last.
        ttl, addresses = route.hops[-1]
        steered = known.via_ttl == ttl and known.via in addresses
        state = replace(state, steered=steered, probes=known.probes)
    ttls = [ttl for ttl, _ in route.hops]
    live = trace(connection.local, connection.peer, connection.protocol, ttls=ttls)
    if live.method != "none":
        return replace(state, taken=live.hops, verified="live")
    if state.steered and known is not None:
        return replace(state, taken=((known.via_ttl, known.via),), verified="connect")
    return replace(state, error=live.reason)


def counts(states: Sequence[PathState]) -> PathCounts:
    """How many connections take the planned path, another one, or are not known."""
    verdicts = [state.as_planned for state in states]
    missed = sum(s.side == "connected" and s.as_planned is not True for s in states)
    return PathCounts(verdicts.count(True), verdicts.count(False), verdicts.count(None), missed)
