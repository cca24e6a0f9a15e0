"""Caps: on the slowdown of a job under levels, and on the levels of a tenant's jobs.

The bounds hold whatever the phases of the jobs. ``docs/understand/schedulers.md`` has their proof,
in the terms used here (h, N, F, slack).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from crux_torch.schedule.arrays import (
    Arrays,
    FloatArray,
    IntArray,
    arrays_of,
    choice_of,
    traffic_matrix,
)
from crux_torch.schedule.default.search import Assignment, JobPaths
from crux_torch.schedule.model import Cluster, Decision
from crux_torch.schedule.papers.intensity import (
    burst_times_s,
    least_s,
    solo_periods_s,
    transfer_times_s,
)

#: Most steps of a fixed-point iteration; one that has not settled gives no bound.
_STEPS = 24


class Bound(NamedTuple):
    """Bounds of a job's iterations in seconds; infinite where nothing is certain.

    Attributes:
        alone_s: an iteration that meets no other job.
        mean_s: upper bound of the mean iteration in the long run.
        longest_s: upper bound of every iteration.
    """

    alone_s: float
    mean_s: float
    longest_s: float

    @property
    def slowdown(self) -> float:
        """Bound on the mean iteration over the iteration alone; 1 for a job that does nothing."""
        return self.mean_s / self.alone_s if self.alone_s > 0 else 1.0


def bounds(cluster: Cluster, decision: Decision) -> dict[str, Bound]:
    """Guarantees of ``decision`` to every job of ``cluster``.

    Raises:
        ClusterError: a cluster that contradicts itself, or paths that are not its own.
    """
    arrays = arrays_of(cluster)
    sharing = Sharing(arrays, traffic_matrix(arrays, choice_of(arrays, decision.path)))
    names = [job.name for job in arrays.jobs]
    level = np.array([decision.level[name] for name in names], np.int64)
    return {name: sharing.bound(j, level) for j, name in enumerate(names)}


class _Ahead(NamedTuple):
    """Jobs ahead of j: the seconds of h_ij, and the pattern that bounds N_i."""

    hold_s: FloatArray
    period_s: FloatArray
    earliest_s: FloatArray  # of each burst (column) of the iteration after the one begun
    share: FloatArray

    def progress(self, window_s: float) -> FloatArray:
        """N_i: iterations' worth that each can move in any window of that length."""
        bursts = np.ceil((window_s - self.earliest_s) / self.period_s[:, None])
        return np.asarray(1.0 + (np.maximum(bursts, 0.0) * self.share).sum(axis=1))


