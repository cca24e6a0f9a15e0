"""Successive halving: plans of one component are played side by side, the worse half drops out.

All plans are played from the same start times for equal lengths. After each round the better half
goes on from where it stands, for a round of twice the length. The plans to beat stay to the end, so
that the winner and they have been seen from equal phases for equal times. Where none beats them,
they alone are played on, past the time in which the jobs fall into step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from crux_torch import _fluid
from crux_torch.schedule.arrays import FloatArray
from crux_torch.schedule.rehearsal import Rehearsal, share_computing
from crux_torch.schedule.search import Assignment

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
        """Count from here."""
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
        rehearsal: of the component's jobs.
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
