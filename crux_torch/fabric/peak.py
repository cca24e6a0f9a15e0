"""Peak FLOP/s of devices by model and data type, as their makers publish them.

Dense figures without structured sparsity, at boost clock. Where a sheet prints only the sparse
figure, it is halved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """One model of accelerator.

    Attributes:
        pattern: regular expression for the name that the driver reports, any case.
        flops: FLOP/s by data type: ``fp64``, ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``,
            ``fp4``.
        source: the maker's document.
    """

    pattern: str
    flops: Mapping[str, float]
    source: str


def _tera(**figures: float) -> Mapping[str, float]:
    return {dtype: value * TERA for dtype, value in figures.items()}


_HOPPER_SXM = _tera(fp64=67, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979)
_HOPPER_NVL = _tera(fp64=60, fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5)
_A100 = _tera(fp64=19.5, fp32=19.5, tf32=156, fp16=312, bf16=312)

#: The first pattern that matches counts, so the narrower ones come first.
PEAKS: tuple[PeakFlops, ...] = (
    PeakFlops(
        r"\bGB200\b",
        _tera(fp64=40, fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000, fp4=10000),
        "NVIDIA GB200 NVL72 datasheet, a 72nd of the rack, sparse figures halved",
    ),
    PeakFlops(
        r"\bB200\b",
        _tera(fp64=37, fp32=75, tf32=1100, fp16=2250, bf16=2250, fp8=4500, fp4=9000),
        "NVIDIA HGX platform page, B200, an eighth of the board, sparse figures halved",
    ),
    PeakFlops(r"\bH200 NVL\b", _HOPPER_NVL, "NVIDIA H200 datasheet, NVL column"),
    PeakFlops(r"\bG?H200\b", _HOPPER_SXM, "NVIDIA H200 datasheet, SXM column"),
    PeakFlops(
        r"\bH[18]00 PCIe\b",
        _tera(fp64=51, fp32=51, tf32=378, fp16=756, bf16=756, fp8=1513),
        "NVIDIA H100 datasheet (2023), PCIe column",
    ),
    PeakFlops(r"\bH100 NVL\b", _HOPPER_NVL, "NVIDIA H100 datasheet, NVL column, one GPU"),
    PeakFlops(r"\bH[18]00\b", _HOPPER_SXM, "NVIDIA H100 datasheet, SXM column"),
    PeakFlops(
        r"\bA[18]00\b",
        _A100,
        "NVIDIA A100 Tensor Core GPU datasheet; fp64 is the tensor cores' figure",
    ),
    PeakFlops(
        r"\bA30\b",
        _tera(fp64=10.3, fp32=10.3, tf32=82, fp16=165, bf16=165),
        "NVIDIA A30 datasheet",
    ),
    PeakFlops(
        r"\bA40\b", _tera(fp32=37.4, tf32=74.8, fp16=149.7, bf16=149.7), "NVIDIA A40 datasheet"
    ),
    PeakFlops(r"\bA10\b", _tera(fp32=31.2, tf32=62.5, fp16=125, bf16=125), "NVIDIA A10 datasheet"),
    PeakFlops(
        r"\bL40S\b",
        _tera(fp32=91.6, tf32=183, fp16=362.05, bf16=362.05, fp8=733),
        "NVIDIA L40S datasheet",
    ),
    PeakFlops(
        r"\bL40\b",
        _tera(fp32=90.5, tf32=90.5, fp16=181.05, bf16=181.05, fp8=362),
        "NVIDIA L40 datasheet",
    ),
    PeakFlops(
        r"\bL4\b",
        _tera(fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5),
        "NVIDIA L4 datasheet, sparse figures halved",
    ),
    PeakFlops(r"\bV100S\b", _tera(fp64=8.2, fp32=16.4, fp16=130), "NVIDIA V100 datasheet, V100S"),
    PeakFlops(r"\bV100-PCIE\b", _tera(fp64=7, fp32=14, fp16=112), "NVIDIA V100 datasheet, PCIe"),
    PeakFlops(r"\bV100\b", _tera(fp64=7.8, fp32=15.7, fp16=125), "NVIDIA V100 datasheet, NVLink"),
    PeakFlops(r"\bT4\b", _tera(fp32=8.1, fp16=65), "NVIDIA T4 datasheet"),
    PeakFlops(
        r"\bP100-PCIE\b", _tera(fp64=4.7, fp32=9.3, fp16=18.7), "NVIDIA P100 datasheet, PCIe"
    ),
    PeakFlops(r"\bP100\b", _tera(fp64=5.3, fp32=10.6, fp16=21.2), "NVIDIA P100 datasheet, NVLink"),
    PeakFlops(
        r"\bRTX 4090\b",
        _tera(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3),
        "NVIDIA Ada GPU architecture whitepaper, appendix A, FP32 accumulation",
    ),
    PeakFlops(
        r"\bRTX 3090\b(?! Ti)",
        _tera(fp32=35.6, tf32=35.6, fp16=71, bf16=71),
        "NVIDIA GA102 whitepaper, table 9, FP32 accumulation",
    ),
    PeakFlops(
        r"\bMI300X\b",
        _tera(fp64=163.4, fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9),
        "AMD Instinct MI300X data sheet",
    ),
)


#: Data types whose products tensor cores make, where a model has a figure for them.
TENSOR = ("tf32", "fp16", "bf16", "fp8", "fp4")
#: What a job most likely trains in, where nothing was counted.
USUAL = ("bf16", "fp16", "fp32")


def peak_flops(device_name: str, dtype: str | None = None) -> float | None:
    """Peak FLOP/s of one device.

    Args:
        device_name: as the driver reports it, such as ``NVIDIA A100-SXM4-80GB``.
        dtype: a data type of :class:`PeakFlops`; None for the fastest, which bounds any claim.

    Returns:
        None for a model or a data type that is not in the table.
    """
    peaks = _peaks(device_name)
    return max(peaks.values(), default=None) if dtype is None else peaks.get(dtype)


def flops_in_use(device_name: str, by_dtype: Mapping[str, float]) -> float | None:
    """FLOP/s of one device at its peak, in the mix of data types that a job computes in.

    Args:
        device_name: as the driver reports it.
        by_dtype: FLOPs by data type; one without a figure counts at the fastest. Where there are
            none at all, the job is taken to train in the first of ``USUAL`` that the device has.

    Returns:
        None for a model that is not in the table.
    """
    peaks = _peaks(device_name)
    total = sum(by_dtype.values())
    if not peaks:
        return None
    if not total:
        return next((peaks[dtype] for dtype in USUAL if dtype in peaks), None)
    return total / sum(flops / _peak(peaks, dtype) for dtype, flops in by_dtype.items())


def tensor_seconds(device_name: str, by_dtype: Mapping[str, float]) -> float | None:
    """Seconds for which FLOPs by data type keep all tensor cores busy at their peak.

    Returns:
        None for a model that is not in the table.
    """
    peaks = _peaks(device_name)
    if not peaks:
        return None
    return sum(by_dtype.get(dtype, 0.0) / peaks[dtype] for dtype in TENSOR if dtype in peaks)


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
