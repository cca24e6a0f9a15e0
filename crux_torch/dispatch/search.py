"""Which ``k`` devices of those that are free have the most bandwidth.

:func:`bidirectional` is LiteGD's Algorithm 1, which asks any predictor. :func:`strongest` is exact
where a choice is as fast as its weakest link, which is the paper's own model (§6.1), and faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from crux_torch.dispatch.cluster import (
    DispatchCluster,
    DispatchError,
    Floats,
    Ints,
    Predictor,
    count,
)


def bidirectional(
    cluster: DispatchCluster, free: Ints, k: int, predict: Predictor | None = None
) -> Ints:
    """LiteGD's bidirectional tree search (§4.3, Algorithm 1).

    The predictor sees a host by its table's value (§4.2.3). So of a host's devices only the best to
    remove, or to add, by that table is asked for. Of equals the first one wins, as in the paper.

    Args:
        free: the devices that may be chosen, a set for each host.
        predict: bytes/s of choices; by default the weakest link of each.

    Raises:
        DispatchError: if fewer than ``k`` devices are free.
    """
    _check(free, k)
    predict = predict or cluster.weakest_link_Bps
    if k == 1:
        return _single(cluster, free)
    steps = _Steps(cluster)
    down = _insertion_tree_search(cluster, free, k, predict, steps)
    up = _best_pair(cluster, free, predict)
    while count(up) < k:
        up = _best(steps.one_more(up, free), predict)
    return _best(np.stack([down, up]), predict)


def _best(choices: Ints, predict: Predictor) -> Ints:
    best: Ints = choices[int(np.argmax(predict(choices)))]
    return best


def _insertion_tree_search(
    cluster: DispatchCluster, free: Ints, k: int, predict: Predictor, steps: _Steps
) -> Ints:
    """From all devices, or from those of the best host that has ``k``, down to ``k``."""
    alone = list(_within_one_host(cluster, free, k))
    chosen = free
    if alone:
        inside = np.stack(alone)
        chosen = np.where(_best(inside, predict) > 0, free, 0)
    while count(chosen) > k:
        chosen = _best(steps.one_less(chosen), predict)
    return chosen


def _within_one_host(cluster: DispatchCluster, free: Ints, k: int) -> Iterator[Ints]:
    for host, best in enumerate(_best_by_size(cluster, free)):
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


def strongest(cluster: DispatchCluster, free: Ints, k: int, unit: int = 1) -> Ints:
    """The ``k`` devices with the strongest weakest link, exactly.

    A choice is at least as strong as ``x`` if each of its hosts takes a number of devices that its
    table allows at ``x``, and if it is within one host or all their links have ``x``. So whether
    there is one is a subset sum over hosts, and bisection over the values that occur finds the
    largest ``x``. Of equals the one with the fewest hosts wins.

    Args:
        unit: every host gives a multiple of it (the devices of one pod).

    Raises:
        DispatchError: if fewer than ``k`` devices are free, or not in such units.
    """
    _check(free, k)
    if k == 1:
        return _single(cluster, free)
    best = [
        [value if size % unit == 0 else (0.0, 0) for size, value in enumerate(sizes)]
        for sizes in _best_by_size(cluster, free)
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


BestBySize = list[list[tuple[float, int]]]


def _best_by_size(cluster: DispatchCluster, free: Ints) -> BestBySize:
    """For each host and number of its free devices the strongest set, and its bytes/s."""
    found: BestBySize = []
    cache: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for host, members in enumerate(free.tolist()):
        key = (id(cluster.tables[host]), members)
        if key not in cache:
            cache[key] = _sizes(cluster.table[host], members)
        found.append(cache[key])
    return found


def _sizes(table: Floats, members: int) -> list[tuple[float, int]]:
    sets = np.array(_subsets(members))
    sizes = np.bitwise_count(sets) if hasattr(np, "bitwise_count") else count(sets[:, None])
    best = []
    for size in range(int(sizes.max()) + 1):
        mine = sets[sizes == size]
        strongest_one = int(mine[int(np.argmax(table[mine]))])
        best.append((float(table[strongest_one]), strongest_one))
    return best


def _subsets(members: int) -> list[int]:
    subsets, subset = [0], members
    while subset:
        subsets.append(subset)
        subset = (subset - 1) & members
    return sorted(subsets)


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


def _single(cluster: DispatchCluster, free: Ints) -> Ints:
    """One device, of the host with the fewest free ones: it spoils the least."""
    numbers = np.array([bin(members).count("1") for members in free.tolist()])
    host = int(np.argmin(np.where(numbers > 0, numbers, numbers.max() + 1)))
    choice = np.zeros_like(free)
    choice[host] = free[host] & -free[host]
    return choice


def _check(free: Ints, k: int) -> None:
    there = int(count(free))
    if not 1 <= k <= there:
        raise DispatchError(f"{k} devices asked for, and {there} are free")
