"""Ideal: what every job would do with the network to itself."""

from __future__ import annotations

from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.compression import check_levels
from crux_torch.schedule.model import Cluster, Decision
from crux_torch.schedule.options import SchedulerOptions
from crux_torch.schedule.paths import select_paths

#: Times that a job's flows may reconsider their paths beside each other.
_SWEEPS = 4


def ideal(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Every job alone, on paths selected for it alone: no contention. Nothing can carry it out.

    The paper's ideal is a job running alone (§6.2), on the paths that the network gives it. There
    its own flows may meet, so that a scheduler that selects paths can do better than that; on
    selected paths ideal bounds the others, but for what path selection misses.
    """
    lowest = int(check_levels(options.levels)[0])
    arrays_of(cluster)
    paths: dict[str, tuple[int, ...]] = {}
    for job in cluster.jobs:
        paths |= select_paths(Cluster(cluster.capacity_Bps, (job,)), sweeps=_SWEEPS)
    return Decision(path=paths, level=dict.fromkeys(paths, lowest), isolated=True)
