"""Equal-cost shortest paths in a network with hosts, and ECMP's choice among them.

A path is a tuple of link numbers. It is found by its rank in the order of all paths, so that some
of millions can be listed. benchmarks/shortest_paths.py compares this with networkx and rustworkx.

Switches forward, hosts do not: a path may pass through any network switch, and through the inner
nodes (PCIe switch, NIC, root complex, NVSwitch) of its two end hosts, but never through another
host and never through a GPU.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from math import gcd
from typing import NamedTuple

#: Owner of the nodes that belong to no host.
NETWORK = -1
#: Destination port of RoCEv2 (IBTA, annex A17). The source port is free and picks the path.
ROCE_V2_PORT = 4791
_UDP = 17


def hashed_choice(src: str, dst: str, src_port: int, candidates: int) -> int:
    """Returns the index of the path that a RoCEv2 flow takes: one CRC32 over its 5-tuple.

    Args:
        src, dst: addresses. A name that is no IP address stands for a made-up address.
        candidates: number of equal-cost paths, 1 or more.
    """
    ports = src_port.to_bytes(2, "big") + ROCE_V2_PORT.to_bytes(2, "big")
    return zlib.crc32(_address(src) + _address(dst) + ports + bytes([_UDP])) % candidates


@lru_cache(maxsize=1 << 16)
def _address(name: str) -> bytes:
    try:
        return ip_address(name).packed
    except ValueError:
        return zlib.crc32(name.encode()).to_bytes(4, "big")


class ShortestPaths:
    """Shortest paths between sets of nodes of one host each, the same on every machine.

    The order is lexicographic in the order of the links of each node. Distances through the network
    are cached by where a path leaves it and what remains from there, because all GPUs behind one
    switch share that.

    Args:
        src, dst: nodes that each link of a directed multigraph leaves and enters.
        cost: metric of each link, 1 or more.
        owner: host that each node belongs to, or ``NETWORK``.
        forwards: for each node, True if a path may pass through it.
    """

    def __init__(
        self,
        *,
        src: Sequence[int],
        dst: Sequence[int],
        cost: Sequence[int],
        owner: Sequence[int],
        forwards: Sequence[bool],
    ) -> None:
        self._src, self._dst, self._cost = src, dst, cost
        self._owner, self._forwards = owner, forwards
        nodes = len(owner)
        self._out: list[list[int]] = [[] for _ in range(nodes)]
        # The links that stay within the network, or within one host, by the node at either end.
        self._out_near: list[list[int]] = [[] for _ in range(nodes)]
        self._into_near: list[list[int]] = [[] for _ in range(nodes)]
        self._exits: dict[int, list[int]] = {}
        self._entries: dict[int, list[int]] = {}
        for link, (u, v) in enumerate(zip(src, dst, strict=True)):
            self._out[u].append(link)
            if owner[u] == owner[v]:
                self._out_near[u].append(link)
                self._into_near[v].append(link)
            elif owner[u] == NETWORK:
                self._entries.setdefault(owner[v], []).append(link)
            else:
                self._exits.setdefault(owner[u], []).append(link)
        self._arrival = lru_cache(maxsize=1 << 14)(self._find_arrival)
        self._network = lru_cache(maxsize=1 << 12)(lambda rest: _Network(self._relax(dict(rest))))
        self._departure = lru_cache(maxsize=1 << 14)(self._find_departure)

    def count(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> int:
        """Returns the number of shortest paths from any of ``sources`` to any of ``targets``."""
        return self._dag(sources, targets).total

    def paths(
        self, sources: tuple[int, ...], targets: tuple[int, ...], limit: int | None = None
    ) -> list[tuple[int, ...]]:
        """Returns the shortest paths as tuples of links; at most ``limit`` of them, evenly spread.

        The first rank depends on the two ends, so that the pairs together use every link.
        """
        dag = self._dag(sources, targets)
        if limit is None or limit >= dag.total:
            return self._every(dag)
        start = zlib.crc32(f"{sources[0]} {targets[0]}".encode())
        return [self._unrank(dag, rank) for rank in spread(dag.total, limit, start)]

    def costs_inside(self, source: int) -> dict[int, int]:
        """Returns the cost from ``source`` to every node of its own host, without leaving it."""
        return self._relax({source: 0}, backward=False)

    def _dag(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> _Dag:
        owner = self._owner
        home, away = owner[sources[0]], owner[targets[0]]
        arrival = self._arrival(targets)
        if home == away != NETWORK:
            dag = _Dag(arrival.inside, arrival, _Network({}))  # no path leaves the host
        elif home == NETWORK:
            network = self._network(arrival.remaining)
            dag = _Dag(network.distance, arrival, network)
            if away == NETWORK:  # what follows a switch then depends on the targets only
                dag.following, dag.counts = network.following, network.counts
        else:
            distance = self._departure(home, arrival.remaining)
            dag = _Dag(distance, arrival, self._network(arrival.remaining))
        reached = [s for s in sources if s in dag.start_distance]
        best = min((dag.start_distance[s] for s in reached), default=0)
        dag.starts = [s for s in reached if dag.start_distance[s] == best]
        dag.total = sum(self._count(s, dag) for s in dag.starts)
        return dag

    def _find_arrival(self, targets: tuple[int, ...]) -> _Arrival:
        """Distances inside the targets' host, and from the switches beside it."""
        host = self._owner[targets[0]]
        if host == NETWORK:
            return _Arrival({}, {}, tuple((t, 0) for t in sorted(targets)))
        inside = self._relax(dict.fromkeys(targets, 0))
        remaining: dict[int, int] = {}
        entries: dict[int, list[int]] = {}
        for link in self._entries.get(host, ()):
            u, v = self._src[link], self._dst[link]
            if v not in inside or not (inside[v] == 0 or self._forwards[v]):
                continue
            cost = self._cost[link] + inside[v]
            if cost < remaining.get(u, cost + 1):
                remaining[u], entries[u] = cost, []
            if cost == remaining[u]:
                entries[u].append(link)
        return _Arrival(inside, entries, tuple(sorted(remaining.items())))

    def _find_departure(self, host: int, remaining: tuple[tuple[int, int], ...]) -> dict[int, int]:
        """Distances from the nodes of the host that a path starts in."""
        network = self._network(remaining)
        nearest: dict[int, int] = {}
        for link in self._exits.get(host, ()):
            u, after = self._src[link], network.distance.get(self._dst[link])
            if after is not None:
                nearest[u] = min(after + self._cost[link], nearest.get(u, after + self._cost[link]))
        return self._relax(nearest)

    def _relax(self, distance: dict[int, int], *, backward: bool = True) -> dict[int, int]:
        """Dijkstra against the direction of the links, within one host or within the network."""
        forward = (self._out_near, self._dst)
        near, end = (self._into_near, self._src) if backward else forward
        queue = [(d, v) for v, d in distance.items()]
        heapq.heapify(queue)
        while queue:
            d, v = heapq.heappop(queue)
            if d > distance[v] or (d > 0 and not self._forwards[v]):
                continue
            for link in near[v]:
                u, candidate = end[link], d + self._cost[link]
                if candidate < distance.get(u, candidate + 1):
                    distance[u] = candidate
                    heapq.heappush(queue, (candidate, u))
        return distance

    def _next_links(self, u: int, dag: _Dag) -> list[int]:
        """The links of ``u`` on a shortest path: within where it is, out of it, or into the end."""
        owner = self._owner
        if owner[u] == NETWORK:
            onward = self._network_links(u, dag.network)
            if dag.leaves_at.get(u) == dag.network.distance[u]:
                return sorted(onward + dag.arrival.entries[u])
            return onward
        ending = u in dag.arrival.inside
        inside = dag.arrival.inside if ending else dag.start_distance
        following = []
        for link in self._out[u]:
            v = self._dst[link]
            if owner[v] == owner[u]:
                after = inside.get(v)
            else:
                # Paths leave the host where they start, and never the one where they end.
                after = None if ending else dag.network.distance.get(v)
            if after == inside[u] - self._cost[link] and (after == 0 or self._forwards[v]):
                following.append(link)
        return following

    def _network_links(self, u: int, network: _Network) -> list[int]:
        if u not in network.onward:
            distance = network.distance
            network.onward[u] = [
                link
                for link in self._out[u]
                if self._owner[self._dst[link]] == NETWORK
                and distance.get(self._dst[link]) == distance[u] - self._cost[link]
            ]
        return network.onward[u]

    def _count(self, u: int, dag: _Dag) -> int:
        if u not in dag.counts:
            following = dag.following[u] = self._next_links(u, dag)
            dst = self._dst
            # Every cost is positive, so that only an end has nothing to follow.
            dag.counts[u] = sum(self._count(dst[link], dag) for link in following) or 1
        return dag.counts[u]

    def _every(self, dag: _Dag) -> list[tuple[int, ...]]:
        """All paths in lexicographic order."""
        dst, following = self._dst, dag.following
        found = []
        begun: list[tuple[int, tuple[int, ...]]] = [(u, ()) for u in reversed(dag.starts)]
        while begun:
            u, path = begun.pop()
            if links := following[u]:
                begun += [(dst[link], (*path, link)) for link in reversed(links)]
            else:
                found.append(path)
        return found

    def _unrank(self, dag: _Dag, rank: int) -> tuple[int, ...]:
        """The path of that rank in lexicographic order, without listing the ones before it."""
        dst, counts = self._dst, dag.counts
        for u in dag.starts:
            if rank < counts[u]:
                break
            rank -= counts[u]
        path = []
        while following := dag.following[u]:
            for link in following:
                if rank < counts[dst[link]]:
                    break
                rank -= counts[dst[link]]
            path.append(link)
            u = dst[link]
        return tuple(path)


