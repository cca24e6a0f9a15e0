"""Greedy placement of flows on candidate paths: the loop is C++ (``csrc/schedule/place.cc``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from crux_torch import _schedule
from crux_torch.schedule.arrays import Arrays, FloatArray, IntArray, Reader, traffic_matrix
from crux_torch.schedule.intensity import (
    intensities,
    per_second,
    solo_periods_s,
    transfer_times_s,
    unrouted_transfer_times_s,
)
from crux_torch.schedule.model import Cluster, Job, Link


def place(arrays: Arrays, order: IntArray, t_s: FloatArray, *, sweeps: int = 0) -> IntArray:
    """The candidate that each flow takes when jobs (by index) choose in ``order``.

    Each flow of a job, the largest first, takes the candidate whose most utilised link is least
    utilised once the flow is on it; then the one with the smallest sum over its links; then the
    first. A link's utilisation is the share of its capacity that the jobs placed so far ask for
    while they meet nobody: bytes of an iteration over the job's own period, which follows from its
    t_j.

    In each of ``sweeps`` every flow then chooses again, all others in place, until none moves.
    """
    period_s = solo_periods_s(arrays, t_s)[arrays.flow_job]
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    flows = np.lexsort((-arrays.flow_bytes, rank[arrays.flow_job]))
    choice = np.empty(len(flows), np.int64)
    choice[flows] = _schedule.place(
        set_start=arrays.set_start,
        path_start=arrays.path_start,
        path_links=arrays.path_links,
        capacity_Bps=arrays.capacity_Bps,
        flow_set=arrays.flow_set[flows],
        rate_Bps=per_second(arrays.flow_bytes, period_s)[flows],
        sweeps=sweeps,
    )
    return choice


class Alone(NamedTuple):
    """What becomes of a job that meets no other; I_j is in FLOP/s, and t_j that on these paths."""

    path: tuple[int, ...]
    t_s: float
    period_s: float
    intensity: float


def alone(
    job: Job,
    capacity_Bps: Mapping[Link, float],
    *,
    sweeps: int = 0,
    reader: Reader | None = None,
) -> Alone:
    """``job`` on the paths that path selection gives it in an empty network.

    So it is not charged for colliding with itself where it need not. Links other than its own do no
    harm; ``sweeps`` are those of :func:`place`. What a ``reader`` reads here serves its next job.

    Raises:
        ClusterError: a job that contradicts itself, or a link without capacity.
    """
    arrays = (reader or Reader()).read(Cluster(capacity_Bps, (job,)))
    before_s = unrouted_transfer_times_s(arrays)
    choice = place(arrays, np.zeros(1, np.int64), before_s, sweeps=sweeps)
    t_s = transfer_times_s(arrays, traffic_matrix(arrays, choice))
    period_s = solo_periods_s(arrays, t_s)
    intensity = intensities(arrays, t_s)
    return Alone(tuple(choice.tolist()), float(t_s[0]), float(period_s[0]), float(intensity[0]))
