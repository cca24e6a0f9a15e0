"""From the candidates that a plan names to what a host can steer by: who answers at which hop.

Pure. A packet whose TTL is t expires at the t-th router of its path, which says so from one of its
addresses. So a path is told from the pair's other candidates by the addresses at the TTLs at which
they differ; a sender tries source ports until those answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, Protocol

import msgspec

from crux_torch.fabric.topology import Path, Topology, TopologyError

#: Addresses over all hops of a route, as many as the transport takes (``CRUX_ROUTE_HOPS``).
MAX_HOP_ADDRESSES = 16
#: Problems that are told at most; there may be one for each flow.
MAX_PROBLEMS = 16

HostName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Ttl = Annotated[int, msgspec.Meta(ge=1, le=255)]
Address = Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
Hop = tuple[Ttl, Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=16)]]


class HostRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The path that connections from one host to another are to take.

    Attributes:
        src: host that sends.
        dst: host that receives.
        destinations: addresses of ``dst`` that the path leads to.
        hops: at each TTL the addresses of which one answers on this path; only the TTLs at which
            the pair's candidates differ, ascending.
    """

    src: HostName
    dst: HostName
    destinations: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=64)]
    hops: Annotated[tuple[Hop, ...], msgspec.Meta(min_length=1, max_length=MAX_HOP_ADDRESSES)]


class HasEnds(Protocol):
    """A flow from one host to another."""

    @property
    def src(self) -> str: ...
    @property
    def dst(self) -> str: ...


class Routes(NamedTuple):
    """What can be steered, and why the rest can't.

    Attributes:
        routes: one for each pair of hosts that has a choice: those of the flows in their order,
            then those for the way back of flows that go one way only.
        problems: what the topology lacks for the other pairs that have a choice; each once.
    """

    routes: tuple[HostRoute, ...]
    problems: tuple[str, ...]


def routes_of(path: Sequence[int], flows: Sequence[HasEnds], topology: Topology) -> Routes:
    """The routes that carry out a plan's paths.

    A TCP connection carries both directions, and the end that connects picks the port. So where
    bytes flow one way only, the other way gets a route as well: back through the same routers.
    A hash that treats both directions alike, as Linux' does, then puts the bytes on their path.

    A pair gets none where its candidates cross the same routers, or where a host is not in the
    topology: the network decides there. A pair whose path can't be told from another candidate by
    the addresses that the topology gives is left out, with the reason in ``problems``.

    Args:
        path: for each flow the index of its candidate in ``topology.candidate_paths``. Of two
            flows of one pair the first counts.
        flows: the job's, as its profile lists them.
        topology: that the path was chosen in.

    Raises:
        ValueError: not one index for each flow, or one that the pair has no candidate for.
    """
    if len(path) != len(flows):
        raise ValueError(f"{len(path)} paths for {len(flows)} flows")
    routes = []
    problems: dict[str, None] = {}
    for (src, dst), wanted in _wanted(path, flows, topology).items():
        try:
            route = _route(src, dst, wanted, topology.candidate_paths(src, dst), topology)
        except TopologyError as error:
            problems[str(error)] = None
        else:
            routes += [route] if route is not None else []
    return Routes(tuple(routes), tuple(problems)[:MAX_PROBLEMS])


def _wanted(
    path: Sequence[int], flows: Sequence[HasEnds], topology: Topology
) -> dict[tuple[str, str], Path]:
    """The path of every pair of known hosts between which bytes flow either way."""
    known = frozenset(topology.hosts)
    wanted: dict[tuple[str, str], Path] = {}
    for chosen, flow in zip(path, flows, strict=True):
        pair = flow.src, flow.dst
        if pair in wanted or flow.src == flow.dst or not known.issuperset(pair):
            continue
        candidates = topology.candidate_paths(*pair)
        if not 0 <= chosen < len(candidates):
            raise ValueError(
                f"path {chosen} of {len(candidates)} from {flow.src} to {flow.dst}: no such one"
            )
        wanted[pair] = candidates[chosen]
    for (src, dst), there in list(wanted.items()):
        back = _back(there, dst, src, topology) if (dst, src) not in wanted else None
        if back is not None:
            wanted[dst, src] = back
    return wanted


def _back(there: Path, src: str, dst: str, topology: Topology) -> Path | None:
    """The candidate from ``src`` to ``dst`` through the nodes of ``there`` in reverse, if any."""
    nodes = [topology.ends(link)[0] for link in there]
    for candidate in topology.candidate_paths(src, dst):
        if [topology.ends(link)[1] for link in reversed(candidate)] == nodes:
            return candidate
    return None


def routers(path: Path, topology: Topology) -> tuple[str, ...]:
    """The network's nodes on ``path``, in order: a packet of TTL t expires at the t-th, from 1."""
    through = (topology.ends(link)[1] for link in path)
    return tuple(node for node in through if topology.host_of(node) is None)


def _route(
    src: str, dst: str, wanted: Path, candidates: Sequence[Path], topology: Topology
) -> HostRoute | None:
    """The route over ``wanted``; None where there is no choice.

    Raises:
        TopologyError: the addresses do not suffice.
    """
    addresses = topology.addresses
    end = topology.ends(wanted[-1])[1]
    destinations = addresses.get(end, ())
    if destinations:
        # These belong to one NIC: a path that ends at another one does not lead there.
        candidates = [c for c in candidates if topology.ends(c[-1])[1] == end]
    mine = routers(wanted, topology)
    others = {routers(candidate, topology) for candidate in candidates} - {mine}
    if not others:
        return None
    if not destinations:
        destinations = addresses.get(dst, ())
    if not destinations:
        raise TopologyError(f"no addresses of {dst}")
    differing = [
        ttl for ttl, node in enumerate(mine, 1) if any(_at(o, ttl) != node for o in others)
    ]
    hops = {ttl: addresses[mine[ttl - 1]] for ttl in differing if addresses.get(mine[ttl - 1])}
    if not _told_apart(hops, mine, others):
        silent = [mine[ttl - 1] for ttl in differing if ttl not in hops]
        raise TopologyError(f"no addresses of {', '.join(silent) or f'a router towards {dst}'}")
    while sum(map(len, hops.values())) > MAX_HOP_ADDRESSES:
        hops = _with_fewer(hops, mine, others)
    return HostRoute(src, dst, destinations[:64], tuple(sorted(hops.items())))


def _told_apart(hops: Iterable[int], mine: Sequence[str], others: Iterable[Sequence[str]]) -> bool:
    """Whether every other candidate differs at one of the TTLs ``hops``."""
    return all(any(_at(other, ttl) != mine[ttl - 1] for ttl in hops) for other in others)


def _with_fewer(
    hops: dict[int, tuple[str, ...]], mine: Sequence[str], others: Iterable[Sequence[str]]
) -> dict[int, tuple[str, ...]]:
    """``hops`` without one TTL that the others make up for, one of many addresses if possible."""
    for ttl in sorted(hops, key=lambda t: -len(hops[t])):
        fewer = {t: given for t, given in hops.items() if t != ttl}
        if _told_apart(fewer, mine, others):
            return fewer
    total = sum(map(len, hops.values()))
    names = ", ".join(mine[ttl - 1] for ttl in sorted(hops))
    raise TopologyError(
        f"{total} addresses of {names}; a route takes {MAX_HOP_ADDRESSES}: list only those from "
        "which they answer probes"
    )


def _at(nodes: Sequence[str], ttl: int) -> str | None:
    return nodes[ttl - 1] if ttl <= len(nodes) else None
