"""W: the work of a job's devices in one iteration, from its ranks' samples."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from crux_torch.measure.device import DeviceUse
from crux_torch.measure.profile import FlopsSource
from crux_torch.measure.sample import RankSample

log = logging.getLogger(__name__)

#: A count may ask for so much more of a device than its activity allows before that is said:
#: counters and marks do not cover the same microseconds.
ACTIVITY_SHARE = 1.1
ACTIVITY_SLACK = 0.02
#: The tensor cores' counters and the count agree within this factor: data types differ by 2, and
#: clocks by less.
TENSOR_FACTOR = 3.0
#: A job that computes does a tenth of what its devices could do, or something was not counted.
TIME_FACTOR = 10.0


class Work(NamedTuple):
    """Work of a job's devices in one iteration: these fields of its ``JobProfile``.

    ``flops`` is never more than the devices could do in a period, where their peak is known.
    """

    flops: float
    flops_source: FlopsSource
    flops_note: str
    flops_by_time: float
    device_flops: float
    device_busy: float | None
    tensor_busy: float | None


class Choice(NamedTuple):
    """An estimate of W, and the reason for taking it in place of another one."""

    flops: float
    source: FlopsSource
    note: str = ""


def work(
    samples: Sequence[RankSample], *, period_s: float, compute_s: float, device_flops: float = 0.0
) -> Work:
    """The work of a job from its ranks' samples, scaled to ranks that sent none.

    Args:
        period_s, compute_s: seconds of an iteration, and of it those in which the devices compute.
        device_flops: FLOP/s of one device, for samples that lack it; 0: not known.
    """
    scale = samples[0].world_size / len(samples)
    in_use = scale * _over_devices(samples, lambda device: device.flops, device_flops)
    peak = scale * _over_devices(samples, lambda device: device.peak_flops, device_flops)
    activities = [s.device.activity for s in samples if s.device and s.device.activity]
    device_busy = _mean([activity.busy for activity in activities])
    busy_s = compute_s if device_busy is None else min(compute_s, device_busy * period_s)
    counted = [_counted(s, period_s) for s in samples if s.flops is not None]
    if 0 < len(counted) < len(samples):
        log.warning("FLOPs counted on %d of %d ranks, scaled", len(counted), len(samples))
    by_time = busy_s * in_use
    choice = choose(
        sum(counted) * samples[0].world_size / len(counted) if counted else None,
        given=any(s.flops_given for s in samples),
        by_tensor=_by_tensor(samples, period_s),
        by_time=by_time,
        uncounted=sorted({name for s in samples for name in s.uncounted_ops}),
    )
    if choice.note and choice.source == "time":
        log.warning("W: %s", choice.note)
    flops = choice.flops
    if peak and flops > peak * period_s:
        log.warning(
            "%s %.3g FLOPs an iteration, and the devices can do %.3g in it: taking those",
            choice.source,
            flops,
            peak * period_s,
        )
        flops = peak * period_s
    for sample in samples:
        _compare_with_activity(sample)
    return Work(
        flops=flops,
        flops_source=choice.source,
        flops_note=choice.note,
        flops_by_time=by_time,
        device_flops=in_use,
        device_busy=device_busy,
        tensor_busy=_mean([activity.tensor for activity in activities]),
    )


def choose(
    counted: float | None,
    *,
    given: bool = False,
    by_tensor: float | None,
    by_time: float,
    uncounted: Sequence[str] = (),
) -> Choice:
    """W out of up to three estimates of it, each in FLOPs of an iteration.

    A count can only be too low, because nothing is counted that does not run. The tensor cores'
    counters see every product, so they are credible. Busy time is an upper bound, so it is credible
    only if they are not known and something is known to be missing from the count.

    Args:
        given: True if the script gave the count; that is never replaced.
        by_tensor: the tensor cores' busy time times their rate; None where it is not known.
        by_time: the devices' busy time times their rate; 0 where that is not known.
        uncounted: operators that multiply, but were not counted.
    """
    if counted is None:
        return Choice(by_tensor or by_time, "time")
    source: FlopsSource = "told" if given else "counted"
    if by_tensor is not None:
        if by_tensor <= TENSOR_FACTOR * counted:
            return Choice(counted, source)
        seen = f"the tensor cores were busy for {by_tensor:.3g} FLOPs"
        found = by_tensor
    else:
        if by_time <= TIME_FACTOR * counted:
            return Choice(counted, source)
        seen = f"the devices could do {by_time:.3g} FLOPs while they computed"
        found = by_time if uncounted else 0.0
    note = f"{counted:.3g} FLOPs were {source}, and {seen}"
    if uncounted:
        note += f"; not counted: {', '.join(uncounted[:3])[:512]}"
    if given or not found:
        return Choice(counted, source, f"{note}; if W is too low, call crux_torch.count_flops()")
    return Choice(
        found, "time", f"{note}; taking the latter. crux_torch.count_flops() knows better"
    )


def _counted(sample: RankSample, period_s: float) -> float:
    """A rank's FLOPs, at most what its own device can do: one rank can't claim for the others."""
    flops = sample.flops or 0.0
    peak = sample.device.peak_flops * period_s if sample.device is not None else 0.0
    if not 0 < peak < flops:
        return flops
    log.warning(
        "rank %d: %.3g FLOPs an iteration, and its device can do %.3g in it: taking those",
        sample.rank,
        flops,
        peak,
    )
    return peak


def _over_devices(
    samples: Sequence[RankSample], rate: Callable[[DeviceUse], float], default: float
) -> float:
    """Sum over the ranks' devices; an unknown rate counts as the mean of the others."""
    rates = [rate(s.device) if s.device is not None else default for s in samples]
    known = [one for one in rates if one > 0]
    return sum(known) / len(known) * len(rates) if known else 0.0


def _by_tensor(samples: Sequence[RankSample], period_s: float) -> float | None:
    """FLOPs of an iteration by the tensor cores' counters, scaled to devices that have none."""
    rates = [
        s.device.activity.tensor * s.device.tensor_flops
        for s in samples
        if s.device and s.device.activity and s.device.activity.tensor is not None
        if s.device.tensor_flops
    ]
    return statistics.fmean(rates) * samples[0].world_size * period_s if rates else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _compare_with_activity(sample: RankSample) -> None:
    """Warn where the counted FLOPs need more time than the device was at work by its counters.

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
