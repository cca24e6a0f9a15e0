"""From the path that a plan chose for a pair of hosts to a route that a host can steer by. Pure.

A packet whose TTL is t expires at the t-th router of its path, and that router answers from one of
its addresses. So the routers at the TTLs at which a pair's candidates differ tell one path from the
others (docs/understand/paths.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from crux_torch.network.topology import CANDIDATE_LIMIT, Path, Topology, TopologyError

#: Addresses over all hops of a route, as many as the transport takes (``CRUX_ROUTE_HOPS``).
MAX_HOP_ADDRESSES = 16
#: Links of one flow at most, those nearest to its source first.
MAX_LINKS = 16
#: Problems that are reported at most; there may be one for each flow.
MAX_PROBLEMS = 16

LinkName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Capacity_Bps = Annotated[float, msgspec.Meta(gt=0.0)]
NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Ttl = Annotated[int, msgspec.Meta(ge=1, le=255)]
Address = Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
AddressedHop = tuple[Ttl, Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=16)]]


class HostFlowLinks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links that a flow between two hosts is sure to cross, whichever path it takes.

    Attributes:
        destinations: addresses of ``dst``.
        links: capacity in bytes per second of each link, in order from ``src``.
        leaves, enters: of these links, the one from ``src`` into the network, and the one from the
            network to ``dst``; empty where the flow has a choice.
    """

    src: NodeName
    dst: NodeName
    destinations: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=64)]
    links: Annotated[dict[LinkName, Capacity_Bps], msgspec.Meta(min_length=1, max_length=MAX_LINKS)]
    leaves: str = ""
    enters: str = ""


# A job's pairs are asked for with every order, and a cluster has one topology at a time.
@lru_cache(maxsize=1 << 16)
def flow_links(topology: Topology, src: str, dst: str) -> HostFlowLinks | None:
    """Returns the sure links from ``src`` to ``dst``; None without any, or without addresses.

    Raises:
        TopologyError: a host is unknown.
    """
    addresses = topology.addresses_of(dst)
    candidates = topology.candidate_paths(src, dst)
    sure = set(candidates[0]).intersection(*candidates[1:])
    links = [link for link in candidates[0] if link in sure][:MAX_LINKS]
    if not addresses or not links:
        return None
    ends = {link: tuple(map(topology.host_of, topology.ends(link))) for link in links}
    leaves = next((link for link, hosts in ends.items() if hosts == (src, None)), "")
    enters = next((link for link, hosts in ends.items() if hosts == (None, dst)), "")
    return HostFlowLinks(
        src=src,
        dst=dst,
        destinations=addresses[:64],
        links={link: topology.capacity_Bps[link] for link in links},
        leaves=leaves,
        enters=enters,
    )


class PlannedHop(msgspec.Struct, frozen=True, array_like=True):
    """A router on a planned path.

    Attributes:
        there, back: TTL at which packets from the path's start, and on the way back, expire at this
            router; 0 if it is not needed to tell the path.
    """

    there: Annotated[int, msgspec.Meta(ge=0, le=255)]
    back: Annotated[int, msgspec.Meta(ge=0, le=255)]
    router: NodeName


class PlannedPath(msgspec.Struct, frozen=True, array_like=True):
    """A path between two hosts of a job, by the routers that tell it from the other candidates.

    Attributes:
        src, dst: its ends: a host, or its NIC if the topology gives that NIC addresses.
        hops: those routers; none if another candidate crosses the same ones.
    """

    src: NodeName
    dst: NodeName
    hops: Annotated[tuple[PlannedHop, ...], msgspec.Meta(max_length=255)]


class HostRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The path that connections from one host to another are to take.

    Attributes:
        destinations: addresses of ``dst`` that the path leads to.
        hops: TTLs, ascending, each with the addresses of which one answers on this path.
    """

    src: NodeName
    dst: NodeName
    destinations: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=64)]
    hops: Annotated[
        tuple[AddressedHop, ...], msgspec.Meta(min_length=1, max_length=MAX_HOP_ADDRESSES)
    ]


class Routes(NamedTuple):
    """Routes that can be steered, and the obstacles to the other planned paths."""

    routes: tuple[HostRoute, ...]
    problems: tuple[str, ...]


def planned_paths(
    chosen: Mapping[tuple[str, str], Path], topology: Topology, limit: int = CANDIDATE_LIMIT
) -> tuple[PlannedPath, ...]:
    """Returns one job's paths as a plan says them.

    A TCP connection carries both directions, and the end that connects picks the port. So if bytes
    flow one way only, the way back is planned as well, through the same routers. A hash that treats
    both directions alike, as Linux' does, then puts the bytes on their path.

    A pair is left out if all of its candidates cross the same routers: it has no choice.

    Args:
        chosen: for pairs of different hosts the candidate that bytes are to take.
        limit: of the candidates that it was chosen from.
    """
    paths = (
        _planned(topology, src, dst, path, (dst, src) not in chosen, limit)
        for (src, dst), path in chosen.items()
    )
    return tuple(path for path in paths if path is not None)


def routes_of(paths: Iterable[PlannedPath], hosts: Collection[str], topology: Topology) -> Routes:
    """Returns the routes that carry out the paths of a job on ``hosts``.

    Raises:
        ValueError: a path that does not join two of ``hosts``, or a name that is not in the
            topology: the plan is another job's, or of another topology.
    """
    routes = []
    problems: dict[str, None] = {}
    for path in paths:
        ends = topology.host_of(path.src), topology.host_of(path.dst)
        if not set(hosts).issuperset(ends):
            raise ValueError(f"a path from {path.src} to {path.dst} does not join hosts of the job")
        if not path.hops:
            problems[f"no router that tells a path from {path.src} to {path.dst}"] = None
        there = {hop.there: hop.router for hop in path.hops if hop.there}
        back = {hop.back: hop.router for hop in path.hops if hop.back}
        for start, end, hops in ((path.src, path.dst, there), (path.dst, path.src, back)):
            try:
                routes += [_route(start, end, hops, topology)] if hops else []
            except TopologyError as error:
                problems[str(error)] = None
    return Routes(tuple(routes), tuple(problems)[:MAX_PROBLEMS])


def candidate_of(
    planned: PlannedPath, candidates: Sequence[Path], topology: Topology
) -> int | None:
    """Returns the number of the candidate that a plan's path means; None if it is none of them."""
    for number, path in enumerate(candidates):
        nodes = _nodes(path, topology)
        ends = {nodes[0], topology.host_of(nodes[0])}, {nodes[-1], topology.host_of(nodes[-1])}
        if planned.src not in ends[0] or planned.dst not in ends[1]:
            continue
        places = ((hop.there or len(nodes) - 1 - hop.back, hop.router) for hop in planned.hops)
        if all(0 < at < len(nodes) - 1 and nodes[at] == router for at, router in places):
            return number
    return None


def routers(path: Path, topology: Topology) -> tuple[str, ...]:
    """Returns the network's nodes on ``path``: a packet of TTL t expires at the t-th, from 1."""
    through = (topology.ends(link)[1] for link in path)
    return tuple(node for node in through if topology.host_of(node) is None)


# A plan keeps the paths of most pairs, and a cluster has one topology at a time.
@lru_cache(maxsize=1 << 16)
def _planned(
    topology: Topology, src: str, dst: str, path: Path, with_way_back: bool, limit: int
) -> PlannedPath | None:
    """Returns ``path`` as a plan says it; None if there is no choice."""
    nodes = _nodes(path, topology)
    candidates = {_nodes(c, topology) for c in topology.candidate_paths(src, dst, limit)}
    there = _distinguishing(nodes, candidates, topology.addresses)
    back = None
    if with_way_back:
        mirrored = nodes[::-1]
        if topology.is_symmetric:
            candidates = {others[::-1] for others in candidates}
        else:
            candidates = {_nodes(c, topology) for c in topology.candidate_paths(dst, src, limit)}
        if mirrored in candidates:
            back = _distinguishing(mirrored, candidates, topology.addresses)
    if there is None and back is None:
        return None
    there, back = there or (), back or ()
    hops = []
    for ttl, router in enumerate(nodes[1:-1], 1):
        ttl_back = len(nodes) - 1 - ttl
        if ttl in there or ttl_back in back:
            ttls = ttl if ttl in there else 0, ttl_back if ttl_back in back else 0
            hops.append(PlannedHop(*ttls, router))
    start = nodes[0] if topology.addresses.get(nodes[0]) else src
    end = nodes[-1] if topology.addresses.get(nodes[-1]) else dst
    return PlannedPath(start, end, tuple(hops))