class Sharing:
    """Jobs that meet on links, and the time that each holds them; computed once for many plans.

    Args:
        traffic: bytes of each job (row) on each link (column), sparse CSR.

    Attributes:
        hold: seconds of one iteration that each job (row) holds each link (column), dense.
        transfer_s: t_j of each job.
        largest: the most bytes that each job has on one link.
        at_s: time in the iteration at which each burst is due, a row for each job, padded with
            copies of its first burst.
        share: share of each burst; 0 where padded.
        start_s: start of each burst alone.
        least_s: seconds that each burst takes at least.
    """

    def __init__(self, arrays: Arrays, traffic: Any) -> None:
        used = np.unique(traffic.indices)
        moved = traffic[:, used].toarray()
        # Links that the same jobs use to the same degree bound them alike.
        self.hold: FloatArray = np.unique(moved / arrays.capacity_Bps[used], axis=1)
        self.largest: FloatArray = moved.max(axis=1, initial=0.0)
        self.transfer_s = transfer_times_s(arrays, traffic)
        self.alone_s = solo_periods_s(arrays, self.transfer_s)
        self.compute_s = np.array([job.compute_s for job in arrays.jobs])
        width = max((len(job.bursts) for job in arrays.jobs), default=1)
        shape = 4, len(arrays.jobs), width
        self.at_s, self.share, self.start_s, self.least_s = np.zeros(shape)
        for j, job in enumerate(arrays.jobs):
            t_s = float(self.transfer_s[j])
            times_s = burst_times_s(job, t_s)
            for b, (burst, (start, _)) in enumerate(zip(job.bursts, times_s, strict=True)):
                self.at_s[j, b], self.share[j, b] = burst.at * job.compute_s, burst.share
                self.start_s[j, b], self.least_s[j, b] = start, least_s(burst, t_s)
            self.at_s[j, len(job.bursts) :] = self.start_s[j, len(job.bursts) :] = self.at_s[j, 0]
        self._left = np.cumsum(self.share[:, ::-1], axis=1)[:, ::-1]
        self._has_ceiling: Any = self.least_s.any(axis=1)

    def meeting(self, j: int) -> list[int]:
        """j and the jobs that share a link with it."""
        met = (self.hold[:, self.hold[j] > 0] > 0).any(axis=1)
        return [int(other) for other in np.flatnonzero(met)]

    def bound(self, j: int, level: IntArray) -> Bound:
        """Bounds of job j when jobs have these levels."""
        alone_s = float(self.alone_s[j])
        links = self.hold[j] > 0
        hold = self.hold[:, links]
        hold_s = hold.max(axis=1, initial=0.0)
        meets = hold_s > 0
        meets[j] = False
        if not meets.any():
            return Bound(alone_s, alone_s, alone_s)
        higher = np.flatnonzero(meets & (level > level[j]))
        peers = np.flatnonzero(meets & (level == level[j]))
        # The job that moves least for its time goes first.
        peers = peers[np.argsort(self.largest[peers] / self.alone_s[peers], kind="stable")]
        # Row k: the first k peers are ahead, the rest share the links with j.
        shared = hold[peers] / self.largest[peers, None] * self.largest[j]
        rest = np.zeros((len(peers) + 1, hold.shape[1]))
        rest[:-1] = np.cumsum(shared[::-1], axis=0)[::-1]
        stretched_s = (rest + hold[j]).max(axis=1)
        busy = np.zeros(len(peers) + 1)
        np.cumsum(hold_s[peers] / self.alone_s[peers], out=busy[1:])
        busy += float((hold_s[higher] / self.alone_s[higher]).sum())
        period_s = np.array([self._period_s(j, s) for s in stretched_s.tolist()])
        coarse_s = np.full(len(busy), np.inf)
        np.divide(period_s, 1.0 - busy, out=coarse_s, where=busy < 1.0)
        mean_s, longest_s = zip(
            *(
                self._bound(j, float(stretched_s[k]), np.concatenate((higher, peers[:k])), hold_s)
                for k in {0, int(np.argmin(coarse_s)), len(peers)}
            ),
            strict=True,
        )
        return Bound(alone_s, min(mean_s), min(longest_s))

    def _period_s(self, j: int, transfer_s: float) -> float:
        """Iteration time alone of j if its transfer took ``transfer_s``."""
        return max(float(self.compute_s[j]), self._end_s(j, transfer_s))

    def _end_s(self, j: int, transfer_s: float) -> float:
        """End of the last burst of that iteration."""
        return float((self.at_s[j] + self._from_here_s(j, transfer_s)).max())

    def _from_here_s(self, j: int, transfer_s: float) -> FloatArray:
        """Seconds of each burst and those after it if the whole transfer took ``transfer_s``."""
        need_s: FloatArray = self._left[j] * transfer_s
        if self._has_ceiling[j]:
            longer_s = np.maximum(self.least_s[j] - self.share[j] * transfer_s, 0.0)
            need_s += np.cumsum(longer_s[::-1])[::-1]
        return need_s

    def _bound(
        self, j: int, stretched_s: float, who: IntArray, hold_s: FloatArray
    ) -> tuple[float, float]:
        """Mean and longest iteration of j with ``who`` ahead of it."""
        ahead = _Ahead(
            hold_s[who],
            self.alone_s[who],
            self.transfer_s[who, None] + self.start_s[who],
            self.share[who],
        )
        busy = float((ahead.hold_s / ahead.period_s).sum())
        windows_s = [
            _window_s(need_s, ahead) if busy < 1.0 else math.inf
            for need_s in self._from_here_s(j, stretched_s).tolist()
        ]
        longest_s = max(float(self.compute_s[j]), float((self.at_s[j] + windows_s).max()))
        period_s = self._period_s(j, stretched_s)
        window_s = max(windows_s)
        most = ahead.progress(window_s) if window_s < math.inf else np.full(len(who), np.inf)
        slack_s = period_s - self._end_s(j, stretched_s)
        taken_s = float((most * ahead.hold_s).sum())
        part = max(0.0, 1.0 - slack_s / taken_s) if 0 < taken_s < math.inf else 1.0
        mean_s = _mean_s(period_s, part * ahead.hold_s, ahead.period_s, most)
        return min(mean_s, longest_s), longest_s


