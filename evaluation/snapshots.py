"""CASSINI's snapshots (NSDI '24, Table 2): jobs on one link of 50 Gbit/s, with and without shifts.

The paper has each job's mean communication time under Themis and with CASSINI, the compatibility
score and the shifts. It has neither the jobs' periods nor how much of the link they ask for while
they send. Both are assumptions here: every pair of a grid is played, and what gives the paper's
score, to the digit that it prints, counts as consistent with it.

All jobs of a snapshot have one period, compute first, and then send one burst. Alone, the burst
takes the shortest time that the table has for the model with that batch.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.results import Result, json_option, publish
from crux_torch.network.builders import GBPS
from crux_torch.schedule.model import Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.schedule.papers.cassini import cassini
from crux_torch.schedule.papers.cassini_grid import Rotation, best_rotation, circle
from crux_torch.schedule.papers.mltcp import mltcp
from crux_torch.sim.play import play

LINK_BPS = 50 * GBPS
#: Angles of a circle: 5 degrees each, as in the paper (§5.1).
ANGLES = 72
#: Shares of the link that a job asks for while it sends: from 0.5 down, two never meet.
DEMANDS = (0.6, 0.7, 0.8, 0.9, 1.0)
#: Periods, as multiples of the snapshot's longest burst.
PERIODS = tuple(1 + step / 10 for step in range(1, 26))
#: What jobs are played under: started together, at random, as CASSINI decides, and under MLTCP,
#: which nobody coordinates, from the same random starts.
HOWS = ("together", "random", "cassini", "mltcp")
#: Iterations that are played, and draws of start times that a mean is taken over.
ITERATIONS, DRAWS = 300, 8


@dataclass(frozen=True, slots=True)
class Row:
    """One job of Table 2; times in ms.

    ``alone`` is what its communication takes alone, as far as the paper's figures tell.
    """

    model: str
    alone: float
    with_cassini: float
    themis: float
    shift: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs that share the link, and the score that the paper prints."""

    number: int
    score: float
    rows: tuple[Row, ...]


#: VGG19 and WideResNet101 of snapshot 5 have the batches of snapshots 2 and 1.
SNAPSHOTS = (
    Snapshot(1, 1.0, (Row("WideResNet101", 138, 138, 205, 0), Row("VGG16", 148, 148, 199, 150))),
    Snapshot(
        2,
        1.0,
        (
            Row("VGG19", 168, 168, 220, 0),
            Row("VGG16", 163, 163, 220, 158),
            Row("ResNet50", 55, 59, 55, 46),
        ),
    ),
    Snapshot(3, 0.9, (Row("VGG19", 166, 166, 176, 0), Row("VGG16", 168, 168, 177, 100))),
    Snapshot(4, 0.8, (Row("RoBERTa", 164, 164, 210, 0), Row("RoBERTa", 164, 180, 208, 60))),
    Snapshot(
        5,
        0.6,
        (
            Row("BERT", 209, 209, 213, 0),
            Row("VGG19", 168, 294, 292, 42),
            Row("WideResNet101", 138, 265, 266, 191),
        ),
    ),
)


def rows_of(
    snapshots: Sequence[Snapshot] = SNAPSHOTS, hows: Sequence[str] = HOWS
) -> Iterator[dict[str, Any]]:
    """A row for each snapshot, demand and period; jobs are played where the score is the paper's.

    ``comm_ms`` has the mean communication of each job under each of ``hows``. Waiting for its grid
    counts as communication.
    """
    for snapshot in snapshots:
        for demand, period_ms, rotation in rotations(snapshot):
            found: dict[str, Any] = {
                "snapshot": snapshot.number,
                "demand": demand,
                "period_ms": period_ms,
                "score": rotation.score,
                "shift_ms": [a * period_ms / ANGLES for a in rotation.angles],
                "consistent": round(rotation.score, 1) == snapshot.score,
            }
            if found["consistent"]:
                cluster = cluster_of(snapshot, demand, period_ms)
                found |= _played(cluster, period_ms, hows)
            yield found


def rotations(snapshot: Snapshot) -> Iterator[tuple[float, float, Rotation]]:
    """The best rotation under each demand and period in ms."""
    longest = max(row.alone for row in snapshot.rows)
    for demand, times in product(DEMANDS, PERIODS):
        period_ms = longest * times
        bursts = [[(period_ms - row.alone, period_ms)] for row in snapshot.rows]
        circles = [circle(burst, period_ms, ANGLES) * demand for burst in bursts]
        yield demand, period_ms, best_rotation(circles)


def cluster_of(snapshot: Snapshot, demand: float, period_ms: float) -> Cluster:
    """The jobs of ``snapshot``: each sends at ``demand`` times the link's rate."""
    capacity_Bps = {"link": LINK_BPS}
    jobs = []
    for i, row in enumerate(snapshot.rows):
        capacity_Bps[f"nic{i}"] = demand * LINK_BPS
        sent = row.alone * 1e-3 * demand * LINK_BPS
        compute_s = (period_ms - row.alone) * 1e-3
        flow = Flow(sent, (("link", f"nic{i}"),))
        jobs.append(Job(f"{i} {row.model}", 8, 1e12, compute_s, (flow,)))
    return Cluster(capacity_Bps, tuple(jobs))


