"""``crux sim compare``: one scenario under each scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from crux_torch import _fluid
from crux_torch.errors import CruxError
from crux_torch.schedule.scheduler import SCHEDULERS, SchedulerOptions
from crux_torch.sim.commands.options import json_option
from crux_torch.sim.play import play
from crux_torch.sim.scenario import read_scenario
from crux_torch.sim.scenario_cluster import cluster_of


def _names(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(SCHEDULERS) if value == "all" else tuple(value.split(","))
    for name in names:
        if name not in SCHEDULERS:
            raise click.BadParameter(
                f"{name!r} is unknown; expected some of {', '.join(SCHEDULERS)}"
            )
    return names


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--schedulers", default="all", show_default=True, callback=_names, help="Comma-separated."
)
@click.option("--levels", default=8, show_default=True, type=click.IntRange(1, 64))
@click.option("--seed", default=0, show_default=True, help="Of what a scheduler draws.")
@json_option
def compare(
    file: Path, schedulers: tuple[str, ...], levels: int, seed: int, json_path: Path | None
) -> None:
    """Play the scenario in FILE under each scheduler.

    Levels and weights in the file are not heeded; `path` is the default path.
    """
    try:
        scenario = read_scenario(file)
        cluster, default_path = cluster_of(scenario)
        options = SchedulerOptions(tuple(range(levels)), seed, default_path)
        start_s = {name: job.start_s for name, job in scenario.jobs.items()}

        def played(name: str) -> Any:
            decision = SCHEDULERS[name](cluster, options)
            return play(cluster, decision, scenario.horizon_s, start_s=start_s)

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
        raise click.ClickException(str(error)) from None
    if json_path is not None:
        settings = {"file": file.name, "levels": levels, "seed": seed}
        text = json.dumps({"benchmark": "compare", "settings": settings, "rows": rows}, indent=1)
        try:
            json_path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{json_path}: can't be written: {error}") from None
    Console().print(_table(rows, list(scenario.jobs)))


def _table(rows: list[dict[str, Any]], jobs: list[str]) -> Table:
    table = Table(title="mean iteration in s (slowdown against ideal)", title_justify="left")
    table.add_column("scheduler")
    for column in ("GPU utilization", *jobs):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            "-" if r["slowdown"] is None else f"{r['mean_iteration_s']:.4f} ({r['slowdown']:.2f})"
            for r in (row["jobs"][job] for job in jobs)
        ]
        table.add_row(row["scheduler"], f"{row['gpu_utilization']:.1%}", *cells)
    return table
