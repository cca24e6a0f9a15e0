"""Correction factors: what a job's iteration pattern adds to its intensity (paper §4.2).

Two jobs share one link, and whoever has priority sends first. How much link time each gains by
being first tells how their intensities compare: ``k_j = (B_j - A_j) / (A_r - B_r)``. A is the link
time of each when the reference job r goes first, and B when job j does, in link seconds per second.
``docs/schedulers.md`` says where this differs from the paper's game.

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
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np

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
    """A job as the game sees it.

    ``bursts`` are sent in order: the share of compute after which one may start, its link seconds.
    """

    compute_s: float
    bursts: tuple[tuple[float, float], ...]


#: Factors that were found: decisions follow each other closely, and most of their pairs are those
#: of the one before. It is emptied when it holds ``_REMEMBERED`` pairs.
_found: dict[tuple[GameJob, GameJob], float] = {}
_REMEMBERED = 1 << 16


def player(job: Job, t_s: float) -> GameJob:
    """``job`` as a player whose bursts share ``t_s`` seconds of the link."""
    return GameJob(job.compute_s, tuple((burst.at, burst.share * t_s) for burst in job.bursts))


def correction_factors(reference: GameJob, jobs: Sequence[GameJob]) -> FloatArray:
    """k_j of every one of ``jobs`` against the reference job, whose own is 1.

    It is 1 for a job without traffic, which meets nobody.
    """
    return pair_factors([(reference, job) for job in jobs])


def pair_factors(players: Sequence[tuple[GameJob, GameJob]]) -> FloatArray:
    """The factor of each (reference, job); equal pairs are played once, and then remembered."""
    merged = {p: _merged(p) for pair in players for p in pair}
    pairs = [(merged[r], merged[j]) for r, j in players]
    factor = {pair: _found.get(pair) for pair in pairs}
    # Arrays are as wide as the most bursts in them: pairs of equal counts are played together.
    fresh: dict[tuple[int, int], list[tuple[GameJob, GameJob]]] = {}
    for (r, j), known in factor.items():
        if known is None:
            fresh.setdefault((len(r.bursts), len(j.bursts)), []).append((r, j))
    if len(_found) > _REMEMBERED:
        _found.clear()
    for (of_r, of_j), group in fresh.items():
        values = _played(group).tolist() if of_r and of_j else repeat(1.0)
        factor.update(played := dict(zip(group, values, strict=False)))
        _found.update(played)
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


def _played(pairs: Sequence[tuple[GameJob, GameJob]]) -> FloatArray:
    """k_j = (B_j - A_j) / (A_r - B_r) of each (reference, job), bounded."""
    rs, js = _Players([r for r, _ in pairs]), _Players([j for _, j in pairs])
    a_r, a_j = rs.link_s / rs.period_s, _rate_when_second(js, first=rs)
    b_j, b_r = js.link_s / js.period_s, _rate_when_second(rs, first=js)
    return bounded_factors(a_r, a_j, b_r, b_j)


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


class _Players:
    """Some players of one number of bursts as arrays, a row each."""

    def __init__(self, players: Sequence[GameJob]) -> None:
        self.compute_s = np.array([p.compute_s for p in players])
        # Bursts and windows are indexed first: each is one array over players.
        self.due_s = np.array([[at * p.compute_s for at, _ in p.bursts] for p in players]).T
        self.burst_s = np.array([[link_s for _, link_s in p.bursts] for p in players]).T
        start_s = np.empty_like(self.due_s)
        end_s = np.zeros(len(players))
        for b, (due_s, burst_s) in enumerate(zip(self.due_s, self.burst_s, strict=True)):
            start_s[b] = np.maximum(due_s, end_s)
            end_s = start_s[b] + burst_s
        self.start_s = start_s
        self.period_s = np.maximum(self.compute_s, end_s)
        self.link_s = self.burst_s.sum(axis=0)
        self.free_s = self.period_s - self.link_s
        #: Seconds of free link before each window.
        self.free_before_s = start_s - (np.cumsum(self.burst_s, axis=0) - self.burst_s)


def _rate_when_second(second: _Players, first: _Players) -> FloatArray:
    """Link seconds per second of each second player, when the first has priority."""
    phases = (np.arange(_PHASES) + 0.5) / _PHASES
    now_s = since_s = first.period_s[:, None] * phases
    compute_s = second.compute_s[:, None]
    for iteration in range(_WARM_UP + _MEASURED):
        if iteration == _WARM_UP:
            since_s = now_s
        end_s = now_s
        for due_s, burst_s in zip(second.due_s, second.burst_s, strict=True):
            start_s = np.maximum(now_s + due_s[:, None], end_s)
            end_s = _sent_by(first, start_s, burst_s[:, None])
        now_s = np.maximum(now_s + compute_s, end_s)
    link_s = second.link_s * (_MEASURED * _PHASES)
    rate = link_s / (now_s - since_s).sum(axis=1)
    # A first player that never leaves the link leaves nothing.
    return np.asarray(np.where(first.free_s > _ROUNDING * first.period_s, rate, 0.0))


def _sent_by(first: _Players, start_s: FloatArray, need_s: FloatArray) -> FloatArray:
    """When ``need_s`` seconds of link have passed since ``start_s`` that the first left free."""
    period_s = first.period_s[:, None]
    free_s = np.maximum(first.free_s, _ROUNDING * first.period_s)[:, None]
    rounding_s = _ROUNDING * period_s
    periods = np.floor(start_s / period_s)
    into_s = start_s - periods * period_s
    target_s = into_s + need_s
    for window_s, busy_s in zip(first.start_s, first.burst_s, strict=True):
        target_s -= np.clip(into_s - window_s[:, None], 0.0, busy_s[:, None])
    more = np.maximum(np.ceil((target_s - rounding_s) / free_s) - 1.0, 0.0)
    target_s -= more * free_s
    end_s: FloatArray = target_s + (periods + more) * period_s
    for before_s, busy_s in zip(first.free_before_s, first.burst_s, strict=True):
        end_s += np.where(target_s > before_s[:, None] + rounding_s, busy_s[:, None], 0.0)
    return end_s
