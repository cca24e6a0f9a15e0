"""Gains of paths, priorities and shifts where the network sprays packets.

Jobs of the catalogue on GPUs drawn at random, on a Clos whose links up carry all, a half or a
quarter of what the links down do.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, json_option, publish, workers_option
from crux_torch.network.builders import two_layer_clos
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.schedulers import SCHEDULERS
from crux_torch.sim.play import play, sprayed
from crux_torch.sim.workers import Workers, mapped
from evaluation.beyond import place_models
from evaluation.testbed_runs import paths_only

OVERSUBSCRIPTION = (1, 2, 4)
#: GPUs of each job, on 24 hosts of 8.
SIZES = (8, 8, 8, 8, 16, 16, 16, 32, 32)
#: What hashes flows onto paths, and what sprays their packets, is played under.
PLAYED = {
    "hashed": ("ecmp", "paths-only", "crux-paper", "crux", "cassini", "ideal"),
    "sprayed": ("ecmp", "crux-pa", "crux", "cassini"),
}
#: Seconds within which jobs start.
STARTS_S = 10.0


def rows_of(seeds: int, horizon_s: float, workers: Workers = 1) -> Iterator[dict[str, Any]]:
    """A row for each network, way of balancing and scheduler: utilisation of each seed."""
    tasks = [(ratio, seed, horizon_s) for ratio in OVERSUBSCRIPTION for seed in range(seeds)]
    found = tracked(mapped(_played, tasks, workers), "clusters", len(tasks))
    for ratio in OVERSUBSCRIPTION:
        of_seed = list(islice(found, seeds))
        for balancing, name in of_seed[0]:
            used, worst = zip(*(each[balancing, name] for each in of_seed), strict=True)
            yield {
                "oversubscription": ratio,
                "balancing": balancing,
                "scheduler": name,
                "gpu_utilization": list(used),
                "worst_slowdown": [s if s < float("inf") else None for s in worst],
            }


def _played(ratio: int, seed: int, horizon_s: float) -> dict[tuple[str, str], tuple[float, float]]:
    """Utilisation and worst slowdown, by way of balancing and scheduler."""
    topology = two_layer_clos(hosts=24, tors=12, aggregations=8, oversubscription=ratio)
    cluster, hashed = place_models("spraying", seed, topology, SIZES)
    rng = random.Random(f"spraying start {seed}")
    start_s = {job.name: rng.uniform(0.0, STARTS_S) for job in cluster.jobs}
    options = SchedulerOptions(seed=seed, default_path=hashed)
    spread = sprayed(cluster)
    alone_s = _times_s(spread, "ideal", replace(options, default_path=None), horizon_s)[1]
    found = {}
    for balancing, names in PLAYED.items():
        here = cluster if balancing == "hashed" else spread
        given = options if balancing == "hashed" else replace(options, default_path=None)
        for name in names:
            used, times_s = _times_s(here, name, given, horizon_s, start_s)
            found[balancing, name] = (
                used,
                max((times_s[j] or float("inf")) / (alone_s[j] or float("inf")) for j in times_s),
            )
    return found


def _times_s(
    cluster: Any,
    name: str,
    options: SchedulerOptions,
    horizon_s: float,
    start_s: Mapping[str, float] | None = None,
) -> tuple[float, dict[str, float | None]]:
    """Utilisation, and the mean iteration of each job."""
    scheduler = paths_only if name == "paths-only" else SCHEDULERS[name]
    report = play(cluster, scheduler(cluster, options), horizon_s, start_s=start_s)
    times_s = {job: found.mean_iteration_s for job, found in report.jobs.items()}
    return report.gpu_utilization, times_s


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the seeds; changes are against ECMP with hashed paths, and with spraying."""
    lines = []
    for ratio in dict.fromkeys(row["oversubscription"] for row in rows):
        mine = [row for row in rows if row["oversubscription"] == ratio]
        base = {
            row["balancing"]: row["gpu_utilization"] for row in mine if row["scheduler"] == "ecmp"
        }
        lines.append(f"links up {ratio}:1 oversubscribed, {len(base['hashed'])} seeds")
        lines.append(
            f"  {'network':<8} {'scheduler':<11} {'utilisation':>11} {'over hashed':>12} "
            f"{'over sprayed':>13} {'worst slowdown':>15}"
        )
        for row in mine:
            used = row["gpu_utilization"]
            over = {
                kind: 100 * (statistics.median(a / b for a, b in zip(used, of, strict=True)) - 1)
                for kind, of in base.items()
            }
            slowest = max(s if s is not None else float("inf") for s in row["worst_slowdown"])
            lines.append(
                f"  {row['balancing']:<8} {row['scheduler']:<11} {statistics.median(used):>11.3f} "
                f"{over['hashed']:>+11.1f}% {over['sprayed']:>+12.1f}% "
                f"{'starves' if slowest == float('inf') else f'{slowest:.2f}':>15}"
            )
        lines.append("")
    return "\n".join(lines)


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--horizon",
    "horizon_s",
    type=click.FloatRange(min=2 * STARTS_S),
    default=60.0,
    show_default=True,
    help="Seconds played.",
)
@workers_option
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/spraying.{json,txt}.")
def spraying(
    seeds: int, horizon_s: float, workers: Workers, json_path: Path | None, out: Path | None
) -> None:
    """Plays random jobs on Clos networks that hash flows, and on those that spray packets."""
    rows = list(rows_of(seeds, horizon_s, workers))
    settings = {"seeds": seeds, "horizon_s": horizon_s, "job_gpus": list(SIZES)}
    publish(Result("spraying", settings, rows), table(rows), json_path, out)
