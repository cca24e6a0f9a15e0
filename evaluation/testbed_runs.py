"""Plays the testbed's cases under every scheduler and compares them with plain ECMP."""

from __future__ import annotations

import io
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from crux_torch import _fluid
from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, json_option, names_option, publish, workers_option
from crux_torch.schedule.model import Cluster, Decision, Scheduler, SchedulerOptions
from crux_torch.schedule.papers.crux import alone as without_others
from crux_torch.schedule.schedulers import SCHEDULERS
from crux_torch.sim.catalogue import A100_FLOPS
from crux_torch.sim.collectives import hashed_paths
from crux_torch.sim.play import Report, engine_of, report_of
from crux_torch.sim.workers import Workers, mapped
from evaluation.testbed import CASES, RECIPES, Case, Setup, cluster_of, jobs_of

#: What the others are compared with: "without Crux".
WITHOUT = "ecmp"
#: A case of each figure, that with the most contention.
SENSITIVE_CASES = (
    "GPT-32 + 4 BERT-8",
    "GPT-48 + 2 ResNet-8 + 2 BERT-16",
    "BERT-16 + 4 ResNet-4",
    "ResNet-8 + BERT-24",
)
SENSITIVITY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("batch_scale", (0.25, 0.5, 1.0, 2.0, 4.0)),
    ("tor_aggregation_links", (1, 2, 4)),
    ("nic_Gbps", (100.0, 200.0, 400.0)),
    ("connections", (1, 2, 4, 8)),
    ("rings_apart", (True, False)),
    ("gradient_start", (None, 0.5, 1.0)),
    ("gradient_bytes_per_parameter", (None, 2, 4)),
)


