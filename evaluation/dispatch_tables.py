"""``python -m evaluation dispatch``: LiteGD's tables, beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import numpy as np

from crux_torch.cli.results import Result, json_option, publish, workers_option
from crux_torch.dispatch.cluster import DispatchCluster
from crux_torch.dispatch.predictor import Network
from crux_torch.dispatch.search import strongest
from crux_torch.sim.workers import Workers, mapped
from evaluation.dispatch import (
    BEHIND,
    FASTER_PCIE,
    LINKS,
    MIXED,
    TABLE_1,
    case,
    cpu_s,
    efficacy,
    errors_GBps,
    methods,
    search_cpu_s,
    trained,
    unseen,
    upgraded,
)
from evaluation.litegd import MODELS, bidirectional, host_table
from evaluation.litegd_network import GpuTokens, printed

T = TypeVar("T")

#: Clusters of the studies of what learns, beside Table 1.
FEW_SEEDS = 1
#: Numbers of GPUs that Figures 9 and 12 are printed for.
KS = (2, 4, 8, 12, 16, 24, 32, 40, 48)


def _mapped(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], workers: Workers
) -> Iterator[T]:
    return mapped(_in_one_thread, [(function, *task) for task in tasks], workers)


def _in_one_thread(function: Callable[..., T], *task: Any) -> T:
    """Equal results on any machine, whatever its number of processors."""
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            return function(*task)
    finally:
        torch.set_num_threads(threads)


def efficacy_rows(seeds: int, network_seeds: int, workers: Workers = 1) -> list[dict[str, Any]]:
    """Clusters of Table 1 and with a faster PCIe, and Figure 10's links: GBE of every method.

    The network is trained for Table 1's.
    """
    cells = [(kinds, "20 to 40") for kinds in TABLE_1]
    cells += [(MIXED, links) for links in LINKS if links != "20 to 40"]
    cells += [(kinds, "20 to 40") for kinds in FASTER_PCIE]
    played = iter(
        _mapped(
            _efficacy,
            [
                (kinds, links, seed, seed < network_seeds and number < len(TABLE_1))
                for number, (kinds, links) in enumerate(cells)
                for seed in range(seeds)
            ],
            workers,
        )
    )
    rows = []
    for kinds, links in cells:
        means: dict[str, list[float]] = {}
        by_k: dict[str, dict[int, list[float]]] = {}
        trainings = []
        searches: dict[str, dict[int, list[float]]] = {}
        for training, methods_found, took in islice(played, seeds):
            trainings += training
            for name, took_s in took.items():
                for k, s in took_s.items():
                    searches.setdefault(name, {}).setdefault(k, []).append(s)
            for name, found in methods_found.items():
                means.setdefault(name, []).append(statistics.fmean(found))
                for k, gbe in enumerate(found, 2):
                    by_k.setdefault(name, {}).setdefault(k, []).append(gbe)
        rows.append(
            {
                "study": "efficacy",
                "hosts": "+".join(kinds),
                "link_GBps": links,
                "gbe": means,
                "by_k": {
                    n: {k: statistics.fmean(v) for k, v in ks.items()} for n, ks in by_k.items()
                },
                "search_cpu_s": searches,
                "training_cpu_s": [cpu for cpu, _ in trainings],
                "training_wall_s": [wall for _, wall in trainings],
            }
        )
    return rows


def _efficacy(
    kinds: Sequence[str], links: str, seed: int, with_network: bool
) -> tuple[list[tuple[float, float]], dict[str, list[float]], dict[str, dict[int, float]]]:
    one = case(kinds, seed, LINKS[links])
    network, *training = trained(one, seed) if with_network else (None,)
    found = efficacy(one, methods(one, seed, network))
    took = {}
    if (tuple(kinds), links) == (MIXED, "20 to 40"):
        took = search_cpu_s(one, methods(one, seed, network, remember=False), KS)
    return [(training[0], training[1])] if training else [], found, took


def error_rows(sizes: Sequence[int], seeds: int, workers: Workers = 1) -> list[dict[str, Any]]:
    """Prediction error by number of samples, on the mixed cluster."""
    tasks = [(size, seed) for size in sizes for seed in range(seeds)]
    found = iter(_mapped(_errors, tasks, workers))
    return [
        {"study": "error", "samples": n, "error_GBps": _by_name(list(islice(found, seeds)))}
        for n in sizes
    ]


def _errors(size: int, seed: int) -> dict[str, float]:
    one = case(MIXED, seed)
    return errors_GBps(one.cluster, one.samples.part(np.arange(size)), seed)


def unseen_rows(seeds: int, workers: Workers = 1) -> list[dict[str, Any]]:
    """Leave one type of host out of the training: error and GBE where it is there."""
    found = iter(
        _mapped(unseen, [(kind, seed) for kind in MIXED for seed in range(seeds)], workers)
    )
    rows = []
    for kind in MIXED:
        errors, gbe = zip(*islice(found, seeds), strict=True)
        rows.append(
            {"study": "unseen", "kind": kind, "error_GBps": _by_name(errors), "gbe": _by_name(gbe)}
        )
    return rows


def update_rows(steps: Sequence[int], seeds: int, workers: Workers = 1) -> list[dict[str, Any]]:
    """Continual updates after a link became three times as fast."""
    found = list(_mapped(_updates, [(seed, steps) for seed in range(seeds)], workers))
    return [
        {"study": "update", "new_samples": samples, "error_GBps": _by_name([f[i] for f in found])}
        for i, samples in enumerate((0, *steps))
    ]


def _updates(seed: int, steps: Sequence[int]) -> list[dict[str, float]]:
    return upgraded(case(MIXED, seed), seed, steps)


def _by_name(found: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [one[name] for one in found] for name in found[0]}


def printed_rows(seeds: int, workers: Workers = 1) -> list[dict[str, Any]]:
    """The network as the paper prints it beside ours, on four hosts of four of the clusters."""
    tasks = [(kinds, seed) for kinds in BEHIND for seed in range(seeds)]
    found = iter(_mapped(printed, tasks, workers))
    rows = []
    for kinds in BEHIND:
        errors, gbe = map(_by_name, zip(*islice(found, seeds), strict=True))
        rows.append(
            {"study": "printed", "hosts": "+".join(kinds), "error_GBps": errors, "gbe": gbe}
        )
    return rows


def time_rows(hosts: Iterable[int]) -> list[dict[str, Any]]:
    """Seconds of CPU to choose in larger clusters, the longest over five k."""
    rows = []
    for number in hosts:
        rng = np.random.default_rng(number)
        tables = [host_table(MIXED[i % len(MIXED)]) for i in range(number)]
        cluster = DispatchCluster(tables, rng.uniform(20e9, 40e9, number))
        took: dict[str, float] = {}
        for name, search in (("strongest", strongest), ("Algorithm 1", bidirectional)):
            for share in (0.01, 0.1, 0.25, 0.5, 0.9):
                k = max(2, int(share * 8 * number))
                s = cpu_s(partial(search, cluster, cluster.everything, k))
                took[name] = max(took.get(name, 0.0), s)
        rows.append({"study": "time", "gpus": 8 * number, "longest_cpu_s": took})
    return rows


def weight_bytes(network: Network) -> int:
    """Bytes of a network's weights."""
    return sum(p.numel() * p.element_size() for p in network.module.parameters())


