"""Candidate paths of many GPU pairs, composed of parts that the pairs share."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from crux_torch.fabric.shortest_paths import spread
from crux_torch.fabric.topology import Path, Topology

#: Paths between two switches that are kept, spread over all; parallel links can make millions.
MIDDLE_LIMIT = 4096


class _Ports(NamedTuple):
    """The ways between a GPU and the switches beside its nearest NICs.

    Attributes:
        beside: of each way, the switch and the cost of the link to it.
        up, down: of each way, its links from the GPU and back to it.
    """

    beside: tuple[tuple[str, int], ...]
    up: tuple[Path, ...]
    down: tuple[Path, ...]


class _Joint(NamedTuple):
    """Paths from one way of a GPU to one way of another: their numbers, the links between."""

    up: int
    down: int
    middle: tuple[Path, ...]


class JoinedPaths:
    """What :meth:`Topology.candidate_paths` gives for two GPUs, in about a tenth of the time.

    If all NICs of a host lead to the same switches at the same cost, a GPU's shortest paths to
    other hosts leave by its nearest NICs. Each is a path to a NIC, a path between two switches, and
    a path from a NIC. Only the middle part is searched, once for each pair of switches. For pairs
    of other hosts, and pairs within a host, the topology is asked. At most ``limit`` paths of a
    pair are given, spread over all of them.
    """

    def __init__(self, topology: Topology, limit: int | None) -> None:
        self._topology = topology
        self._limit = limit
        self._at: dict[str, list[tuple[str, str, int]]] = {}
        self._from: dict[str, list[tuple[str, str, int]]] = {}
        for edge in topology.edges:
            src, dst = topology.nodes[edge.src], topology.nodes[edge.dst]
            if src.host is not None and dst.host is None:
                self._at.setdefault(edge.src, []).append((edge.name, edge.dst, edge.link.cost))
            elif src.host is None and dst.host is not None:
                self._from.setdefault(edge.dst, []).append((edge.name, edge.src, edge.link.cost))
        self._candidates = lru_cache(maxsize=1 << 15)(self._find_candidates)
        self._joints = lru_cache(maxsize=None)(self._find_joints)
        self._middle = lru_cache(maxsize=None)(self._find_middle)
        self._ports = lru_cache(maxsize=None)(self._find_ports)
        self._uniform = lru_cache(maxsize=None)(self._is_uniform)

    def __call__(self, src: str, dst: str) -> tuple[Path, ...]:
        """The candidates from ``src`` to ``dst``, two GPUs; cached, so one object for a pair."""
        return self._candidates(src, dst)

    def _find_candidates(self, src: str, dst: str) -> tuple[Path, ...]:
        home, away = self._topology.host_of(src), self._topology.host_of(dst)
        if home == away or not (home and away and self._uniform(home) and self._uniform(away)):
            return self._topology.candidate_paths(src, dst, self._limit)
        ours, theirs = self._ports(src), self._ports(dst)
        joints = self._joints(ours.beside, theirs.beside)
        total = sum(len(joint.middle) for joint in joints)
        ranks = spread(total, self._limit, zlib.crc32(f"{src} {dst}".encode()))
        found: list[Path] = []
        first = begin = 0  # of the paths by their ranks, and of the ranks
        for joint in joints:
            up, down, middle = ours.up[joint.up], theirs.down[joint.down], joint.middle
            end = bisect_left(ranks, first + len(middle), begin)
            found += [up + middle[rank - first] + down for rank in ranks[begin:end]]
            first, begin = first + len(middle), end
        return tuple(found)

    def _find_joints(
        self, ours: tuple[tuple[str, int], ...], theirs: tuple[tuple[str, int], ...]
    ) -> tuple[_Joint, ...]:
        """Those of the least cost between the ways of two GPUs."""
        found = []
        for up, (src, cost_up) in enumerate(ours):
            for down, (dst, cost_down) in enumerate(theirs):
                cost, middle = self._middle(src, dst)
                found.append((cost_up + cost + cost_down, _Joint(up, down, middle)))
        best = min(cost for cost, _ in found)
        return tuple(joint for cost, joint in found if cost == best)

    def _find_middle(self, src: str, dst: str) -> tuple[int, tuple[Path, ...]]:
        limit = None if self._limit is None else max(self._limit, MIDDLE_LIMIT)
        paths = self._topology.candidate_paths(src, dst, limit)
        links = self._topology.links
        return sum(links[name].cost for name in paths[0]), paths

    def _find_ports(self, gpu: str) -> _Ports:
        topology = self._topology
        beside, up, down = [], [], []
        for nic in topology.nearest_nics(gpu):
            back = {(switch, cost): name for name, switch, cost in self._from[nic]}
            for out in topology.candidate_paths(gpu, nic, None):
                for into in topology.candidate_paths(nic, gpu, None):
                    for name, switch, cost in self._at[nic]:
                        beside.append((switch, cost))
                        up.append((*out, name))
                        down.append((back[switch, cost], *into))
        return _Ports(tuple(beside), tuple(up), tuple(down))

    def _is_uniform(self, host: str) -> bool:
        """All NICs lead to the same switches and back, and each has one way to its GPUs."""
        nics = self._topology.inside(host, "nic")
        out = [sorted((s, c) for _, s, c in self._at.get(nic, ())) for nic in nics]
        back = [sorted((s, c) for _, s, c in self._from.get(nic, ())) for nic in nics]
        return bool(nics and out[0]) and all(ports == out[0] for ports in out + back)
