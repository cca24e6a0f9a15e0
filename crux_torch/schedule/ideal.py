"""Ideal: what every job would do with the network to itself."""

from __future__ import annotations

from crux_torch.schedule.arrays import arrays_of, check_levels
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions
from crux_torch.schedule.placing import alone

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
