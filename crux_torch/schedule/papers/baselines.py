"""The schedulers that the paper compares Crux with (§4.4, §6): ECMP alone, Varys, TACCL, Sincronia.

And the ideal, which no scheduler can carry out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy import sparse

from crux_torch.schedule.arrays import (
    FloatArray,
    IntArray,
    arrays_of,
    check_levels,
    choice_of,
    in_order,
    paths_of,
    traffic_matrix,
)
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions
from crux_torch.schedule.papers.crux import alone, place
from crux_torch.schedule.papers.intensity import transfer_times_s, unrouted_transfer_times_s


def ecmp(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Default paths and the lowest level for every job."""
    lowest = int(check_levels(options.levels)[0])
    jobs = in_order(cluster.jobs)
    given = options.default_path or {}

    def paths(fresh: list[int]) -> Iterable[tuple[int, ...]]:
        some = replace(cluster, jobs=tuple(jobs[i] for i in fresh))
        arrays = arrays_of(some, options.memory)
        return paths_of(arrays, choice_of(arrays, given)).values()

    # Another mapping may have other capacities the next time.
    links = cluster.capacity_Bps
    constant = links if isinstance(links, MappingProxyType) else object()
    keys = [(job.flows, given.get(job.name)) for job in jobs]
    found = options.memory.of_jobs("ecmp", constant, keys, paths)
    names = [job.name for job in jobs]
    return Decision(path=dict(zip(names, found, strict=True)), level=dict.fromkeys(names, lowest))


#: Times that a job's flows may reconsider their paths beside each other.
_SWEEPS = 4


def ideal(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Every job alone, on paths selected for it alone: no contention. Nothing can carry it out.

    The paper's ideal is a job running alone (§6.2), on the paths that the network gives it. There
    the job's own flows may meet, and a scheduler that selects paths can do better than that. On
    selected paths, ideal bounds the other schedulers, except for what path selection misses.
    """
    lowest = int(check_levels(options.levels)[0])
    arrays_of(cluster)  # raises where the cluster as a whole contradicts itself
    paths = {
        job.name: alone(job, cluster.capacity_Bps, sweeps=_SWEEPS).path for job in cluster.jobs
    }
    return Decision(path=paths, level=dict.fromkeys(paths, lowest), isolated=True)


def varys(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Smallest effective bottleneck first (Chowdhury et al., SIGCOMM '14), as in §4.4.

    Orders jobs by t_j, the shortest first, on the default paths; balanced compression.
    Jobs without traffic come last and on the lowest level, so that levels serve those with.
    """
    arrays = arrays_of(cluster, options.memory)
    choice = choice_of(arrays, options.default_path)
    levels = check_levels(options.levels)
    bottleneck_s = transfer_times_s(arrays, traffic_matrix(arrays, choice))
    order = np.argsort(np.where(bottleneck_s > 0, bottleneck_s, np.inf), kind="stable")
    level = np.full(len(order), levels[0])
    sending = int((bottleneck_s > 0).sum())
    level[:sending] = compress_balanced(sending, levels)
    names = [arrays.jobs[j].name for j in order.tolist()]
    return Decision(
        path=paths_of(arrays, choice),
        level=dict(zip(names, level.tolist(), strict=True)),
        priority={name: float(len(names) - rank) for rank, name in enumerate(names)},
    )


def compress_balanced(jobs: int, levels: IntArray) -> IntArray:
    """The level of each rank, 0 the first, with equally many jobs on each level (Figure 13)."""
    return levels[::-1][np.arange(jobs) * min(len(levels), jobs) // max(1, jobs)]


def taccl(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """TACCL*, the paper's inter-job form of TACCL's routing and ordering (§4.4, footnote 3).

    Least congested links for each job, in the order of names; longer distance first.
    A job's distance is the mean number of links that its bytes cross, which is what priority
    holds. Jobs of equal distance have equal level.
    """
    arrays = arrays_of(cluster, options.memory)
    levels = check_levels(options.levels)
    choice = place(arrays, np.arange(len(arrays.jobs)), unrouted_transfer_times_s(arrays))
    path = arrays.set_start[arrays.flow_set] + choice
    nowhere = len(arrays.capacity_Bps) - 1
    start = arrays.path_start[path]
    links = arrays.path_start[path + 1] - start
    if len(links):
        links[arrays.path_links[start] == nowhere] = 0
    jobs = len(arrays.jobs)
    moved = np.bincount(arrays.flow_job, arrays.flow_bytes, jobs)
    crossed = np.bincount(arrays.flow_job, arrays.flow_bytes * links, jobs)
    distance = np.divide(crossed, moved, out=np.zeros(jobs), where=moved > 0)
    return Decision(
        path=paths_of(arrays, choice),
        level=arrays.by_name(compress_distances(distance, levels)),
        priority=arrays.by_name(distance),
    )


def compress_distances(distance: FloatArray, levels: IntArray) -> IntArray:
    """The level of each job: distinct distances in equal shares, the longest on the highest."""
    distinct, rank = np.unique(np.round(-distance, 9), return_inverse=True)
    used = min(len(levels), len(distinct))
    return levels[::-1][rank * used // max(1, len(distinct))]


def sincronia(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Bottleneck-select-scale-iterate (Agarwal et al., SIGCOMM '18), as in §4.4.

    Jobs in primal-dual order on the default paths; the first ones get levels of their own.
    """
    arrays = arrays_of(cluster, options.memory)
    choice = choice_of(arrays, options.default_path)
    order = bssi_order(traffic_matrix(arrays, choice), 1.0 / arrays.capacity_Bps).tolist()
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
