"""crux-fair: Crux with a certified bound on how much any job is slowed down (paper §7.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from crux_torch.schedule.arrays import FloatArray, IntArray, arrays_of, choice_of, traffic_matrix
from crux_torch.schedule.crux import crux
from crux_torch.schedule.fairness_bound import Sharing
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions


def crux_fair(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-full, changed as little as keeps every job's mean slowdown below a bound.

    A job's limit is ``options.max_slowdown``, or its certified slowdown under fair sharing (all
    jobs on one level), whichever is larger. Paths stay Crux's, and so does the order of the jobs
    that are not raised. ``docs/fairness.md`` says how levels are chosen, why that ends, and what
    ``Decision.slowdown`` guarantees; without a bound the levels are Crux-full's.

    Raises:
        ClusterError: a cluster that contradicts itself.
        ValueError: levels that are not ascending, or none; a bound below 1.
    """
    most = math.inf if options.max_slowdown is None else options.max_slowdown
    if not most >= 1:
        raise ValueError(f"max_slowdown is {most}; expected 1 or more")
    decision = crux(cluster, options)
    arrays = arrays_of(cluster)
    sharing = Sharing.of(arrays, traffic_matrix(arrays, choice_of(arrays, decision.path)))
    level = np.array([decision.level[job.name] for job in arrays.jobs], np.int64)
    slowdown = _bounded(sharing, level, options.levels, most)
    return replace(decision, level=arrays.by_name(level), slowdown=arrays.by_name(slowdown))


def _bounded(sharing: Sharing, level: IntArray, levels: Sequence[int], most: float) -> FloatArray:
    """Raises jobs, in ``level``, until all keep their limits; returns the slowdown of each."""
    top = levels[-1]
    everywhere_top = np.full(len(level), top)
    jobs = range(len(level))
    fair = np.array([sharing.bound(j, everywhere_top).slowdown for j in jobs])
    limit = np.maximum(most, fair)

    def bound(j: int) -> float:
        found = sharing.bound(j, level).slowdown
        # With fewer jobs beside it, fair sharing's bound holds as well.
        return min(found, float(fair[j])) if level[j] == top else found

    slowdown = np.array([bound(j) for j in jobs])
    while len(over := np.flatnonzero(slowdown > limit)):
        worst = int(over[np.argmax(slowdown[over] / limit[over])])
        for higher in levels[levels.index(level[worst]) + 1 :]:
            level[worst] = higher
            if bound(worst) <= limit[worst]:
                break
        for j in sharing.meeting(worst):
            slowdown[j] = bound(j)
    return slowdown