def paths_only(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux's paths without its priorities: what path selection alone is worth."""
    found = SCHEDULERS["crux-paper"](cluster, options)
    lowest = min(options.levels)
    return Decision(path=found.path, level=dict.fromkeys(found.level, lowest))


def alone(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Every job with the network to itself on ECMP's paths, as a job ran alone in the testbed."""
    return replace(SCHEDULERS["ecmp"](cluster, options), isolated=True)


#: Beside the registered ones.
VARIANTS: dict[str, Scheduler] = {"paths-only": paths_only, "alone": alone}


@dataclass(frozen=True, slots=True)
class Draws:
    """Number and length of the plays of each case.

    Attributes:
        count: draws of ECMP's hash and of the jobs' start phases.
        seed: of the first draw.
        horizon_s: seconds simulated of each.
    """

    count: int = 100
    seed: int = 0
    horizon_s: float = 120.0


def scheduler(name: str) -> Scheduler:
    """The scheduler or variant of that name.

    Raises:
        KeyError: there is none.
    """
    return VARIANTS[name] if name in VARIANTS else SCHEDULERS[name]


def evaluate(
    case: Case, schedulers: Sequence[str], draws: Draws, setup: Setup | None = None
) -> list[dict[str, Any]]:
    """One row for each scheduler: utilisation, gain and completion times over all draws.

    Args:
        case: what runs.
        schedulers: names; ``ecmp`` is played whether or not it is among them.
        draws: the same hashes and start phases for every scheduler.
        setup: default: the evaluation's.
    """
    setup = setup or Setup()
    topology = setup.topology()
    jobs = jobs_of(case, topology, setup)
    cluster = cluster_of(jobs, topology)
    seeds = range(draws.seed, draws.seed + draws.count)
    options = [
        SchedulerOptions(
            seed=seed,
            default_path={job.name: hashed_paths(job, topology, seed=seed) for job in jobs},
        )
        for seed in seeds
    ]
    starts = [_phases(cluster, seed) for seed in seeds]
    wanted = list(dict.fromkeys((WITHOUT, *schedulers)))
    reports = {
        name: _play(cluster, [scheduler(name)(cluster, o) for o in options], starts, draws)
        for name in wanted
    }
    return [
        _row(case, cluster, name, reports[name], reports[WITHOUT])
        for name in wanted
        if name in schedulers
    ]


def communication_share(case: Case, setup: Setup | None = None) -> dict[str, float]:
    """Share t_j of an iteration alone of each kind of job, on paths that do not collide."""
    setup = setup or Setup()
    topology = setup.topology()
    found: dict[str, float] = {}
    for job in jobs_of(case, topology, setup):
        mine = without_others(job, topology.capacity_Bps)
        found.setdefault(_kind(job.name), mine.t_s / mine.period_s)
    return found


def changes() -> list[tuple[str, Any, Case]]:
    """Every figure of the setup, each of its values, and every case that is played with it."""
    cases = [c for c in CASES if c.name in SENSITIVE_CASES]
    return [
        (changed, value, case)
        for changed, values in SENSITIVITY
        for value in values
        for case in cases
    ]


def sensitivity(changed: str, value: Any, case: Case, draws: Draws) -> dict[str, Any]:
    """Gain of Crux over ECMP when one figure of the setup is another, everything else equal.

    Args:
        changed: the figure's name in ``Setup``.
        value: the other value.
        case: what runs.
        draws: of it.
    """
    setup = replace(Setup(), **{changed: value})
    rows = evaluate(case, ("crux-paper", "paths-only"), draws, setup)
    row, paths = ({r["scheduler"]: r for r in rows}[n] for n in ("crux-paper", "paths-only"))
    largest = max(case.parts, key=lambda part: part.gpus).kind
    return {
        "changed": changed,
        "value": value,
        "setup": asdict(setup),
        "figure": case.figure,
        "case": case.name,
        "largest_job": largest,
        "communication_share": communication_share(case, setup)[largest],
        "gain_pct": row["gain_pct"],
        "paths_only_gain_pct": paths["gain_pct"],
        "jct_pct": {kind: job["jct_pct"] for kind, job in row["jobs"].items()},
    }


def _phases(cluster: Cluster, seed: int) -> dict[str, float]:
    """Every job starts at a point of its own first iteration."""
    draw = random.Random(f"{seed}: phases")
    return {job.name: draw.random() * job.compute_s for job in cluster.jobs}


def _play(
    cluster: Cluster,
    decisions: Sequence[Decision],
    starts: Sequence[Mapping[str, float]],
    draws: Draws,
) -> list[Report]:
    engines = [engine_of(cluster, d, start_s=s) for d, s in zip(decisions, starts, strict=True)]
    _fluid.run_all(engines, [draws.horizon_s] * len(engines))
    return [report_of(engine, draws.horizon_s) for engine in engines]


def _row(
    case: Case, cluster: Cluster, name: str, reports: Sequence[Report], without: Sequence[Report]
) -> dict[str, Any]:
    kinds: dict[str, list[str]] = {}
    for job in cluster.jobs:
        kinds.setdefault(_kind(job.name), []).append(job.name)
    pairs = list(zip(reports, without, strict=True))
    jobs = {
        kind: {
            "gpus": next(j.gpus for j in cluster.jobs if j.name in names),
            "count": len(names),
            "compute_s": next(j.compute_s for j in cluster.jobs if j.name in names),
            "iteration_s": _spread(_iteration_s(r, n) for r in reports for n in names),
            "jct_pct": _spread(
                100 * (_iteration_s(a, n) / _iteration_s(b, n) - 1) for a, b in pairs for n in names
            ),
        }
        for kind, names in kinds.items()
    }
    return {
        "figure": case.figure,
        "case": case.name,
        "scheduler": name,
        "utilization": _spread(r.gpu_utilization for r in reports),
        "gain_pct": _spread(100 * (a.gpu_utilization / b.gpu_utilization - 1) for a, b in pairs),
        "jobs": jobs,
        "paper": {"gain_pct": case.paper.gain_pct, "jct_pct": case.paper.jct_pct},
    }


def _iteration_s(report: Report, name: str) -> float:
    mean = report.jobs[name].mean_iteration_s
    if mean is None:
        raise ValueError(f"{name} ended no iteration in {report.horizon_s} s: a longer horizon")
    return mean


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    low, high = np.percentile(found, (10, 90))
    return {"median": statistics.median(found), "p10": float(low), "p90": float(high)}


def _kind(name: str) -> str:
    return name.rstrip("0123456789")


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
@workers_option
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
    workers: Workers,
    vary: bool,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """The paper's testbed (Figure 18) with the jobs of Figures 19 to 22."""
    times = Draws(draws, seed, horizon_s)
    settings: dict[str, Any] = {
        "draws": draws,
        "seed": seed,
        "horizon_s": horizon_s,
        "setup": asdict(Setup()),
        "recipes": {kind: asdict(recipe) for kind, recipe in RECIPES.items()},
        "peak_flops": A100_FLOPS,
    }
    if vary:
        tasks = [(*change, times) for change in changes()]
        rows = list(tracked(mapped(sensitivity, tasks, workers), "cases", len(tasks)))
        result = Result("testbed_sensitivity", settings, rows)
        tables: Iterable[Table] = [sensitivity_table(rows)]
    else:
        chosen = [c for c in CASES if not figures or str(c.figure) in figures]
        rows = []
        found = mapped(evaluate, [(case, schedulers, times) for case in chosen], workers)
        for case, played in zip(chosen, tracked(found, "cases", len(chosen)), strict=True):
            share = communication_share(case)
            rows += [{**row, "communication_share": share} for row in played]
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
