"""The order of a choice's ranks: neighbours in the ring are near, within a host and between hosts.

torch's ring goes from each rank to the next one and from the last to the first, as Gloo's and
NCCL's rings between hosts do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

from crux_torch.dispatch.cluster import DispatchCluster, Ints
from crux_torch.dispatch.table import HostTable
from crux_torch.fabric.topology import Topology

#: Orders of so many devices are all tried; of more, the nearest one follows.
ALL_TRIED = 8

Nearness = Callable[[int, int], float]


def in_ring_order(
    cluster: DispatchCluster, choice: Ints, topology: Topology | None = None
) -> list[tuple[str, str]]:
    """Host and device of every rank.

    Between hosts the topology decides (of two hosts the number of links on the way), within a host
    the table's bandwidth of each two devices.
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

    if len(devices) > ALL_TRIED:
        return [devices[i] for i in _following_the_nearest(len(devices), nearness)]

    def worth(order: tuple[int, ...]) -> tuple[float, float]:
        pairs = [nearness(a, b) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        return min(pairs), sum(pairs)

    orders = ((0, *rest) for rest in permutations(range(1, len(devices))))
    best = max(orders, key=worth) if len(devices) > 2 else range(len(devices))
    return [devices[i] for i in best]


def _following_the_nearest(number: int, nearness: Nearness) -> list[int]:
    order, left = [0], list(range(1, number))
    while left:
        following = max(left, key=lambda i: nearness(order[-1], i))
        left.remove(following)
        order.append(following)
    return order