def _played(cluster: Cluster, period_ms: float, hows: Sequence[str]) -> dict[str, Any]:
    horizon_s = ITERATIONS * period_ms * 1e-3
    options = SchedulerOptions()
    plain, shifted = ecmp(cluster, options), cassini(cluster, options)
    names = [job.name for job in cluster.jobs]

    def comm_ms(decision: Any, start_s: Mapping[str, float] | None = None) -> list[float]:
        report = play(cluster, decision, horizon_s, start_s=start_s)
        mean_s = {name: found.mean_iteration_s or math.inf for name, found in report.jobs.items()}
        return [1e3 * (mean_s[job.name] - job.compute_s) for job in cluster.jobs]

    rng = random.Random(f"snapshot {period_ms}")
    starts = [{n: rng.random() * period_ms * 1e-3 for n in names} for _ in range(DRAWS)]

    def at_random_ms(decision: Any) -> list[float]:
        drawn = [comm_ms(decision, start_s) for start_s in starts]
        return [statistics.mean(times) for times in zip(*drawn, strict=True)]

    at_random = at_random_ms(plain)
    played: dict[str, Callable[[], list[float]]] = {
        "together": lambda: comm_ms(plain),
        "random": lambda: at_random,
        # Where nothing is shifted, the jobs start as they would without CASSINI.
        "cassini": lambda: comm_ms(shifted) if shifted.grid_s else at_random,
        "mltcp": lambda: at_random_ms(mltcp(cluster, options)),
    }
    return {"shifted": bool(shifted.grid_s), "comm_ms": {how: played[how]() for how in hows}}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table of the paper's times of each job, and the median, least and most over fitting pairs."""
    lines = [
        "CASSINI's snapshots on one link of 50 Gbit/s: mean communication in ms, over those pairs "
        f"of {len(DEMANDS)} demands and {len(PERIODS)} periods that give the paper's score.",
        "In brackets the least and the most. 'shifted' counts the pairs where CASSINI shifts jobs.",
        "",
        f"{'snapshot':<9}{'score':>6}{'pairs':>7}{'shifted':>9}  {'job':<14}{'paper: Themis':>14}"
        f"{'CASSINI':>9}{'shift':>7} | {'together':>19}{'random':>19}{'CASSINI':>19}{'MLTCP':>19}"
        f"{'shift':>19}",
    ]
    for snapshot in SNAPSHOTS:
        mine = [r for r in rows if r["snapshot"] == snapshot.number and r["consistent"]]
        tried = sum(r["snapshot"] == snapshot.number for r in rows)
        for i, row in enumerate(snapshot.rows):
            head = (
                f"{snapshot.number:<9}{snapshot.score:>6.1f}{f'{len(mine)}/{tried}':>7}"
                f"{sum(r['shifted'] for r in mine):>9}"
                if i == 0
                else " " * 31
            )
            columns = [[r["comm_ms"][how][i] for r in mine] for how in HOWS]
            columns.append([r["shift_ms"][i] for r in mine])
            cells = "".join(f"{_spread(values):>19}" for values in columns)
            lines.append(
                f"{head}  {row.model:<14}{row.themis:>14.0f}{row.with_cassini:>9.0f}"
                f"{row.shift:>7.0f} | {cells}"
            )
    lines += ["", "Each over CASSINI, the mean of a snapshot's jobs:", ""]
    lines.append(
        f"{'snapshot':<9}{'paper: Themis':>14} | {'together':>21}{'random':>21}{'MLTCP':>21}"
    )
    for snapshot in SNAPSHOTS:
        mine = [r for r in rows if r["snapshot"] == snapshot.number and r["consistent"]]
        paper = _ratio([r.themis for r in snapshot.rows], [r.with_cassini for r in snapshot.rows])
        cells = "".join(
            f"{_spread([_ratio(r['comm_ms'][h], r['comm_ms']['cassini']) for r in mine], 2):>21}"
            for h in HOWS
            if h != "cassini"
        )
        lines.append(f"{snapshot.number:<9}{paper:>14.2f} | {cells}")
    return "\n".join(lines) + "\n"


def _ratio(times: Sequence[float], of: Sequence[float]) -> float:
    return statistics.mean(a / b for a, b in zip(times, of, strict=True))


def _spread(values: Sequence[float], digits: int = 0) -> str:
    if not values:
        return "-"
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


@click.command()
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/snapshots.{json,txt}.")
def snapshots(json_path: Path | None, out: Path | None) -> None:
    """Plays the jobs of CASSINI's Table 2 on one link, under every period that fits its scores."""
    rows = list(rows_of())
    settings = {
        "demands": list(DEMANDS),
        "periods": list(PERIODS),
        "iterations": ITERATIONS,
        "draws": DRAWS,
    }
    publish(Result("snapshots", settings, rows), table(rows), json_path, out)
