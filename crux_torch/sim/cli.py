"""``crux sim``: the simulator's commands."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from crux_torch.sim.commands.compare import compare
from crux_torch.sim.commands.figures import figures
from crux_torch.sim.commands.optimality import optimality
from crux_torch.sim.commands.options import json_option
from crux_torch.sim.commands.testbed import testbed
from crux_torch.sim.commands.trace import trace
from crux_torch.sim.run import Report, run_scenario
from crux_torch.sim.scenario import Scenario, ScenarioError, read_scenario


@click.group()
def sim() -> None:
    """What would Crux do on a cluster, with its jobs?"""


sim.add_command(compare)
sim.add_command(figures)
sim.add_command(optimality)
sim.add_command(testbed)
sim.add_command(trace)


@sim.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
@click.option(
    "--skip-repeats/--no-skip-repeats",
    default=True,
    show_default=True,
    help="Count stretches that provably repeat instead of playing them.",
)
@click.option(
    "--repeat-tolerance",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=1e-9,
    show_default=True,
    help="States are the same within this share of the period.",
)
def run(file: Path, json_path: Path | None, skip_repeats: bool, repeat_tolerance: float) -> None:
    """Play the scenario in FILE to its horizon."""
    try:
        scenario = read_scenario(file)
        report = run_scenario(
            scenario, skip_repeats=skip_repeats, repeat_tolerance=repeat_tolerance
        )
    except ScenarioError as error:
        raise click.ClickException(str(error)) from None
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{json_path}: can't be written: {error}") from None
    Console().print(_table(scenario, report))


def _table(scenario: Scenario, report: Report) -> Table:
    table = Table(
        title=f"{report.horizon_s:g} s, GPU utilization {report.gpu_utilization:.1%}",
        title_justify="left",
    )
    table.add_column("job")
    for column in ("GPUs", "level", "iterations", "compute s", "comm s", "mean iteration s"):
        table.add_column(column, justify="right")
    for name, job in report.jobs.items():
        spec = scenario.jobs[name]
        mean = job.mean_iteration_s
        table.add_row(
            name,
            f"{spec.gpus:g}",
            str(spec.level),
            str(job.completed),
            f"{job.compute_s:.3f}",
            f"{job.comm_s:.3f}",
            "-" if mean is None else f"{mean:.4f}",
        )
    return table
