"""LiteGD as the paper has it: the hosts of Appendix A, Algorithm 1, and the baselines of §6.

The paper's measured tables are not published. Here the links of each host have their nominal rates,
and a set's bandwidth is that of the best rings over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from random import Random

import numpy as np

from crux_torch.dispatch.cluster import (
    DispatchCluster,
    Floats,
    HostTable,
    Ints,
    Predictor,
    count,
    table_of,
)
from crux_torch.dispatch.samples import Samples
from crux_torch.dispatch.search import best_by_size, check_free, single
from crux_torch.dispatch.this_host import PCIE4_BPS, UPI_BPS, HostModel, rings_Bps

#: One direction of 16 lanes at 8 GT/s with 128b/130b encoding (PCI Express 3.0).
PCIE3_BPS = 15.75e9
#: One direction of one NVLink 2 to 4, and of one link of RTX A6000's bridge (112.5 GB/s over 4
#: links, both directions; NVIDIA's data sheets).
NVLINK_BPS, BRIDGE_BPS = 25e9, 112.5e9 / 8
#: One direction between two sockets: two QPI links of 9.6 GT/s.
QPI_BPS = 38.4e9
#: Table 4: a DGX-1's hybrid cube mesh.
_DGX1 = (
    *((0, 1, 1), (0, 2, 2), (0, 3, 1), (0, 7, 2), (1, 2, 1), (1, 3, 2), (1, 6, 2), (2, 3, 2)),
    *((2, 5, 1), (3, 4, 1), (4, 5, 2), (4, 6, 2), (4, 7, 1), (5, 6, 1), (5, 7, 2), (6, 7, 1)),
)
_BRIDGES = ((0, 1, 4), (2, 3, 4), (4, 5, 4), (6, 7, 4))
_FOUR_AND_FOUR = (0, 0, 0, 0, 1, 1, 1, 1)
#: Hosts by the kind of their GPUs (Tables 3 to 6).
MODELS = {
    "4090": HostModel(_FOUR_AND_FOUR, PCIE4_BPS, UPI_BPS, peer_to_peer=False),
    "V100": HostModel((0, 0, 1, 1, 2, 2, 3, 3), PCIE3_BPS, QPI_BPS, _DGX1),
    # Not the paper's: sets without a ring of NVLinks are as fast as in the other hosts.
    "V100-PCIe4": HostModel((0, 0, 1, 1, 2, 2, 3, 3), PCIE4_BPS, QPI_BPS, _DGX1),
    "A6000": HostModel(_FOUR_AND_FOUR, PCIE4_BPS, UPI_BPS, _BRIDGES, BRIDGE_BPS),
    "A800": HostModel(_FOUR_AND_FOUR, PCIE4_BPS, UPI_BPS, nvswitch_Bps=8 * NVLINK_BPS),
    "H100": HostModel(_FOUR_AND_FOUR, PCIE4_BPS, UPI_BPS, nvswitch_Bps=16 * NVLINK_BPS),
}
#: Scores of connections: NVLinks by their number, then PCIe, then across sockets or hosts.
PXB_SCORE, SYS_SCORE, HOST_SCORE = 0.5, 0.25, 0.1


def connection(model: HostModel, one: int, other: int) -> str:
    """The connection of two GPUs as ``nvidia-smi topo`` calls it: NV8, NV2, PXB or SYS."""
    if model.nvswitch_Bps:
        return f"NV{round(model.nvswitch_Bps / model.nvlink_Bps)}"
    if links := model.links(one, other):
        return f"NV{links}"
    return "PXB" if model.groups[one] == model.groups[other] else "SYS"


@lru_cache
def host_table(kind: str) -> HostTable:
    """The table of a host of ``MODELS``, by the ring model."""
    model = MODELS[kind]
    size = len(model.groups)
    found = {}
    for members in range(1 << size):
        gpus = tuple(gpu for gpu in range(size) if members >> gpu & 1)
        if len(gpus) > 1:
            found[members] = rings_Bps(model, gpus)
    return table_of(kind, map(str, range(size)), found)


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
                score[i, j] = _score(connection(MODELS[cluster.tables[host].host], one, other))
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


def _score(name: str) -> float:
    if name.startswith("NV"):
        return float(name[2:])
    return PXB_SCORE if name == "PXB" else SYS_SCORE


def _devices(free: Ints) -> list[tuple[int, int]]:
    return [
        (h, i) for h, members in enumerate(free.tolist()) for i in range(16) if members >> i & 1
    ]


def _taken(free: Ints, devices: list[tuple[int, int]]) -> Ints:
    choice = np.zeros_like(free)
    for host, device in devices:
        choice[host] |= 1 << device
    return choice


def bidirectional(
    cluster: DispatchCluster,
    free: Ints,
    k: int,
    predict: Predictor | None = None,
    *,
    at_bottleneck: bool = False,
) -> Ints:
    """LiteGD's bidirectional tree search (§4.3, Algorithm 1).

    The predictor sees a host by its table's value (§4.2.3). So of a host's devices only the best to
    remove, or to add, by that table is asked for. The paper does not say which of equals it takes.

    Args:
        free: the devices that may be chosen, a set for each host.
        predict: bytes/s of choices; by default the weakest link of each.
        at_bottleneck: of equals, remove the device at the bottleneck; otherwise the first.

    Raises:
        DispatchError: if fewer than ``k`` devices are free.
    """
    check_free(free, k)
    predict = predict or cluster.weakest_link_Bps
    if k == 1:
        return single(free)
    steps = _Steps(cluster)
    one_less = _at_bottleneck if at_bottleneck else _best
    down = _insertion_tree_search(cluster, free, k, predict, steps, one_less)
    up = _best_pair(cluster, free, predict)
    while count(up) < k:
        up = _best(steps.one_more(up, free), predict)
    return _best(np.stack([down, up]), predict)


def _best(choices: Ints, predict: Predictor) -> Ints:
    best: Ints = choices[int(np.argmax(predict(choices)))]
    return best


def _at_bottleneck(choices: Ints, predict: Predictor) -> Ints:
    """The best of choices that each lack a device of another host; of equals, at the bottleneck.

    Removed is "the GPU that contributes most significantly to the bottleneck" (§4.3.2). Where
    several of a host have to go before anything is gained, that is one of the host without which
    the others would be the fastest.
    """
    rates = predict(choices)
    equal = np.flatnonzero(rates == rates.max())
    if len(equal) == 1:
        return np.asarray(choices[equal[0]])
    # Each row lacks a device of its own host alone, so the most of all rows is the choice before.
    whole = np.bitwise_or.reduce(choices)
    without = np.where(choices[equal] == whole, whole, 0)
    return np.asarray(choices[equal[int(np.argmax(predict(without)))]])


def _insertion_tree_search(
    cluster: DispatchCluster,
    free: Ints,
    k: int,
    predict: Predictor,
    steps: _Steps,
    one_less: Callable[[Ints, Predictor], Ints],
) -> Ints:
    """From all devices, or from those of the best host that has ``k``, down to ``k``."""
    alone = list(_within_one_host(cluster, free, k))
    chosen = free
    if alone:
        inside = np.stack(alone)
        chosen = np.where(_best(inside, predict) > 0, free, 0)
    while count(chosen) > k:
        chosen = one_less(steps.one_less(chosen), predict)
    return chosen


def _within_one_host(cluster: DispatchCluster, free: Ints, k: int) -> Iterator[Ints]:
    for host, best in enumerate(best_by_size(cluster, free)):
        if k < len(best) and best[k][0] > 0:
            choice = np.zeros_like(free)
            choice[host] = best[k][1]
            yield choice


class _Steps:
    """A device less or more, a row for each host; which device, is looked up once for each set."""

    def __init__(self, cluster: DispatchCluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[int, int, int], int] = {}

    def one_less(self, chosen: Ints) -> Ints:
        """``chosen`` without one device, a row for each host that has any."""
        return self._changed(chosen, chosen)

    def one_more(self, chosen: Ints, free: Ints) -> Ints:
        """``chosen`` with one more free device, a row for each host that has any."""
        return self._changed(chosen, free & ~chosen)

    def _changed(self, chosen: Ints, devices: Ints) -> Ints:
        hosts = np.flatnonzero(devices)
        rows = np.repeat(chosen[None], len(hosts), axis=0)
        rows[np.arange(len(hosts)), hosts] = [
            self._best_of(*one)
            for one in zip(
                hosts.tolist(), chosen[hosts].tolist(), devices[hosts].tolist(), strict=True
            )
        ]
        return rows

    def _best_of(self, host: int, members: int, devices: int) -> int:
        """The best of ``members`` with one of ``devices`` flipped, by the host's table."""
        key = id(self._cluster.tables[host]), members, devices
        if key not in self._known:
            sets = [members ^ 1 << i for i in range(self._cluster.sizes[host]) if devices >> i & 1]
            self._known[key] = sets[int(np.argmax(self._cluster.table[host, sets]))]
        return self._known[key]


