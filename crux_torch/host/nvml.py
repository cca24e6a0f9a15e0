"""The GPUs of this host by NVML (``nvidia-ml-py``): models, NVLinks, and how two are connected.

Without a driver, a library, a permission or a function of NVML there are fewer facts, never an
error. NVML waits for the driver, which can take long while a GPU is reset or falls off the bus.
Callers that must not wait use :func:`bounded`.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeVar

from crux_torch.host.pcie import Distance
from crux_torch.host.peak import peak_flops
from crux_torch.host.sysfs import as_sysfs_writes

log = logging.getLogger(__name__)

T = TypeVar("T")
#: How long a caller of :func:`bounded` waits for NVML. If persistence mode is off, the first call
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
        mig, mig_uuids: whether it is split into MIG instances (None if unknown), and which.
        gpm: whether it has GPM's hardware counters.
        processes: how many processes compute on it; None if NVML does not say. In a container, NVML
            may see its own processes alone.
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
    """Two GPUs of this host: their indices, the lower first, and what NVML says, if it does.

    ``peer_access`` is ``ok``, or why one can't access the other's memory.
    """

    a: int
    b: int
    distance: Distance | None
    peer_access: str | None


@dataclass(frozen=True, slots=True)
class NvmlReport:
    """What NVML says of this host.

    Attributes:
        driver: its version; empty without one.
        error: why NVML did not answer, in its own words; None if it did.
    """

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    error: str | None = None


@contextmanager
def session(library: Any = None) -> Iterator[Any]:
    """NVML, initialised; raises whatever ``pynvml`` raises, also if it or the driver is missing."""
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
    """What NVML says of this host; with ``pairs`` also how every two GPUs are connected.

    ``library`` stands in for the module ``pynvml``.
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
    """The GPUs that NVML lists; none without a driver or without ``nvidia-ml-py``."""
    return read_nvml(library).gpus


_waiting_for: threading.Thread | None = None
_lock = threading.Lock()


def bounded(call: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T | None:
    """What ``call`` returns, from a thread of its own; None if it raises or takes longer.

    While a call is overdue no other is started, so a driver that hangs blocks one thread only.
    """
    global _waiting_for
    answer: list[T] = []

    def run() -> None:
        try:
            answer.append(call())
        except Exception as error:
            log.debug("NVML failed: %s", error)

    with _lock:
        if _waiting_for is not None and _waiting_for.is_alive():
            return None
        thread = threading.Thread(target=run, name="crux-nvml", daemon=True)
        _waiting_for = thread
        thread.start()
    thread.join(timeout_s)
    return answer[0] if answer else None


def bounded_report() -> NvmlReport:
    """What NVML says of this host, pairs of GPUs included, in bounded time."""
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
    """What an optional function of NVML answers; None if it is missing or fails."""
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