def storage_row() -> dict[str, Any]:
    """Bytes of the network's weights and of the largest table of a host."""
    sizes = [len(msgspec.json.encode(host_table(kind))) for kind in MODELS]
    return {
        "study": "storage",
        "network_bytes": weight_bytes(Network()),
        "printed_bytes": weight_bytes(GpuTokens()),
        "host_bytes": max(sizes),
    }


ORDER = (
    "strongest, links fitted",
    "strongest, network's links",
    "Algorithm 1, true",
    "Algorithm 1, at bottleneck",
    "Algorithm 1, links fitted",
    "Algorithm 1, trees",
    "Algorithm 1, network",
    "topology",
    "by index",
    "at random",
)


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as tables: means over seeds, the least and the most in brackets."""
    lines = [
        "GPU bandwidth efficacy in %, mean over k (Table 1, Figure 10)",
        "paper: LiteGD | topology-aware, by index, at random",
    ]
    for row in _of(rows, "efficacy"):
        paper = TABLE_1.get(tuple(row["hosts"].split("+")))
        known = paper is not None and row["link_GBps"] == "20 to 40"
        told = f"paper {paper[0]} | {paper[1]} {paper[2]} {paper[3]}" if known else ""
        lines.append(f"{row['hosts']}, links of {row['link_GBps']} GB/s  {told}")
        for name in ORDER:
            if name in row["gbe"]:
                values = [100 * value for value in row["gbe"][name]]
                spread = f"[{min(values):.1f}-{max(values):.1f}]"
                lines.append(f"  {name:<26} {statistics.fmean(values):6.1f} {spread:>14}")
        if row["training_cpu_s"]:
            cpu_most_s, wall_s = max(row["training_cpu_s"]), max(row["training_wall_s"])
            lines.append(
                f"  training of the network: {cpu_most_s:.0f} s of CPU at most, {wall_s:.0f} s on "
                "the clock"
            )
    for row in _of(rows, "efficacy"):
        if row["hosts"] == "+".join(MIXED) and row["link_GBps"] == "20 to 40":
            lines += ["", "GBE in % by k on the mixed cluster (Figure 9)"]
            lines += _by_k({n: {k: 100 * v for k, v in m.items()} for n, m in row["by_k"].items()})
            lines += ["", "CPU time of a choice in ms by k there, the longest of them (Figure 12)"]
            took = row["search_cpu_s"].items()
            lines += _by_k({n: {k: 1e3 * max(v) for k, v in m.items()} for n, m in took})
    lines += ["", "Error of predictions in GB/s by number of samples, on the mixed cluster"]
    for row in _of(rows, "error"):
        lines.append(f"  {row['samples']:>5}: {_means(row['error_GBps'], '{:.3f}')}")
    lines += ["", "Two hosts of a type that was not there join; nothing was measured across them"]
    for row in _of(rows, "unseen"):
        lines.append(f"  {row['kind']:>5}: error in GB/s: {_means(row['error_GBps'], '{:.2f}')}")
        lines.append(f"         GBE in %: {_means(row['gbe'], '{:.1f}', 100)}")
    lines += ["", "Error in GB/s after a host's link became three times as fast"]
    for row in _of(rows, "update"):
        lines.append(
            f"  {row['new_samples']:>5} new samples: {_means(row['error_GBps'], '{:.3f}')}"
        )
    lines += ["", "The network as printed beside ours: 500 samples of four hosts, 20 to 40 GB/s"]
    for row in _of(rows, "printed"):
        errors, gbe = _means(row["error_GBps"], "{:.2f}"), _means(row["gbe"], "{:.1f}", 100)
        lines.append(f"  {row['hosts']:<20} error in GB/s: {errors}; GBE of Algorithm 1: {gbe}")
    lines += ["", "CPU time of the longest choice in ms, all GPUs free"]
    for row in _of(rows, "time"):
        cells = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in row["longest_cpu_s"].items())
        lines.append(f"  {row['gpus']:>5} GPUs: {cells}")
    for row in _of(rows, "storage"):
        lines += [
            "",
            f"Storage: network {row['network_bytes'] / 1e3:.0f} KB, as printed "
            f"{row['printed_bytes'] / 1e3:.0f} KB, a host's table {row['host_bytes'] / 1e3:.1f} KB "
            "at most",
        ]
    return "\n".join(lines) + "\n"


def _by_k(found: Mapping[str, Mapping[Any, float]]) -> list[str]:
    """A line for each method, in which every k has a column."""
    lines = [f"  {'k':<26}" + "".join(f"{k:>7}" for k in KS)]
    for name in ORDER:
        if name in found:
            mine = {int(k): value for k, value in found[name].items()}
            cells = "".join(f"{mine[k]:7.1f}" if k in mine else "      -" for k in KS)
            lines.append(f"  {name:<26}{cells}")
    return lines


def _means(found: dict[str, list[float]], form: str, unit: float = 1) -> str:
    cells = (f"{n} {form.format(unit * statistics.fmean(v))}" for n, v in found.items())
    return ", ".join(cells)


def _of(rows: Sequence[dict[str, Any]], study: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["study"] == study]


@click.command()
@click.option("--seeds", default=5, show_default=True, help="Clusters of each kind.")
@click.option("--network-seeds", default=1, show_default=True, help="Of these with the network.")
@workers_option
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/dispatch.{json,txt}.")
def dispatch(
    seeds: int, network_seeds: int, workers: Workers, json_path: Path | None, out: Path | None
) -> None:
    """Chooses GPUs with LiteGD, the exact search and the baselines."""
    # Times are of this process while no other of ours runs.
    rows = [*time_rows((8, 32, 128)), storage_row()]
    rows += efficacy_rows(seeds, network_seeds, workers)
    if network_seeds:
        few = min(network_seeds, FEW_SEEDS)
        rows += error_rows((50, 100, 250, 500, 1000), few, workers)
        rows += unseen_rows(few, workers)
        rows += update_rows((50, 100, 200), few, workers)
        rows += printed_rows(few, workers)
    settings = {"seeds": seeds, "network_seeds": network_seeds}
    publish(Result("dispatch", settings, rows), text_of(rows), json_path, out)
