"""crux-fair: Crux with a certified bound on how much any job is slowed down (paper §7.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from crux_torch.schedule.arrays import IntArray, arrays_of, choice_of, traffic_matrix
from crux_torch.schedule.crux import crux_full
from crux_torch.schedule.dag import components_of
from crux_torch.schedule.fairness_bound import Sharing
from crux_torch.schedule.model import Cluster, Decision
from crux_torch.schedule.options import SchedulerOptions

#: Halvings of the gap, in its logarithm, between a bound that can't be kept and fair sharing's.
_HALVINGS = 5


def crux_fair(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-full, changed as little as keeps every job's mean slowdown below a bound.

    From Crux's plan on, the job that exceeds ``options.max_slowdown`` the most is raised to the
    lowest level on which it can't exceed it, whatever the phases
    (:mod:`crux_torch.schedule.fairness_bound`). That may push others over the bound, who are
    treated likewise, until none is left. Jobs only ever rise, so this ends, at the latest where
    all share one level. Paths stay Crux's, and so does the order of those who are not raised.

    Jobs that meet, directly or through others, keep or miss the bound together. Where they can't
    be seen to keep it, the smallest bound is taken that they can, fair sharing's at most.
    ``Decision.slowdown`` says what every job is guaranteed. Without a bound the levels are
    Crux-full's, and it says what those guarantee: nothing (infinite) below jobs that never pause.

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
    level = np.array([decision.level[name] for name in names], np.int64)
    component = components_of(traffic)
    for c in range(int(component.max(initial=-1)) + 1):
        jobs = np.flatnonzero(component == c).tolist()
        level = _bounded(sharing, jobs, level, options.levels, limit)
    slowdown = _slowdowns(sharing, range(len(names)), level)
    return replace(
        decision,
        level=dict(zip(names, level.tolist(), strict=True)),
        slowdown={name: slowdown[j] for j, name in enumerate(names)},
    )


def _bounded(
    sharing: Sharing, jobs: list[int], level: IntArray, levels: Sequence[int], limit: float
) -> IntArray:
    """Levels that keep ``jobs`` below the bound, or below the smallest one that can be kept."""
    kept = _raised(sharing, jobs, level, levels, limit)
    if kept is not None:
        return kept
    best = level.copy()
    best[jobs] = levels[-1]
    enough = max(_slowdowns(sharing, jobs, best).values())
    for _ in range(_HALVINGS if enough > limit else 0):
        between = math.sqrt(limit * enough)
        kept = _raised(sharing, jobs, level, levels, between)
        if kept is None:
            limit = between
        else:
            best, enough = kept, between
    return best


def _raised(
    sharing: Sharing, jobs: list[int], level: IntArray, levels: Sequence[int], limit: float
) -> IntArray | None:
    """``level`` with jobs raised until none of ``jobs`` exceeds ``limit``; None if one has to."""
    level = level.copy()
    slowdown = _slowdowns(sharing, jobs, level)
    while True:
        worst = max(jobs, key=slowdown.__getitem__)
        if slowdown[worst] <= limit:
            return level
        for higher in levels[levels.index(level[worst]) + 1 :]:
            level[worst] = higher
            if _slowdowns(sharing, (worst,), level)[worst] <= limit:
                break
        else:
            return None
        slowdown.update(_slowdowns(sharing, sharing.meeting(worst), level))


def _slowdowns(sharing: Sharing, jobs: Iterable[int], level: IntArray) -> dict[int, float]:
    weight = np.ones(len(level))
    return {j: sharing.bound(j, level, weight).slowdown for j in jobs}
