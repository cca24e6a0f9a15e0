"""How much slower than alone a job can get under levels, whatever the phases.

The proof, in the terms used here (h, N, F, slack), is in ``docs/fairness.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from crux_torch.schedule.arrays import (
    Arrays,
    FloatArray,
    IntArray,
    arrays_of,
    choice_of,
    traffic_matrix,
)
from crux_torch.schedule.intensity import burst_times_s, solo_periods_s, transfer_times_s
from crux_torch.schedule.model import Cluster, Decision

#: Steps of a fixed-point iteration that has not settled by then; the bound is then given up.
_STEPS = 24


class Bound(NamedTuple):
    """What is certain about a job, in seconds; infinite where nothing is.

    Attributes:
        alone_s: an iteration that meets no other job.
        mean_s: the mean iteration in the long run is at most this.
        longest_s: no iteration is longer.
    """

    alone_s: float
    mean_s: float
    longest_s: float

    @property
    def slowdown(self) -> float:
        """Bound on the mean iteration over the iteration alone; 1 for a job that does nothing."""
        return self.mean_s / self.alone_s if self.alone_s > 0 else 1.0


def bounds(cluster: Cluster, decision: Decision) -> dict[str, Bound]:
    """What ``decision`` guarantees to every job of ``cluster``.

    Raises:
        ClusterError: a cluster that contradicts itself, or paths that are not its own.
    """
    arrays = arrays_of(cluster)
    sharing = Sharing.of(arrays, traffic_matrix(arrays, choice_of(arrays, decision.path)))
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


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """Which jobs meet on which links, and how long each holds them; computed once for many plans.

    Attributes:
        hold: seconds of one iteration that each job (row) holds each link (column), dense.
        transfer_s: t_j of each job.
        largest: the most bytes that each job has on one link.
        at_s: when in the iteration each burst is due, a row a job, padded with a last burst's.
        share: of each burst; 0 where padded.
        start_s: when each burst starts alone.
    """

    hold: FloatArray
    transfer_s: FloatArray
    alone_s: FloatArray
    largest: FloatArray
    compute_s: FloatArray
    at_s: FloatArray
    share: FloatArray
    start_s: FloatArray

    @classmethod
    def of(cls, arrays: Arrays, traffic: Any) -> Sharing:
        """From a cluster and the bytes of each job (row) on each link (column), sparse CSR."""
        used = np.unique(traffic.indices)
        moved = traffic[:, used].toarray()
        # Links that the same jobs use to the same degree bound them alike.
        hold = np.unique(moved / arrays.capacity_Bps[used], axis=1)
        transfer_s = transfer_times_s(arrays, traffic)
        width = max((len(job.bursts) for job in arrays.jobs), default=1)
        shape = (len(arrays.jobs), width)
        at_s, share, start_s = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for j, job in enumerate(arrays.jobs):
            times_s = burst_times_s(job, float(transfer_s[j]))
            for b, (burst, (start, _)) in enumerate(zip(job.bursts, times_s, strict=True)):
                at_s[j, b], share[j, b] = burst.at * job.compute_s, burst.share
                start_s[j, b] = start
            at_s[j, len(job.bursts) :] = start_s[j, len(job.bursts) :] = at_s[j, 0]
        return cls(
            hold=hold,
            transfer_s=transfer_s,
            alone_s=solo_periods_s(arrays, transfer_s),
            largest=moved.max(axis=1, initial=0.0),
            compute_s=np.array([job.compute_s for job in arrays.jobs]),
            at_s=at_s,
            share=share,
            start_s=start_s,
        )

    def meeting(self, j: int) -> list[int]:
        """j and the jobs that share a link with it."""
        met = (self.hold[:, self.hold[j] > 0] > 0).any(axis=1)
        return [int(other) for other in np.flatnonzero(met)]

    def bound(self, j: int, level: IntArray) -> Bound:
        """What is certain about job j when jobs have these levels."""
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
        # Who moves least for its time goes first.
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
        """When the last burst of that iteration ends."""
        return float((self.at_s[j] + self._from_here(j) * transfer_s).max())

    def _from_here(self, j: int) -> FloatArray:
        """Share of the bytes that each burst and those after it carry."""
        return np.asarray(np.cumsum(self.share[j][::-1])[::-1])

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
            _window_s(x * stretched_s, ahead) if busy < 1.0 else math.inf
            for x in self._from_here(j).tolist()
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
