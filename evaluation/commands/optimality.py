"""``python -m evaluation optimality``: each mechanism beside the optimum of small cases (§4.4)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from crux_torch.cli.results import Result, json_option, publish
from crux_torch.cli.sim_options import threads_option
from crux_torch.report.tables import Grid
from crux_torch.schedule.policy import BRIEF, FEW_WORK
from evaluation.optimality import (
    JUDGED,
    LEVELS,
    MECHANISMS,
    NEAR,
    SCREENED,
    Outcome,
    judge,
    summarise,
)
from evaluation.small_case import AGGREGATIONS, HOSTS, JOBS, RING_MODELS, TORS, draw_case

TITLES = {
    "paths": "Path selection (§4.1)",
    "capped": "Path selection where no job may be slowed down beyond the default's cap",
    "priority": "Priority assignment (§4.2)",
    "compression": "Priority compression (§4.3)",
}


@click.command()
@click.option("--cases", type=click.IntRange(1), default=1500, show_default=True)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of case 1."
)
@threads_option
@json_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write NAME.json and NAME.txt to this folder.",
)
@click.option("--name", default="optimality", show_default=True, help="Name of the result.")
def optimality(
    cases: int, seed: int, threads: int, json_path: Path | None, out: Path | None, name: str
) -> None:
    """Small cases whose optimum is enumerated, as in the paper's §4.4 and Figure 16."""
    # The first case would pay for what is loaded or made on first use.
    judge(draw_case(seed), threads=threads)
    with _progress() as progress:
        seeds = progress.track(range(seed, seed + cases), description="cases")
        outcomes = [judge(draw_case(s), threads=threads) for s in seeds]
    result = Result(name, _settings(cases, seed, outcomes), summarise(outcomes))
    text = _text(result)
    publish(result, text, json_path, out)


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _settings(cases: int, seed: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "cases": cases,
        "seed": seed,
        "jobs": JOBS,
        "hosts": [HOSTS[0], HOSTS[-1]],
        "tors": [TORS[0], TORS[-1]],
        "aggregations": AGGREGATIONS,
        "levels": len(LEVELS),
        "models": [model.name for model in RING_MODELS],
        "screened": asdict(SCREENED),
        "near": NEAR,
        "judged": asdict(JUDGED),
        "rehearsed": asdict(BRIEF),
        "rehearsal_work": FEW_WORK,
        "optimum_mean": float(np.mean([outcome.optimum for outcome in outcomes])),
        "plays": sum(outcome.plays for outcome in outcomes),
    }


def _text(result: Result) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=120, color_system=None)
    settings = result.settings
    console.print(
        f"{settings['cases']} cases of {settings['jobs']} jobs and {settings['levels']} levels: "
        f"share of the optimal GPU utilisation, which is {settings['optimum_mean']:.1%} on average"
    )
    for mechanism in MECHANISMS:
        _table([row for row in result.rows if row["mechanism"] == mechanism]).print(console)
    return buffer.getvalue()


def _table(rows: Sequence[Any]) -> Grid:
    shown = [
        {
            "scheduler": row["scheduler"],
            "mean": f"{row['share_mean']:.2%}",
            "paper": "" if row["paper_share"] is None else f"{row['paper_share']:.2%}",
            "5th percentile": f"{row['share_p5']:.2%}",
            "worst": f"{row['share_min']:.2%}",
            "decision ms": f"{row['decision_ms']['median']:.2f}",
            "CPU ms": f"{row['decision_cpu_ms']['median']:.2f}",
            "CPU p95": f"{row['decision_cpu_ms']['p95']:.2f}",
        }
        for row in rows
    ]
    return Grid(shown, text=("scheduler",), title=TITLES[rows[0]["mechanism"]])
