"""What each decision that Crux takes differently from the paper's text is worth.

One decision at a time is taken as the paper words it, and the plan is played beside Crux's own, on
the same clusters and from the same start times. docs/schedulers.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np

from crux_torch.schedule import correction, crux
from crux_torch.schedule.arrays import Arrays, FloatArray, IntArray, arrays_of
from crux_torch.schedule.contention_dag import Edges
from crux_torch.schedule.correction import GameJob
from crux_torch.sim.play import play
from evaluation.beyond import Case
from evaluation.paper_game import factor
from evaluation.single_bursts import single_bursts

#: Figures 11 and 12 play three iterations of the longer job.
_ITERATIONS = 3
_RANDOM_START_TIMES = Edges.random_start_times


def _most_bytes(arrays: Arrays, traffic: Any, t_s: FloatArray) -> int:
    """The reference job by bytes of an iteration, not by bytes per second."""
    return int(np.argmax(np.asarray(traffic.sum(axis=1))))


def _short_games(reference: GameJob, jobs: Sequence[GameJob]) -> FloatArray:
    """k_j as in Figures 11 and 12: a few iterations, from the first burst of both."""
    found = np.ones(len(jobs))
    for j, job in enumerate(jobs):
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
    "one burst an iteration": [(crux, "arrays_of", lambda c: arrays_of(single_bursts(c)))],
}


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
        correction._found.clear()
        stack.callback(correction._found.clear)
        for where, name, what in patches:
            stack.enter_context(mock.patch.object(where, name, what))
        decision = crux.crux_paper(case.cluster, case.options)
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
