"""The GPUs of this host by NVML (``nvidia-ml-py``), and the peak FLOP/s of their models.

``peak_flops.csv`` has the makers' figures in TFLOP/s: dense, without structured sparsity, at boost
clock. Where a sheet prints only the sparse figure, it is halved.

Without a driver, a library, a permission or a function of NVML there are fewer facts, never an
error. NVML waits for the driver, which can take long while a GPU is reset or falls off the bus.
Callers that must not wait use :func:`bounded`.
"""

from __future__ import annotations

import csv
import importlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

from crux_torch.host.interfaces import as_sysfs_writes
from crux_torch.host.pcie import Distance
from crux_torch.threads import call_in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Limit of waiting for NVML in :func:`bounded`. If persistence mode is off, the first call
#: wakes up the driver, which takes a second or two for each GPU.
TIMEOUT_S = 10.0

#: Bytes per second of one NVLink and direction by compute capability, major or major and minor:
#: NVIDIA's papers on P100, V100, A100, GA102 (112.5 GB/s both ways over four), H100 and Blackwell.
#: The version that NVML tells is not used: for an H100 drivers have been seen to tell Blackwell's.
NVLINK_Bps: dict[tuple[int, ...], float] = {
    (6,): 20e9,
    (7,): 25e9,
    (8, 0): 25e9,
    (8, 6): 14.0625e9,
    (9,): 25e9,
    (10,): 50e9,
}
#: ``nvmlIntNvLinkDeviceType_t``.
NVLINK_KINDS: dict[int | None, Literal["gpu", "switch"]] = {0: "gpu", 2: "switch"}
#: ``nvmlGpuTopologyLevel_t``: 0, 10, ... 50.
LEVELS = {10 * distance: distance for distance in Distance}
#: ``nvmlGpuP2PStatus_t``, in words.
PEER_STATUS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "not across these PCIe root ports",
    4: "switched off by a registry key",
    5: "not supported",
}
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
#: Likeliest training data types of a job whose operations were not counted.
USUAL = ("bf16", "fp16", "fp32")


def peak_flops(device_name: str, dtype: str | None = None) -> float | None:
    """Returns the peak FLOP/s of one device; None for an unknown model or data type.

    Args:
        device_name: as the driver reports it, such as ``NVIDIA A100-SXM4-80GB``.
        dtype: a data type of :class:`PeakFlops`; None for the fastest, which bounds any claim.
    """
    peaks = _peaks(device_name)
    return max(peaks.values(), default=None) if dtype is None else peaks.get(dtype)


def flops_in_use(device_name: str, by_dtype: Mapping[str, float]) -> float | None:
    """Returns the peak FLOP/s of one device, in the mix of data types that a job computes in.

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
    """Returns the seconds that FLOPs keep all tensor cores busy; None: no figures."""
    peaks = _peaks(device_name)
    if not peaks:
        return None
    return sum(by_dtype.get(dtype, 0.0) / peaks[dtype] for dtype in TENSOR if dtype in peaks)


def tensor_flops(device_name: str, by_dtype: Mapping[str, float]) -> float | None:
    """Returns the FLOP/s of tensor cores in the mix of types they multiply; None: no figures.

    FLOPs that were not counted are most likely of the first type of ``USUAL`` that the device has,
    so the result is never less than that type's.
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


