"""GPU intensity: computation that a second of a job's communication unblocks (paper §3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np

from crux_torch import _schedule
from crux_torch.schedule.arrays import Arrays, FloatArray, IntArray
from crux_torch.schedule.model import Burst, Flow, Job, Link, Memory

#: The engine takes a shorter transfer for none.
SHORTEST_S = 1e-18


def link_traffic(job: Job, path: Sequence[int]) -> dict[Link, float]:
    """M_j: bytes of one iteration on each link that carries any when flow i takes ``path[i]``."""
    traffic: dict[Link, float] = {}
    for flow, chosen in zip(job.flows, path, strict=True):
        for link in flow.candidates[chosen]:
            traffic[link] = traffic.get(link, 0.0) + flow.bytes
    return {link: amount for link, amount in traffic.items() if amount > 0}


def part_traffic(job: Job, path: Sequence[int]) -> list[dict[Link, float]]:
    """:func:`link_traffic` of each part of the job that crosses any link; at least one."""
    if not job.parts:
        return [link_traffic(job, path)]
    flows: dict[int, list[Flow]] = {}
    chosen: dict[int, list[int]] = {}
    for part, flow, candidate in zip(job.parts, job.flows, path, strict=True):
        flows.setdefault(part, []).append(flow)
        chosen.setdefault(part, []).append(candidate)
    moved = (
        link_traffic(replace(job, flows=tuple(flows[part])), chosen[part]) for part in sorted(flows)
    )
    return [traffic for traffic in moved if traffic] or [{}]


def burst_traffic(
    job: Job, traffic: Mapping[Link, float]
) -> list[tuple[float, dict[Link, float], float]]:
    """The fluid engine's bursts of a job that moves ``traffic`` in an iteration."""
    return [
        (b.at, {link: b.share * m for link, m in traffic.items()}, b.least_s) for b in job.bursts
    ]


def bursts_of_parts(
    job: Job, parts: Sequence[Mapping[Link, float]]
) -> (
    list[tuple[float, dict[Link, float], float]]
    | list[tuple[float, list[dict[Link, float]], float]]
):
    """:func:`burst_traffic` of a job whose parts, at least one, move so much in an iteration."""
    if len(parts) == 1:
        return burst_traffic(job, parts[0])
    return [
        (b.at, [{link: b.share * m for link, m in part.items()} for part in parts], b.least_s)
        for b in job.bursts
    ]


def transfer_times_s(arrays: Arrays, traffic: Any) -> FloatArray:
    """t_j = max_e M_{j,e} / B_e of every job in seconds (Definition 2); 0 without traffic.

    ``traffic`` is M, see :func:`~crux_torch.schedule.arrays.traffic_matrix`.
    """
    t_s = np.zeros(traffic.shape[0])
    sending = np.diff(traffic.indptr) > 0
    if sending.any():
        entries_s = traffic.data * (1.0 / arrays.capacity_Bps)[traffic.indices]
        t_s[sending] = np.maximum.reduceat(entries_s, traffic.indptr[:-1][sending])
    return t_s


def unrouted_transfer_times_s(arrays: Arrays) -> FloatArray:
    """t_j of every job before any path is chosen: the larger of two estimates from below.

    One spreads every flow evenly over its candidates. Good path selection comes close to that when
    there are many flows. The other gives each flow alone its best candidate; it is the larger one
    when there are few flows.
    """
    return _schedule.unrouted_transfer_times_s(**arrays.candidates, **arrays.flows)


def remembered_transfer_times_s(arrays: Arrays, memory: Memory) -> FloatArray:
    """:func:`unrouted_transfer_times_s`, of jobs of the last decision out of ``memory``."""

    def times_s(fresh: list[int]) -> list[float]:
        chosen = np.isin(np.arange(len(arrays.jobs)), fresh)
        counts = np.diff(arrays.flow_start)
        flows = np.repeat(chosen, counts)
        some = replace(
            arrays,
            jobs=tuple(compress(arrays.jobs, chosen)),
            flow_start=np.concatenate(([0], counts[chosen].cumsum())),
            flow_set=arrays.flow_set[flows],
            flow_bytes=arrays.flow_bytes[flows],
        )
        return list(unrouted_transfer_times_s(some).tolist())

    jobs = [(job.flows, None) for job in arrays.jobs]
    found = memory.of_jobs("unrouted", arrays.capacity_Bps, jobs, times_s)
    return np.array(found, np.float64)


def intensities(arrays: Arrays, t_s: FloatArray) -> FloatArray:
    """I_j = W_j / t_j in FLOP/s of every job (Equation 2).

    It is infinite where t_j is 0, or so small that the quotient overflows.
    """
    flops = np.array([job.flops for job in arrays.jobs], np.float64)
    result = np.full(len(flops), np.inf)
    with np.errstate(over="ignore"):
        np.divide(flops, t_s, out=result, where=t_s > 0)
    return result


def solo_periods_s(arrays: Arrays, t_s: FloatArray) -> FloatArray:
    """Seconds of one iteration of every job that meets no other, from its t_j and its bursts."""
    compute_s = np.array([job.compute_s for job in arrays.jobs], np.float64)
    ends_s = [
        times_s[-1][1] if (times_s := burst_times_s(job, t)) else 0.0
        for job, t in zip(arrays.jobs, t_s.tolist(), strict=True)
    ]
    return np.maximum(np.array(ends_s, np.float64), compute_s)


def burst_times_s(job: Job, t_s: float) -> list[tuple[float, float]]:
    """(Start, end) in an iteration of the sending of each burst, if the job meets no other."""
    times = []
    end = 0.0
    for burst in job.bursts:
        start = max(end, burst.at * job.compute_s)
        end = start + burst_s(burst, t_s)
        times.append((start, end))
    return times


def burst_s(burst: Burst, t_s: float) -> float:
    """Seconds that a burst takes if its job meets no other."""
    return max(burst.share * t_s, least_s(burst, t_s))


def least_s(burst: Burst, t_s: float) -> float:
    """Seconds that a burst takes at least: none if it moves nothing."""
    return burst.least_s if burst.share * t_s >= SHORTEST_S else 0.0


def per_second(amount: FloatArray, period_s: FloatArray) -> FloatArray:
    """``amount`` of an iteration over its seconds; 0 where an iteration takes no time.

    Infinite where that is more than a number can hold.
    """
    rate = np.zeros(len(amount))
    with np.errstate(over="ignore"):
        np.divide(amount, period_s, out=rate, where=period_s > 0)
    return rate


def by_descending(values: FloatArray) -> IntArray:
    """Job indices from the largest value to the smallest; equal values in the order of names."""
    return np.argsort(-values, kind="stable")
