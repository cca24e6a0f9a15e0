"""Plans of one component, judged by a rehearsal: a race between them, and a search for more.

**Race.** Successive halving: plans are played side by side, the worse half drops out. All plans are
played from the same start times for equal lengths. After each round the better half goes on from
where it stands, for a round of twice the length. The plans to beat stay to the end, so that the
winner and they have been seen from equal phases for equal times. Where none beats them, they alone
are played on, past the time in which the jobs fall into step.

**Search.** A beam search over moves of plans, within a budget of plays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from math import prod
from typing import NamedTuple

import numpy as np

from crux_torch import _fluid
from crux_torch.schedule.arrays import FloatArray
from crux_torch.schedule.default.rehearsal import Rehearsal, RoutedJob, share_computing
from crux_torch.schedule.model import Job

#: Iterations of a job, on average, in the first round; a share of a round runs before the count.
_FIRST = 10
#: And of the slowest job, where the budget affords them.
_FIRST_OF_SLOWEST = 3
_WARM_UP = 0.5
#: Share of the warm-up that tells whether more than the favourite can be afforded at all.
_PEEK = 0.1
#: Share of the work that the first round may take.
_FIRST_ROUND = 0.6
#: Iterations of a job, on average, that settle a race.
_SETTLED = 240
#: Iterations of a plan's jobs, if each met nobody, to a unit of the work that one round may take. A
#: round of more is not begun: a job of nanoseconds beside one of years would never end it.
_ITERATIONS = 4
#: Standard errors of a lead that are not counted as lead.
_CAUTION = 2.0


class Run:
    """One plan on its way, from every set of start times."""

    def __init__(self, rehearsal: Rehearsal, plan: Assignment) -> None:
        self.plan = plan
        self.work = 0
        routes = [rehearsal.route(j, own) for j, own in enumerate(plan.path)]
        self._alone, parts = rehearsal.parts(routes)
        level = np.array(plan.level, np.int64)
        self._phases = rehearsal.phases
        self._engines = [
            rehearsal.engine(part, level, k) for part in parts for k in range(self._phases)
        ]
        self._jobs = rehearsal.jobs
        self._index = {job.name: j for j, job in enumerate(rehearsal.jobs)}
        self._gpus = np.array([job.gpus for job in rehearsal.jobs])
        self._compute_s = np.array([job.compute_s for job in rehearsal.jobs])
        self._meets = np.zeros(len(routes), bool)
        self._meets[[j for part in parts for j in part.jobs]] = True
        self._period_s = np.array([route.period_s for route in routes])
        self._begun = [engine.results() for engine in self._engines]
        self._span_s = 0.0

    def advance(self, until_s: float) -> None:
        """Play on."""
        _fluid.run_all(self._engines, [until_s] * len(self._engines))
        self.work = sum(engine.work for engine in self._engines)

    def begin(self) -> None:
        """Restart the counts."""
        self._begun = [engine.results() for engine in self._engines]
        self._span_s = -self._now_s

    def busy_gpus(self) -> FloatArray:
        """GPUs that compute, from each set of start times, since the count began."""
        return np.asarray(self._alone + self._shares() @ self._gpus)

    def iteration_s(self) -> FloatArray:
        """Mean iteration of each job, over all sets of start times, since the count began."""
        share = self._shares().mean(axis=0)
        mean_s = np.full(len(share), np.inf)
        np.divide(self._compute_s, share, out=mean_s, where=share > 0)
        return np.where(self._meets & (self._compute_s > 0), mean_s, self._period_s)

    @property
    def _now_s(self) -> float:
        return self._engines[0].now_s if self._engines else 0.0

    def _shares(self) -> FloatArray:
        """Share of the time, from each set of start times (row), in which each job computes."""
        span_s = self._now_s + self._span_s
        share = np.zeros((self._phases, len(self._index)))
        for e, (engine, before) in enumerate(zip(self._engines, self._begun, strict=True)):
            for name, after in engine.results().items():
                j = self._index[name]
                job = self._jobs[j]
                share[e % self._phases, j] = share_computing(job, before[name], after, span_s)
        return share


def race(
    rehearsal: Rehearsal,
    safe_plans: Sequence[Assignment],
    plans: Iterable[Assignment],
    work: int,
    safe_work: int,
    lead: float,
    max_slowdown: float,
) -> Assignment:
    """The plan to adopt.

    Args:
        safe_plans: at least one, those to beat.
        plans: the others; no more are taken than the budget affords.
        work: budget, in units of ``Engine.work``.
        safe_work: another one, for telling the safe plans apart.
        lead: share by which another plan must beat the best of the safe ones, beyond what the
            start times may make of it.
        max_slowdown: a plan drops out if a job's mean iteration takes longer than this many times
            its iteration alone on the paths of the first safe plan, and longer than under each of
            the safe plans.
    """
    favourite = safe_plans[0]
    periods_s = [rehearsal.route(j, own).period_s for j, own in enumerate(favourite.path)]
    rate = sum(1.0 / s for s in periods_s if s > 0)
    if rate == 0.0:
        return favourite
    an_iteration_s = len(periods_s) / rate
    length_s = max(_FIRST * an_iteration_s, max(periods_s))
    most = max(work, safe_work)
    longest_s = _ITERATIONS * most / (rate * rehearsal.phases)
    if length_s > longest_s:
        return favourite
    now_s = _WARM_UP * length_s
    first = Run(rehearsal, favourite)
    first.advance(0.0)
    set_up, affordable = first.work, 0
    for part in (_PEEK, 1.0):
        first.advance(part * now_s)
        first_round = set_up + (first.work - set_up) * (1 + _WARM_UP) / (part * _WARM_UP)
        affordable = int(_FIRST_ROUND * work / max(1.0, first_round)) - len(safe_plans)
        safe_too = len(safe_plans) > 1 and first_round * len(safe_plans) <= safe_work
        if affordable < 1 and not safe_too:
            return favourite
    safe = [first, *(Run(rehearsal, plan) for plan in safe_plans[1:])]
    taken = dict.fromkeys(islice(plans, max(0, affordable)))
    others = [Run(rehearsal, plan) for plan in taken if plan not in safe_plans]
    longer = _FIRST_ROUND * work / max(1.0, first_round * (len(safe) + len(others)))
    enough_s = max(length_s, _FIRST_OF_SLOWEST * max(periods_s))
    length_s = min(enough_s, max(1.0, longer) * length_s, longest_s)
    now_s = _WARM_UP * length_s
    for run in (*safe, *others):
        run.advance(now_s)
        run.begin()
        # One plan took what all may: its jobs iterate far more often than the favourite's did.
        if run.work > most:
            return favourite

    def slows_nobody_down(run: Run) -> bool:
        fair_s = np.max([one.iteration_s() for one in safe], axis=0)
        alone_s = np.array(periods_s)
        capped_s = np.multiply(max_slowdown, alone_s, out=np.zeros(len(alone_s)), where=alone_s > 0)
        most_s = np.maximum(capped_s, fair_s)
        return bool((run.iteration_s() <= most_s).all())

    gone = 0
    while True:
        now_s += length_s
        spent = sum(run.work for run in (*safe, *others))
        for run in (*safe, *others):
            run.advance(now_s)
            if run.work > most:
                return favourite
        spent_now = sum(run.work for run in (*safe, *others))
        if now_s >= _SETTLED * an_iteration_s and len(others) <= 1:
            break
        stay = math.ceil(len(others) / 2) if len(others) > 1 else len(others)
        ranked = sorted(
            others, key=lambda run: (not slows_nobody_down(run), -float(run.busy_gpus().mean()))
        )
        gone += sum(run.work for run in ranked[stay:])
        others = ranked[:stay]
        kept = sum(run.work for run in (*safe, *others))
        length_s *= 2
        ahead = 2 * (spent_now - spent) * kept / max(1, spent_now)
        if gone + kept + ahead > work or length_s > longest_s:
            break
    best_safe = max(safe, key=lambda run: float(run.busy_gpus().mean()))
    others = [run for run in others if slows_nobody_down(run)]
    if others:
        best = max(others, key=lambda run: float(run.busy_gpus().mean()))
        floor = best_safe.busy_gpus()
        gain = best.busy_gpus() - floor
        doubt = _CAUTION * float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else 0.0
        if float(gain.mean()) - doubt > lead * float(floor.mean()):
            return best.plan
    return _settled(safe, now_s, _SETTLED * an_iteration_s, safe_work)


def _settled(safe: Sequence[Run], now_s: float, until_s: float, work: int) -> Assignment:
    """The best of the safe plans when they are played on until then, or as far as ``work`` goes."""
    spent_a_s = sum(run.work for run in safe) / now_s
    until_s = min(until_s, now_s + work / max(1.0, spent_a_s))
    if len(safe) > 1 and until_s > 2 * now_s:
        for run in safe:
            run.begin()
            run.advance(until_s)
    return max(safe, key=lambda run: float(run.busy_gpus().mean())).plan


#: Choices of paths that one job is offered at a time.
_ALTERNATIVES = 8
BEAM = 5
#: Moves of a plan after which the best are chosen anew.
STRIDE = 4
#: Choices of paths of all jobs together up to which every one is a move.
_ALL_PATHS = 64

#: For each job the candidate that each of its flows takes.
JobPaths = tuple[tuple[int, ...], ...]


class Assignment(NamedTuple):
    """A plan: the candidate of each flow of each job, and each job's level.

    Levels count from 0 without gaps: plans that differ in their numbers alone are equal.
    """

    path: JobPaths
    level: tuple[int, ...]


#: Plans that differ from one by a step, the most promising kinds first.
Moves = Callable[[Assignment], Iterable[Assignment]]


def search(
    rehearsal: Rehearsal,
    starts: Sequence[Assignment],
    moves: Moves,
    work: int,
    allowed: Callable[[Assignment], bool] = lambda _: True,
) -> list[Assignment]:
    """The best plans found, the best first: from ``starts`` on to the best of their moves.

    This is a beam search. It continues from ``BEAM`` plans with different paths at a time, so that
    paths that need other levels to be best are not lost. Paths that play alike, such as all jobs
    over the other one of two equal switches, are not different. All starts are judged, so that the
    best is no worse than any of them. Each of the best takes ``STRIDE`` of its moves, then the best
    are chosen anew: one that drops out goes on where it was if it comes back. ``work`` is the
    budget of the rehearsal; a step is cut to half of what is left, at the mean work of the plays so
    far. Only ``allowed`` plans, the first start among them, are grown and returned.
    """
    busy = judge(rehearsal, starts)
    untried: dict[Assignment, Iterator[Assignment]] = {}
    while True:
        beam = _beam(rehearsal, busy, allowed)
        a_plan = rehearsal.work * rehearsal.phases // max(1, rehearsal.plays)
        left = (work - rehearsal.work) // max(1, a_plan)
        step: dict[Assignment, None] = {}
        for plan in beam:
            if plan not in untried:
                untried[plan] = iter(moves(plan))
            fresh = (p for p in untried[plan] if p not in busy and p not in step)
            step.update(dict.fromkeys(islice(fresh, STRIDE)))
        # Half of what is left: the next plans may take more work than those so far.
        affordable = list(islice(step, max(0, (left + 1) // 2)))
        if not affordable:
            return beam
        busy |= judge(rehearsal, affordable)


def judge(rehearsal: Rehearsal, plans: Sequence[Assignment]) -> dict[Assignment, float]:
    """The GPUs that each plan keeps busy."""
    by_path: dict[JobPaths, list[Assignment]] = {}
    for plan in plans:
        by_path.setdefault(plan.path, []).append(plan)
    values = rehearsal.busy_gpus(
        (_routes(rehearsal, path), np.array([plan.level for plan in same], np.int64))
        for path, same in by_path.items()
    )
    judged = (plan for same in by_path.values() for plan in same)
    return dict(zip(judged, np.concatenate(values).tolist(), strict=True))


def can_be_played(rehearsal: Rehearsal, plan: Assignment, work: int) -> bool:
    """True if a plan can be judged within so much work."""
    level = np.array(plan.level, np.int64)
    return rehearsal.takes_at_most(work, _routes(rehearsal, plan.path), level)


def _routes(rehearsal: Rehearsal, path: JobPaths) -> list[RoutedJob]:
    return [rehearsal.route(j, own) for j, own in enumerate(path)]


def _beam(
    rehearsal: Rehearsal, busy: Mapping[Assignment, float], allowed: Callable[[Assignment], bool]
) -> list[Assignment]:
    """The best plans of different paths, the best first; of equals the one judged first."""
    known: set[frozenset[object]] = set()
    beam: list[Assignment] = []
    for plan in sorted(busy, key=lambda plan: -busy[plan]):
        parts = rehearsal.parts(_routes(rehearsal, plan.path))[1]
        plays = frozenset(part.key for part in parts)
        if plays not in known and allowed(plan):
            known.add(plays)
            beam.append(plan)
            if len(beam) == BEAM:
                break
    return beam


def dense(level: Sequence[float]) -> tuple[int, ...]:
    """The same order of jobs with levels that count from 0 without gaps."""
    rank = {value: i for i, value in enumerate(sorted(set(level)))}
    return tuple(rank[value] for value in level)


def level_moves(level: tuple[int, ...], job: int, levels: int) -> Iterator[tuple[int, ...]]:
    """Job ``job`` on each other level, and on a level of its own between any two."""
    for double in range(-1, 2 * max(level) + 2):
        moved = dense([double / 2 if j == job else other for j, other in enumerate(level)])
        if max(moved) < levels and moved != level:
            yield moved


def swaps(level: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Any two jobs in each other's place."""
    for i, k in combinations(range(len(level)), 2):
        if level[i] != level[k]:
            swapped = list(level)
            swapped[i], swapped[k] = level[k], level[i]
            yield tuple(swapped)


