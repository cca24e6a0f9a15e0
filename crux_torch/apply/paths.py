"""Compares the planned path of each connection with the one that it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from crux_torch.agreement.records import PathCounts
from crux_torch.apply.transport import Connection, Route
from crux_torch.backend.tcp_sockets import Endpoint, TcpSocket
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.live_trace import ConnectionTrace
from crux_torch.network.probe.packets import Transport as IpProtocol
from crux_torch.network.routes import HostRoute

#: ``connected``: by this process, whose source port it is; ``accepted``: the other end chose.
Side = Literal["connected", "accepted"]
#: ``live``: by packets of the connection itself; ``connect``: by probes from its port before it was
#: made; ``no``: not at all.
Verified = Literal["live", "connect", "no"]

#: :func:`crux_torch.network.probe.prober.trace_connection`.
Tracer = Callable[..., ConnectionTrace]


@dataclass(frozen=True, slots=True)
class PathState:
    """One connection to a host for which the plan has a path.

    Attributes:
        wanted: at each TTL the addresses of which one answers on the path.
        taken: the answers at those TTLs.
        verified: source of ``taken``.
        steered: True if this process chose its source port for the path.
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
        """True if it takes the planned path; None if that is not known."""
        if self.verified == "connect":
            return self.steered
        answered = dict(self.taken)
        right = [answered[ttl] in addresses for ttl, addresses in self.wanted if answered.get(ttl)]
        if not all(right):
            return False
        return True if len(right) == len(self.wanted) else None

    def as_status(self) -> dict[str, Any]:
        """Returns the entry of ``crux_torch.status()``."""
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
    """Returns the routes for the transport: one for each address.

    Args:
        dscp: value of new TCP connections from their first packet; None: the network's default.
        udp_ports: by destination, source ports that lead over the path (RoCEv2).
        qp_dscp, overrides: of queue pairs, see :class:`Route`.
        any_path: True to leave TCP connections on the network's paths.
    """
    found = []
    for route in routes:
        hops = () if any_path else tuple((ttl, a) for ttl, given in route.hops for a in given)
        for to in route.destinations:
            ports = (udp_ports or {}).get(to, ())
            found.append(Route(to, hops, dscp, qp_dscp, overrides, udp_ports=ports))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Routed:
    """A live connection for which there is a route.

    Attributes:
        id: a socket's inode, a queue pair's number.
        local, peer: its endpoints; the port of a queue pair is its UDP source port.
        known: the transport's entry; None if it was made unseen.
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
    """Returns the connections to destinations of ``routes``.

    Args:
        sockets, listeners: of the inner backends.
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
    """Returns the path that one connection takes; ``trace`` asks the hops."""
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
    """Returns the numbers of connections on the planned path, another one, or an unknown one."""
    verdicts = [state.as_planned for state in states]
    missed = sum(s.side == "connected" and s.as_planned is not True for s in states)
    return PathCounts(verdicts.count(True), verdicts.count(False), verdicts.count(None), missed)