def _window_s(need_s: float, ahead: _Ahead) -> float:
    """The smallest T with T = need + sum h N(T); infinite if it is long in coming."""
    window_s = need_s
    for _ in range(_STEPS):
        longer_s = need_s + float(ahead.hold_s @ ahead.progress(window_s))
        if longer_s <= window_s * (1 + 1e-12):
            return longer_s
        window_s = longer_s
    return math.inf


def _mean_s(period_s: float, hold_s: FloatArray, every_s: FloatArray, most: FloatArray) -> float:
    """The solution y of y = period + sum hold min(most, y / every): concave, so there is one."""
    # Whoever reaches its most does so at y = most * every: from there on it is a constant.
    order = np.argsort(most * every_s, kind="stable")
    for k in range(len(order) + 1):
        full, rising = order[:k], order[k:]
        busy = float((hold_s[rising] / every_s[rising]).sum())
        if busy >= 1.0:
            continue
        y = (period_s + float((hold_s[full] * most[full]).sum())) / (1.0 - busy)
        if not len(rising) or y <= most[rising[0]] * every_s[rising[0]]:
            return y
    return math.inf


#: What rounding may add to a bound.
_ROUNDING = 1e-9


class SlowdownCap:
    """No job's mean iteration may take more than ``most`` times its iteration alone.

    Where fair sharing (all jobs on one level, on the same paths) can't guarantee that to a job
    either, fair sharing's guarantee is the job's limit.
    """

    def __init__(self, arrays: Arrays, most: float) -> None:
        self._arrays = arrays
        self._most = most
        self._known: dict[JobPaths, _Limits] = {}
        self._kept: dict[Assignment, bool] = {}

    def keeps(self, plan: Assignment) -> bool:
        """True if every job is certain to stay within its limit."""
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
            sharing = Sharing(arrays, traffic_matrix(arrays, choice_of(arrays, by_name)))
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
        """Share by which the job's bound is above its limit; 0 where it keeps it."""
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


class Cap(Protocol):
    """Bounds of the levels of one tenant's jobs.

    Attributes:
        highest: level that none of its jobs exceeds.
        above, share: at most this share of its jobs (0 to 1, rounded down to whole jobs) is above
            this level.
    """

    @property
    def highest(self) -> int: ...

    @property
    def above(self) -> int: ...

    @property
    def share(self) -> float: ...


class Standing(NamedTuple):
    """A job's level and its priority P_j in a schedule."""

    level: int
    priority: float


def tenant_of(job: str, caps: Collection[str]) -> str | None:
    """The longest of the prefixes ``caps`` with which the job's name begins; None: no such one."""
    return max((prefix for prefix in caps if job.startswith(prefix)), key=len, default=None)


def highest_usable(most: int, levels: Collection[int]) -> int:
    """The highest of ``levels`` up to ``most``, or the lowest of all."""
    return max((level for level in levels if level <= most), default=min(levels))


def capped(
    standings: Mapping[str, Standing], levels: Collection[int], caps: Mapping[str, Cap]
) -> dict[str, int]:
    """Levels of the jobs, each tenant's within its cap.

    No job rises, and no two jobs of a tenant change their order. Of those that a share leaves above
    a level, the ones with the highest level stay there, then those with the highest priority, then
    the first by name.

    Args:
        standings: of all jobs of the cluster, by name.
        levels: that may be assigned, at least one.
        caps: by tenant: the beginning of its jobs' names.
    """
    found = {job: standing.level for job, standing in standings.items()}
    jobs_of: dict[str, list[str]] = {}
    for job in standings:
        if (tenant := tenant_of(job, caps)) is not None:
            jobs_of.setdefault(tenant, []).append(job)
    for tenant, jobs in jobs_of.items():
        cap = caps[tenant]
        ranked = sorted(jobs, key=lambda job: (*(-x for x in standings[job]), job))
        may_be_above = math.floor(cap.share * len(jobs) + 1e-9)
        for place, job in enumerate(ranked):
            most = cap.highest if place < may_be_above else min(cap.highest, cap.above)
            if found[job] > most:
                found[job] = min(found[job], highest_usable(most, levels))
    return found
