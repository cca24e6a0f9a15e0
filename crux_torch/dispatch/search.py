"""Choices of free devices of a cluster: the strongest ones, and the order of their ranks.

:func:`strongest` is exact where a choice is as fast as its weakest link, as in LiteGD's model
(§6.1). Ranks are put in the order of a ring, since Gloo and NCCL send from each rank to the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as numbers
from itertools import permutations

import numpy as np

from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, HostTable, Ints, count
from crux_torch.network.topology import Topology

#: Orders of so many devices are all tried; of more, the nearest one follows.
ALL_TRIED = 8


@dataclass(frozen=True, eq=False)
class Choice:
    """Devices for a job, and what they are worth.

    Attributes:
        devices: a set (bits) for each host.
        alone_Bps: bytes/s while no other job runs; infinite for one device.
        limit: name of the weakest link.
        now_Bps: bytes/s on what running jobs leave of each link: the idle share, or an even share.
            None where no traffic is known.
        utilisation: share of the time in which the GPUs of all jobs compute, the new job's
            included, under Crux's plan for all of them. None where no traffic is known.
    """

    devices: Ints
    alone_Bps: float
    limit: str
    now_Bps: float | None = None
    utilisation: float | None = None

    @property
    def worth(self) -> float:
        """Value by which choices are compared."""
        return self.alone_Bps if self.utilisation is None else self.utilisation


def strongest(cluster: DispatchCluster, free: Ints, k: int, unit: int = 1) -> Ints:
    """The ``k`` devices with the strongest weakest link, exactly.

    A choice is at least as strong as ``x`` if each of its hosts takes a number of devices that its
    table allows at ``x``, and if it is within one host or all their links have ``x``. So the test
    for ``x`` is a subset sum over hosts. Bisection over the values that occur finds the largest
    ``x``. Of equals the one with the fewest hosts wins.

    Args:
        unit: every host gives a multiple of it (the devices of one pod).

    Raises:
        DispatchError: if fewer than ``k`` devices are free, or not in such units.
    """
    check_free(free, k)
    if k == 1:
        return single(free)
    best = [
        [value if size % unit == 0 else (0.0, 0) for size, value in enumerate(sizes)]
        for sizes in best_by_size(cluster, free)
    ]
    values = {x for sizes in best for x, _ in sizes if 0 < x < np.inf} | set(cluster.uplink_Bps)
    ascending = sorted(values)
    low, high, found = 0, len(ascending), None
    while low < high:
        middle = (low + high) // 2
        choice = _at_least(cluster, best, ascending[middle], k)
        if choice is None:
            high = middle
        else:
            low, found = middle + 1, choice
    if found is None:
        raise DispatchError(
            f"no {k} free devices whose sets were all measured"
            + (f", {unit} or a multiple of each host" if unit > 1 else "")
            + ": measure more sets of these hosts"
        )
    return found


#: For each host and number of devices the bytes/s of the strongest set, and the set.
BestBySize = list[list[tuple[float, int]]]


def best_by_size(cluster: DispatchCluster, free: Ints) -> BestBySize:
    """The strongest set of each number of free devices of each host, and its bytes/s."""
    found: BestBySize = []
    cache: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for host, members in enumerate(free.tolist()):
        key = (id(cluster.tables[host]), members)
        if key not in cache:
            table = cluster.table[host]
            every = np.arange(members + 1)
            sets = every[every & ~members == 0]
            sizes = count(sets[:, None])
            best = []
            for size in range(int(sizes.max()) + 1):
                mine = sets[sizes == size]
                one = int(mine[int(np.argmax(table[mine]))])
                best.append((float(table[one]), one))
            cache[key] = best
        found.append(cache[key])
    return found


def _at_least(cluster: DispatchCluster, best: BestBySize, x: float, k: int) -> Ints | None:
    """Some ``k`` devices of the fewest hosts whose weakest link has ``x``, if there are any."""
    choice = np.zeros(len(best), np.int64)
    for host, sizes in enumerate(best):
        if k < len(sizes) and sizes[k][0] >= x:
            choice[host] = sizes[k][1]
            return choice
    hosts = [h for h in range(len(best)) if cluster.uplink_Bps[h] >= x and len(best[h]) > 1]
    # The fewest of the hosts so far that make n devices, and what the last of them has of these.
    fewest = np.full(k + 1, np.inf)
    fewest[0] = 0
    took = np.zeros((len(hosts), k + 1), np.int64)
    for i, host in enumerate(hosts):
        before = fewest.copy()
        for size, (value, _) in enumerate(best[host][: k + 1]):
            if size and value >= x:
                through = before[: k + 1 - size] + 1
                better = through < fewest[size:]
                fewest[size:][better] = through[better]
                took[i, size:][better] = size
    if not np.isfinite(fewest[k]):
        return None
    left = k
    for i in reversed(range(len(hosts))):
        size = int(took[i, left])
        choice[hosts[i]] = best[hosts[i]][size][1]
        left -= size
    return choice


def single(free: Ints) -> Ints:
    """One device, of the host with the fewest free ones: it spoils the least."""
    room = count(free[:, None])
    host = int(np.argmin(np.where(room > 0, room, room.max() + 1)))
    choice = np.zeros_like(free)
    choice[host] = free[host] & -free[host]
    return choice


def check_free(free: Ints, k: int) -> None:
    """Raises DispatchError if fewer than ``k`` devices are free."""
    there = int(count(free))
    if not 1 <= k <= there:
        raise DispatchError(f"{k} devices asked for, and {there} are free")


def alternatives(cluster: DispatchCluster, free: Ints, k: int, unit: int = 1) -> Iterator[Choice]:
    """Choices of ``k`` free devices, the strongest first, each over another set of hosts.

    After each choice come those that do without one of its hosts. Every host gives a multiple of
    ``unit``.

    Raises:
        DispatchError: if there is no choice at all.
    """
    order = numbers()
    queue: list[tuple[float, int, Ints, Ints]] = []

    def add(allowed: Ints) -> None:
        devices = strongest(cluster, allowed, k, unit)
        rate_Bps = float(cluster.weakest_link_Bps(devices[None])[0])
        heapq.heappush(queue, (-rate_Bps, next(order), devices, allowed))

    add(free)
    seen: set[tuple[int, ...]] = set()
    while queue:
        rate_Bps, _, devices, allowed = heapq.heappop(queue)
        hosts = tuple(np.flatnonzero(devices).tolist())
        if hosts not in seen:
            seen.add(hosts)
            yield Choice(devices, -rate_Bps, limit(cluster, devices))
        for host in hosts:
            without = allowed.copy()
            without[host] = 0
            try:
                add(without)
            except DispatchError:
                continue


def limit(cluster: DispatchCluster, choice: Ints) -> str:
    """The weakest link of a choice, in words."""
    rate_Bps = float(cluster.weakest_link_Bps(choice[None])[0])
    hosts = np.flatnonzero(choice).tolist()
    inside = cluster.inside_Bps(choice[None])[0]
    for host in hosts:
        if len(hosts) > 1 and cluster.uplink_Bps[host] == rate_Bps:
            return f"the link of {cluster.tables[host].host}"
        if inside[host] == rate_Bps and np.isfinite(rate_Bps):
            return f"within {cluster.tables[host].host}"
    return "nothing: it is one device"


def in_ring_order(
    cluster: DispatchCluster, choice: Ints, topology: Topology | None = None
) -> list[tuple[str, str]]:
    """Host and device of every rank: neighbours in the ring are near to each other.

    Between hosts the number of links on the way counts, within a host the table's bandwidth of each
    two devices.
    """
    by_name = {table.host: table for table in cluster.tables}
    devices = cluster.names(choice)
    return [
        (host, device)
        for host in ring_of_hosts(list(devices), topology)
        for device in ring_of_devices(by_name[host], devices[host])
    ]


def ring_of_hosts(hosts: Sequence[str], topology: Topology | None) -> list[str]:
    """``hosts`` so that each is followed by one near to it, from the first one on."""
    if topology is None or not set(hosts) <= set(topology.hosts):
        return list(hosts)
    known = topology

    def nearness(one: int, other: int) -> float:
        return -len(known.candidate_paths(hosts[one], hosts[other], 1)[0])

    return [hosts[i] for i in _following_the_nearest(len(hosts), nearness)]


def ring_of_devices(table: HostTable, devices: Sequence[str]) -> list[str]:
    """``devices`` so that the slowest two neighbours are as fast as possible, then all of them."""
    bit = [1 << table.devices.index(device) for device in devices]

    def nearness(one: int, other: int) -> float:
        return float(table.array[bit[one] | bit[other]])

    def worth(order: Sequence[int]) -> tuple[float, float]:
        pairs = [nearness(a, b) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        return min(pairs), sum(pairs)

    best: Sequence[int] = range(len(devices))
    if len(devices) > ALL_TRIED:
        best = _following_the_nearest(len(devices), nearness)
    elif len(devices) > 2:
        best = max(((0, *rest) for rest in permutations(range(1, len(devices)))), key=worth)
    return [devices[i] for i in best]


def _following_the_nearest(number: int, nearness: Callable[[int, int], float]) -> list[int]:
    order, left = [0], list(range(1, number))
    while left:
        following = max(left, key=lambda i: nearness(order[-1], i))
        left.remove(following)
        order.append(following)
    return order
