"""Compares paths that connections were seen to take with the candidates of a topology. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from crux_torch.network.discover.fragment import SeenPair
from crux_torch.network.routes import routers
from crux_torch.network.topology import CANDIDATE_LIMIT, Path, Topology

#: Contradictions that are told at most, and routers that one names; each pair may have one.
MAX_TOLD, MAX_NAMED = 16, 4

Routers = tuple[str, ...]


class _Ends(NamedTuple):
    """Hosts and addresses of a pair."""

    src: str
    dst: str
    src_address: str
    dst_address: str


def links_in(pair: SeenPair) -> frozenset[tuple[str, ...]]:
    """Returns the links of a pair's paths: addresses that answered, and each two in a row.

    Most routers answer with an address for each link. Those that answer with one for all links are
    told by the router before.
    """
    found: set[tuple[str, ...]] = set()
    for path in pair.paths:
        found.update((hop,) for hop in path.hops if hop is not None)
        for hop, following in itertools.pairwise(path.hops):
            if hop is not None and following is not None:
                found.add((hop, following))
    return frozenset(found)


def taken_candidate(
    pairs: Iterable[SeenPair], topology: Topology, limit: int = CANDIDATE_LIMIT
) -> int | None:
    """Returns the index of the candidate that most connections between two hosts take.

    Hops that did not answer, or whose address the topology lacks, fit every candidate. Of several
    candidates that fit, the first counts.

    Args:
        pairs: of the two hosts in one direction; the topology knows both.
        limit: of the candidates, see :meth:`Topology.candidate_paths`.

    Returns:
        None if nothing was seen that tells one candidate from another, or if no candidate fits.
    """
    count: dict[int, int] = {}
    for pair in pairs:
        for seen in pair.paths:
            index = _candidate_of(topology, _ends(pair), seen.hops, limit)
            if index is not None:
                count[index] = count.get(index, 0) + seen.connections
    return min(count, key=lambda index: (-count[index], index), default=None)


def contradictions(pairs: Iterable[SeenPair], topology: Topology) -> tuple[str, ...]:
    """Returns sentences about seen paths that are none of the topology's.

    Each names the first router that no candidate has there. Pairs of hosts that the topology lacks
    contradict nothing.
    """
    found: dict[str, None] = {}
    known = frozenset(topology.hosts)
    for pair in pairs:
        if pair.src == pair.dst or not known.issuperset((pair.src, pair.dst)):
            continue
        for seen in pair.paths:
            if sentence := _contradiction(topology, _ends(pair), seen.hops):
                found[sentence] = None
        if len(found) >= MAX_TOLD:
            break
    return tuple(found)[:MAX_TOLD]


def _contradiction(topology: Topology, ends: _Ends, hops: tuple[str | None, ...]) -> str:
    left = list(dict.fromkeys(_candidates(topology, ends, CANDIDATE_LIMIT)))
    for ttl, address in enumerate(_routers_seen(topology, ends, hops), 1):
        here = [nodes for nodes in left if ttl <= len(nodes)]
        fits = [nodes for nodes in here if _may_answer(topology, nodes[ttl - 1], address)]
        if not fits:
            names = sorted({nodes[ttl - 1] for nodes in here})[:MAX_NAMED]
            there = f"the topology has {', '.join(names)}" if names else "no path has a hop"
            node = topology.node_at.get(address or "")
            router = f"{node} ({address})" if node else address or "a router"
            return f"hop {ttl} from {ends.src} to {ends.dst} is {router}, where {there}"
        left = fits
    return ""


def _may_answer(topology: Topology, node: str, address: str | None) -> bool:
    """True if ``node`` may have answered from ``address``."""
    given = topology.addresses.get(node)
    return address is None or address in given if given else address not in topology.node_at


# A plan reads the same paths again and again, and a cluster has one topology at a time.
@lru_cache(maxsize=1 << 16)
def _candidate_of(
    topology: Topology, ends: _Ends, hops: tuple[str | None, ...], limit: int
) -> int | None:
    candidates = _candidates(topology, ends, limit)
    if len(candidates) == 1:
        return 0
    seen = [
        None if address is None else topology.node_at.get(address)
        for address in _routers_seen(topology, ends, hops)
    ]
    if not any(seen):
        return None
    return next((i for i, nodes in enumerate(candidates) if _fits(seen, nodes)), None)


def _fits(seen: Sequence[str | None], nodes: Routers) -> bool:
    """True if a path over ``nodes`` could have given these answers, the last ones left out."""
    return len(seen) <= len(nodes) and all(
        a is None or a == b for a, b in zip(seen, nodes, strict=False)
    )


def _routers_seen(
    topology: Topology, ends: _Ends, hops: tuple[str | None, ...]
) -> tuple[str | None, ...]:
    """The answers of routers: without the silent end, and without the destination's own."""
    end = len(hops)
    while end:
        address = hops[end - 1]
        node = topology.node_at.get(address or "")
        if address is not None and (node is None or topology.host_of(node) != ends.dst):
            break
        end -= 1
    return hops[:end]


@lru_cache(maxsize=1 << 14)
def _candidates(topology: Topology, ends: _Ends, limit: int) -> tuple[Routers, ...]:
    """The routers of each candidate; none for one that joins other NICs than the pair's."""
    paths = topology.candidate_paths(ends.src, ends.dst, limit)
    return tuple(routers(path, topology) if _joins(topology, path, ends) else () for path in paths)


def _joins(topology: Topology, path: Path, ends: _Ends) -> bool:
    """True if ``path`` begins and ends where the addresses are; that of a host is any NIC's."""
    nodes = topology.ends(path[0])[0], topology.ends(path[-1])[1]
    given = (topology.node_at.get(a) for a in (ends.src_address, ends.dst_address))
    pairs = zip(given, nodes, strict=True)
    return all(a is None or topology.nodes[a].kind == "host" or a == b for a, b in pairs)


def _ends(pair: SeenPair) -> _Ends:
    return _Ends(pair.src, pair.dst, pair.src_address, pair.dst_address)
