"""``python -m evaluation dispatch``: LiteGD's tables, beside the paper's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from crux_torch.cli.results import Result, publish
from crux_torch.cli.sim_options import json_option
from crux_torch.dispatch.cluster import DispatchCluster
from crux_torch.dispatch.hosts import host_table
from crux_torch.dispatch.search import bidirectional, strongest
from evaluation.dispatch import (
    LINKS,
    MIXED,
    TABLE_1,
    case,
    efficacy,
    errors_GBps,
    methods,
    trained,
    upgraded,
)


def efficacy_rows(seeds: int, network_seeds: int) -> list[dict[str, Any]]:
    """Table 1's clusters, and Figure 10's links with the mixed one: GBE of every method."""
    rows = []
    cells = [(kinds, "20 to 40") for kinds in TABLE_1]
    cells += [(MIXED, links) for links in LINKS if links != "20 to 40"]
    for kinds, links in cells:
        means: dict[str, list[float]] = {}
        seconds: dict[str, list[float]] = {}
        by_k: dict[str, dict[int, list[float]]] = {}
        training_s = []
        for seed in range(seeds):
            one = case(kinds, seed, LINKS[links])
            network = None
            if seed < network_seeds:
                network, took_s = trained(one, seed)
                training_s.append(took_s)
            for name, found in efficacy(one, methods(one, seed, network)).items():
                means.setdefault(name, []).append(statistics.fmean(gbe for gbe, _ in found))
                seconds.setdefault(name, []).append(max(s for _, s in found))
                for k, (gbe, _) in enumerate(found, 2):
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
                "longest_s": {name: max(values) for name, values in seconds.items()},
                "training_s": training_s,
            }
        )
    return rows


def error_rows(sizes: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Prediction error by number of samples, on the mixed cluster."""
    rows = []
    for size in sizes:
        found = []
        for seed in range(seeds):
            one = case(MIXED, seed)
            found.append(errors_GBps(one.cluster, one.samples.part(np.arange(size)), seed))
        network, fitted = (list(values) for values in zip(*found, strict=True))
        rows.append({"study": "error", "samples": size, "network": network, "fitted": fitted})
    return rows


def update_rows(steps: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Continual updates after a link became three times as fast."""
    found = [upgraded(case(MIXED, seed), seed, steps) for seed in range(seeds)]
    return [
        {
            "study": "update",
            "new_samples": at[0][0],
            "with_the_host": [changed for _, changed, _ in at],
            "without_it": [others for _, _, others in at],
        }
        for at in zip(*found, strict=True)
    ]


def time_rows(hosts: Iterable[int]) -> list[dict[str, Any]]:
    """Seconds to choose in larger clusters, the longest over five k."""
    rows = []
    for number in hosts:
        rng = np.random.default_rng(number)
        tables = [host_table(MIXED[i % len(MIXED)]) for i in range(number)]
        cluster = DispatchCluster(tables, rng.uniform(20e9, 40e9, number))
        took: dict[str, float] = {}
        for name, search in (("strongest", strongest), ("Algorithm 1", bidirectional)):
            for share in (0.01, 0.1, 0.25, 0.5, 0.9):
                begin_s = time.perf_counter()
                search(cluster, cluster.everything, max(2, int(share * 8 * number)))
                took[name] = max(took.get(name, 0.0), time.perf_counter() - begin_s)
        rows.append({"study": "time", "gpus": 8 * number, "longest_s": took})
    return rows


ORDER = (
    "strongest, links fitted",
    "Algorithm 1, true",
    "Algorithm 1, links fitted",
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
                longest_ms = 1e3 * row["longest_s"][name]
                lines.append(
                    f"  {name:<26} {statistics.fmean(values):6.1f} {spread:>14}"
                    f"   longest choice {longest_ms:8.1f} ms"
                )
        if row["training_s"]:
            lines.append(f"  training of the network: {max(row['training_s']):.0f} s at most")
    for row in _of(rows, "efficacy"):
        if row["hosts"] == "+".join(MIXED) and row["link_GBps"] == "20 to 40":
            lines += ["", "GBE in % by k on the mixed cluster (Figure 9)"]
            ks = [2, 4, 8, 12, 16, 24, 32, 40, 48]
            lines.append(f"  {'k':<26}" + "".join(f"{k:>7}" for k in ks))
            for name in ORDER:
                if name in row["by_k"]:
                    mine = {int(k): value for k, value in row["by_k"][name].items()}
                    cells = "".join(f"{100 * mine[k]:7.1f}" if k in mine else "      -" for k in ks)
                    lines.append(f"  {name:<26}{cells}")
    lines += ["", "Error of predictions in GB/s by number of samples, on the mixed cluster"]
    for row in _of(rows, "error"):
        network, fitted = statistics.fmean(row["network"]), statistics.fmean(row["fitted"])
        lines.append(f"  {row['samples']:>5}: network {network:.3f}, fitted links {fitted:.3f}")
    lines += ["", "The network's error in GB/s after a host's link became three times as fast"]
    for row in _of(rows, "update"):
        changed, others = (statistics.fmean(row[k]) for k in ("with_the_host", "without_it"))
        number = row["new_samples"]
        lines.append(f"  {number:>5} new samples: with it {changed:.3f}, others {others:.3f}")
    lines += ["", "Longest choice in ms, all GPUs free"]
    for row in _of(rows, "time"):
        cells = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in row["longest_s"].items())
        lines.append(f"  {row['gpus']:>5} GPUs: {cells}")
    return "\n".join(lines) + "\n"


def _of(rows: Sequence[dict[str, Any]], study: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["study"] == study]


@click.command()
@click.option("--seeds", default=5, show_default=True, help="Clusters of each kind.")
@click.option("--network-seeds", default=2, show_default=True, help="Of these with the network.")
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/dispatch.{json,txt}.")
def dispatch(seeds: int, network_seeds: int, json_path: Path | None, out: Path | None) -> None:
    """Chooses GPUs with LiteGD, the exact search and the baselines."""
    rows = efficacy_rows(seeds, network_seeds)
    if network_seeds:
        rows += error_rows((50, 100, 250, 500, 1000), network_seeds)
        rows += update_rows((50, 100, 200), network_seeds)
    rows += time_rows((8, 32, 128))
    settings = {"seeds": seeds, "network_seeds": network_seeds}
    publish(Result("dispatch", settings, rows), text_of(rows), json_path, out)
