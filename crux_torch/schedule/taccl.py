"""TACCL*: the paper's inter-job form of TACCL's routing and ordering (§4.4, footnote 3)."""

from __future__ import annotations

import numpy as np

from crux_torch.schedule.arrays import FloatArray, IntArray, arrays_of, check_levels, paths_of
from crux_torch.schedule.intensity import unrouted_transfer_times_s
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions
from crux_torch.schedule.placing import place


def taccl(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Least congested links for each job, in the order of names; longer distance first.

    A job's distance is the mean number of links that its bytes cross, which is what priority
    holds. Jobs of equal distance have equal level.
    """
    arrays = arrays_of(cluster)
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
