"""Sincronia: bottleneck-select-scale-iterate (Agarwal et al., SIGCOMM '18), as in §4.4."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from crux_torch.schedule.arrays import (
    FloatArray,
    IntArray,
    arrays_of,
    check_levels,
    choice_of,
    paths_of,
)
from crux_torch.schedule.arrays import traffic_matrix as traffic_of
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions


def sincronia(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Jobs in primal-dual order on the default paths; the first ones get levels of their own."""
    arrays = arrays_of(cluster)
    choice = choice_of(arrays, options.default_path)
    order = bssi_order(traffic_of(arrays, choice), 1.0 / arrays.capacity_Bps).tolist()
    level = compress_first(len(order), check_levels(options.levels)).tolist()
    return Decision(
        path=paths_of(arrays, choice),
        level={arrays.jobs[j].name: level[rank] for rank, j in enumerate(order)},
        priority={arrays.jobs[j].name: float(len(order) - r) for r, j in enumerate(order)},
    )


def bssi_order(traffic: Any, seconds_per_byte: FloatArray) -> IntArray:
    """Job indices, first to send first, all of weight 1 at the start.

    From the last place to the first: take the bottleneck, the link with the most seconds of traffic
    of jobs not yet placed; place last, of the jobs on it, the one with the smallest weight for its
    seconds there; scale down the weights of the others on that link by what placing it cost. Jobs
    without traffic hinder nobody and need no place: they come after all others. ``traffic`` is a
    sparse CSR matrix of jobs by links, in bytes.
    """
    jobs = traffic.shape[0]
    demand_s = sparse.csr_array(
        (traffic.data * seconds_per_byte[traffic.indices], traffic.indices, traffic.indptr),
        shape=traffic.shape,
    )
    on_link = demand_s.tocsc()
    load_s = np.asarray(demand_s.sum(axis=0), np.float64)
    weight = np.ones(jobs)
    left = np.diff(traffic.indptr) > 0
    users = np.diff(on_link.indptr).astype(np.int64)
    order: list[int] = []
    for _ in range(int(left.sum())):
        bottleneck = int(np.argmax(np.where(users > 0, load_s, -1.0)))
        column = slice(on_link.indptr[bottleneck], on_link.indptr[bottleneck + 1])
        here = left[on_link.indices[column]]
        rivals, seconds = on_link.indices[column][here], on_link.data[column][here]
        cost = weight[rivals] / seconds
        last = int(np.argmin(cost))
        job = int(rivals[last])
        weight[rivals] -= cost[last] * seconds
        row = slice(demand_s.indptr[job], demand_s.indptr[job + 1])
        load_s[demand_s.indices[row]] -= demand_s.data[row]
        users[demand_s.indices[row]] -= 1
        left[job] = False
        order.append(job)
    placed = np.array(order[::-1], np.int64)
    return np.concatenate((placed, np.setdiff1d(np.arange(jobs), placed)))


def compress_first(jobs: int, levels: IntArray) -> IntArray:
    """The level of each rank, 0 the first: one job on each level but the lowest (Figure 13)."""
    return levels[::-1][np.minimum(np.arange(jobs), len(levels) - 1)]
