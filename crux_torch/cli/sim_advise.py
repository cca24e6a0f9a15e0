"""``crux sim advise``: who slows a job down, and what each policy would change."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from crux_torch import _fluid
from crux_torch.cli.results import write_text
from crux_torch.cli.sim_options import json_option, names_option, numbers_table, scenario_argument
from crux_torch.errors import CruxError
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.scheduler import LIVE, SCHEDULERS
from crux_torch.sim.advise import JobAdvice, advise
from crux_torch.sim.scenario import cluster_of, read_scenario


@click.command("advise")
@scenario_argument
@names_option("--schedulers", "schedulers", SCHEDULERS, ",".join(LIVE))
@click.option(
    "--levels", default=8, show_default=True, type=click.IntRange(1, 64), help="Priority levels."
)
@json_option
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the tables to this file as a page.",
)
def advise_command(
    file: Path,
    schedulers: tuple[str, ...],
    levels: int,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Say who slows each job in FILE down, and what each scheduler would change.

    The jobs are played on the paths in FILE with fair sharing, again without each other job on
    their links, and under each scheduler. Without a rival, a job is faster by what that rival costs
    it; two rivals may each cost nothing if either alone is enough to hold the job up.
    """
    try:
        scenario = read_scenario(file)
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    try:
        cluster, default_path = cluster_of(scenario)
        found = advise(
            cluster,
            SchedulerOptions(tuple(range(levels)), 0, default_path),
            scenario.horizon_s,
            start_s={name: job.start_s for name, job in scenario.jobs.items()},
            schedulers=schedulers,
            slack_bytes=scenario.slack_bytes,
        )
    except (CruxError, _fluid.SpecError) as error:
        raise click.ClickException(f"{file}: {error}") from None
    if json_path is not None:
        jobs = {name: asdict(advice) for name, advice in found.items()}
        settings = {"file": file.name, "levels": levels}
        text = json.dumps({"benchmark": "advise", "settings": settings, "jobs": jobs}, indent=1)
        write_text(json_path, text + "\n")
    console = Console(record=True)
    for name, advice in found.items():
        console.print(_table(name, advice))
    if html_path is not None:
        write_text(html_path, console.export_html())


def _table(name: str, advice: JobAdvice) -> Table:
    now_s = advice.iteration_s
    title = f"{name}: {'no iteration ends' if now_s is None else f'{now_s:.4f} s an iteration'}"
    table = numbers_table(title, "if", "iteration s", "change")

    def row(what: str, then_s: float | None) -> None:
        known = now_s is not None and then_s is not None
        change = f"{then_s / now_s - 1:+.1%}" if known else "-"  # type: ignore[operator]
        table.add_row(what, "-" if then_s is None else f"{then_s:.4f}", change)

    row("alone", advice.alone_s)
    # The one that costs most comes first.
    for rival, then_s in sorted(advice.without_s.items(), key=lambda r: (r[1] is None, r[1] or 0)):
        row(f"without {rival}", then_s)
    for scheduler, then_s in advice.under_s.items():
        row(f"under {scheduler}", then_s)
    return table
