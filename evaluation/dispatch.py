"""LiteGD's evaluation (§6): GPU bandwidth efficacy on clusters made of the hosts of its Appendix A.

A cluster has eight hosts of eight GPUs, a link of each host to the switch, and GPUs that are taken
already. GBE is the bandwidth of a choice over that of the best choice (equation 1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from crux_torch.dispatch.cluster import DispatchCluster, Floats, Ints, Predictor, count
from crux_torch.dispatch.predictor import Network
from crux_torch.dispatch.samples import Samples, across_hosts, fit_uplinks, predicted_links
from crux_torch.dispatch.search import strongest
from evaluation.litegd import Trees, at_random, bidirectional, by_index, by_topology, host_table

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
#: Clusters of Table 1 on which Algorithm 1 is behind the paper, and two of them with a faster PCIe.
BEHIND = (("4090",), ("V100",), ("4090", "V100", "A6000"), MIXED)
FASTER_PCIE = (("V100-PCIe4",), ("4090", "V100-PCIe4", "A6000"))
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
    """Choices across hosts as `crux dispatch measure` draws them, with their true bandwidths."""
    choices = across_hosts(cluster.sizes, number, rng)
    return Samples(choices, cluster.weakest_link_Bps(choices))


Method = Callable[[int], Ints]


def methods(
    one: Case, seed: int, network: Network | None, *, remember: bool = True
) -> dict[str, Method]:
    """Every way to choose; a trained ``network`` adds LiteGD as the paper has it, and the trees.

    Args:
        remember: ask no prediction twice, which makes choices for many k quick, and their times
            meaningless.
    """
    cluster, free = one.cluster, one.free
    fitted = fit_uplinks(cluster, one.samples)
    rng = Random(seed)
    found: dict[str, Method] = {
        "strongest, links fitted": lambda k: strongest(fitted, free, k),
        "Algorithm 1, links fitted": lambda k: bidirectional(fitted, free, k),
        "Algorithm 1, true": lambda k: bidirectional(cluster, free, k),
        "Algorithm 1, at bottleneck": lambda k: bidirectional(cluster, free, k, at_bottleneck=True),
        "topology": lambda k: by_topology(cluster, free, k),
        "by index": lambda k: by_index(free, k),
        "at random": lambda k: at_random(free, k, rng),
    }
    if network is not None:
        predict = network.predictor(cluster)
        trees = Trees(cluster, one.samples, seed).predictor(cluster)
        if remember:
            predict, trees = remembered(predict), remembered(trees)
        found["Algorithm 1, trees"] = lambda k: bidirectional(cluster, free, k, trees)
        found["strongest, network's links"] = lambda k: strongest(
            predicted_links(cluster, predict), free, k
        )
        found["Algorithm 1, network"] = lambda k: bidirectional(cluster, free, k, predict)
    return found


def remembered(predict: Predictor) -> Predictor:
    """``predict``, which is asked once for each choice: the searches for all k pass by the same."""
    known: dict[bytes, float] = {}

    def asked(choices: Ints) -> Floats:
        keys = [row.tobytes() for row in choices]
        new = [i for i, key in enumerate(keys) if key not in known]
        if new:
            known.update(zip((keys[i] for i in new), predict(choices[new]).tolist(), strict=True))
        return np.array([known[key] for key in keys])

    return asked


def efficacy(one: Case, chosen: Mapping[str, Method], step: int = 1) -> dict[str, list[float]]:
    """GBE of each method for every ``step``-th k from 2 to all free GPUs."""
    found: dict[str, list[float]] = {name: [] for name in chosen}
    for k in range(2, int(count(one.free)) + 1, step):
        best = rate_Bps(one, strongest(one.cluster, one.free, k))
        for name, choose in chosen.items():
            found[name].append(rate_Bps(one, choose(k)) / best)
    return found


def search_cpu_s(
    one: Case, chosen: Mapping[str, Method], ks: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Seconds of CPU, of all threads, that each method takes to choose ``k`` GPUs (Figure 12).

    A k beyond the free GPUs is left out.
    """
    ks = [k for k in ks if k <= count(one.free)]
    return {name: {k: cpu_s(partial(choose, k)) for k in ks} for name, choose in chosen.items()}


def cpu_s(call: Callable[[], object]) -> float:
    """Seconds of CPU, of all threads, that ``call`` takes."""
    begin_s = time.process_time()
    call()
    return time.process_time() - begin_s


def rate_Bps(one: Case, choice: Ints) -> float:
    """The true bandwidth of a choice."""
    return float(one.cluster.weakest_link_Bps(choice[None])[0])


def trained(one: Case, seed: int) -> tuple[Network, float, float]:
    """LiteGD's network after its training, and the seconds that took: of CPU, and on the clock."""
    network = Network(seed)
    begin_s = time.perf_counter()
    took_s = cpu_s(lambda: network.train(one.cluster, one.samples))
    return network, took_s, time.perf_counter() - begin_s