@dataclass(frozen=True, slots=True)
class NvLink:
    """The active NVLinks between a GPU and one peer.

    Attributes:
        peer: PCI address of the other end as sysfs writes it; empty if NVML does not say.
        capacity_Bps: bytes per second of each direction, all links together; None for a GPU whose
            NVLink rate is unknown.
    """

    peer: str
    kind: Literal["gpu", "switch", "other"]
    count: int
    capacity_Bps: float | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this host.

    Attributes:
        memory_bytes: total memory; None if NVML does not say (a GPU split by MIG without the
            permission, or one that shares the host's memory).
        pci_address: ``DOMAIN:BUS:DEVICE.FUNCTION`` in lower case, as sysfs writes it.
        peak_flops: fastest published FLOP/s of the model; None if the model is not known.
        mig, mig_uuids: True if it is split into MIG instances (None if unknown), and their UUIDs.
        gpm: True if it has GPM's hardware counters.
        processes: number of those that compute on it; None if NVML does not say. In a container,
            NVML may see its own processes alone.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    pci_address: str
    peak_flops: float | None
    nvlinks: tuple[NvLink, ...] = ()
    mig: bool | None = None
    mig_uuids: tuple[str, ...] = ()
    gpm: bool = False
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuPair:
    """Two GPUs of this host by index, the lower first.

    ``peer_access`` is ``ok``, or the reason why one can't access the other's memory.
    """

    a: int
    b: int
    distance: Distance | None
    peer_access: str | None


@dataclass(frozen=True, slots=True)
class NvmlReport:
    """NVML's facts about this host.

    Attributes:
        driver: its version; empty without one.
        error: NVML's own words if it did not answer; else None.
    """

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    error: str | None = None


@contextmanager
def session(library: Any = None) -> Iterator[Any]:
    """Yields NVML, initialised; raises ``pynvml``'s errors, also if it or the driver is missing."""
    try:
        nvml = library or importlib.import_module("pynvml")
    except ModuleNotFoundError:
        remedy = "pip install 'crux-torch[live]'"
        raise ModuleNotFoundError(f"nvidia-ml-py is not installed: {remedy}") from None
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        _try(nvml.nvmlShutdown)


def read_nvml(library: Any = None, *, pairs: bool = False) -> NvmlReport:
    """Returns NVML's facts about this host; with ``pairs`` also about every two GPUs.

    Args:
        library: the module ``pynvml``, or one like it.
    """
    try:
        with session(library) as nvml:
            listed = (_try(_gpu, nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
            found = [each for each in listed if each is not None]
            joined = [_pair(nvml, a, b) for a, b in combinations(found, 2) if pairs]
            driver = _str(_ask(nvml, "nvmlSystemGetDriverVersion") or "")
            return NvmlReport(driver, tuple(gpu for gpu, _ in found), tuple(joined))
    # NVML's errors are a class of its own, and an old library can lack any symbol.
    except Exception as error:
        log.debug("no NVML: %s", error)
        return NvmlReport(error=str(error) or type(error).__name__)


def read_gpus(library: Any = None) -> tuple[Gpu, ...]:
    """Returns the GPUs that NVML lists; none without a driver or without ``nvidia-ml-py``."""
    return read_nvml(library).gpus


_waiting_for: Future[Any] | None = None
_lock = threading.Lock()


def bounded(call: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T | None:
    """Returns the result of ``call`` in a thread of its own; None if it raises or takes longer.

    While a call is overdue no other is started, so a driver that hangs blocks one thread only.

    Thread safety: any thread may call it; a lock lets one start a call at a time.
    """
    global _waiting_for
    with _lock:
        if _waiting_for is not None and not _waiting_for.done():
            return None
        future = call_in_thread(call, "crux-nvml")
        _waiting_for = future
    try:
        return future.result(timeout_s)
    except Exception as error:
        log.debug("NVML failed: %s", error)
        return None


def bounded_report() -> NvmlReport:
    """Returns NVML's facts about this host, pairs of GPUs included, in bounded time."""
    return bounded(lambda: read_nvml(pairs=True)) or NvmlReport(error="NVML does not answer")


def _gpu(nvml: Any, index: int) -> tuple[Gpu, Any]:
    """A GPU and NVML's handle of it."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = _str(nvml.nvmlDeviceGetName(handle))
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    support = _ask(nvml, "nvmlGpmQueryDeviceSupport", handle)
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    gpu = Gpu(
        index=index,
        name=name,
        uuid=_str(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=None if memory is None else int(memory.total),
        pci_address=as_sysfs_writes(_str(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        peak_flops=peak_flops(name),
        nvlinks=_nvlinks(nvml, handle),
        mig=None if mode is None else bool(mode[0]),
        mig_uuids=_mig_uuids(nvml, handle) if mode and mode[0] else (),
        gpm=bool(support and support.isSupportedDevice),
        processes=None if processes is None else len(processes),
    )
    return gpu, handle


def _nvlinks(nvml: Any, handle: Any) -> tuple[NvLink, ...]:
    """The active links by peer, in the order of their numbers."""
    counts: Counter[tuple[str, int | None]] = Counter()
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
        if not _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link):
            # Later ones may be there all the same.
            continue
        remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        counts[as_sysfs_writes(_str(remote.busId)) if remote is not None else "", kind] += 1
    capability = tuple(_ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle) or ())
    each = NVLINK_Bps.get(capability) or NVLINK_Bps.get(capability[:1])
    return tuple(
        NvLink(peer, NVLINK_KINDS.get(kind, "other"), count, each and each * count)
        for (peer, kind), count in counts.items()
    )


def _mig_uuids(nvml: Any, handle: Any) -> tuple[str, ...]:
    count = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    instances = [_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(count)]
    uuids = [_ask(nvml, "nvmlDeviceGetUUID", i) for i in instances if i is not None]
    return tuple(_str(uuid) for uuid in uuids if uuid is not None)


def _pair(nvml: Any, first: tuple[Gpu, Any], second: tuple[Gpu, Any]) -> GpuPair:
    (a, a_handle), (b, b_handle) = first, second
    level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", a_handle, b_handle)
    # NVML_P2P_CAPS_INDEX_READ is a tuple in nvidia-ml-py, and no ctypes call takes it.
    ability = getattr(nvml, "NVML_P2P_CAPS_INDEX_WRITE", None)
    status = _ask(nvml, "nvmlDeviceGetP2PStatus", a_handle, b_handle, ability)
    return GpuPair(
        a.index,
        b.index,
        None if level is None else LEVELS.get(int(level)),
        None if status is None else PEER_STATUS.get(int(status), f"status {int(status)}"),
    )


def _ask(nvml: Any, function: str, *args: Any) -> Any:
    """The answer of an optional function of NVML; None if it is missing or fails."""
    call = getattr(nvml, function, None)
    return None if call is None else _try(call, *args)


def _try(call: Callable[..., T], *args: Any) -> T | None:
    try:
        return call(*args)
    except Exception as error:
        log.debug("NVML: %s", error)
        return None


def _str(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
