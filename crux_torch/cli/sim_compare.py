"""``crux sim compare``: one scenario under each scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from crux_torch import _fluid
from crux_torch.cli.results import write_text
from crux_torch.cli.sim_options import json_option, names_option, numbers_table, scenario_argument
from crux_torch.errors import CruxError
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim.play import play
from crux_torch.sim.scenario import cluster_of, read_scenario


@click.command()
@scenario_argument
@names_option("--schedulers", "schedulers", SCHEDULERS, "all")
@click.option(
    "--levels", default=8, show_default=True, type=click.IntRange(1, 64), help="Priority levels."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the schedulers' random draws.")
@json_option
def compare(
    file: Path, schedulers: tuple[str, ...], levels: int, seed: int, json_path: Path | None
) -> None:
    """Play the scenario in FILE under each scheduler.

    The schedulers choose levels, weights and paths; levels and weights in the file have no effect.
    A job's `path` in the file is the path that ECMP takes.
    """
    try:
        scenario = read_scenario(file)
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    try:
        cluster, default_path = cluster_of(scenario)
        options = SchedulerOptions(tuple(range(levels)), seed, default_path)
        start_s = {name: job.start_s for name, job in scenario.jobs.items()}

        def played(name: str) -> Any:
            decision = SCHEDULERS[name](cluster, options)
            notes.extend(f"{name}: {note}" for note in decision.notes)
            return play(
                cluster,
                decision,
                scenario.horizon_s,
                start_s=start_s,
                slack_bytes=scenario.slack_bytes,
            )

        notes: list[str] = []
        alone = played("ideal").jobs
        rows = []
        for name in schedulers:
            report = played(name)
            jobs = {}
            for job, result in report.jobs.items():
                mean_s, alone_s = result.mean_iteration_s, alone[job].mean_iteration_s
                known = mean_s is not None and alone_s
                jobs[job] = {
                    "mean_iteration_s": mean_s,
                    "slowdown": mean_s / alone_s if known else None,
                }
            rows.append(
                {"scheduler": name, "gpu_utilization": report.gpu_utilization, "jobs": jobs}
            )
    except (CruxError, _fluid.SpecError) as error:
        raise click.ClickException(f"{file}: {error}") from None
    if json_path is not None:
        settings = {"file": file.name, "levels": levels, "seed": seed}
        text = json.dumps({"benchmark": "compare", "settings": settings, "rows": rows}, indent=1)
        write_text(json_path, text + "\n")
    Console().print(_table(rows, list(scenario.jobs)), *notes, sep="\n")


def _table(rows: list[dict[str, Any]], jobs: list[str]) -> Table:
    title = "mean iteration in s (slowdown against ideal)"
    table = numbers_table(title, "scheduler", "GPU utilization", *jobs)
    for row in rows:
        cells = [
            "-" if r["slowdown"] is None else f"{r['mean_iteration_s']:.4f} ({r['slowdown']:.2f})"
            for r in (row["jobs"][job] for job in jobs)
        ]
        table.add_row(row["scheduler"], f"{row['gpu_utilization']:.1%}", *cells)
    return table
