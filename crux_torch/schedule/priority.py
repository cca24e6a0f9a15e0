"""Priority assignment: intensity, corrected for the pattern of the job's iterations (§4.2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from crux_torch.schedule.arrays import Arrays, FloatArray, row_max
from crux_torch.schedule.correction import correction_factors, player
from crux_torch.schedule.intensity import intensities, solo_periods_s


class Priorities(NamedTuple):
    """For each job, in the order of names: P_j = k_j I_j (Equation 3) and its factors."""

    priority: FloatArray
    intensity: FloatArray
    correction: FloatArray


def assign_priorities(arrays: Arrays, traffic: Any) -> Priorities:
    """P_j of every job, given ``traffic``: bytes of each job (row) on each link (column)."""
    t_s = row_max(traffic, 1.0 / arrays.capacity_Bps)
    intensity = intensities(arrays, t_s)
    reference = reference_job(arrays, traffic, t_s)
    players = [player(job, t) for job, t in zip(arrays.jobs, t_s.tolist(), strict=True)]
    correction = correction_factors(players[reference], players) if players else np.ones(0)
    correction[reference : reference + 1] = 1.0
    return Priorities(correction * intensity, intensity, correction)


def reference_job(arrays: Arrays, traffic: Any, t_s: FloatArray) -> int:
    """The job with the most traffic: bytes per second, over all its links, while it is alone.

    Per second and on every link, since the reference stands for the job that others are most
    likely to meet; of equals the first by name.
    """
    if not arrays.jobs:
        return 0
    period_s = solo_periods_s(arrays, t_s)
    moved = np.asarray(traffic.sum(axis=1), np.float64)
    rate_Bps = np.divide(moved, period_s, out=np.zeros(len(moved)), where=period_s > 0)
    return int(np.argmax(rate_Bps))
