"""crux-fair: Crux with a certified bound on how much any job is slowed down (paper §7.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from crux_torch.schedule.arrays import FloatArray, IntArray, arrays_of, choice_of, traffic_matrix
from crux_torch.schedule.crux import crux_full
from crux_torch.schedule.dag import components_of
from crux_torch.schedule.fairness_bound import Sharing
from crux_torch.schedule.model import Cluster, Decision
from crux_torch.schedule.options import SchedulerOptions

#: A job that keeps Crux's level has the middle one; few enough steps for a switch's round robin.
WEIGHTS = tuple(4.0**n for n in range(-3, 4))
#: Halvings of the gap, in its logarithm, between a bound that can't be kept and fair sharing's.
_HALVINGS = 5


class _Plan(NamedTuple):
    level: IntArray
    weight: FloatArray


def crux_fair(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-full, changed as little as keeps every job's mean slowdown below a bound.

    From Crux's plan on, the job that exceeds ``options.max_slowdown`` the most is given the lowest
    level, not below its own, and there the least weight, with which it can't exceed it whatever
    the phases (:mod:`crux_torch.schedule.fairness_bound`); this may push others over the bound,
    who are treated likewise, until none is left. Jobs only ever rise, so this ends.

    Jobs that meet, directly or through others, keep or miss the bound together. Where it can't be
    kept so, the smallest one is taken that can, fair sharing's at most. ``Decision.slowdown`` says
    what every job is guaranteed; without a bound it says what Crux-full guarantees, which may be
    nothing (infinite).

    Raises:
        ClusterError: a cluster that contradicts itself.
        ValueError: levels that are not ascending, or none; a bound below 1.
    """
    limit = math.inf if options.max_slowdown is None else options.max_slowdown
    if not limit >= 1:
        raise ValueError(f"max_slowdown is {limit}; expected 1 or more")
    decision = crux_full(cluster, options)
    arrays = arrays_of(cluster)
    traffic = traffic_matrix(arrays, choice_of(arrays, decision.path))
    sharing = Sharing.of(arrays, traffic)
    names = [job.name for job in arrays.jobs]
    plan = _Plan(np.array([decision.level[name] for name in names], np.int64), np.ones(len(names)))
    component = components_of(traffic)
    for c in range(int(component.max(initial=-1)) + 1):
        jobs = np.flatnonzero(component == c).tolist()
        plan = _bounded(sharing, jobs, plan, options.levels, limit)
    slowdown = _slowdowns(sharing, range(len(names)), plan)
    return replace(
        decision,
        level=dict(zip(names, plan.level.tolist(), strict=True)),
        weight=dict(zip(names, plan.weight.tolist(), strict=True)),
        slowdown={name: slowdown[j] for j, name in enumerate(names)},
    )


def _bounded(
    sharing: Sharing, jobs: list[int], plan: _Plan, levels: Sequence[int], limit: float
) -> _Plan:
    """``plan`` with ``jobs`` under the bound, or under the smallest one that can be kept."""
    kept = _raised(sharing, jobs, plan, levels, limit)
    if kept is not None:
        return kept
    fair = _Plan(plan.level.copy(), plan.weight.copy())
    fair.level[jobs] = levels[-1]
    best, enough = fair, max(_slowdowns(sharing, jobs, fair).values())
    for _ in range(_HALVINGS if enough > limit else 0):
        between = math.sqrt(limit * enough)
        kept = _raised(sharing, jobs, plan, levels, between)
        if kept is None:
            limit = between
        else:
            best, enough = kept, between
    return best


def _raised(
    sharing: Sharing, jobs: list[int], plan: _Plan, levels: Sequence[int], limit: float
) -> _Plan | None:
    """``plan`` with jobs raised until none of ``jobs`` exceeds ``limit``; None if one has to."""
    plan = _Plan(plan.level.copy(), plan.weight.copy())
    slowdown = _slowdowns(sharing, jobs, plan)
    while True:
        worst = max(jobs, key=slowdown.__getitem__)
        if slowdown[worst] <= limit:
            return plan
        if not _raise(sharing, worst, plan, levels, limit):
            return None
        slowdown.update(_slowdowns(sharing, sharing.meeting(worst), plan))


def _raise(sharing: Sharing, j: int, plan: _Plan, levels: Sequence[int], limit: float) -> bool:
    """Moves j, in place, to the lowest level and weight that bound it; False if none does."""

    def fits(level: int, weight: float) -> bool:
        plan.level[j], plan.weight[j] = level, weight
        return sharing.bound(j, plan.level, plan.weight).slowdown <= limit

    before = (int(plan.level[j]), float(plan.weight[j]))
    for level in levels[levels.index(before[0]) :]:
        # What the largest weight can't do, none can.
        if (level, WEIGHTS[-1]) > before and fits(level, WEIGHTS[-1]):
            return any(fits(level, w) for w in WEIGHTS if (level, w) > before)
    return False


def _slowdowns(sharing: Sharing, jobs: Sequence[int], plan: _Plan) -> dict[int, float]:
    return {j: sharing.bound(j, plan.level, plan.weight).slowdown for j in jobs}
