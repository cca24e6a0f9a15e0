"""W of a job: what its ranks counted, or what their devices could do in the time they computed."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from crux_torch.measure.device import DeviceUse
from crux_torch.measure.job_profile import FlopsSource
from crux_torch.measure.sample import RankSample

log = logging.getLogger(__name__)

#: A count may ask for so much more of a device than its activity allows before that is said:
#: counters and marks do not cover the same microseconds.
ACTIVITY_SHARE = 1.1
ACTIVITY_SLACK = 0.02


class Work(NamedTuple):
    """What the devices of a job do in one iteration: these fields of its ``JobProfile``.

    ``flops`` is never more than the devices could do in a period, where their peak is known.
    """

    flops: float
    flops_source: FlopsSource
    flops_by_time: float
    device_flops: float
    device_busy: float | None
    tensor_busy: float | None


def work(
    samples: Sequence[RankSample],
    *,
    period_s: float,
    compute_s: float,
    device_flops: float = 0.0,
) -> Work:
    """The work of a job from its ranks' samples, scaled to ranks that sent none.

    Args:
        period_s, compute_s: seconds of an iteration, and of it those in which the devices compute.
        device_flops: FLOP/s of one device, for ranks that do not tell their own; 0: not known.
    """
    scale = samples[0].world_size / len(samples)
    in_use = scale * _over_devices(samples, lambda device: device.flops, device_flops)
    peak = scale * _over_devices(samples, lambda device: device.peak_flops, device_flops)
    by_time = compute_s * in_use
    counted = [s.flops for s in samples if s.flops is not None]
    told = any(s.flops_told for s in samples)
    flops = by_time
    if counted:
        if len(counted) < len(samples):
            log.warning("FLOPs counted on %d of %d ranks, scaled", len(counted), len(samples))
        flops = sum(counted) * scale * len(samples) / len(counted)
    if peak and flops > peak * period_s:
        log.warning(
            "counted %.3g FLOPs an iteration, and the devices can do %.3g in it: taking those",
            flops,
            peak * period_s,
        )
        flops = peak * period_s
    for sample in samples:
        _compare_with_activity(sample)
    activities = [s.device.activity for s in samples if s.device and s.device.activity]
    return Work(
        flops=flops,
        flops_source="told" if told else "counted" if counted else "time",
        flops_by_time=by_time,
        device_flops=in_use,
        device_busy=_mean([activity.busy for activity in activities]),
        tensor_busy=_mean([activity.tensor for activity in activities]),
    )


def _over_devices(
    samples: Sequence[RankSample], of: Callable[[DeviceUse], float], default: float
) -> float:
    """Sum over the ranks' devices; those that do not tell count as the mean of the others."""
    told = [of(s.device) if s.device is not None else default for s in samples]
    known = [rate for rate in told if rate > 0]
    return sum(known) / len(known) * len(told) if known else 0.0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _compare_with_activity(sample: RankSample) -> None:
    """Say so where the counted FLOPs ask for more time than the device's counters saw at work.

    Less is no contradiction: counters see every product at its own pace, other processes on the
    device, and kernels that wait.
    """
    device = sample.device
    if device is None or device.activity is None or sample.flops is None or not sample.period_s:
        return
    activity = device.activity
    asked: list[tuple[str, float, float | None]] = []
    if device.tensor_s is not None:
        asked.append(("tensor cores", device.tensor_s, activity.tensor))
    if device.flops:
        asked.append(("device", sample.flops / device.flops, activity.busy))
    for what, seconds, seen in asked:
        needed = seconds / sample.period_s
        if seen is not None and needed > ACTIVITY_SHARE * seen + ACTIVITY_SLACK:
            log.warning(
                "rank %d counts FLOPs that take its %s %.0f%% of the time at peak, but the %s "
                "worked %.0f%%: is its W right?",
                sample.rank,
                what,
                100 * needed,
                what,
                100 * seen,
            )
            return
