"""LiteGD's evaluation (§6): GPU bandwidth efficacy on clusters made of the hosts of its Appendix A.

A cluster has eight hosts of eight GPUs, a link of each host to the switch, and GPUs that are taken
already. GBE is the bandwidth of a choice over that of the best choice (equation 1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from crux_torch.dispatch.baselines import at_random, by_index, by_topology
from crux_torch.dispatch.cluster import DispatchCluster, Ints, count
from crux_torch.dispatch.hosts import host_table
from crux_torch.dispatch.predictor import Network, Samples, fit_uplinks
from crux_torch.dispatch.search import bidirectional, strongest

#: Table 1: LiteGD, topology-aware, by index and at random, mean GBE in % over k = 2 … 64.
TABLE_1: Mapping[tuple[str, ...], tuple[float, float, float, float]] = {
    ("4090",): (97.97, 58.0, 57.3, 66.8),
    ("V100",): (90.45, 70.4, 54.9, 50.5),
    ("A6000",): (83.77, 74.4, 71.7, 71.2),
    ("A800",): (89.12, 89.8, 90.6, 85.3),
    ("4090", "V100", "A6000"): (93.3, 45.8, 48.2, 49.0),
    ("V100", "A6000", "A800"): (88.9, 68.9, 57.80, 54.0),
    ("4090", "V100", "A6000", "A800"): (90.3, 43.5, 47.3, 44.2),
}
MIXED = ("4090", "V100", "A6000", "A800")
#: Figure 10: GB/s of hosts' links; two values are drawn between.
LINKS: Mapping[str, tuple[float, float]] = {
    "20": (20, 20),
    "40": (40, 40),
    "60": (60, 60),
    "20 to 40": (20, 40),
}
HOSTS, SAMPLES = 8, 1000
#: Share of the GPUs that are taken.
TAKEN = 0.2


@dataclass(frozen=True, eq=False)
class Case:
    """A cluster, its free GPUs, and choices that were measured when it was idle."""

    cluster: DispatchCluster
    free: Ints
    samples: Samples


def case(
    kinds: Sequence[str],
    seed: int,
    link_GBps: tuple[float, float] = (20, 40),
    hosts: int = HOSTS,
    samples: int = SAMPLES,
) -> Case:
    """A cluster whose hosts are of ``kinds`` in turn."""
    rng = np.random.default_rng(seed)
    tables = [host_table(kinds[i % len(kinds)]) for i in range(hosts)]
    cluster = DispatchCluster(tables, rng.uniform(*link_GBps, hosts) * 1e9)
    taken = rng.random((hosts, 8)) < TAKEN
    free = ((~taken) << np.arange(8)).sum(axis=1)
    return Case(cluster, free, measured(cluster, samples, rng))


def measured(cluster: DispatchCluster, number: int, rng: np.random.Generator) -> Samples:
    """Random choices across hosts, of every size alike, with their true bandwidths."""
    devices = [(h, i) for h, size in enumerate(cluster.sizes) for i in range(size)]
    rows: list[Ints] = []
    while len(rows) < number:
        row = np.zeros(len(cluster.sizes), np.int64)
        for one in rng.choice(len(devices), rng.integers(2, len(devices) + 1), replace=False):
            host, device = devices[one]
            row[host] |= 1 << device
        if np.count_nonzero(row) > 1:
            rows.append(row)
    choices = np.stack(rows)
    return Samples(choices, cluster.weakest_link_Bps(choices))


Method = Callable[[int], Ints]


def methods(one: Case, seed: int, network: Network | None) -> dict[str, Method]:
    """Every way to choose; a trained ``network`` adds LiteGD as the paper has it."""
    cluster, free = one.cluster, one.free
    fitted = fit_uplinks(cluster, one.samples)
    rng = Random(seed)
    found: dict[str, Method] = {
        "strongest, links fitted": lambda k: strongest(fitted, free, k),
        "Algorithm 1, links fitted": lambda k: bidirectional(fitted, free, k),
        "Algorithm 1, true": lambda k: bidirectional(cluster, free, k),
        "topology": lambda k: by_topology(cluster, free, k),
        "by index": lambda k: by_index(free, k),
        "at random": lambda k: at_random(free, k, rng),
    }
    if network is not None:
        predict = network.predictor(cluster)
        found["Algorithm 1, network"] = lambda k: bidirectional(cluster, free, k, predict)
    return found


def efficacy(one: Case, chosen: Mapping[str, Method]) -> dict[str, list[tuple[float, float]]]:
    """For each method and k from 2 to the number of free GPUs: GBE, and seconds to choose."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for k in range(2, int(count(one.free)) + 1):
        best = rate_Bps(one, strongest(one.cluster, one.free, k))
        for name, choose in chosen.items():
            begin_s = time.perf_counter()
            choice = choose(k)
            found[name].append((rate_Bps(one, choice) / best, time.perf_counter() - begin_s))
    return found


def rate_Bps(one: Case, choice: Ints) -> float:
    """The true bandwidth of a choice."""
    return float(one.cluster.weakest_link_Bps(choice[None])[0])


def trained(one: Case, seed: int) -> tuple[Network, float]:
    """LiteGD's network after its training, and how many seconds that took."""
    network = Network(seed)
    begin_s = time.perf_counter()
    network.train(one.cluster, one.samples)
    return network, time.perf_counter() - begin_s


def errors_GBps(cluster: DispatchCluster, learned_from: Samples, seed: int) -> tuple[float, float]:
    """Mean absolute error of the network and of the fitted links on 500 other choices."""
    test = measured(cluster, 500, np.random.default_rng(seed + 1))
    network = Network(seed)
    network.train(cluster, learned_from)
    fitted = fit_uplinks(cluster, learned_from)
    return (
        _mae_GBps(network.predictor(cluster)(test.choices), test),
        _mae_GBps(fitted.weakest_link_Bps(test.choices), test),
    )


def upgraded(one: Case, seed: int, steps: Sequence[int]) -> list[tuple[int, float, float]]:
    """A host's link becomes three times as fast: the network's error after so many new samples.

    Returns:
        number of new samples, and the error in GB/s on choices with and without that host.
    """
    network = Network(seed)
    network.train(one.cluster, one.samples)
    slowest = int(np.argmin(one.cluster.uplink_Bps))
    uplink_Bps = one.cluster.uplink_Bps.copy()
    uplink_Bps[slowest] *= 3
    after = DispatchCluster(one.cluster.tables, uplink_Bps)
    rng = np.random.default_rng(seed + 2)
    test = measured(after, 1000, rng)
    with_it = test.choices[:, slowest] > 0
    parts = [test.part(np.flatnonzero(rows)) for rows in (with_it, ~with_it)]

    def told(samples: int) -> tuple[int, float, float]:
        predict = network.predictor(after)
        changed, others = (_mae_GBps(predict(part.choices), part) for part in parts)
        return samples, changed, others

    found, seen = [told(0)], 0
    for step in steps:
        network.train(after, measured(after, step - seen, rng))
        seen = step
        found.append(told(seen))
    return found


def _mae_GBps(predicted_Bps: np.ndarray, test: Samples) -> float:
    return float(np.abs(predicted_Bps - test.bandwidth_Bps).mean()) / 1e9
