"""``crux sim advise``: who slows a job down, and what each policy would change."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from crux_torch import _fluid
from crux_torch.cli.results import json_option, put_json, write_text
from crux_torch.cli.sim_options import names_option, scenario_argument
from crux_torch.errors import CruxError
from crux_torch.report.json_text import json_text
from crux_torch.report.tables import Grid, console
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.scheduler import LIVE, SCHEDULERS
from crux_torch.sim.advise import JobAdvice, advise
from crux_torch.sim.scenario import cluster_of, read_scenario

#: Letters in a line of the page.
HTML_WIDTH = 100


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
    tables = [_table(name, advice) for name, advice in found.items()]
    if html_path is not None:
        page = Console(record=True, file=io.StringIO(), width=HTML_WIDTH)
        for table in tables:
            table.print(page)
        write_text(html_path, page.export_html())
    jobs = {name: asdict(advice) for name, advice in found.items()}
    settings = {"file": file.name, "levels": levels}
    told = {"benchmark": "advise", "settings": settings, "jobs": jobs}
    if not put_json(json_path, json_text(told)):
        for table in tables:
            table.print(console())


def _table(name: str, advice: JobAdvice) -> Grid:
    now_s = advice.iteration_s
    title = f"{name}: {'no iteration ends' if now_s is None else f'{now_s:.4f} s an iteration'}"
    rows = []

    def row(what: str, then_s: float | None) -> None:
        known = now_s is not None and then_s is not None
        change = f"{then_s / now_s - 1:+.1%}" if known else "-"  # type: ignore[operator]
        shown = "-" if then_s is None else f"{then_s:.4f}"
        rows.append({"if": what, "iteration s": shown, "change": change})

    row("alone", advice.alone_s)
    # The one that costs most comes first.
    for rival, then_s in sorted(advice.without_s.items(), key=lambda r: (r[1] is None, r[1] or 0)):
        row(f"without {rival}", then_s)
    for scheduler, then_s in advice.under_s.items():
        row(f"under {scheduler}", then_s)
    return Grid(rows, text=("if",), title=title)
