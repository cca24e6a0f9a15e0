"""GPU intensity: how much computation a second of a job's communication unblocks (paper §3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from crux_torch import _schedule
from crux_torch.schedule.arrays import Arrays, FloatArray, IntArray, row_max, traffic_matrix
from crux_torch.schedule.model import Job, Link


def link_traffic(job: Job, path: Sequence[int]) -> dict[Link, float]:
    """M_j: bytes of one iteration on each link, given the candidate that each flow takes."""
    traffic: dict[Link, float] = {}
    for flow, chosen in zip(job.flows, path, strict=True):
        for link in flow.candidates[chosen]:
            traffic[link] = traffic.get(link, 0.0) + flow.bytes
    return traffic


def transfer_time_s(traffic: Mapping[Link, float], capacity_Bps: Mapping[Link, float]) -> float:
    """t_j = max_e M_{j,e} / B_e in seconds (Definition 2); 0 without traffic."""
    return max((moved / capacity_Bps[link] for link, moved in traffic.items()), default=0.0)


def intensity(job: Job, t_s: float) -> float:
    """I_j = W_j / t_j in FLOP/s (Equation 2); infinite for a job without traffic."""
    return job.flops / t_s if t_s > 0 else math.inf


def transfer_times_s(arrays: Arrays, choice: IntArray) -> FloatArray:
    """t_j of every job on its chosen paths."""
    return row_max(traffic_matrix(arrays, choice), 1.0 / arrays.capacity_Bps)


def unrouted_transfer_times_s(arrays: Arrays) -> FloatArray:
    """t_j of every job before any path is chosen: the larger of two estimates from below.

    Path selection goes by intensity, which is known only once paths are chosen; this breaks the
    circle. One estimate spreads every flow evenly over its candidates, which is what good path
    selection comes close to when there are many flows; the other gives each flow alone its best
    candidate, which no selection can beat, and which tells when there are few.
    """
    return _schedule.unrouted_transfer_times_s(
        set_start=arrays.set_start,
        path_start=arrays.path_start,
        path_links=arrays.path_links,
        capacity_Bps=arrays.capacity_Bps,
        flow_start=arrays.flow_start,
        flow_set=arrays.flow_set,
        flow_bytes=arrays.flow_bytes,
    )


def intensities(arrays: Arrays, t_s: FloatArray) -> FloatArray:
    """I_j in FLOP/s of every job; infinite where t_j is 0, or so small that it overflows."""
    flops = np.array([job.flops for job in arrays.jobs], np.float64)
    result = np.full(len(flops), np.inf)
    with np.errstate(over="ignore"):
        np.divide(flops, t_s, out=result, where=t_s > 0)
    return result


def solo_periods_s(arrays: Arrays, t_s: FloatArray) -> FloatArray:
    """Seconds of one iteration of every job that meets no other, from its t_j and its bursts."""
    compute_s = np.array([job.compute_s for job in arrays.jobs], np.float64)
    bursts = [job.bursts for job in arrays.jobs]
    end_s = np.zeros(len(bursts))
    for b in range(max(map(len, bursts), default=0)):
        having = np.array([j for j, mine in enumerate(bursts) if len(mine) > b], np.int64)
        at = np.array([bursts[j][b].at for j in having.tolist()])
        share = np.array([bursts[j][b].share for j in having.tolist()])
        end_s[having] = np.maximum(end_s[having], at * compute_s[having]) + share * t_s[having]
    return np.maximum(end_s, compute_s)


def by_descending(values: FloatArray) -> IntArray:
    """Job indices from the largest value to the smallest; equal values in the order of names."""
    return np.argsort(-values, kind="stable")
