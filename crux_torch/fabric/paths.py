"""Equal-cost shortest paths on integer arrays: distances once a destination, paths by their rank.

Networks forward, hosts do not: a path may pass through any network switch, and through the inner
nodes (PCIe switch, NIC, root complex, NVSwitch) of the two hosts that it joins, but never through
another host and never through a GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import NamedTuple

#: Owner of the nodes that belong to no host.
NETWORK = -1


class LinkArrays(NamedTuple):
    """A directed multigraph; a link is its index.

    Attributes:
        src: node that each link leaves.
        dst: node that each link enters.
        cost: metric of each link, 1 or more.
        owner: host that each node belongs to, or ``NETWORK``.
        forwards: whether a path may pass through each node.
    """

    src: Sequence[int]
    dst: Sequence[int]
    cost: Sequence[int]
    owner: Sequence[int]
    forwards: Sequence[bool]


class ShortestPaths:
    """Shortest paths between sets of nodes of one host each, in a fixed order.

    The order is lexicographic in the order of the links of each node, so that the same links in
    the same order give the same paths on every machine.
    """

    def __init__(self, links: LinkArrays) -> None:
        self._links = links
        nodes = len(links.owner)
        self._out: list[list[int]] = [[] for _ in range(nodes)]
        self._into: list[list[int]] = [[] for _ in range(nodes)]
        self._exits: dict[int, list[int]] = {}
        for link, (u, v) in enumerate(zip(links.src, links.dst, strict=True)):
            self._out[u].append(link)
            if links.owner[u] in (NETWORK, links.owner[v]):
                self._into[v].append(link)
            else:
                self._exits.setdefault(links.owner[u], []).append(link)
        self._distances_to = lru_cache(maxsize=4096)(self._distances)

    def count(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> int:
        """How many shortest paths lead from any of ``sources`` to any of ``targets``; 0: none."""
        return self._dag(sources, targets).total

    def costs_inside(self, source: int) -> dict[int, int]:
        """Cost from ``source`` to every node of its own host that is reached without leaving it."""
        links = self._links
        costs = {source: 0}
        queue = [(0, source)]
        while queue:
            cost, u = heapq.heappop(queue)
            if cost > costs[u] or (cost and not self._passable(u)):
                continue
            for link in self._out[u]:
                v, further = links.dst[link], cost + links.cost[link]
                if links.owner[v] == links.owner[source] and further < costs.get(v, further + 1):
                    costs[v] = further
                    heapq.heappush(queue, (further, v))
        return costs

    def paths(
        self, sources: tuple[int, ...], targets: tuple[int, ...], limit: int | None = None
    ) -> list[tuple[int, ...]]:
        """The shortest paths as tuples of links; at most ``limit`` of them, evenly spread."""
        dag = self._dag(sources, targets)
        return [self._unrank(dag, rank) for rank in spread(dag.total, limit)]

    def _dag(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> _Dag:
        hosts = (self._links.owner[sources[0]], self._links.owner[targets[0]])
        dag = _Dag(self._from_source_host(sources, targets), hosts)
        reached = [s for s in sources if s in dag.distance]
        best = min((dag.distance[s] for s in reached), default=0)
        dag.starts = [s for s in reached if dag.distance[s] == best]
        dag.total = sum(self._count(s, dag) for s in dag.starts)
        return dag

    def _distances(self, targets: tuple[int, ...]) -> dict[int, int]:
        """Distance to the nearest target from the network and from the targets' own host."""
        distance = dict.fromkeys(targets, 0)
        return self._relax(distance, [(0, t) for t in sorted(targets)], None)

    def _from_source_host(
        self, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> dict[int, int]:
        """The distances to ``targets``, carried on into the host of ``sources``."""
        links = self._links
        distance = dict(self._distances_to(targets))
        host = links.owner[sources[0]]
        if host == NETWORK or host == links.owner[targets[0]]:
            return distance
        queue = []
        for link in self._exits.get(host, ()):
            after = distance.get(links.dst[link])
            u = links.src[link]
            if after is not None and self._passable(links.dst[link]):
                queue.append((after + links.cost[link], u))
        for d, u in queue:
            distance[u] = min(d, distance.get(u, d))
        heapq.heapify(queue)
        return self._relax(distance, queue, host)

    def _relax(
        self, distance: dict[int, int], queue: list[tuple[int, int]], host: int | None
    ) -> dict[int, int]:
        """Dijkstra against the direction of the links; within ``host`` only, if one is given."""
        links = self._links
        while queue:
            d, v = heapq.heappop(queue)
            if d > distance[v] or (d > 0 and not self._passable(v)):
                continue
            for link in self._into[v]:
                u = links.src[link]
                if host is not None and links.owner[u] != host:
                    continue
                candidate = d + links.cost[link]
                if candidate < distance.get(u, candidate + 1):
                    distance[u] = candidate
                    heapq.heappush(queue, (candidate, u))
        return distance

    def _passable(self, node: int) -> bool:
        return self._links.forwards[node]

    def _next_links(self, u: int, dag: _Dag) -> list[int]:
        """The links of ``u`` on a shortest path; out of the source's host, into the target's."""
        links, distance = self._links, dag.distance
        here, at = distance[u], links.owner[u]
        source_host, target_host = dag.hosts
        enter = {at}
        if at == NETWORK:
            enter.add(target_host)
        elif at == source_host != target_host:
            enter.add(NETWORK)
        return [
            link
            for link in self._out[u]
            if links.owner[v := links.dst[link]] in enter
            and distance.get(v, here) == here - links.cost[link]
            and (distance[v] == 0 or self._passable(v))
        ]

    def _count(self, u: int, dag: _Dag) -> int:
        if dag.distance[u] == 0:
            return 1
        if u not in dag.counts:
            dag.counts[u] = sum(
                self._count(self._links.dst[link], dag) for link in self._next_links(u, dag)
            )
        return dag.counts[u]

    def _unrank(self, dag: _Dag, rank: int) -> tuple[int, ...]:
        """The path of that rank in lexicographic order, without listing the ones before it."""
        dst, counts = self._links.dst, dag.counts
        for u in dag.starts:
            here = counts.get(u, 1)
            if rank < here:
                break
            rank -= here
        path = []
        while dag.distance[u] > 0:
            for link in self._next_links(u, dag):
                here = counts.get(dst[link], 1)
                if rank < here:
                    break
                rank -= here
            path.append(link)
            u = dst[link]
        return tuple(path)


@dataclass(slots=True)
class _Dag:
    """The shortest-path links between two sets of nodes, with the paths counted from each node."""

    distance: dict[int, int]
    hosts: tuple[int, int]
    starts: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0


def spread(total: int, limit: int | None) -> Iterable[int]:
    """``limit`` ranks out of ``total``, ascending and spread over all of them.

    An even stride would take the same branch at every switch whose fan-out divides it, so the
    stride is near the golden section of ``total`` and coprime to it.
    """
    if limit is None or limit >= total:
        return range(total)
    step = max(1, round(total * 0.6180339887498949))
    while gcd(step, total) != 1:
        step += 1
    return sorted(i * step % total for i in range(limit))