def moves_of_levels(levels: int) -> Moves:
    """Steps that leave paths as they are, over plans of at most ``levels`` levels."""

    def moves(plan: Assignment) -> Iterator[Assignment]:
        for job in range(len(plan.level)):
            for level in level_moves(plan.level, job, levels):
                yield Assignment(plan.path, level)
        for level in swaps(plan.level):
            yield Assignment(plan.path, level)

    return moves


def moves_of_plans(jobs: Sequence[Job], levels: int) -> Moves:
    """Other paths for some jobs, another level for one, or both for one."""
    of_levels = moves_of_levels(levels)
    counts = [len(flow.candidates) for job in jobs for flow in job.flows]
    few = prod(counts) <= _ALL_PATHS

    def rerouted(path: JobPaths, job: int, own: tuple[int, ...]) -> JobPaths:
        return (*path[:job], own, *path[job + 1 :])

    def repaths(path: JobPaths, others: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[JobPaths]:
        if few:
            yield from product(*([own, *more] for own, more in zip(path, others, strict=True)))
            return
        for j, mine in enumerate(others):
            yield from (rerouted(path, j, own) for own in mine)
        for i, k in combinations(range(len(jobs)), 2):
            for one, other in product(others[i][:2], others[k][:2]):
                yield rerouted(rerouted(path, i, one), k, other)

    def moves(plan: Assignment) -> Iterator[Assignment]:
        others = [list(alternatives(job, own)) for job, own in zip(jobs, plan.path, strict=True)]
        for path in repaths(plan.path, others):
            yield Assignment(path, plan.level)
        yield from of_levels(plan)
        for j, mine in enumerate(others):
            for own, level in product(mine, level_moves(plan.level, j, levels)):
                yield Assignment(rerouted(plan.path, j, own), level)

    return moves


def alternatives(job: Job, own: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Other choices of paths for a job: all of them where they are few.

    Otherwise the next candidates for all its flows together, then for single flows, the largest
    first.
    """
    counts = [len(flow.candidates) for flow in job.flows]
    if prod(counts) <= _ALTERNATIVES + 1:
        every = product(*map(range, counts))
        yield from (path for path in every if path != own)
        return
    turned = [
        tuple((c + turn) % n for c, n in zip(own, counts, strict=True))
        for turn in range(1, min(max(counts), _ALTERNATIVES // 2 + 1))
    ]
    yield from turned
    largest = sorted(range(len(counts)), key=lambda f: -job.flows[f].bytes)
    movable = [f for f in largest if counts[f] > 1]
    for f in movable[: _ALTERNATIVES - len(turned)]:
        yield (*own[:f], (own[f] + 1) % counts[f], *own[f + 1 :])
