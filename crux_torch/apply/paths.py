"""Which path each connection was to take, and which one it does take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from crux_torch.apply.sockets import Endpoint, TcpSocket
from crux_torch.apply.transport import Connection, Route
from crux_torch.control.records import PathCounts
from crux_torch.fabric.probe import Trace
from crux_torch.fabric.route import HostRoute

#: ``connected``: by this process, whose source port it is; ``accepted``: the other end chose.
Side = Literal["connected", "accepted"]
#: ``live``: by packets of the connection itself, seen at the hops; ``connect``: by probes from its
#: port before it was made; ``no``: not at all.
Verified = Literal["live", "connect", "no"]


class Tracer(Protocol):
    """:func:`crux_torch.fabric.probe.trace_connection`, as far as TCP needs it."""

    def __call__(self, local: Endpoint, peer: Endpoint, /, *, ttls: Sequence[int]) -> Trace: ...


@dataclass(frozen=True, slots=True)
class PathState:
    """One connection to a host for which the plan has a path.

    Attributes:
        local: this process's endpoint.
        peer: the other endpoint.
        side: who made it.
        wanted: at each TTL the addresses of which one answers on the path.
        taken: who answered at those TTLs; None where nobody did.
        verified: how that is known.
        steered: whether this process chose its source port for the path.
        probes: packets that were sent to choose it.
        error: why no more is known, or empty.
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
        """Whether it takes the path; None where that is not known."""
        if self.verified == "connect":
            return self.steered
        answered = dict(self.taken)
        told = [answered[ttl] in addresses for ttl, addresses in self.wanted if answered.get(ttl)]
        if not all(told):
            return False
        return True if len(told) == len(self.wanted) else None

    def told(self) -> dict[str, Any]:
        """As ``crux_torch.status()`` shows it."""
        return {
            "local": self.local,
            "peer": self.peer,
            "side": self.side,
            "wanted": [list(hop) for hop in self.wanted],
            "taken": [list(hop) for hop in self.taken],
            "as_planned": self.as_planned,
            "verified": self.verified,
            "steered": self.steered,
            "probes": self.probes,
            "error": self.error or None,
        }


def routes_from(routes: Iterable[HostRoute], dscp: int | None) -> tuple[Route, ...]:
    """What the transport is told: a route for each address.

    Args:
        routes: of the host where it runs.
        dscp: that new connections carry from their first packet; None: the network's default.
    """
    return tuple(
        Route(
            destination,
            hops=tuple((ttl, address) for ttl, addresses in route.hops for address in addresses),
            dscp=dscp,
        )
        for route in routes
        for destination in route.destinations
    )


def observe(
    sock: TcpSocket,
    side: Side,
    route: HostRoute,
    known: Connection | None,
    trace: Tracer,
) -> PathState:
    """Look which path one connection takes.

    Args:
        sock: the connection.
        side: who made it.
        route: that its packets are to take.
        known: what the transport knows of it, None where it did not see it made.
        trace: asks the hops of the live connection.
    """
    assert sock.peer is not None
    state = PathState(sock.local, sock.peer, side, route.hops)
    if side == "connected" and known is not None:
        # A search ends at a port that has passed every hop, the last one last.
        ttl, addresses = route.hops[-1]
        steered = known.via_ttl == ttl and known.via in addresses
        state = replace(state, steered=steered, probes=known.probes)
    live = trace(sock.local, sock.peer, ttls=[ttl for ttl, _ in route.hops])
    if live.method != "none":
        return replace(state, taken=live.hops, verified="live")
    if state.steered and known is not None:
        return replace(state, taken=((known.via_ttl, known.via),), verified="connect")
    return replace(state, error=live.reason)


def counts(states: Sequence[PathState]) -> PathCounts:
    """How many connections take the planned path, another one, or are not known."""
    verdicts = [state.as_planned for state in states]
    return PathCounts(verdicts.count(True), verdicts.count(False), verdicts.count(None))
