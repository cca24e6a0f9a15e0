"""CASSINI's Figures 11 to 16 (NSDI '24, §5.2 to §5.6): Themis and Pollux alone and with CASSINI.

:mod:`evaluation.cassini_jobs` has the assumptions about jobs and network,
:mod:`evaluation.cassini_shares` those about Themis and Pollux. Further ones:

- **Poisson traces** (Figures 11, 12): seed by seed with a load of 80% to 100%. Figure 11 trains all
  models, data parallel but for DLRM; Figure 12 trains GPTs and DLRM in parts.
- **Dynamic traces** (Figures 13, 14, 16): the jobs that are there are drawn, those that arrive are
  the paper's. Counted are ``WATCHED_S`` seconds from the arrival on.
- **Placement**: Themis and Pollux take the GPUs that are nearest to each other, as HiveD does.
  CASSINI takes the most compatible of up to ten choices that are as near. Whoever wins workers is
  placed anew. *Random* shares out as Themis does, and *ideal* gives each job a network of its own.
- **ECN marks** need queues, which the fluid engine does not have. *Contended bytes* stand for them:
  those that a job sends on a link while the jobs that send there could, alone, fill more than it.
- **Figure 15** draws a snapshot of Table 2 under the middle one of the demands and periods that
  give the paper's score (:mod:`evaluation.snapshots`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import numpy as np

from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, json_option, publish, workers_option
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.schedule.papers.cassini import cassini as cassini_of
from crux_torch.schedule.papers.cassini_grid import families
from crux_torch.sim.course import Watch, change
from crux_torch.sim.placement import Placer
from crux_torch.sim.play import play
from crux_torch.sim.workers import Workers, mapped
from evaluation.cassini_jobs import (
    COMPUTE,
    DYNAMIC,
    MODEL_PARALLEL,
    TABLE_3,
    StudyJob,
    dynamic,
    placer_of,
    poisson,
    testbed,
)
from evaluation.cassini_play import SCHEMES, Outcome, Run
from evaluation.snapshots import SNAPSHOTS, Snapshot, cluster_of, rotations

#: Load of the Poisson traces, seed by seed.
LOADS = (0.8, 0.85, 0.9, 0.95, 1.0)
#: Seconds until jobs arrive in a dynamic trace, seconds counted from then on, and of one measure.
ARRIVE_S, WATCHED_S, TICK_S = 5.0, 30.0, 1e-3
#: The cells by figure and computation.
CELLS = (
    *((11, compute) for compute in COMPUTE),
    *((figure, COMPUTE[0]) for figure in (12, 13, 14, 16)),
)
#: Gains of CASSINI over Themis and Pollux, mean and 99th percentile, that the paper reports.
PAPER: dict[tuple[int, str], tuple[float, float]] = {
    (11, "themis"): (1.6, 1.8),
    (12, "themis"): (1.2, 1.6),
    (13, "themis"): (1.5, 2.2),
    (13, "pollux"): (1.6, 2.5),
    (14, "themis"): (1.2, 1.6),
    (16, "themis"): (1.4, 1.9),
}
WITH = {"themis": "th+cassini", "pollux": "po+cassini"}
#: Figure 15: periods played before the three that are drawn, and measures in each of these.
PLAYED, DRAWN, STEPS = 60, 3, 60


def cell(figure: int, compute: str, seed: int, count: int) -> list[dict[str, Any]]:
    """A row for each scheme on one trace; ``count`` is the number of jobs of a Poisson trace."""
    rng = random.Random(f"cassini {figure} {seed}")
    load = LOADS[seed % len(LOADS)] if figure in (11, 12) else None
    placer = placer_of(DYNAMIC[figure].topology() if load is None else testbed())
    how: dict[str, Any] = {}
    if load is None:
        jobs = dynamic(DYNAMIC[figure], ARRIVE_S, rng)
        how = {"tick_s": TICK_S, "until_s": ARRIVE_S + WATCHED_S, "watch_s": ARRIVE_S}
    else:
        kinds = MODEL_PARALLEL if figure == 12 else tuple(TABLE_3)
        jobs = poisson(kinds, compute, count, load, placer, rng)
    about = {"figure": figure, "compute": compute, "seed": seed, "load": load}
    about["fit"] = fit(jobs, placer)
    rows = []
    for name, scheme in SCHEMES.items():
        outcome = Run(jobs, placer, scheme, seed, **how).play()
        rows.append({**about, "scheme": name, **_row(outcome, watched=load is None)})
    return rows


def fit(jobs: Sequence[StudyJob], placer: Placer) -> float:
    """Share of the pairs of jobs that send whose iterations fit one grid of CASSINI's."""
    alone_s = [placer.reference(job.model, job.workers).alone_s for job in jobs if job.workers > 1]
    pairs = [families(np.array(pair)).number for pair in combinations(alone_s, 2)]
    return statistics.mean(float(a == b) for a, b in pairs) if pairs else 0.0


