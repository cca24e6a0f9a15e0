"""``crux sim trace``: weeks of jobs on a whole cluster, under each scheduler."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.plots import plot_option, put_plot
from crux_torch.cli.progress import tracked
from crux_torch.cli.results import STDOUT, Result, json_option, names_option, number, workers_option
from crux_torch.report.tables import Grid, console
from crux_torch.schedule.schedulers import IN_TRACES
from crux_torch.sim.placement import PLACEMENTS, RANKED
from crux_torch.sim.replay import TOPOLOGIES, ReplayOptions, Run, run_rows, settings_of, topology_of
from crux_torch.sim.traces import Workload
from crux_torch.sim.workers import Workers

#: Letters in a line of the file of tables.
FILE_WIDTH = 132
#: A topology, a placement and a scheduler: what one row is about.
Cell = tuple[str, str, str]
Row = dict[str, Any]


@click.command()
@click.option(
    "--trace",
    "kind",
    default=None,
    help="hybrid, generated, lingjun, or a CSV file with the columns "
    "name,model,gpus,submit_s,duration_s.  [default: hybrid with --data, else generated]",
)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of philly.csv.gz and lingjun_job_sizes.csv, or of job.csv and worker.csv.",
)
@click.option(
    "--topology",
    "topologies",
    default="clos",
    help=f"Comma-separated: {', '.join(TOPOLOGIES)}, or topology files.",
)
@names_option("--schedulers", "schedulers", IN_TRACES, "all")
@names_option("--placement", "placements", (*PLACEMENTS, RANKED), "none")
@click.option("--jobs", type=click.IntRange(1), default=5000, help="Jobs that arrive, at most.")
@number("--days", 1, None, 14, "Length of the trace. Later jobs are left out.")
@number("--seed", 0, None, 0, "Seed of everything that is drawn at random.")
@click.option(
    "--iterations-as-one",
    type=click.IntRange(1),
    default=200,
    help="Simulate this many iterations as one that is as long as all of them; 1 is exact.",
)
@click.option("--levels", type=click.IntRange(1), default=8, help="Priority levels.")
@click.option(
    "--max-slowdown",
    type=click.FloatRange(1.0),
    default=3.0,
    help="With crux, levels make a job's mean iteration at most this many times as long as alone.",
)
@click.option(
    "--steady-tolerance",
    type=click.FloatRange(0.0, 0.5),
    default=0.0,
    help="Above 0: extrapolate rates that have settled to within this share.",
)
@click.option(
    "--rings-together", is_flag=True, help="All rings and groups of a job move as one transfer."
)
@click.option(
    "--fixed-durations",
    is_flag=True,
    help="A job leaves after the trace's duration, however far it got; else when its work is done.",
)
@number("--replan replan_s", 0.0, None, 60.0, "Seconds between two plans, at least.")
@workers_option
@json_option
@plot_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write NAME.json and NAME.txt to this folder, again after every row.",
)
@click.option("--name", default="trace", help="Name of the result.")
def trace(
    topologies: str, placements: tuple[str, ...], schedulers: tuple[str, ...], **how: Any
) -> None:
    """Play weeks of arriving jobs on a cluster.

    Prints utilisation, completion times and slowdowns for each scheduler.
    """
    play_rows(list(product(topologies.split(","), placements, schedulers)), **how)


def play_rows(
    cells: Sequence[Cell],
    *,
    kind: str | None,
    data: str | None,
    jobs: int,
    days: int,
    seed: int,
    iterations_as_one: int,
    levels: int,
    max_slowdown: float,
    steady_tolerance: float,
    rings_together: bool,
    fixed_durations: bool,
    replan_s: float,
    workers: Workers,
    json_path: Path | None,
    out: Path | None,
    name: str,
    row_of: Callable[[Row], Row] = lambda row: row,
    columns: Mapping[str, Callable[[Row], str]] | None = None,
    plot_path: Path | None = None,
) -> None:
    """Plays the cells, writes the result files after every one, and prints the tables.

    Args:
        row_of: what becomes of a row before it is written.
        columns: further columns of the tables, after the utilisation: heading and content.
        plot_path: where to draw the rows; None: nowhere.
    """
    if kind is None:
        kind = "hybrid" if data else "generated"
        if not data:
            click.echo("No --data: the trace is generated from the published marginals.", err=True)
    workload = Workload(kind, data, jobs, days, seed)
    options = ReplayOptions(
        levels=tuple(range(levels)),
        max_slowdown=max_slowdown,
        seed=seed,
        replan_s=replan_s,
        grid_s=6 * 3600.0,
        iterations_as_one=iterations_as_one,
        steady_tolerance=steady_tolerance,
        rings_apart=not rings_together,
        fixed_durations=fixed_durations,
    )
    runs = [
        Run(workload, topology, scheduler, replace(options, placement=placement))
        for topology, placement, scheduler in cells
    ]
    rows: list[Row] = []
    loaded = workload.load()
    if loaded.dropped:
        left = ", ".join(f"{count} ({why})" for why, count in loaded.dropped.items())
        click.echo(f"Left out of the trace: {left}.", err=True)
    settings = settings_of(workload, options, loaded)
    for topology in {topology for topology, _, _ in cells} - set(TOPOLOGIES):
        topology_of(topology)
    for row in tracked(run_rows(runs, workers), "rows", len(runs)):
        rows.append(row_of(row))
        result = Result(name, settings, rows)
        result.write(_text(settings, rows, columns or {}, FILE_WIDTH), json_path, out)
    if plot_path is not None:
        from crux_torch.report.page.simulated import trace_charts

        put_plot(plot_path, f"{kind} trace", _tables(rows, columns or {}), trace_charts(rows))
    shown = _text(settings, rows, columns or {}, console().width)
    click.echo(result.to_json() if json_path == STDOUT else shown, nl=False)


def _text(
    settings: dict[str, Any],
    rows: list[Row],
    columns: Mapping[str, Callable[[Row], str]],
    width: int,
) -> str:
    """One table for each network and placement. Gains are over ECMP in the same table."""
    found = settings["trace"]
    wanted = found["mean_gpus_wanted"]
    load = f"that arrive within {found['window_s']:g} s"
    if wanted is not None:
        load = f"in {found['days']} days, which want {wanted:.0f} GPUs on average"
    buffer = io.StringIO()
    to = console(buffer, width)
    to.print(
        f"{found['kind']} trace: {found['jobs']} jobs {load}. It is not the paper's trace: compare "
        "orderings and gaps."
    )
    for table in _tables(rows, columns):
        table.print(to)
    return buffer.getvalue()


def _tables(rows: list[Row], columns: Mapping[str, Callable[[Row], str]]) -> list[Grid]:
    keys = dict.fromkeys((row["topology"], row["placement"]) for row in rows)
    of_key = [[r for r in rows if (r["topology"], r["placement"]) == key] for key in keys]
    return [_table(mine, columns) for mine in of_key]


def _table(rows: list[Row], columns: Mapping[str, Callable[[Row], str]]) -> Grid:
    first = rows[0]
    base = next((row["held_utilization"] for row in rows if row["scheduler"] == "ecmp"), None)

    def gain(row: Row) -> str:
        return f"{row['held_utilization'] / base - 1:+.1%}" if base else "-"

    shown: dict[str, Callable[[Row], str]] = {
        "scheduler": lambda row: row["scheduler"],
        "util.": lambda row: f"{row['gpu_utilization']:.3f}",
        **columns,
        "util. of held": lambda row: f"{row['held_utilization']:.3f}",
        "vs ECMP": gain,
        "network": lambda row: f"{row['network_utilization']:.3f}",
        "JCT mean h": lambda row: f"{row['jct_mean_s'] / 3600:.2f}",
        "p99 h": lambda row: f"{row['jct_p99_s'] / 3600:.1f}",
        "queue h": lambda row: f"{row['queued_mean_s'] / 3600:.2f}",
        "slowdown mean": lambda row: f"{row['slowdown_mean']:.3f}",
        "worst": lambda row: f"{row['slowdown_worst']:.2f}",
        "CPU s": lambda row: f"{row['cpu_s']:.1f}",
        "RSS MiB": lambda row: f"{row['max_rss_MiB']:.0f}",
    }
    title = f"{first['topology']}, {first['gpus']} GPUs, placement {first['placement']}"
    cells = [{heading: cell(row) for heading, cell in shown.items()} for row in rows]
    return Grid(cells, text=("scheduler",), title=title)
