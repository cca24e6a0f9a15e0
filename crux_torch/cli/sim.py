"""``crux sim``: the simulator's commands."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from crux_torch.cli.results import json_option, put_json
from crux_torch.cli.sim_advise import advise_command
from crux_torch.cli.sim_compare import compare
from crux_torch.cli.sim_import import import_command
from crux_torch.cli.sim_options import scenario_argument
from crux_torch.cli.sim_trace import trace
from crux_torch.report.json_text import json_text
from crux_torch.report.tables import Grid, console
from crux_torch.sim.play import Report, run_scenario
from crux_torch.sim.scenario import Scenario, ScenarioError, read_scenario


@click.group()
def sim() -> None:
    """Simulate jobs on a network under Crux and other schedulers."""


sim.add_command(advise_command)
sim.add_command(compare)
sim.add_command(import_command)
sim.add_command(trace)


@sim.command()
@scenario_argument
@json_option
@click.option(
    "--skip-repeats/--no-skip-repeats",
    default=True,
    show_default=True,
    help="Count repetitions of the same state instead of playing them.",
)
@click.option(
    "--repeat-tolerance",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=1e-9,
    show_default=True,
    help="Two states count as the same if they differ by at most this share of the period.",
)
def run(file: Path, json_path: Path | None, skip_repeats: bool, repeat_tolerance: float) -> None:
    """Play the scenario in FILE to its horizon."""
    try:
        scenario = read_scenario(file)
    except ScenarioError as error:
        raise click.ClickException(str(error)) from None
    try:
        report = run_scenario(
            scenario, skip_repeats=skip_repeats, repeat_tolerance=repeat_tolerance
        )
    except ScenarioError as error:
        raise click.ClickException(f"{file}: {error}") from None
    if not put_json(json_path, json_text(asdict(report))):
        _table(scenario, report).print(console())


def _table(scenario: Scenario, report: Report) -> Grid:
    rows = []
    for name, job in report.jobs.items():
        spec, mean_s = scenario.jobs[name], job.mean_iteration_s
        rows.append(
            {
                "job": name,
                "GPUs": f"{spec.gpus:g}",
                "level": str(spec.level),
                "iterations": str(job.completed),
                "compute s": f"{job.compute_s:.3f}",
                "comm s": f"{job.comm_s:.3f}",
                "iteration s": "-" if mean_s is None else f"{mean_s:.4f}",
            }
        )
    title = f"{report.horizon_s:g} s, GPU utilization {report.gpu_utilization:.1%}"
    return Grid(rows, text=("job",), title=title)
