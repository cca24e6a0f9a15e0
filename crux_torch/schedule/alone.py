"""A job with the network to itself: its paths, t_j and iteration time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from crux_torch.schedule.arrays import arrays_of, traffic_matrix
from crux_torch.schedule.intensity import (
    intensities,
    solo_periods_s,
    transfer_times_s,
    unrouted_transfer_times_s,
)
from crux_torch.schedule.model import Cluster, Job, Link
from crux_torch.schedule.placing import place


class Alone(NamedTuple):
    """What becomes of a job that meets no other.

    Attributes:
        path: the candidate that each of its flows takes.
        t_s: t_j on these paths.
        period_s: seconds of one iteration.
        intensity: I_j in FLOP/s.
    """

    path: tuple[int, ...]
    t_s: float
    period_s: float
    intensity: float


def alone(job: Job, capacity_Bps: Mapping[Link, float], *, sweeps: int = 0) -> Alone:
    """``job`` on the paths that path selection gives it in an empty network.

    So it is not charged for colliding with itself where it need not.

    Args:
        job: its flows and their candidates.
        capacity_Bps: of every link; others than the job's do no harm.
        sweeps: see :func:`~crux_torch.schedule.placing.place`.

    Raises:
        ClusterError: a job that contradicts itself, or a link without capacity.
    """
    arrays = arrays_of(Cluster(capacity_Bps, (job,)))
    before_s = unrouted_transfer_times_s(arrays)
    choice = place(arrays, np.zeros(1, np.int64), before_s, sweeps=sweeps)
    t_s = transfer_times_s(arrays, traffic_matrix(arrays, choice))
    period_s = solo_periods_s(arrays, t_s)
    intensity = intensities(arrays, t_s)
    return Alone(tuple(choice.tolist()), float(t_s[0]), float(period_s[0]), float(intensity[0]))
