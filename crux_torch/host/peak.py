"""Peak FLOP/s of devices by model and data type, as their makers publish them.

``peak_flops.csv`` has the figures in TFLOP/s: dense, without structured sparsity, at boost clock.
Where a sheet prints only the sparse figure, it is halved.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TERA = 1e12
FIGURES = Path(__file__).with_name("peak_flops.csv")


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """One model of accelerator.

    Attributes:
        pattern: regular expression for the name that the driver reports, any case.
        flops: FLOP/s by data type: ``fp64``, ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``,
            ``fp4``.
    """

    pattern: str
    flops: Mapping[str, float]
    source: str


def _row(pattern: str, source: str, **tera: str) -> PeakFlops:
    flops = {dtype: float(value) * TERA for dtype, value in tera.items() if value}
    return PeakFlops(pattern, flops, source)


#: The first pattern that matches counts, so the narrower ones come first.
PEAKS = tuple(_row(**row) for row in csv.DictReader(FIGURES.read_text("utf-8").splitlines()))
#: Data types that tensor cores multiply, if the model has a figure for them.
TENSOR = ("tf32", "fp16", "bf16", "fp8", "fp4")
#: What a job most likely trains in, where nothing was counted.
USUAL = ("bf16", "fp16", "fp32")


def peak_flops(device_name: str, dtype: str | None = None) -> float | None:
    """Peak FLOP/s of one device; None for a model or a data type that is not in the table.

    Args:
        device_name: as the driver reports it, such as ``NVIDIA A100-SXM4-80GB``.
        dtype: a data type of :class:`PeakFlops`; None for the fastest, which bounds any claim.
    """
    peaks = _peaks(device_name)
    return max(peaks.values(), default=None) if dtype is None else peaks.get(dtype)


def flops_in_use(device_name: str, by_dtype: Mapping[str, float]) -> float | None:
    """FLOP/s of one device at its peak, in the mix of data types that a job computes in.

    Args:
        device_name: as for :func:`peak_flops`; the result is None for the same models.
        by_dtype: FLOPs by data type; one without a figure counts at the fastest. Where there are
            none at all, the job is taken to train in the first of ``USUAL`` that the device has.
    """
    peaks = _peaks(device_name)
    total = sum(by_dtype.values())
    if not peaks:
        return None
    if not total:
        return next((peaks[dtype] for dtype in USUAL if dtype in peaks), None)
    return total / sum(flops / _peak(peaks, dtype) for dtype, flops in by_dtype.items())


def tensor_seconds(device_name: str, by_dtype: Mapping[str, float]) -> float | None:
    """Seconds for which FLOPs by data type keep all tensor cores busy; None: no figures."""
    peaks = _peaks(device_name)
    if not peaks:
        return None
    return sum(by_dtype.get(dtype, 0.0) / peaks[dtype] for dtype in TENSOR if dtype in peaks)


def tensor_flops(device_name: str, by_dtype: Mapping[str, float]) -> float | None:
    """FLOP/s of one device's tensor cores, in the types that they multiply in; None: no figures.

    What was not counted is most likely of the first type of ``USUAL`` that the device has, so the
    result is never less than that type's.
    """
    peaks = _peaks(device_name)
    usual = next((peaks[dtype] for dtype in USUAL if dtype in TENSOR and dtype in peaks), None)
    counted = {d: flops for d, flops in by_dtype.items() if d in TENSOR and d in peaks and flops}
    if not counted:
        return usual
    mixed = sum(counted.values()) / sum(flops / peaks[d] for d, flops in counted.items())
    return max(mixed, usual or 0.0)


def _peaks(device_name: str) -> Mapping[str, float]:
    for entry in PEAKS:
        if re.search(entry.pattern, device_name, re.IGNORECASE):
            return entry.flops
    return {}


def _peak(peaks: Mapping[str, float], dtype: str) -> float:
    if dtype == "tf32" and dtype not in peaks:
        # torch's switches allow it, and the device knows FP32 only.
        dtype = "fp32"
    return peaks.get(dtype) or max(peaks.values())
