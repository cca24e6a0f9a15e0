"""GPU-intensity-based path selection (paper §4.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crux_torch import _schedule
from crux_torch.schedule.arrays import (
    Arrays,
    ClusterError,
    FloatArray,
    IntArray,
    arrays_of,
    paths_of,
)
from crux_torch.schedule.intensity import (
    by_descending,
    intensities,
    solo_periods_s,
    unrouted_transfer_times_s,
)
from crux_torch.schedule.model import Cluster


def select_paths(
    cluster: Cluster, order: Sequence[str] | None = None, *, sweeps: int = 0
) -> dict[str, tuple[int, ...]]:
    """Gives every job, the most GPU-intensive first, the least congested of its candidate paths.

    Each flow of a job, the largest first, takes the candidate whose most utilised link is least
    utilised once the flow is on it; then the one with the smallest sum over its links; then the
    first. A link's utilisation is the share of its capacity that the jobs placed so far ask for
    while they meet nobody: bytes of an iteration over the job's own period.

    Args:
        order: names of all jobs, first choice first; default: descending intensity, with t_j
            as :func:`~crux_torch.schedule.intensity.unrouted_transfer_times_s` estimates it.
        sweeps: see :func:`place`.

    Returns:
        For each job the index of the candidate that each of its flows takes.

    Raises:
        ClusterError: a cluster that contradicts itself, or an order that is not of its jobs.
    """
    arrays = arrays_of(cluster)
    t_s = unrouted_transfer_times_s(arrays)
    if order is None:
        ranked = by_descending(intensities(arrays, t_s))
    else:
        index = {job.name: j for j, job in enumerate(arrays.jobs)}
        if sorted(order) != [job.name for job in arrays.jobs]:
            raise ClusterError("the order of path selection must name every job once")
        ranked = np.array([index[name] for name in order], np.int64)
    return paths_of(arrays, place(arrays, ranked, t_s, sweeps=sweeps))


def place(arrays: Arrays, order: IntArray, t_s: FloatArray, *, sweeps: int = 0) -> IntArray:
    """The candidate that each flow takes when jobs choose in ``order``.

    Args:
        order: job indices, first choice first.
        t_s: t_j of every job, which tells its period.
        sweeps: times that every flow then chooses again, in the same order, with all others in
            place; fewer if none moves.
    """
    period_s = solo_periods_s(arrays, t_s)[arrays.flow_job]
    rate_Bps = np.divide(
        arrays.flow_bytes, period_s, out=np.zeros(len(period_s)), where=period_s > 0
    )
    flows = _flows_in_order(arrays, order)
    choice = np.empty(len(flows), np.int64)
    choice[flows] = _schedule.place(
        set_start=arrays.set_start,
        path_start=arrays.path_start,
        path_links=arrays.path_links,
        capacity_Bps=arrays.capacity_Bps,
        flow_set=arrays.flow_set[flows],
        rate_Bps=rate_Bps[flows],
        sweeps=sweeps,
    )
    return choice


def _flows_in_order(arrays: Arrays, order: IntArray) -> IntArray:
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return np.lexsort((-arrays.flow_bytes, rank[arrays.flow_job]))
