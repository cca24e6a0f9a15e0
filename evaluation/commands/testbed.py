"""``python -m evaluation testbed``: Figures 19 to 22 beside the paper's gains."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from crux_torch.cli.results import Result, json_option, publish
from crux_torch.cli.sim_options import names_option, threads_option
from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim.catalogue import A100_FLOPS
from evaluation.testbed import CASES, RECIPES, Setup
from evaluation.testbed_runs import (
    SENSITIVE_CASES,
    SENSITIVITY,
    VARIANTS,
    WITHOUT,
    Draws,
    communication_share,
    evaluate,
    sensitivity,
)

FIGURES = tuple(sorted({case.figure for case in CASES}))
#: The paper's bars, what explains them, and what a job is at best.
SHOWN = ("ecmp", "crux-paper", "paths-only", "crux-pa", "alone", "ideal")


@click.command()
@click.option(
    "--figure",
    "figures",
    type=click.Choice([str(f) for f in FIGURES]),
    multiple=True,
    help="Only this figure's cases; may be given more than once.",
)
@names_option("--schedulers", "schedulers", [*SCHEDULERS, *VARIANTS], ",".join(SHOWN))
@click.option(
    "--draws",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Draws of ECMP's hash and of start phases, the same for every scheduler.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="First seed.")
@click.option(
    "--horizon",
    "horizon_s",
    type=click.FloatRange(10.0),
    default=120.0,
    show_default=True,
    help="Seconds simulated of each draw.",
)
@threads_option
@click.option(
    "--sensitivity",
    "vary",
    is_flag=True,
    help="How the gain depends on batch, overlap, precision, NICs, oversubscription, connections.",
)
@json_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write testbed.json and testbed.txt (testbed_sensitivity.*) to this folder.",
)
def testbed(
    figures: tuple[str, ...],
    schedulers: tuple[str, ...],
    draws: int,
    seed: int,
    horizon_s: float,
    threads: int,
    vary: bool,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """The paper's testbed (Figure 18) with the jobs of Figures 19 to 22."""
    times = Draws(draws, seed, horizon_s, threads)
    settings: dict[str, Any] = {
        "draws": draws,
        "seed": seed,
        "horizon_s": horizon_s,
        "setup": asdict(Setup()),
        "recipes": {kind: asdict(recipe) for kind, recipe in RECIPES.items()},
        "peak_flops": A100_FLOPS,
    }
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if vary:
            count = len(SENSITIVE_CASES) * sum(len(values) for _, values in SENSITIVITY)
            task = progress.add_task("cases", total=count)
            rows = list(sensitivity(times, lambda: progress.advance(task)))
            result = Result("testbed_sensitivity", settings, rows)
            tables: Iterable[Table] = [sensitivity_table(rows)]
        else:
            chosen = [c for c in CASES if not figures or str(c.figure) in figures]
            rows = []
            for case in progress.track(chosen, description="cases"):
                share = communication_share(case)
                for row in evaluate(case, schedulers, times):
                    rows.append({**row, "communication_share": share})
            result = Result("testbed", {**settings, "schedulers": schedulers}, rows)
            tables = [figure_table(rows, f) for f in FIGURES if any(r["figure"] == f for r in rows)]
    text = _text(tables)
    publish(result, text, json_path, out)


def figure_table(rows: list[dict[str, Any]], figure: int) -> Table:
    """The rows of one figure: medians over all draws, 10th and 90th percentile of the gain."""
    mine = [row for row in rows if row["figure"] == figure]
    paper = mine[0]["paper"]
    kinds = list(dict.fromkeys(kind for row in mine for kind in row["jobs"]))
    said = ", ".join(f"{kind} JCT {_range(paper['jct_pct'].get(kind))}" for kind in kinds)
    table = Table(
        title=f"Figure {figure}; the paper's Crux: utilisation {_range(paper['gain_pct'])}, {said}",
        title_justify="left",
    )
    table.add_column("case")
    table.add_column("scheduler")
    for name in ("GPU utilisation", "gain %", "p10..p90", *(f"{k} JCT %" for k in kinds)):
        table.add_column(name, justify="right")
    last = None
    for row in mine:
        if last not in (None, row["case"]):
            table.add_section()
        gain = row["gain_pct"]
        plain = row["scheduler"] == WITHOUT
        table.add_row(
            row["case"] if row["case"] != last else "",
            row["scheduler"],
            f"{row['utilization']['median']:.3f}",
            "" if plain else f"{gain['median']:+.1f}",
            "" if plain else f"{gain['p10']:+.1f}..{gain['p90']:+.1f}",
            *("" if plain else f"{row['jobs'][k]['jct_pct']['median']:+.1f}" for k in kinds),
        )
        last = row["case"]
    return table


def sensitivity_table(rows: list[dict[str, Any]]) -> Table:
    """Gain of Crux for each changed figure; the communication share is the largest job's."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    table = Table(
        title="Gain of Crux over ECMP in % (of its paths alone in brackets); communication's share "
        "of an iteration of the job with the most GPUs",
        title_justify="left",
    )
    table.add_column("changed")
    table.add_column("value", justify="right")
    for case in cases:
        table.add_column(case, justify="right")
    by_place: dict[tuple[str, Any], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_place.setdefault((row["changed"], row["value"]), {})[row["case"]] = row
    last = None
    for (changed, value), found in by_place.items():
        if last not in (None, changed):
            table.add_section()
        cells = []
        for case in cases:
            row = found[case]
            cells.append(
                f"{row['gain_pct']['median']:+.1f} ({row['paths_only_gain_pct']['median']:+.1f}), "
                f"{row['communication_share']:.0%}"
            )
        shown = (
            "recipe" if value is None else str(value) if isinstance(value, bool) else f"{value:g}"
        )
        table.add_row(changed if changed != last else "", shown, *cells)
        last = changed
    return table


def _range(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    low, high = values
    return f"{low:+g}%" if low == high else f"{low:+g}..{high:+g}%"


def _text(tables: Iterable[Table]) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=150, color_system=None)
    for table in tables:
        console.print(table)
    return buffer.getvalue()
