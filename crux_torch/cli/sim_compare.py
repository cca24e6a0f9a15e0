"""``crux sim compare``: one scenario under each scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from crux_torch import _fluid
from crux_torch.cli.results import json_option, put_json
from crux_torch.cli.sim_options import names_option, scenario_argument
from crux_torch.errors import CruxError
from crux_torch.report.json_text import json_text
from crux_torch.report.tables import Grid, console, say
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim.play import JobReport, Report, play
from crux_torch.sim.scenario import cluster_of, read_scenario

Row = dict[str, Any]


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

        def played(name: str) -> Report:
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
        rows: list[Row] = []
        for name in schedulers:
            report = played(name)
            jobs = {}
            for job, result in report.jobs.items():
                mean_s, alone_s = result.mean_iteration_s, alone[job].mean_iteration_s
                times = mean_s / alone_s if mean_s is not None and alone_s else None
                jobs[job] = {"mean_iteration_s": mean_s, "slowdown": times}
            rows.append(
                {"scheduler": name, "gpu_utilization": report.gpu_utilization, "jobs": jobs}
            )
    except (CruxError, _fluid.SpecError) as error:
        raise click.ClickException(f"{file}: {error}") from None
    settings = {"file": file.name, "levels": levels, "seed": seed}
    told = {"benchmark": "compare", "settings": settings, "rows": rows, "notes": notes}
    if put_json(json_path, json_text(told)):
        return
    to = console()
    _summary(rows).print(to)
    _jobs(rows, alone).print(to)
    say(to, "ideal s: mean iteration under ideal, in seconds; -: no iteration ended")
    for note in notes:
        say(to, note)


def _summary(rows: Sequence[Row]) -> Grid:
    """A row for each scheduler."""
    shown = []
    for row in rows:
        times = {name: r["slowdown"] for name, r in row["jobs"].items() if r["slowdown"]}
        worst = max(times, key=lambda name: times[name], default="")
        shown.append(
            {
                "scheduler": row["scheduler"],
                "GPU utilization": f"{row['gpu_utilization']:.1%}",
                "mean slowdown": f"{fmean(times.values()):.2f}" if times else "-",
                "worst": f"{times[worst]:.2f}" if times else "-",
                "worst job": worst or "-",
            }
        )
    return Grid(shown, text=("scheduler", "worst job"))


def _jobs(rows: Sequence[Row], alone: Mapping[str, JobReport]) -> Grid:
    """A row for each job: its iteration under ideal, and its slowdown under each scheduler."""

    def cells(job: str) -> dict[str, str]:
        ideal_s = alone[job].mean_iteration_s
        found = {row["scheduler"]: row["jobs"][job]["slowdown"] for row in rows}
        return {
            "job": job,
            "ideal s": "-" if ideal_s is None else f"{ideal_s:.4g}",
            **{name: "-" if times is None else f"{times:.2f}" for name, times in found.items()},
        }

    title = "slowdown of each job: its mean iteration over the one under ideal"
    return Grid([cells(job) for job in alone], text=("job",), title=title)
