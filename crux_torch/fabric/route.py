"""From a chosen path to what a plan says of it, and from there to what a host can steer by. Pure.

A packet whose TTL is t expires at the t-th router of its path, and that router answers from one of
its addresses. So the routers at the TTLs at which a pair's candidates differ tell one path from the
others (docs/paths.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from crux_torch.fabric.topology import CANDIDATE_LIMIT, Path, Topology, TopologyError

#: Addresses over all hops of a route, as many as the transport takes (``CRUX_ROUTE_HOPS``).
MAX_HOP_ADDRESSES = 16
#: Problems that are reported at most; there may be one for each flow.
MAX_PROBLEMS = 16

NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Ttl = Annotated[int, msgspec.Meta(ge=1, le=255)]
Address = Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
AddressedHop = tuple[Ttl, Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=16)]]
Nodes = tuple[str, ...]


class PlannedHop(msgspec.Struct, frozen=True, array_like=True):
    """A router on a planned path.

    Attributes:
        there: TTL at which packets from the path's start expire at this router; 0 if the router is
            not needed to tell the path.
        back: the same for packets on the way back.
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
    """What can be steered, and what the topology lacks for the other planned paths."""

    routes: tuple[HostRoute, ...]
    problems: tuple[str, ...]


def planned_paths(
    chosen: Mapping[tuple[str, str], Path], topology: Topology, limit: int = CANDIDATE_LIMIT
) -> tuple[PlannedPath, ...]:
    """One job's paths as a plan says them.

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
    """The routes that carry out the paths of a job on ``hosts``, by the topology's addresses.

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


def routers(path: Path, topology: Topology) -> Nodes:
    """The network's nodes on ``path``, in order: a packet of TTL t expires at the t-th, from 1."""
    through = (topology.ends(link)[1] for link in path)
    return tuple(node for node in through if topology.host_of(node) is None)


# A plan keeps the paths of most pairs, and a cluster has one topology at a time.
@lru_cache(maxsize=1 << 16)
def _planned(
    topology: Topology, src: str, dst: str, path: Path, with_way_back: bool, limit: int
) -> PlannedPath | None:
    """What a plan says of ``path``; None if there is no choice."""
    wanted = _nodes(path, topology)
    candidates = {_nodes(c, topology) for c in topology.candidate_paths(src, dst, limit)}
    there = _telling(wanted, candidates, topology.addresses)
    back = None
    if with_way_back:
        mirrored = wanted[::-1]
        if topology.is_symmetric:
            candidates = {nodes[::-1] for nodes in candidates}
        else:
            candidates = {_nodes(c, topology) for c in topology.candidate_paths(dst, src, limit)}
        if mirrored in candidates:
            back = _telling(mirrored, candidates, topology.addresses)
    if there is None and back is None:
        return None
    there, back = there or (), back or ()
    hops = []
    for ttl, router in enumerate(wanted[1:-1], 1):
        ttl_back = len(wanted) - 1 - ttl
        if ttl in there or ttl_back in back:
            told = ttl if ttl in there else 0, ttl_back if ttl_back in back else 0
            hops.append(PlannedHop(*told, router))
    start = wanted[0] if topology.addresses.get(wanted[0]) else src
    end = wanted[-1] if topology.addresses.get(wanted[-1]) else dst
    return PlannedPath(start, end, tuple(hops))


def _nodes(path: Path, topology: Topology) -> Nodes:
    """Where ``path`` begins, its routers, and where it ends."""
    return topology.ends(path[0])[0], *routers(path, topology), topology.ends(path[-1])[1]


def _telling(
    wanted: Nodes, candidates: Iterable[Nodes], addresses: Mapping[str, Sequence[str]]
) -> tuple[int, ...] | None:
    """The TTLs whose routers tell ``wanted`` from the other candidates; None without a choice.

    Only routers with addresses count, and few enough of them for a route. If these do not suffice,
    the result names routers all the same, so that the leader can report what is missing.
    """
    mine, end = wanted[1:-1], wanted[-1]
    # The addresses of a NIC are not reached over paths that end at another NIC.
    others = {c[1:-1] for c in candidates if c[-1] == end or not addresses.get(end)} - {mine}
    if not others:
        return None
    differing = [t for t, node in enumerate(mine, 1) if any(_at(o, t) != node for o in others)]
    ttls = [t for t in differing if addresses.get(mine[t - 1])]
    if not _told_apart(ttls, mine, others):
        return tuple(differing) if ttls != differing else ()
    while sum(len(addresses[mine[t - 1]]) for t in ttls) > MAX_HOP_ADDRESSES:
        # Rather without one router of many addresses than without several of few.
        by_size = sorted(ttls, key=lambda t: -len(addresses[mine[t - 1]]))
        smaller = ([t for t in ttls if t != without] for without in by_size)
        fewer = next((s for s in smaller if _told_apart(s, mine, others)), None)
        if fewer is None:
            break
        ttls = fewer
    return tuple(ttls)


def _told_apart(ttls: Iterable[int], mine: Nodes, others: Iterable[Nodes]) -> bool:
    """Whether every other candidate crosses another router at one of ``ttls``."""
    return all(any(_at(other, t) != mine[t - 1] for t in ttls) for other in others)


def _at(nodes: Nodes, ttl: int) -> str | None:
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
        raise TopologyError(
            f"{total} addresses of {', '.join(hops[ttl] for ttl in sorted(hops))}; a route takes "
            f"{MAX_HOP_ADDRESSES}: list only those from which they answer probes"
        )
    return HostRoute(src, dst, destinations[:64], found)
