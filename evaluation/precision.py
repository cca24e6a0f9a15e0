"""CASSINI's angles (NSDI '24, Figure 18): how fine a circle must be, and how long a rotation takes.

The jobs of Table 2 under demands and periods of :mod:`evaluation.snapshots`. Each is rotated on a
circle of few or many angles, and the shifts that follow are scored on a circle of ``FINE`` angles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

from crux_torch.cli.results import Result, json_option, publish
from crux_torch.schedule.papers.cassini_grid import best_rotation, circle, compatibility_score
from evaluation.snapshots import DEMANDS, PERIODS, SNAPSHOTS, Snapshot

#: 40 degrees to 1; the paper takes 72.
ANGLES = (9, 18, 36, 72, 180, 360)
#: Angles of the circle on which shifts are scored; each of ``ANGLES`` divides it.
FINE = 360
#: Loss of score that does not count.
SAME = 1e-3


def rows_of(snapshots: Sequence[Snapshot] = SNAPSHOTS) -> Iterator[dict[str, Any]]:
    """A row for each number of angles, snapshot, demand and period."""
    for snapshot, demand, times in product(snapshots, DEMANDS, PERIODS[:: len(PERIODS) // 8]):
        longest_ms = max(row.alone for row in snapshot.rows)
        period_ms = longest_ms * times
        bursts = [[(period_ms - row.alone, period_ms)] for row in snapshot.rows]
        fine = [circle(burst, period_ms, FINE) * demand for burst in bursts]
        best = best_rotation(fine).score
        for angles in ANGLES:
            circles = [circle(burst, period_ms, angles) * demand for burst in bursts]
            began_s = time.process_time()
            rotation = best_rotation(circles)
            taken_s = time.process_time() - began_s
            turned = [
                np.roll(f, a * FINE // angles) for f, a in zip(fine, rotation.angles, strict=True)
            ]
            yield {
                "snapshot": snapshot.number,
                "demand": demand,
                "period_ms": period_ms,
                "angles": angles,
                "lost": max(0.0, best - compatibility_score(np.sum(turned, axis=0))),
                "cpu_s": taken_s,
            }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each number of angles: cases without loss, and time over that of 72 angles."""
    base_s = statistics.median(row["cpu_s"] for row in rows if row["angles"] == 72)
    lines = [
        f"{'angles':>6}{'degrees':>9}{'no loss':>9}{'mean loss':>11}{'largest':>9}{'time x 72':>11}"
    ]
    for angles in ANGLES:
        mine = [row for row in rows if row["angles"] == angles]
        lost = [row["lost"] for row in mine]
        exact = sum(loss <= SAME for loss in lost) / len(lost)
        taken_s = statistics.median(row["cpu_s"] for row in mine)
        lines.append(
            f"{angles:>6}{360 / angles:>9.1f}{exact:>9.0%}{statistics.mean(lost):>11.4f}"
            f"{max(lost):>9.3f}{taken_s / base_s:>11.2f}"
        )
    cases = len(rows) // len(ANGLES)
    lines.append(f"{cases} cases; loss of compatibility score, up to {SAME} does not count")
    return "\n".join(lines) + "\n"


@click.command()
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/precision.{json,txt}.")
def precision(json_path: Path | None, out: Path | None) -> None:
    """Rotates the jobs of CASSINI's Table 2 on circles of few and of many angles."""
    rows = list(rows_of())
    publish(
        Result("precision", {"angles": list(ANGLES), "fine": FINE}, rows),
        table(rows),
        json_path,
        out,
    )
