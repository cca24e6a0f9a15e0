"""``python -m evaluation dispatch-contention``: newcomers beside running jobs, by each rule."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from crux_torch.cli.results import Result, json_option, publish
from evaluation.dispatch_contention import RULES, choices, judged, scene


def contention_rows(seeds: Iterable[int]) -> list[dict[str, Any]]:
    """Utilisation of each seeded cluster by each rule."""
    rows = []
    for seed in seeds:
        one = scene(seed)
        begin_s = time.perf_counter()
        chosen = choices(one, seed)
        took_s = time.perf_counter() - begin_s
        rows.append(
            {
                "seed": seed,
                "jobs": len(one.jobs),
                "gpus": one.k,
                "hosts": {n: int(np.count_nonzero(choice)) for n, choice in chosen.items()},
                "utilisation": {name: judged(one, choice) for name, choice in chosen.items()},
                "took_s": took_s,
            }
        )
    return rows


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """One line a cluster, and what it comes to."""
    lines = [
        "Share of the time in which the GPUs of all jobs compute, in %",
        f"{'cluster':>7} {'jobs':>5} {'GPUs':>5}" + "".join(f"{rule:>18}" for rule in RULES),
    ]
    for row in rows:
        cells = "".join(f"{100 * row['utilisation'][rule]:18.2f}" for rule in RULES)
        lines.append(f"{row['seed']:>7} {row['jobs']:>5} {row['gpus']:>5}{cells}")
    means = [statistics.fmean(row["utilisation"][rule] for row in rows) for rule in RULES]
    lines.append(f"{'mean':<19}" + "".join(f"{100 * mean:18.2f}" for mean in means))
    *others, aware = RULES
    margins = [
        row["utilisation"][aware] - max(row["utilisation"][rule] for rule in others) for row in rows
    ]
    good, better = sum(m >= -1e-9 for m in margins), sum(m > 1e-9 for m in margins)
    lines.append(
        f"{aware}: the best, or as good, in {good} of {len(rows)}; better than all in {better}; "
        f"over the best other {100 * statistics.fmean(margins):+.2f} points on average, from "
        f"{100 * min(margins):+.2f} to {100 * max(margins):+.2f}"
    )
    lines.append(f"longest choice by all four rules: {max(row['took_s'] for row in rows):.1f} s")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--seeds", default=20, show_default=True, help="Clusters.")
@json_option
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write DIR/dispatch_contention.{json,txt}."
)
def dispatch_contention(seeds: int, json_path: Path | None, out: Path | None) -> None:
    """Places a newcomer beside running jobs by bandwidth, compactness, chance and utilisation."""
    rows = contention_rows(range(seeds))
    result = Result("dispatch_contention", {"seeds": seeds}, rows)
    publish(result, text_of(rows), json_path, out)
