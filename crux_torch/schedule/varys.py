"""Varys: smallest effective bottleneck first (Chowdhury et al., SIGCOMM '14), as in §4.4."""

from __future__ import annotations

import numpy as np

from crux_torch.schedule.arrays import (
    IntArray,
    arrays_of,
    check_levels,
    choice_of,
    paths_of,
    traffic_matrix,
)
from crux_torch.schedule.intensity import transfer_times_s
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions


def varys(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Orders jobs by t_j, the shortest first, on the default paths; balanced compression.

    Jobs without traffic come last and on the lowest level, so that levels serve those with.
    """
    arrays = arrays_of(cluster)
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