def errors_GBps(cluster: DispatchCluster, learned_from: Samples, seed: int) -> dict[str, float]:
    """Mean absolute error of what learns, on 500 other choices."""
    test = measured(cluster, 500, np.random.default_rng(seed + 1))
    learned = predictors(cluster, cluster, learned_from, seed)
    return {name: mae_GBps(predict(test.choices), test) for name, predict in learned.items()}


def predictors(
    seen: DispatchCluster, asked: DispatchCluster, samples: Samples, seed: int
) -> dict[str, Predictor]:
    """Predictors after ``samples`` of the cluster ``seen``, for the hosts of ``asked``.

    These are the hosts that were seen, and then any that were not.
    """
    network = Network(seed)
    network.train(seen, samples)
    new = len(asked.tables) - len(seen.tables)
    wider = Samples(np.pad(samples.choices, ((0, 0), (0, new))), samples.bandwidth_Bps)
    return {
        "network": network.predictor(asked),
        "trees": Trees(seen, samples, seed).predictor(asked),
        "fitted links": fit_uplinks(asked, wider).weakest_link_Bps,
    }


def unseen(kind: str, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Two hosts of a ``kind`` that was not there join a cluster: their tables are measured, and no
    choice with them across hosts.

    Returns:
        the error in GB/s on choices with the new hosts, and mean GBE of the choices made, each by
        what made the predictions.
    """
    one = case([other for other in MIXED if other != kind], seed)
    rng = np.random.default_rng(seed + 3)
    tables = [*one.cluster.tables, host_table(kind), host_table(kind)]
    uplink_Bps = np.concatenate([one.cluster.uplink_Bps, rng.uniform(20e9, 40e9, 2)])
    larger = DispatchCluster(tables, uplink_Bps)
    test = measured(larger, 2000, rng)
    test = test.part(np.flatnonzero((test.choices[:, HOSTS:] > 0).any(axis=1))[:500])
    learned = predictors(one.cluster, larger, one.samples, seed)
    errors = {name: mae_GBps(predict(test.choices), test) for name, predict in learned.items()}
    free = np.concatenate([one.free, [0xFF, 0xFF]])
    wider = Case(larger, free, test)
    chosen: dict[str, Method] = {
        f"Algorithm 1, {name}": searched(larger, free, remembered(predict))
        for name, predict in learned.items()
    }
    padded = Samples(np.pad(one.samples.choices, ((0, 0), (0, 2))), one.samples.bandwidth_Bps)
    fitted = fit_uplinks(larger, padded)
    chosen["strongest, links fitted"] = lambda k: strongest(fitted, free, k)
    found = efficacy(wider, chosen, step=3)
    return errors, {name: float(np.mean(f)) for name, f in found.items()}


def searched(cluster: DispatchCluster, free: Ints, predict: Predictor) -> Method:
    """Algorithm 1 with ``predict``."""
    return lambda k: bidirectional(cluster, free, k, predict)


def upgraded(one: Case, seed: int, steps: Sequence[int]) -> list[dict[str, float]]:
    """A host's link becomes three times as fast: errors in GB/s before and after new samples.

    Returns:
        for none and for each number of ``steps`` of new samples, the error on choices that the
        link had limited and on others.
    """
    network = Network(seed)
    network.train(one.cluster, one.samples)
    slowest = int(np.argmin(one.cluster.uplink_Bps))
    uplink_Bps = one.cluster.uplink_Bps.copy()
    uplink_Bps[slowest] *= 3
    after = DispatchCluster(one.cluster.tables, uplink_Bps)
    rng = np.random.default_rng(seed + 2)
    new, test = measured(after, max(steps), rng), measured(after, 1000, rng)
    faster = test.bandwidth_Bps > one.cluster.weakest_link_Bps(test.choices)
    parts = {
        name: test.part(np.flatnonzero(rows))
        for name, rows in (("faster now", faster), ("others", ~faster))
    }

    def told(samples: int) -> dict[str, float]:
        fitted = fit_uplinks(after, one.samples.joined(new.part(np.arange(samples))))
        predict = {"network": network.predictor(after), "links": fitted.weakest_link_Bps}
        return {
            f"{by}, {name}": mae_GBps(asked(part.choices), part)
            for by, asked in predict.items()
            for name, part in parts.items()
        }

    found, seen = [told(0)], 0
    for step in steps:
        network.train(after, new.part(np.arange(seen, step)))
        seen = step
        found.append(told(seen))
    return found


def mae_GBps(predicted_Bps: Floats, test: Samples) -> float:
    """The mean absolute error on ``test``."""
    return float(np.abs(predicted_Bps - test.bandwidth_Bps).mean()) / 1e9
