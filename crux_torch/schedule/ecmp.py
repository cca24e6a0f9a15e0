"""The network by itself: ECMP's paths, one level, fair sharing."""

from __future__ import annotations

from crux_torch.schedule.arrays import arrays_of, check_levels, choice_of, paths_of
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions


def ecmp(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Default paths and the lowest level for every job."""
    arrays = arrays_of(cluster)
    lowest = int(check_levels(options.levels)[0])
    return Decision(
        path=paths_of(arrays, choice_of(arrays, options.default_path)),
        level={job.name: lowest for job in arrays.jobs},
    )