def _best_pair(cluster: DispatchCluster, free: Ints, predict: Predictor) -> Ints:
    """The best two devices. Of a host's single devices only the first is asked for."""
    hosts = np.flatnonzero(free)
    pairs = list(_within_one_host(cluster, free, 2))
    first = free & -free
    for i, one in enumerate(hosts.tolist()):
        for other in hosts[i + 1 :].tolist():
            pair = np.zeros_like(free)
            pair[[one, other]] = first[[one, other]]
            pairs.append(pair)
    rows = np.stack(pairs)
    return _best(rows, predict)


class Trees:
    """scikit-learn's histogram trees over what LiteGD's network sees (§4.2.3).

    A choice has the bandwidth within each host by its table and how many devices it takes there
    (missing where the host is not involved), and over all hosts the least bandwidth, the number of
    hosts and the number of devices. Hosts beyond those of the training have no column of their own.

    Args:
        seed: of whatever scikit-learn draws.
    """

    def __init__(self, cluster: DispatchCluster, samples: Samples, seed: int = 0) -> None:
        # Whoever needs the hosts only does not wait for scikit-learn.
        from sklearn.ensemble import HistGradientBoostingRegressor

        self._hosts = len(cluster.tables)
        # Squares: of the absolute error the trees stop at the median where most samples are equal.
        self._model = HistGradientBoostingRegressor(
            max_iter=300, min_samples_leaf=5, early_stopping=False, random_state=seed
        )
        self._model.fit(self._features(cluster, samples.choices), np.log(samples.bandwidth_Bps))

    def predictor(self, cluster: DispatchCluster) -> Predictor:
        """Bytes/s of choices of ``cluster``: by the table within a host, else by the trees."""

        def predict(choices: Ints) -> Floats:
            inside = cluster.inside_Bps(choices).min(axis=1)
            across = (choices > 0).sum(axis=1) > 1
            if across.any():
                found = np.exp(self._model.predict(self._features(cluster, choices[across])))
                inside[across] = np.where(inside[across] > 0, found, 0.0)
            return np.asarray(inside)

        return predict

    def _features(self, cluster: DispatchCluster, choices: Ints) -> Floats:
        involved = choices > 0
        inside = cluster.inside_Bps(choices)
        number = (choices[..., None] >> np.arange(16) & 1).sum(axis=-1)
        each = np.stack([np.where(np.isfinite(inside), inside, 1e15), number], axis=-1)
        each = np.where(involved[..., None], each, np.nan)[:, : self._hosts]
        least = np.minimum(inside.min(axis=1), 1e15)
        whole = np.stack([least, involved.sum(axis=1), number.sum(axis=1)], axis=1)
        return np.concatenate([each.reshape(len(choices), -1), whole], axis=1)
