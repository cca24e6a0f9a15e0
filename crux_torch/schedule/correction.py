"""Correction factors: what a job's iteration pattern adds to its intensity (paper §4.2).

Two jobs share one link, and whoever has priority sends first. How much link time each gains by
being first tells how their intensities compare: ``k_j = (B_j - A_j) / (A_r - B_r)``, with A the
link seconds when the reference job r goes first and B those when job j does.

:func:`play` is that game event by event, from any phase and over any horizon, as in the paper's
figures. :func:`correction_factors` is what a schedule uses: the same game in the long run,
averaged over phases and for all jobs at once.

The long run. With priority a job runs as if alone, so its link time is periodic and known in
closed form. The other one is followed for ``_WARM_UP + _MEASURED`` of its own iterations, the
first of which are dropped because two jobs of similar periods first fall into step; what counts is
its link seconds per second over the rest. This is repeated from ``_PHASES`` phases of the first
job, evenly spread over its period, and the link seconds and the seconds are summed over phases. A
and B are thus seconds per second, and the horizon is as long as the iterations take.

Neither job gains from being second, so both differences are at least 0. A difference below
``_NO_HARM`` of what the job gets alone counts as none:

- neither is harmed by the other's priority: ``k = 1``, intensity alone decides;
- only j is harmed when second: giving it priority costs nothing, so ``k`` is the upper bound;
- only r is harmed when second: ``k`` is the lower bound.

All factors are kept within ``K_MIN`` to ``K_MAX``: the game is a model of two jobs on one link,
and must not outvote measured intensities that differ by more than an order of magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from crux_torch.schedule.arrays import FloatArray
from crux_torch.schedule.model import Job

K_MIN, K_MAX = 1 / 8, 8.0

#: Bursts of one iteration that the long-run game tells apart; closer ones are merged.
_BURSTS = 4
_PHASES = 8
_WARM_UP = 8
_MEASURED = 24
_NO_HARM = 0.005
#: Shapes whose factor against one reference is kept for the next call.
_REMEMBERED = 1 << 13
#: Share of a period by which two events may differ through rounding alone.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Player:
    """A job as the game sees it.

    Attributes:
        compute_s: seconds of computation of one iteration.
        bursts: for each burst the share of compute after which it may start, and its link
            seconds; sent in order.
    """

    compute_s: float
    bursts: tuple[tuple[float, float], ...]

    @property
    def link_s(self) -> float:
        """Link seconds of one iteration."""
        return sum(link_s for _, link_s in self.bursts)

    @property
    def period_s(self) -> float:
        """Seconds of one iteration without contention."""
        return max([self.compute_s, *(end for _, end in self.windows)])

    @property
    def windows(self) -> list[tuple[float, float]]:
        """When each burst uses the link without contention, in seconds of the iteration."""
        windows = []
        end = 0.0
        for at, link_s in self.bursts:
            start = max(end, at * self.compute_s)
            end = start + link_s
            windows.append((start, end))
        return windows


def player(job: Job, t_s: float) -> Player:
    """``job`` as a player whose bursts share ``t_s`` seconds of the link."""
    return Player(job.compute_s, tuple((burst.at, burst.share * t_s) for burst in job.bursts))


class Outcome(NamedTuple):
    """Seconds of the horizon in which each player (first, second) used the link and computed."""

    link_s: tuple[float, float]
    compute_s: tuple[float, float]


class _State:
    """A player in the middle of its iteration."""

    def __init__(self, who: Player, phase_s: float) -> None:
        self.who = who
        self.link_s = self.compute_s = 0.0
        self._begin()
        into = phase_s % who.period_s if who.period_s > 0 else 0.0
        self.computed = min(into, who.compute_s)
        self.left = [min(end - start, max(0.0, end - into)) for start, end in who.windows]

    def _begin(self) -> None:
        self.computed = 0.0
        self.left = [link_s for _, link_s in self.who.bursts]

    def next_burst(self) -> int | None:
        return next((b for b, left in enumerate(self.left) if left > 0), None)

    def start_if_done(self) -> None:
        if self.computed >= self.who.compute_s and self.next_burst() is None:
            self._begin()

    def due_in_s(self) -> float:
        """Seconds of computation until the next burst may start; infinite if there is none."""
        burst = self.next_burst()
        if burst is None:
            return float("inf")
        return max(0.0, self.who.bursts[burst][0] * self.who.compute_s - self.computed)

    def to_compute_s(self) -> float:
        return self.who.compute_s - self.computed


def play(
    first: Player,
    second: Player,
    horizon_s: float,
    phase_s: tuple[float, float] | None = None,
) -> Outcome:
    """Two jobs on one link under strict, preemptive priority, event by event.

    A job computes while it communicates; its next iteration starts when both have ended.

    Args:
        first: the job with priority.
        second: the other.
        horizon_s: seconds to play.
        phase_s: for each player, how many seconds of an uncontended iteration lie behind it at
            the start; default: each is about to send its first burst, as in Figures 11 and 12.

    Raises:
        ValueError: an iteration that takes no time.
    """
    if min(first.period_s, second.period_s) <= 0:
        raise ValueError("a player's iteration needs computation or communication")
    if phase_s is None:
        phase_s = tuple(p.windows[0][0] if p.bursts else 0.0 for p in (first, second))  # type: ignore[assignment]
        assert phase_s is not None
    players = (_State(first, phase_s[0]), _State(second, phase_s[1]))
    # Events closer than this are one: sums of floats never meet exactly.
    instant_s = _ROUNDING * min(first.period_s, second.period_s)
    now_s = 0.0
    while now_s < horizon_s - instant_s:
        for p in players:
            p.start_if_done()
        sender = next((p for p in players if p.due_in_s() <= 0.0), None)
        step_s = horizon_s - now_s
        for p in players:
            if p.to_compute_s() > 0:
                step_s = min(step_s, p.to_compute_s())
            if p.due_in_s() > 0:
                step_s = min(step_s, p.due_in_s())
        burst = sender.next_burst() if sender else None
        if sender and burst is not None:
            step_s = min(step_s, sender.left[burst])
            sender.link_s += step_s
            sender.left[burst] -= step_s
            if sender.left[burst] <= instant_s:
                sender.left[burst] = 0.0
        for p in players:
            if p.to_compute_s() > 0:
                p.compute_s += step_s
                p.computed += step_s
                if p.to_compute_s() <= instant_s:
                    p.computed = p.who.compute_s
                elif p.due_in_s() <= instant_s:
                    p.computed += p.due_in_s()
        now_s += step_s
    return Outcome(
        (players[0].link_s, players[1].link_s), (players[0].compute_s, players[1].compute_s)
    )


def correction_factor(
    reference: Player,
    job: Player,
    horizon_s: float | None = None,
    phase_s: tuple[float, float] | None = None,
) -> float:
    """k_j of ``job`` against the reference job, whose own is 1 (paper §4.2).

    Args:
        horizon_s: play this many seconds once, from one phase, as the paper's figures do;
            default: the long run, averaged over phases (see this module's description).
        phase_s: with ``horizon_s``, the phases of the reference and of the job.
    """
    if horizon_s is None:
        return float(correction_factors(reference, [job])[0])
    with_r_first = play(reference, job, horizon_s, phase_s)
    reverse = (phase_s[1], phase_s[0]) if phase_s else None
    with_j_first = play(job, reference, horizon_s, reverse)
    a_r, a_j = with_r_first.link_s
    b_j, b_r = with_j_first.link_s
    return float(_factor(*(np.array([x]) for x in (a_r, a_j, b_r, b_j)))[0])


def correction_factors(reference: Player, jobs: Sequence[Player]) -> FloatArray:
    """k_j of every one of ``jobs`` in the long run; jobs of one shape are played once.

    A job without traffic meets nobody: its factor is 1.
    """
    r = _merged(reference)
    shapes = [_merged(p) for p in jobs]
    if r.link_s <= 0:
        return np.ones(len(shapes))
    played = _played(r)
    factors = {shape: played.get(shape) for shape in shapes}
    fresh = [shape for shape, factor in factors.items() if factor is None]
    # Arrays are as wide as the most bursts in them: jobs of one count go together.
    for count in {len(shape.bursts) for shape in fresh}:
        group = [s for s in fresh if len(s.bursts) == count]
        values = _long_run_factors(r, group) if count else np.ones(len(group))
        factors.update(zip(group, values.tolist(), strict=True))
    if len(played) > _REMEMBERED:
        played.clear()
    played.update((shape, factors[shape]) for shape in fresh)
    return np.array([factors[shape] for shape in shapes], np.float64)


@lru_cache(maxsize=16)
def _played(reference: Player) -> dict[Player, float | None]:
    """Factors against ``reference`` of the last shapes played: decisions follow each other closely,
    and most of their pairs are those of the one before."""
    return {}


def pair_factors(references: Sequence[Player], jobs: Sequence[Player]) -> FloatArray:
    """For each i the factor of ``jobs[i]`` against ``references[i]``, in the long run.

    Equal pairs are played once, and 1 stands for a pair of which one has no traffic.
    """
    shapes = [(_merged(r), _merged(j)) for r, j in zip(references, jobs, strict=True)]
    factors = dict.fromkeys(shapes, 1.0)
    by_bursts: dict[tuple[int, int], list[tuple[Player, Player]]] = {}
    for r, j in factors:
        if r.bursts and j.bursts:
            by_bursts.setdefault((len(r.bursts), len(j.bursts)), []).append((r, j))
    for group in by_bursts.values():
        rs, js = _Players([r for r, _ in group]), _Players([j for _, j in group])
        values = _factor(
            a_r=rs.link_s / rs.period_s,
            a_j=_rate_when_second(js, first=rs),
            b_r=_rate_when_second(rs, first=js),
            b_j=js.link_s / js.period_s,
        )
        factors.update(zip(group, values.tolist(), strict=True))
    return np.array([factors[shape] for shape in shapes], np.float64)


def _merged(p: Player) -> Player:
    """``p`` with the closest of its bursts merged until few enough are left."""
    bursts = [(at, link_s) for at, link_s in p.bursts if link_s > 0]
    while len(bursts) > _BURSTS:
        gaps = [after[0] - before[0] for before, after in pairwise(bursts)]
        b = gaps.index(min(gaps))
        (at, link_s), (later_at, later_s) = bursts[b : b + 2]
        both_s = link_s + later_s
        bursts[b : b + 2] = [((at * link_s + later_at * later_s) / both_s, both_s)]
    return Player(p.compute_s, tuple(bursts))


def _factor(a_r: FloatArray, a_j: FloatArray, b_r: FloatArray, b_j: FloatArray) -> FloatArray:
    """k_j = (B_j - A_j) / (A_r - B_r), bounded, with the decisions of the module's description."""
    j_loses, r_loses = b_j - a_j, a_r - b_r
    j_harmed, r_harmed = j_loses > _NO_HARM * b_j, r_loses > _NO_HARM * a_r
    ratio = np.divide(j_loses, r_loses, out=np.ones(len(a_r)), where=j_harmed & r_harmed)
    ratio[j_harmed & ~r_harmed] = K_MAX
    ratio[~j_harmed & r_harmed] = K_MIN
    return np.clip(ratio, K_MIN, K_MAX)


def _long_run_factors(reference: Player, jobs: Sequence[Player]) -> FloatArray:
    r, many = _Players([reference]), _Players(jobs)
    return _factor(
        a_r=np.broadcast_to(r.link_s / r.period_s, len(jobs)),
        a_j=_rate_when_second(many, first=r),
        b_r=_rate_when_second(r, first=many),
        b_j=many.link_s / many.period_s,
    )


class _Players:
    """Some players of one number of bursts as arrays, a row each."""

    def __init__(self, players: Sequence[Player]) -> None:
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
    wide = max(len(second.compute_s), len(first.compute_s))
    now_s = np.broadcast_to(first.period_s[:, None] * phases, (wide, _PHASES)).copy()
    compute_s = second.compute_s[:, None]
    since_s = now_s
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
