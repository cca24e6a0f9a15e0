"""Correction factors: what a job's iteration pattern adds to its intensity (paper §4.2).

Two jobs share one link, and whoever has priority sends first. How much link time each gains by
being first tells how their intensities compare: ``k_j = (B_j - A_j) / (A_r - B_r)``. A is the link
time of each when the reference job r goes first, and B when job j does, in link seconds per second.
``docs/understand/schedulers.md`` says where this differs from the paper's game.

With priority a job runs as if alone, so its link time is periodic and known in closed form. The
other one is followed for ``_WARM_UP + _MEASURED`` of its own iterations. The first ones are
dropped, because two jobs of similar periods first fall into step. This is repeated from ``_PHASES``
phases of the first job, evenly spread over its period, and summed over phases.

Neither job gains from being second. A loss below ``_NO_HARM`` of what the job gets alone counts as
none. Factors are kept within ``K_MIN`` to ``K_MAX``: the game is a model of two jobs on one link,
and must not outvote measured intensities that differ by more than an order of magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from crux_torch import _schedule
from crux_torch.schedule.arrays import FloatArray
from crux_torch.schedule.model import Job

K_MIN, K_MAX = 1 / 8, 8.0

#: Bursts of one iteration that the game tells apart; closer ones are merged.
_BURSTS = 4
_PHASES = 8
_WARM_UP = 8
_MEASURED = 24
_NO_HARM = 0.005
#: Share of a period by which two events may differ through rounding alone.
_ROUNDING = 1e-9


class GameJob(NamedTuple):
    """A job in the game: of each burst, the share of compute before it, and its link seconds."""

    compute_s: float
    bursts: tuple[tuple[float, float], ...]


#: Pairs whose factors are remembered.
_REMEMBERED = 1 << 16


def player(job: Job, t_s: float) -> GameJob:
    """``job`` with bursts that share ``t_s`` seconds of the link."""
    return GameJob(job.compute_s, tuple((burst.at, burst.share * t_s) for burst in job.bursts))


def correction_factors(
    pairs: Sequence[tuple[GameJob, GameJob]], known: dict[Any, float] | None = None
) -> FloatArray:
    """k_j of the second of each pair against the first, the reference job, whose own is 1.

    It is 1 for a job without traffic, which meets nobody. Equal pairs are played once; ``known``
    holds those that were played before, and takes up the others.
    """
    known = {} if known is None else known
    merged = {p: _merged(p) for pair in pairs for p in pair}
    pairs = [(merged[r], merged[j]) for r, j in pairs]
    factor = {pair: known.get(pair) for pair in pairs}
    fresh = [pair for pair, k in factor.items() if k is None]
    played = dict.fromkeys(fresh, 1.0)
    if meeting := [(r, j) for r, j in fresh if r.bursts and j.bursts]:
        played |= zip(meeting, _played(meeting), strict=True)
    if len(known) > _REMEMBERED:
        known.clear()
    known.update(played)
    factor |= played
    return np.array([factor[pair] for pair in pairs], np.float64)


def _merged(p: GameJob) -> GameJob:
    """``p`` with the closest of its bursts merged until few enough are left."""
    bursts = [(at, link_s) for at, link_s in p.bursts if link_s > 0]
    while len(bursts) > _BURSTS:
        gaps = [after[0] - before[0] for before, after in pairwise(bursts)]
        b = gaps.index(min(gaps))
        (at, link_s), (later_at, later_s) = bursts[b : b + 2]
        both_s = link_s + later_s
        bursts[b : b + 2] = [((at * link_s + later_at * later_s) / both_s, both_s)]
    return GameJob(p.compute_s, tuple(bursts))


def _played(pairs: Sequence[tuple[GameJob, GameJob]]) -> list[float]:
    """k_j = (B_j - A_j) / (A_r - B_r) of each (reference, job), bounded."""
    number: dict[GameJob, int] = {}
    both = np.array([[number.setdefault(p, len(number)) for p in pair] for pair in pairs])
    bursts = [[(at * p.compute_s, link_s) for at, link_s in p.bursts] for p in number]
    due_s, burst_s = np.array([burst for own in bursts for burst in own]).T
    compute_s = np.array([p.compute_s for p in number])
    second = _schedule.rates_when_second(
        compute_s=compute_s,
        burst_start=np.cumsum([0, *map(len, bursts)]),
        due_s=due_s,
        burst_s=burst_s,
        second=both[:, ::-1].ravel(),
        first=both.ravel(),
        phases=_PHASES,
        warm_up=_WARM_UP,
        measured=_MEASURED,
        rounding=_ROUNDING,
    )
    alone = np.array([_rate_alone(p) for p in number])
    a_j, b_r = second.reshape(-1, 2).T
    a_r, b_j = alone[both].T
    factors: list[float] = bounded_factors(a_r, a_j, b_r, b_j).tolist()
    return factors


def _rate_alone(p: GameJob) -> float:
    """Link seconds per second of a player that nobody holds up."""
    end_s = sent_s = 0.0
    for at, link_s in p.bursts:
        end_s = max(at * p.compute_s, end_s) + link_s
        sent_s += link_s
    return sent_s / max(p.compute_s, end_s)


def bounded_factors(
    a_r: FloatArray, a_j: FloatArray, b_r: FloatArray, b_j: FloatArray
) -> FloatArray:
    """k_j from the link time of both when r goes first (a) and when j does (b)."""
    j_loses, r_loses = b_j - a_j, a_r - b_r
    j_harmed, r_harmed = j_loses > _NO_HARM * b_j, r_loses > _NO_HARM * a_r
    ratio = np.divide(j_loses, r_loses, out=np.ones(len(a_r)), where=j_harmed & r_harmed)
    ratio[j_harmed & ~r_harmed] = K_MAX
    ratio[~j_harmed & r_harmed] = K_MIN
    return np.clip(ratio, K_MIN, K_MAX)
