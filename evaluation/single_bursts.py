"""Jobs as the paper's model has them: one burst an iteration, one overlap ratio (§4.2, §7.1)."""

from __future__ import annotations

from dataclasses import replace

from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.intensity import solo_periods_s, unrouted_transfer_times_s
from crux_torch.schedule.model import Burst, Cluster, Job


def single_bursts(cluster: Cluster) -> Cluster:
    """``cluster`` with the bursts of every job replaced by one that has the same overlap.

    That one carries all bytes and ends when the last burst does alone, so that an iteration alone
    takes as long and hides as much of its communication behind computation. Where all of it is
    hidden it starts when the bytes start on average, or earlier if it would not be hidden then.
    Transfer times are those of :func:`unrouted_transfer_times_s`, as no path is chosen yet.

    Raises:
        ClusterError: a cluster that contradicts itself.
    """
    arrays = arrays_of(cluster)
    t_s = unrouted_transfer_times_s(arrays)
    period_s = solo_periods_s(arrays, t_s)
    return replace(
        cluster,
        jobs=tuple(
            _single(job, t, period)
            for job, t, period in zip(arrays.jobs, t_s.tolist(), period_s.tolist(), strict=True)
        ),
    )


def _single(job: Job, t_s: float, period_s: float) -> Job:
    if len(job.bursts) < 2 or not job.compute_s > 0:
        return job
    # Of a burst that ends with the iteration, or with the computation, the latest start.
    latest = (period_s - t_s) / job.compute_s
    mean = sum(burst.at * burst.share for burst in job.bursts)
    at = min(latest, mean) if period_s <= job.compute_s else latest
    return replace(job, bursts=(Burst(min(max(at, 0.0), 1.0), 1.0),))
