"""A cap on how much any job is slowed down: which plans keep it, and the nearest that does."""

from __future__ import annotations

import numpy as np

from crux_torch.schedule.arrays import Arrays, IntArray, choice_of, traffic_matrix
from crux_torch.schedule.fairness_bound import Sharing
from crux_torch.schedule.search import Assignment, JobPaths

#: What rounding may add to a bound.
_ROUNDING = 1e-9


class SlowdownCap:
    """No job's mean iteration may take more than ``most`` times its iteration alone.

    Where fair sharing (all jobs on one level, on the same paths) can't guarantee that to a job
    either, what it does guarantee is the job's limit. ``docs/fairness.md`` has the proof of the
    bounds.
    """

    def __init__(self, arrays: Arrays, most: float) -> None:
        self._arrays = arrays
        self._most = most
        self._known: dict[JobPaths, _Limits] = {}
        self._kept: dict[Assignment, bool] = {}

    def keeps(self, plan: Assignment) -> bool:
        """Whether every job is certain to stay within its limit."""
        if self._most == np.inf or not any(plan.level):
            return True
        kept = self._kept.get(plan)
        if kept is None:
            limits = self._on(plan.path)
            level = np.array(plan.level, np.int64)
            # The lowest level first: its jobs are the ones that break a cap.
            jobs = np.argsort(level, kind="stable").tolist()
            kept = self._kept[plan] = all(limits.excess(j, level) <= 0 for j in jobs)
        return kept

    def raised(self, plan: Assignment, levels: int) -> tuple[int, ...]:
        """The levels (0 to ``levels`` - 1) of the plan, jobs raised until all keep their limits.

        The job that exceeds its limit the most is raised to the lowest level on which it no longer
        does, and so on; after each step only the jobs that meet it, on the levels that it left
        behind or came to, are bounded anew. This ends, because levels only rise, and because a job
        that no higher one meets keeps its limit.
        """
        level = np.array(plan.level, np.int64)
        level += levels - 1 - level.max(initial=0)
        if self._most < np.inf:
            limits = self._on(plan.path)
            excess = np.array([limits.excess(j, level) for j in range(len(level))])
            while (excess > 0).any():
                worst = int(np.argmax(excess))
                before = level[worst]
                for higher in range(int(level[worst]) + 1, levels):
                    level[worst] = higher
                    if limits.excess(worst, level) <= 0:
                        break
                for j in limits.sharing.meeting(worst):
                    if before <= level[j] <= level[worst]:
                        excess[j] = limits.excess(j, level)
        return tuple(level.tolist())

    def _on(self, path: JobPaths) -> _Limits:
        known = self._known.get(path)
        if known is None:
            arrays = self._arrays
            by_name = {job.name: own for job, own in zip(arrays.jobs, path, strict=True)}
            sharing = Sharing.of(arrays, traffic_matrix(arrays, choice_of(arrays, by_name)))
            known = self._known[path] = _Limits(sharing, self._most)
        return known


class _Limits:
    """The limit of every job on given paths: the cap, or fair sharing's bound if it is larger."""

    def __init__(self, sharing: Sharing, most: float) -> None:
        self.sharing = sharing
        self._most = most
        self._everyone = np.zeros(len(sharing.alone_s), np.int64)
        self._fair: dict[int, float] = {}
        used = sharing.hold > 0
        self._meet = used @ used.T
        self._known: dict[tuple[int, bytes], float] = {}

    def excess(self, j: int, level: IntArray) -> float:
        """By what share the job's bound is above its limit; 0 where it keeps it."""
        relation = np.sign(level[self._meet[j]] - level[j]).astype(np.int8)
        # With fewer jobs beside it and none above it, fair sharing's bound holds as well.
        if not (relation > 0).any():
            return 0.0
        key = j, relation.tobytes()
        if key not in self._known:
            self._known[key] = self._excess(j, level)
        return self._known[key]

    def _excess(self, j: int, level: IntArray) -> float:
        slowdown = self.sharing.bound(j, level).slowdown
        if slowdown <= self._most * (1 + _ROUNDING):
            return 0.0
        if j not in self._fair:
            self._fair[j] = self.sharing.bound(j, self._everyone).slowdown
        limit = max(self._most, self._fair[j]) * (1 + _ROUNDING)
        return max(0.0, slowdown / limit - 1.0) if limit < np.inf else 0.0
