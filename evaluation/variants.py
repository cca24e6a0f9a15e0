"""Value of each decision that Crux takes differently from the paper's text.

One decision at a time is taken as the paper words it, and the plan is played beside Crux's own, on
the same clusters and from the same start times. docs/understand/schedulers.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import numpy as np

from crux_torch import _fluid
from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, json_option, publish, workers_option
from crux_torch.schedule.arrays import Arrays, FloatArray, IntArray, arrays_of
from crux_torch.schedule.model import Memory
from crux_torch.schedule.papers import correction, crux
from crux_torch.schedule.papers.compression import Edges
from crux_torch.schedule.papers.correction import GameJob, bounded_factors
from crux_torch.sim.play import play
from crux_torch.sim.workers import Workers, mapped
from evaluation.beyond import KINDS, Case, single_bursts


class Outcome(NamedTuple):
    """Seconds of the horizon in which each player (first, second) used the link and computed."""

    link_s: tuple[float, float]
    compute_s: tuple[float, float]


def play_game(first: GameJob, second: GameJob, horizon_s: float, *, fresh: bool = False) -> Outcome:
    """Two jobs on one link under strict, preemptive priority.

    Args:
        first: the job with priority.
        second: the other.
        horizon_s: seconds to play_game.
        fresh: both begin an iteration at the start; otherwise each is about to send its first
            burst, as in Figures 11 and 12.
    """
    players = {"first": first, "second": second}
    due_s = {n: 0.0 if fresh else p.compute_s * p.bursts[0][0] for n, p in players.items()}
    begin_s = max(due_s.values())
    # A link of its own beside the common one tells how much of that a player has used.
    engine = _fluid.Engine([("common", 1.0, 0.0), *((name, 1.0, 0.0) for name in players)])
    for level, (name, p) in enumerate(reversed(players.items())):
        engine.add_job(
            name,
            compute_s=p.compute_s,
            bursts=[(at, {"common": link_s, name: link_s}) for at, link_s in p.bursts],
            level=level,
            start_s=begin_s - due_s[name],
        )
    engine.run_until(begin_s)
    link_before_s, before = engine.link_bytes(), engine.results()
    engine.run_until(begin_s + horizon_s)
    link_s, after = engine.link_bytes(), engine.results()
    used = [link_s[name] - link_before_s[name] for name in players]
    computed = [after[name]["compute_s"] - before[name]["compute_s"] for name in players]
    return Outcome((used[0], used[1]), (computed[0], computed[1]))


def factor(reference: GameJob, job: GameJob, horizon_s: float, *, fresh: bool = False) -> float:
    """k_j of ``job`` against the reference job, whose own is 1."""
    a_r, a_j = play_game(reference, job, horizon_s, fresh=fresh).link_s
    b_j, b_r = play_game(job, reference, horizon_s, fresh=fresh).link_s
    return float(bounded_factors(*(np.array([x]) for x in (a_r, a_j, b_r, b_j)))[0])


#: Figures 11 and 12 play three iterations of the longer job.
_ITERATIONS = 3
_RANDOM_START_TIMES = Edges.random_start_times


def _most_bytes(arrays: Arrays, traffic: Any, t_s: FloatArray) -> int:
    """The reference job by bytes of an iteration, not by bytes per second."""
    return int(np.argmax(np.asarray(traffic.sum(axis=1))))


def _short_games(pairs: Sequence[tuple[GameJob, GameJob]], _known: object) -> FloatArray:
    """k_j as in Figures 11 and 12: a few iterations, from the first burst of both."""
    found = np.ones(len(pairs))
    for j, (reference, job) in enumerate(pairs):
        if _link_s(reference) > 0 and _link_s(job) > 0:
            longest_s = max(_period_s(reference), _period_s(job))
            found[j] = factor(reference, job, _ITERATIONS * longest_s)
    return found


def _link_s(player: GameJob) -> float:
    return sum(link_s for _, link_s in player.bursts)


def _period_s(player: GameJob) -> float:
    end_s = 0.0
    for at, link_s in player.bursts:
        end_s = max(end_s, at * player.compute_s) + link_s
    return max(end_s, player.compute_s)


def _breadth_first(edges: Edges, depth: IntArray, count: int, seed: int) -> FloatArray:
    """Start times of ``count`` breadth-first orders: each is the first column of a draw."""
    draws = [_RANDOM_START_TIMES(edges, depth, 1, seed * count + i) for i in range(count)]
    return np.concatenate(draws, axis=1)


#: For each variant, what takes the place of which attribute of which module.
VARIANTS: Mapping[str, Sequence[tuple[object, str, object]]] = {
    "reference job by bytes of an iteration": [(crux, "reference_job", _most_bytes)],
    "k from three iterations of one start": [(crux, "correction_factors", _short_games)],
    "k without bounds": [(correction, "K_MIN", 1e-9), (correction, "K_MAX", 1e9)],
    "breadth-first orders only": [(Edges, "random_start_times", _breadth_first)],
    "one burst an iteration": [(crux, "arrays_of", lambda c, _: arrays_of(single_bursts(c)))],
}


def _measured(kind: str, seed: int, horizon_s: float) -> list[dict[str, Any]]:
    return list(measure(KINDS[kind](seed), horizon_s))


def measure(case: Case, horizon_s: float) -> Iterator[dict[str, Any]]:
    """One row for each variant: GPU utilisation over that of Crux as it is."""
    base = _utilization(case, horizon_s, [])
    for name, patches in VARIANTS.items():
        yield {
            "case": case.kind,
            "seed": case.seed,
            "variant": name,
            "ratio": _utilization(case, horizon_s, patches) / base,
        }


def _utilization(
    case: Case, horizon_s: float, patches: Sequence[tuple[object, str, object]]
) -> float:
    with ExitStack() as stack:
        for where, name, what in patches:
            stack.enter_context(mock.patch.object(where, name, what))
        options = replace(case.options, memory=Memory())
        decision = crux.crux_paper(case.cluster, options)
    return play(case.cluster, decision, horizon_s, start_s=case.start_s).gpu_utilization


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean change of the utilisation in per cent, and the share of clusters that change."""
    kinds = list(dict.fromkeys(row["case"] for row in rows))
    lines = ["| as the paper words it | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for name in VARIANTS:
        cells = []
        for kind in kinds:
            ratio = np.array(
                [r["ratio"] for r in rows if (r["case"], r["variant"]) == (kind, name)]
            )
            changed = int((np.abs(ratio - 1.0) > 1e-3).sum())
            cells.append(f"{100 * (ratio.mean() - 1):+.2f}% ({changed} of {len(ratio)})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--small", type=click.IntRange(0), default=200, show_default=True)
@click.option("--testbed", type=click.IntRange(0), default=20, show_default=True)
@click.option("--clos", type=click.IntRange(0), default=3, show_default=True)
@click.option("--horizon", "horizon_s", type=click.FloatRange(1.0), default=120.0)
@workers_option
@json_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write variants.json and variants.txt to this folder.",
)
def variants(
    small: int,
    testbed: int,
    clos: int,
    horizon_s: float,
    workers: Workers,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """Take one decision at a time as the paper words it, and compare GPU utilisation."""
    counts = {"small": small, "testbed": testbed, "clos": clos}
    tasks = [(kind, seed, horizon_s) for kind, count in counts.items() for seed in range(count)]
    found = tracked(mapped(_measured, tasks, workers), "clusters", len(tasks))
    rows = [row for of_cluster in found for row in of_cluster]
    result = Result("variants", {"cases": counts, "horizon_s": horizon_s}, rows)
    publish(result, table(rows), json_path, out)