class _Arrival(NamedTuple):
    """The end of a path.

    Attributes:
        inside: distance from each node of the targets' host.
        entries: for each switch beside that host, its links there that are on a shortest path.
        remaining: (switch, distance from it into the host), sorted; a target switch has 0.
    """

    inside: dict[int, int]
    entries: dict[int, list[int]]
    remaining: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Network:
    """The middle of a path: distance from each switch, and its links onward, as they are asked.

    ``following`` and ``counts`` are those of every path that begins and ends at switches.
    """

    distance: dict[int, int]
    onward: dict[int, list[int]] = field(default_factory=dict)
    following: dict[int, list[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Dag:
    """All shortest paths between two sets of nodes, with the paths counted from each node."""

    start_distance: dict[int, int]
    arrival: _Arrival
    network: _Network
    leaves_at: dict[int, int] = field(init=False)
    starts: list[int] = field(default_factory=list)
    following: dict[int, list[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def __post_init__(self) -> None:
        self.leaves_at = {u: d for u, d in self.arrival.remaining if u in self.arrival.entries}


def spread(total: int, limit: int | None, start: int = 0) -> Sequence[int]:
    """``limit`` ranks out of ``total``, ascending and spread over all of them, from ``start``.

    An even stride would take the same branch at every switch whose fan-out divides it, so the
    stride is near the golden section of ``total`` and coprime to it.
    """
    if limit is None or limit >= total:
        return range(total)
    step = _stride(total)
    return sorted([(start + i * step) % total for i in range(limit)])


@lru_cache(maxsize=1 << 10)
def _stride(total: int) -> int:
    step = max(1, round(total * 0.6180339887498949))
    while gcd(step, total) != 1:
        step += 1
    return step
