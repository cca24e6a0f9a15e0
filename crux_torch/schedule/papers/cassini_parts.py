"""The input of CASSINI's time shifts: jobs that can overfill links together, and their arcs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import sparse

from crux_torch.schedule.arrays import Arrays, FloatArray, IntArray
from crux_torch.schedule.model import Job
from crux_torch.schedule.papers.cassini_grid import Arc, Circles, circles_of
from crux_torch.schedule.papers.compression import components_of
from crux_torch.schedule.papers.intensity import (
    burst_s,
    burst_times_s,
    solo_periods_s,
    transfer_times_s,
)

#: Share that a measured iteration time gets added, so that a job that came late catches up before
#: it is late again.
HEADROOM = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """Jobs that a chain of contended links joins: all that their shifts depend on.

    ``entries`` has for each job its links, and the share of their capacity that it asks for in the
    highest of its ``arcs``.
    """

    entries: tuple[tuple[tuple[int, float], ...], ...]
    arcs: tuple[tuple[Arc, ...], ...]
    period_s: tuple[float, ...]

    def matrix(self) -> Any:
        """``entries`` as a sparse matrix."""
        start = np.cumsum([0, *(len(row) for row in self.entries)])
        links = [link for row in self.entries for link, _ in row]
        shares = [share for row in self.entries for _, share in row]
        return sparse.csr_array((shares, links, start), shape=(len(start) - 1, max(links) + 1))

    def duty(self) -> FloatArray:
        """Mean rate of each job over its iteration, as a share of its highest."""
        sending_s = [sum(h * (end - start) for start, end, h in own) for own in self.arcs]
        return np.array(sending_s, np.float64) / np.array(self.period_s, np.float64)

    def circles(self, stretch: float = 1.0) -> Circles:
        """The jobs' circles, on grids stretched this much."""
        return circles_of(self.arcs, np.array(self.period_s), stretch)


def parts_of(arrays: Arrays, traffic: Any) -> list[tuple[list[int], Part]]:
    """The jobs that meet on links which they can overfill together, component by component."""
    t_s = transfer_times_s(arrays, traffic)
    measured_s = np.array([job.period_s for job in arrays.jobs], np.float64)
    period_s = np.maximum(solo_periods_s(arrays, t_s), (1.0 + HEADROOM) * measured_s)
    rows = np.repeat(np.arange(traffic.shape[0]), np.diff(traffic.indptr))
    up = [_up_phases(job, t) for job, t in zip(arrays.jobs, t_s.tolist(), strict=True)]
    highest = np.array([most for _, most in up], np.float64)
    share = highest[rows] * traffic.data / (t_s[rows] * arrays.capacity_Bps[traffic.indices])
    peak = np.bincount(traffic.indices, share, traffic.shape[1])
    # On other links no rotation matters; they would only close loops.
    counts = peak[traffic.indices] > 1 + 1e-9
    if not counts.any():
        return []
    places = (rows[counts], traffic.indices[counts])
    demand = sparse.csr_array((share[counts], places), shape=traffic.shape)
    demand.sort_indices()
    parts = []
    for jobs in groups(components_of(demand)):
        if len(jobs) < 2:
            continue
        mine = demand[jobs]
        _, links = np.unique(mine.indices, return_inverse=True)
        entries = list(zip(links.tolist(), mine.data.tolist(), strict=True))
        start = mine.indptr.tolist()
        part = Part(
            entries=tuple(tuple(entries[a:b]) for a, b in pairwise(start)),
            arcs=tuple(up[j][0] for j in jobs.tolist()),
            period_s=tuple(period_s[jobs].tolist()),
        )
        parts.append((jobs.tolist(), part))
    return parts


def _up_phases(job: Job, t_s: float) -> tuple[tuple[Arc, ...], float]:
    """The job's arcs, and the highest rate of them as a share of what its slowest link gives."""
    heights = []
    for burst in job.bursts:
        full_s, alone_s = burst.share * t_s, burst_s(burst, t_s)
        heights.append(full_s / alone_s if alone_s > full_s else 1.0)
    highest = max(heights, default=1.0)
    times_s = burst_times_s(job, t_s)
    arcs = (Arc(*ends, h / highest) for ends, h in zip(times_s, heights, strict=True))
    return tuple(arcs), highest


def groups(number: IntArray) -> list[IntArray]:
    """The indices of each number, ascending."""
    order = np.argsort(number, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