def _nodes(path: Path, topology: Topology) -> tuple[str, ...]:
    """The start of ``path``, its routers, and its end."""
    return topology.ends(path[0])[0], *routers(path, topology), topology.ends(path[-1])[1]


def _distinguishing(
    nodes: tuple[str, ...],
    candidates: Iterable[tuple[str, ...]],
    addresses: Mapping[str, Sequence[str]],
) -> tuple[int, ...] | None:
    """The TTLs whose routers tell ``nodes`` from the other candidates; None without a choice.

    Only routers with addresses count, and few enough of them for a route. If these do not suffice,
    the result names routers all the same, so that the leader can report what is missing.
    """
    mine, end = nodes[1:-1], nodes[-1]
    # The addresses of a NIC are not reached over paths that end at another NIC.
    others = {c[1:-1] for c in candidates if c[-1] == end or not addresses.get(end)} - {mine}
    if not others:
        return None
    differing = [t for t, node in enumerate(mine, 1) if any(_at(o, t) != node for o in others)]
    ttls = [t for t in differing if addresses.get(mine[t - 1])]
    if not _are_distinct(ttls, mine, others):
        return tuple(differing) if ttls != differing else ()
    while sum(len(addresses[mine[t - 1]]) for t in ttls) > MAX_HOP_ADDRESSES:
        # Rather without one router of many addresses than without several of few.
        by_size = sorted(ttls, key=lambda t: -len(addresses[mine[t - 1]]))
        smaller = ([t for t in ttls if t != without] for without in by_size)
        fewer = next((s for s in smaller if _are_distinct(s, mine, others)), None)
        if fewer is None:
            break
        ttls = fewer
    return tuple(ttls)


def _are_distinct(
    ttls: Iterable[int], mine: tuple[str, ...], others: Iterable[tuple[str, ...]]
) -> bool:
    """True if every other candidate crosses another router at one of ``ttls``."""
    return all(any(_at(other, t) != mine[t - 1] for t in ttls) for other in others)


def _at(nodes: tuple[str, ...], ttl: int) -> str | None:
    return nodes[ttl - 1] if ttl <= len(nodes) else None


def _route(start: str, end: str, hops: Mapping[int, str], topology: Topology) -> HostRoute:
    """The route from the host of ``start`` over ``hops`` to the addresses of ``end``."""
    src, dst = topology.host_of(start), topology.host_of(end)
    assert src is not None
    assert dst is not None
    addresses = topology.addresses
    destinations = addresses.get(end) or addresses.get(dst)
    if not destinations:
        raise TopologyError(f"no addresses of {dst}")
    silent = [hops[ttl] for ttl in sorted(hops) if not addresses.get(hops[ttl])]
    if silent:
        raise TopologyError(f"no addresses of {', '.join(silent)}")
    found = tuple((ttl, addresses[hops[ttl]]) for ttl in sorted(hops))
    total = sum(len(given) for _, given in found)
    if total > MAX_HOP_ADDRESSES:
        found = _arrivals(start, end, hops, topology)
        total = sum(len(given) for _, given in found)
    if total > MAX_HOP_ADDRESSES:
        raise TopologyError(
            f"{total} addresses of {', '.join(hops[ttl] for ttl in sorted(hops))}; a route takes "
            f"{MAX_HOP_ADDRESSES}: list only those from which they answer probes"
        )
    return HostRoute(src, dst, destinations[:64], found)


def _arrivals(
    start: str, end: str, hops: Mapping[int, str], topology: Topology
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The hops, each with the addresses at which packets from the router before it arrive.

    A large switch has an address for each cable, and most answer from that one. The subnets of
    addresses tell which cable leads where. If they do not, all addresses of the router stay.
    """
    candidates = (_nodes(path, topology) for path in topology.candidate_paths(start, end))
    taken = [n for n in candidates if all(_at(n[1:-1], ttl) == hops[ttl] for ttl in hops)]
    node_at, mates = topology.node_at, topology.cable_mates
    found = []
    for ttl in sorted(hops):
        before = {nodes[ttl - 1] for nodes in taken}
        every = topology.addresses[hops[ttl]]
        near = tuple(a for a in every if node_at.get(mates.get(a, "")) in before)
        found.append((ttl, near or every))
    return tuple(found)
