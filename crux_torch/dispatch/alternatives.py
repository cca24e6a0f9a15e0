"""The best choices over different hosts, and what limits each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as numbers

import numpy as np

from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Ints
from crux_torch.dispatch.search import strongest


@dataclass(frozen=True, eq=False)
class Alternative:
    """A choice, its bytes/s (infinite for one device), and what its weakest link is."""

    choice: Ints
    bandwidth_Bps: float
    limit: str


def alternatives(
    cluster: DispatchCluster, free: Ints, k: int, unit: int = 1
) -> Iterator[Alternative]:
    """Choices of ``k`` free devices, the strongest first, each over another set of hosts.

    After each choice come those that do without one of its hosts. Every host gives a multiple of
    ``unit``.

    Raises:
        DispatchError: if there is no choice at all.
    """
    order = numbers()
    queue: list[tuple[float, int, Ints, Ints]] = []

    def add(allowed: Ints, *, must: bool = False) -> None:
        try:
            choice = strongest(cluster, allowed, k, unit)
        except DispatchError:
            if must:
                raise
            return
        rate = float(cluster.weakest_link_Bps(choice[None])[0])
        heapq.heappush(queue, (-rate, next(order), choice, allowed))

    add(free, must=True)
    seen: set[tuple[int, ...]] = set()
    while queue:
        rate, _, choice, allowed = heapq.heappop(queue)
        hosts = tuple(np.flatnonzero(choice).tolist())
        if hosts not in seen:
            seen.add(hosts)
            yield Alternative(choice, -rate, limit(cluster, choice))
        for host in hosts:
            without = allowed.copy()
            without[host] = 0
            add(without)


def limit(cluster: DispatchCluster, choice: Ints) -> str:
    """What the weakest link of a choice is, in words."""
    rate_Bps = float(cluster.weakest_link_Bps(choice[None])[0])
    hosts = np.flatnonzero(choice).tolist()
    inside = cluster.inside_Bps(choice[None])[0]
    for host in hosts:
        if len(hosts) > 1 and cluster.uplink_Bps[host] == rate_Bps:
            return f"the link of {cluster.tables[host].host}"
        if inside[host] == rate_Bps and np.isfinite(rate_Bps):
            return f"within {cluster.tables[host].host}"
    return "nothing: it is one device"
