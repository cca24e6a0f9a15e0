"""``crux sim trace``: weeks of jobs on a whole cluster, beside Figures 23 and 25."""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from crux_torch.errors import CruxError
from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim.commands.options import json_option, threads_option
from crux_torch.sim.placement import PLACEMENTS
from crux_torch.sim.replay import ReplayOptions
from crux_torch.sim.results import Result, write_result
from crux_torch.sim.trace_study import TOPOLOGIES, Run, Workload, run_rows, settings_of, topology_of

#: Rows of Figure 25 and of the network without contention, which need no other schedulers.
STACKED = ("ecmp", "crux", "ideal")


def _names(value: str, known: list[str]) -> tuple[str, ...]:
    names = tuple(known) if value == "all" else tuple(value.split(","))
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; expected some of {', '.join(known)}")
    return names


def _schedulers(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    return _names(value, list(SCHEDULERS))


def _placements(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    return _names(value, list(PLACEMENTS))


@click.command()
@click.option(
    "--trace",
    "kind",
    default=None,
    help="hybrid, generated, lingjun, or a CSV name,model,gpus,submit_s,duration_s. "
    "Default: hybrid with --data, else generated.",
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
    show_default=True,
    help=f"Comma-separated: {', '.join(TOPOLOGIES)}, or topology files.",
)
@click.option(
    "--schedulers",
    default="all",
    show_default=True,
    callback=_schedulers,
    help="Comma-separated, or all.",
)
@click.option(
    "--placement",
    "placements",
    default="none",
    show_default=True,
    callback=_placements,
    help=f"Comma-separated: {', '.join(PLACEMENTS)}, or all.",
)
@click.option(
    "--paper",
    is_flag=True,
    help="All rows of Figures 23 and 25, and a network without contention; "
    "for --topology and --placement.",
)
@click.option("--jobs", type=click.IntRange(1), default=5000, show_default=True)
@click.option("--days", type=click.IntRange(1), default=14, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--iterations-as-one",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="So many iterations are simulated as one, as long as all of them; 1 is exact.",
)
@click.option(
    "--levels", type=click.IntRange(1), default=8, show_default=True, help="Priority levels."
)
@click.option(
    "--max-slowdown",
    type=click.FloatRange(1.0),
    help="What crux-fair is to guarantee: no job's mean iteration takes so many times its own.",
)
@click.option(
    "--steady-tolerance",
    type=click.FloatRange(0.0, 0.5),
    default=0.0,
    show_default=True,
    help="Above 0: rates that have settled to this share are extrapolated.",
)
@click.option(
    "--replan",
    "replan_s",
    type=click.FloatRange(0.0),
    default=60.0,
    show_default=True,
    help="Least seconds between two plans.",
)
@threads_option
@json_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write NAME.json and NAME.txt to this folder, anew after every row.",
)
@click.option("--name", default="trace", show_default=True, help="Of the result.")
def trace(
    kind: str | None,
    data: str | None,
    topologies: str,
    schedulers: tuple[str, ...],
    placements: tuple[str, ...],
    paper: bool,
    jobs: int,
    days: int,
    seed: int,
    iterations_as_one: int,
    levels: int,
    max_slowdown: float | None,
    steady_tolerance: float,
    replan_s: float,
    threads: int,
    json_path: Path | None,
    out: Path | None,
    name: str,
) -> None:
    """Weeks of jobs on a cluster: utilisation, completion times and slowdowns by scheduler."""
    if kind is None:
        kind = "hybrid" if data else "generated"
        if not data:
            click.echo("No --data: the trace is generated from the published marginals.", err=True)
    workload = Workload(kind, data, jobs, days, seed)

    def run(topology: str, placement: str, scheduler: str) -> Run:
        options = ReplayOptions(
            placement=placement,
            levels=tuple(range(levels)),
            max_slowdown=max_slowdown,
            seed=seed,
            replan_s=replan_s,
            grid_s=6 * 3600.0,
            iterations_as_one=iterations_as_one,
            steady_tolerance=steady_tolerance,
        )
        return Run(workload, topology, scheduler, options)

    cells = list(product(topologies.split(","), placements, schedulers))
    if paper:
        cells = _paper_cells(schedulers)
    runs = [run(*cell) for cell in cells]
    bar = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: list[dict[str, Any]] = []
    try:
        settings = settings_of(workload, runs[0].options, workload.load())
        for topology in {topology for topology, _, _ in cells} - set(TOPOLOGIES):
            topology_of(topology)
        with Progress(*bar, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("rows", total=len(runs))
            for row in run_rows(runs, threads):
                rows.append(row)
                result, text = Result(name, settings, rows), _text(settings, rows)
                if out is not None:
                    write_result(result, text, out)
                if json_path is not None:
                    json_path.write_text(result.to_json(), encoding="utf-8")
                progress.advance(task)
    except (OSError, CruxError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(text, nl=False)


def _paper_cells(schedulers: tuple[str, ...]) -> list[tuple[str, str, str]]:
    stacked = [name for name in STACKED if name in schedulers]
    return [
        *product(("clos", "double-sided"), ("none",), schedulers),
        *product(("clos",), ("muri", "hived"), stacked),
        *product(("non-blocking",), ("none",), stacked),
    ]


def _text(settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """One table for each network and placement; gains are over ECMP in the same table."""
    found = settings["trace"]
    buffer = io.StringIO()
    console = Console(file=buffer, width=132)
    console.print(
        f"{found['kind']} trace: {found['jobs']} jobs in {found['days']} days, which want "
        f"{found['mean_gpus_wanted']:.0f} GPUs on average. It is not the paper's trace: compare "
        "orderings and gaps.",
        highlight=False,
    )
    for key in dict.fromkeys((row["topology"], row["placement"]) for row in rows):
        console.print(_table([row for row in rows if (row["topology"], row["placement"]) == key]))
    return buffer.getvalue()


def _table(rows: list[dict[str, Any]]) -> Table:
    first = rows[0]
    table = Table(
        title=f"{first['topology']}, {first['gpus']} GPUs, placement {first['placement']}",
        title_justify="left",
    )
    table.add_column("scheduler")
    columns = (
        "util.",
        "paper",
        "util. of held",
        "vs ECMP",
        "network",
        "JCT mean h",
        "p99 h",
        "queue h",
        "slowdown mean",
        "worst",
        "CPU s",
        "RSS MiB",
    )
    for column in columns:
        table.add_column(column, justify="right")
    base = next((row["held_utilization"] for row in rows if row["scheduler"] == "ecmp"), None)
    for row in rows:
        paper = row["paper_gpu_utilization"]
        table.add_row(
            row["scheduler"],
            f"{row['gpu_utilization']:.3f}",
            "-" if paper is None else f"{paper:.2f}",
            f"{row['held_utilization']:.3f}",
            "-" if not base else f"{row['held_utilization'] / base - 1:+.1%}",
            f"{row['network_utilization']:.3f}",
            f"{row['jct_mean_s'] / 3600:.2f}",
            f"{row['jct_p99_s'] / 3600:.1f}",
            f"{row['queued_mean_s'] / 3600:.2f}",
            f"{row['slowdown_mean']:.3f}",
            f"{row['slowdown_worst']:.2f}",
            f"{row['cpu_s']:.1f}",
            f"{row['max_rss_MiB']:.0f}",
        )
    return table
