"""What LiteGD is compared with (§5.2, §6): by index, at random, by types of connections."""

from __future__ import annotations

from random import Random

import numpy as np

from crux_torch.dispatch.cluster import DispatchCluster, Ints
from crux_torch.dispatch.hosts import MODELS

#: Scores of connections: NVLinks by their number, then PCIe, then across sockets or hosts.
PXB_SCORE, SYS_SCORE, HOST_SCORE = 0.5, 0.25, 0.1


def by_index(free: Ints, k: int) -> Ints:
    """The first ``k`` free devices, host by host."""
    return _taken(free, _devices(free)[:k])


def at_random(free: Ints, k: int, rng: Random) -> Ints:
    """Any ``k`` free devices."""
    return _taken(free, rng.sample(_devices(free), k))


def by_topology(cluster: DispatchCluster, free: Ints, k: int) -> Ints:
    """From the best-connected pair, the device that adds the most score, until there are ``k``.

    Hosts are those of ``MODELS``, by their tables' names.
    """
    devices = _devices(free)
    score = np.full((len(devices), len(devices)), HOST_SCORE)
    for i, (host, one) in enumerate(devices):
        for j, (there, other) in enumerate(devices):
            if host == there and one != other:
                score[i, j] = _score(MODELS[cluster.tables[host].host].type_of(one, other))
    np.fill_diagonal(score, -np.inf)
    if k == 1:
        return _taken(free, devices[:1])
    chosen = [int(i) for i in np.unravel_index(int(np.argmax(score)), score.shape)]
    gained = score[chosen].sum(axis=0)
    while len(chosen) < k:
        gained[chosen] = -np.inf
        chosen.append(int(np.argmax(gained)))
        gained = gained + score[chosen[-1]]
    return _taken(free, [devices[i] for i in chosen])


def _score(connection: str) -> float:
    if connection.startswith("NV"):
        return float(connection[2:])
    return PXB_SCORE if connection == "PXB" else SYS_SCORE


def _devices(free: Ints) -> list[tuple[int, int]]:
    return [
        (h, i) for h, members in enumerate(free.tolist()) for i in range(16) if members >> i & 1
    ]


def _taken(free: Ints, devices: list[tuple[int, int]]) -> Ints:
    choice = np.zeros_like(free)
    for host, device in devices:
        choice[host] |= 1 << device
    return choice