def _row(outcome: Outcome, *, watched: bool) -> dict[str, Any]:
    return {
        **outcome.quantities(),
        "met": outcome.met,
        "shifted": outcome.shifted,
        "sending": outcome.sending,
        "score": outcome.score,
        "moves": outcome.moves,
        "contended_bytes": outcome.marked_per_iteration() if watched else None,
    }


def utilisation(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """Rows of Figure 15: the link's use over time, without and with CASSINI's shifts."""
    fitting = [
        (demand, period_ms)
        for demand, period_ms, rotation in rotations(snapshot)
        if round(rotation.score, 1) == snapshot.score
    ]
    demand, period_ms = fitting[len(fitting) // 2]
    cluster = cluster_of(snapshot, demand, period_ms)
    step_s = period_ms * 1e-3 / STEPS
    time_s = [step_s * (PLAYED * STEPS + i) for i in range(DRAWN * STEPS + 1)]
    for how, decide in (("themis", ecmp), ("th+cassini", cassini_of)):
        watch = Watch(time_s)
        play(cluster, decide(cluster, SchedulerOptions()), time_s[-1], watch=watch)
        used = change(watch.course().link_bytes["link"], np.array(time_s))
        used = used / cluster.capacity_Bps["link"]
        yield {
            "figure": 15,
            "snapshot": snapshot.number,
            "paper_score": snapshot.score,
            "scheme": how,
            "demand": demand,
            "period_s": period_ms * 1e-3,
            "step_s": step_s,
            "mean_used": float(used.mean()),
            "full": float((used > 0.99).mean()),
            "idle": float((used < 0.01).mean()),
            "used": [round(float(u), 3) for u in used],
        }


def gains(rows: Sequence[Mapping[str, Any]], base: str, key: str) -> list[float]:
    """``key`` under a scheduler over that with CASSINI, seed by seed."""
    of = {(row["scheme"], row["seed"]): row[key] for row in rows}
    return [of[base, seed] / of[WITH[base], seed] for _, seed in of if _ == base]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The schemes of each figure, the gains of CASSINI beside the paper's, and contended bytes."""
    lines: list[str] = []
    for figure, compute in CELLS:
        mine = [r for r in rows if r["figure"] == figure and r["compute"] == compute]
        if mine:
            lines += [*_schemes(figure, compute, mine), "", *_gains(figure, mine), ""]
            if mine[0]["contended_bytes"] is not None:
                lines += [*_contended(mine), ""]
    snapshots = [row for row in rows if row["figure"] == 15]
    if snapshots:
        lines.append("Figure 15: shares of the time that the link is full and idle")
        lines.append(
            f"{'snapshot':<9}{'score':>6}{'demand':>8}{'period ms':>11} | "
            f"{'full: together':>15}{'CASSINI':>9} | {'idle: together':>15}{'CASSINI':>9}"
        )
        for plain, shifted in zip(snapshots[::2], snapshots[1::2], strict=True):
            lines.append(
                f"{plain['snapshot']:<9}{plain['paper_score']:>6.1f}{plain['demand']:>8.1f}"
                f"{1e3 * plain['period_s']:>11.0f} | {plain['full']:>15.2f}{shifted['full']:>9.2f}"
                f" | {plain['idle']:>15.2f}{shifted['idle']:>9.2f}"
            )
    return "\n".join(lines) + "\n"


def _schemes(figure: int, compute: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    seeds = len({row["seed"] for row in rows})
    mean = _means([row for row in rows if row["scheme"] == "themis"])
    yield (
        f"Figure {figure}, computation: {compute}, {seeds} seeds; what jobs send takes "
        f"{mean('sending'):.0%} of their time; {mean('fit'):.0%} of pairs fit one grid"
    )
    yield (
        f"  {'scheduler':<11}{'mean s':>8}{'p99 s':>8}{'over alone: mean':>18}{'p99':>7}"
        f"{'share links':>13}{'shifted':>9}{'score':>7}{'moves':>7}"
    )
    for name in SCHEMES:
        mine = [row for row in rows if row["scheme"] == name]
        mean = _means(mine)
        scores = [row["score"] for row in mine if row["score"] is not None]
        score = f"{statistics.mean(scores):.2f}" if scores else "-"
        yield (
            f"  {name:<11}{mean('mean_s'):>8.3f}{mean('p99_s'):>8.3f}"
            f"{mean('mean_slowdown'):>18.3f}{mean('p99_slowdown'):>7.2f}{mean('met'):>13.0%}"
            f"{mean('shifted'):>9.0%}{score:>7}{mean('moves'):>7.0f}"
        )


def _means(rows: Sequence[Mapping[str, Any]]) -> Callable[[str], float]:
    return lambda key: statistics.mean(row[key] for row in rows)


def _gains(figure: int, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    keys = ("mean_s", "p99_s", "mean_slowdown", "p99_slowdown")
    yield f"  {'gain over':<11}" + "".join(f"{key:>22}" for key in keys) + f"{'paper':>12}"
    for base in WITH:
        cells = ""
        for key in keys:
            found = gains(rows, base, key)
            middle = f"{statistics.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            cells += f"{middle:>22}"
        paper = PAPER.get((figure, base))
        yield f"  {base:<11}{cells}{'-' if paper is None else f'{paper[0]}, {paper[1]}':>12}"


def _contended(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"  contended MB an iteration  {''.join(f'{name:>12}' for name in SCHEMES)}"
    kinds = [kind for kind in TABLE_3 if any(kind in row["contended_bytes"] for row in rows)]
    for kind in kinds:
        cells = ""
        for name in SCHEMES:
            found = [
                row["contended_bytes"][kind] / 1e6
                for row in rows
                if row["scheme"] == name and kind in row["contended_bytes"]
            ]
            cells += f"{statistics.mean(found):>12.2f}" if found else f"{'-':>12}"
        yield f"  {kind:<25}  {cells}"


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--jobs",
    "count",
    type=click.IntRange(1),
    default=60,
    show_default=True,
    help="Jobs of a Poisson trace.",
)
@workers_option
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/cassini.{json,txt}.")
def cassini(
    seeds: int, count: int, workers: Workers, json_path: Path | None, out: Path | None
) -> None:
    """Plays CASSINI's traces under Themis and Pollux, alone and with CASSINI (Figures 11 to 16)."""
    cells = [(figure, compute, seed, count) for figure, compute in CELLS for seed in range(seeds)]
    found = tracked(mapped(cell, cells, workers), "traces", len(cells))
    rows = [row for of_cell in found for row in of_cell]
    rows += [row for snapshot in SNAPSHOTS for row in utilisation(snapshot)]
    settings = {"seeds": seeds, "jobs": count, "loads": list(LOADS), "watched_s": WATCHED_S}
    publish(Result("cassini", settings, rows), table(rows), json_path, out)
