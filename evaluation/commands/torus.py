"""``python -m evaluation torus``: GPU utilisation on 2D and 3D tori of 64 hosts.

evaluation/torus.py describes the cases and the schedulers. Hosts are those of the testbed (8 GPUs,
4 NICs of 200 Gb/s). Links between routers have 100 Gb/s, where they are the bottleneck, or
400 Gb/s, where they hardly are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from crux_torch.cli.results import Result, json_option, publish
from crux_torch.cli.sim_options import chosen
from crux_torch.fabric import builders
from crux_torch.fabric.builders.server import GBPS
from evaluation.torus import (
    LEVELS,
    SCHEDULERS_PLAYED,
    STARTS_S,
    SWEEPS,
    Placement,
    outcomes,
    torus_case,
)

SHAPES = ((8, 8), (4, 4, 4))
LINK_GBPS = (100, 400)
PLACEMENTS: tuple[Placement, ...] = ("scattered", "packed")


def rows_of(
    schedulers: Sequence[str], seeds: int, horizon_s: float, progress: bool
) -> list[dict[str, Any]]:
    """One row for every torus, rate, placement and scheduler; values of all seeds in order."""
    rows = []
    console = Console(stderr=True)
    for shape in SHAPES:
        for gbps in LINK_GBPS:
            topology = builders.torus(shape, link_Bps=gbps * GBPS)
            for placement in PLACEMENTS:
                words = f"{'x'.join(map(str, shape))} {gbps} Gb/s {placement}"
                played = [
                    outcomes(
                        torus_case(shape, placement, seed, topology=topology),
                        horizon_s,
                        schedulers,
                    )
                    for seed in track(range(seeds), words, console=console, disable=not progress)
                ]
                for scheduler in schedulers:
                    mine = [found[scheduler] for found in played]
                    best = [found["ideal"].gpu_utilization for found in played]
                    rows.append(
                        {
                            "shape": shape,
                            "link_Gbps": gbps,
                            "placement": placement,
                            "scheduler": scheduler,
                            "gpu_utilization": [o.gpu_utilization for o in mine],
                            "of_ideal": [
                                o.gpu_utilization / b for o, b in zip(mine, best, strict=True)
                            ],
                            "busiest_link": [o.busiest for o in mine],
                            "slowdown": [o.slowdown for o in mine],
                            "decision_s": [o.decision_s for o in mine],
                        }
                    )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text: medians over seeds, the least and the most in brackets."""
    lines = []
    for _, group in groupby(rows, key=itemgetter("shape", "link_Gbps", "placement")):
        cell = list(group)
        first = cell[0]
        shape = "x".join(map(str, first["shape"]))
        by_name = {row["scheduler"]: row for row in cell}
        lines += [
            f"{shape} torus, links of {first['link_Gbps']} Gb/s, {first['placement']} jobs, "
            f"{len(first['of_ideal'])} seeds",
            f"  {'':<16} {'utilisation':>20} {'of ideal':>20} {'over ecmp':>9} {'beats it':>8} "
            f"{'busiest link':>12} {'worst slowdown':>14} {'decision ms':>11}",
        ]
        for row in cell:
            against = zip(row["of_ideal"], by_name["ecmp"]["of_ideal"], strict=True)
            gains = [mine / other for mine, other in against]
            lines.append(
                f"  {row['scheduler']:<16} {spread(row['gpu_utilization']):>20} "
                f"{spread(row['of_ideal']):>20} {statistics.median(gains) - 1:>+9.1%} "
                f"{sum(gain > 1 for gain in gains):>2} of {len(gains):>2} "
                f"{statistics.median(row['busiest_link']):>12.2f} "
                f"{statistics.median(row['slowdown']):>14.2f} "
                f"{statistics.median(row['decision_s']) * 1e3:>11.1f}"
            )
        lines.append("")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}-{max(values):.3f}]"


@click.command()
@click.option(
    "--schedulers",
    default=",".join(SCHEDULERS_PLAYED),
    show_default=True,
    help="Comma-separated. ecmp and ideal, which the others are compared with, are always played.",
)
@click.option("--seeds", default=6, show_default=True, help="Cases of each kind.")
@click.option(
    "--horizon",
    "horizon_s",
    type=click.FloatRange(min=2 * STARTS_S),
    default=30.0,
    show_default=True,
    help="Seconds played.",
)
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/torus.{json,txt}.")
def torus(
    schedulers: str, seeds: int, horizon_s: float, json_path: Path | None, out: Path | None
) -> None:
    """Plays random jobs on tori under every scheduler."""
    wanted = {*chosen(schedulers, list(SCHEDULERS_PLAYED)), "ecmp", "ideal"}
    played = [scheduler for scheduler in SCHEDULERS_PLAYED if scheduler in wanted]
    rows = rows_of(played, seeds, horizon_s, progress=Console(stderr=True).is_terminal)
    text = table(rows)
    settings = {
        "seeds": seeds,
        "horizon_s": horizon_s,
        "levels": len(LEVELS),
        "sweeps": SWEEPS,
    }
    result = Result("torus", settings, rows)
    publish(result, text, json_path, out)
