"""Finds this process's own GPU, and measures its activity: by GPM's counters, else by polling."""

from __future__ import annotations

import logging
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from crux_torch.host.nvml import Gpu, read_gpus, session

log = logging.getLogger(__name__)

#: Picks a GPU out of all of the host.
Choice = Callable[[Sequence[Gpu]], Gpu | None]
#: Period of polling; NVML's rates are means over a fraction of a second.
POLL_S = 0.5
#: Limit of waiting for the counters at the end of a measurement.
FINISH_S = 0.5
MIB = float(1 << 20)
KILOBYTE = 1e3

#: Fields of :class:`DeviceActivity`: GPM's metric, and the size of its unit.
GPM_METRICS = {
    "busy": ("NVML_GPM_METRIC_SM_UTIL", 0.01),
    "tensor": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    "pcie_sent_Bps": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    "pcie_received_Bps": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
    "nvlink_sent_Bps": ("NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB),
    "nvlink_received_Bps": ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB),
}

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as CUDA shows it to this process: its number, UUID (empty if unknown) and model."""

    ordinal: int
    uuid: str
    name: str


def current_device(torch: Any = None) -> CudaDevice | None:
    """Returns the CUDA device that the calling thread has chosen; None if CUDA is unused yet.

    The choice belongs to the thread: call it on the one that trains. It never makes a CUDA context.
    """
    torch = torch or sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    ordinal = int(torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(ordinal)
    return CudaDevice(ordinal, str(getattr(properties, "uuid", "")), properties.name)


class OwnDevice:
    """The CUDA device that this process trains on: the choice of the thread that made this.

    Thread safety: :meth:`look` has an effect only on that thread; any may call :meth:`device`.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._chosen: CudaDevice | None = None
        self.look()

    def look(self) -> None:
        """Ask CUDA again; each thread has its own device."""
        if threading.get_ident() == self._thread:
            self._chosen = current_device() or self._chosen

    def device(self, visible: int, env: Mapping[str, str]) -> CudaDevice | None:
        """Returns the device; None if unknown.

        A script may choose its device after its process group was made. Then it is the only one of
        the ``visible`` devices, or the one with the number of its local rank, as launchers
        document it.
        """
        if self._chosen is not None:
            return self._chosen
        if visible == 1:
            return CudaDevice(0, "", "")
        rank = env.get("LOCAL_RANK", "")
        chosen = rank.isdecimal() and int(rank) < visible
        return CudaDevice(int(rank), "", "") if chosen else None


def own_gpu(
    gpus: Sequence[Gpu], ordinal: int, uuid: str = "", env: Mapping[str, str] | None = None
) -> Gpu | None:
    """Returns the GPU that CUDA calls ``ordinal`` in this process; None if it is not certain.

    Args:
        uuid: as CUDA reports it, with or without its prefix; decides if it is not empty.
        env: with CUDA_VISIBLE_DEVICES, in case no UUID is known.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    if bare:
        return next(
            (g for g in gpus if g.uuid == f"GPU-{bare}" or f"MIG-{bare}" in g.mig_uuids), None
        )
    visible = visible_gpus(gpus, env or {})
    return visible[ordinal] if 0 <= ordinal < len(visible) else None


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> tuple[Gpu | None, ...]:
    """Returns the GPUs that CUDA shows a process, in CUDA's order; None for an unknown one.

    As the CUDA programming guide (environment variables) has it: indices, UUIDs or their unique
    beginnings, MIG instances; the first that is not valid ends the list. Unless CUDA_DEVICE_ORDER
    says PCI_BUS_ID, CUDA numbers the fastest first, which is NVML's order only among equal GPUs.
    """
    ordered = env.get(ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) < 2
    by_index: Sequence[Gpu | None] = gpus if ordered else [None] * len(gpus)
    if VISIBLE not in env:
        return tuple(by_index)
    found: list[Gpu | None] = []
    taken: set[int | str] = set()
    for token in (part.strip() for part in env[VISIBLE].split(",")):
        key: int | str = token
        if token.isdecimal() and int(token) < len(gpus):
            key = int(token)
            chosen = by_index[key]
        elif (chosen := _by_uuid(gpus, token)) is None:
            break
        if key in taken:
            # CUDA shows nothing at all if a device is named twice.
            return ()
        taken.add(key)
        found.append(chosen)
    return tuple(found)


def _by_uuid(gpus: Sequence[Gpu], token: str) -> Gpu | None:
    """The GPU with a UUID, or with an instance of that UUID, if exactly one fits."""
    if token.startswith("MIG-GPU-"):
        # MIG-GPU-UUID/INSTANCE/COMPUTE: how drivers before 470 name an instance.
        token = token.removeprefix("MIG-").partition("/")[0]
    if not token.startswith(("GPU-", "MIG-")) or len(token) == len("GPU-"):
        return None
    uuids = [(gpu, uuid) for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids)]
    fitting = {gpu.index: gpu for gpu, uuid in uuids if uuid.startswith(token)}
    return next(iter(fitting.values())) if len(fitting) == 1 else None


class DeviceActivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Means over a measurement. A field is None if the device does not report it.

    Attributes:
        source: ``gpm``: hardware counters over the whole time; ``utilization``: polled rates.
        busy: with ``gpm`` the mean share of SMs that were busy, with ``utilization`` the share of
            time in which any kernel ran. Both count a collective's kernels while they wait.
        tensor: share of time in which the SMs' tensor cores worked.
        pcie_sent_Bps, pcie_received_Bps: seen from the device.
        nvlink_sent_Bps, nvlink_received_Bps: over all its NVLinks.
    """

    source: Literal["gpm", "utilization"]
    busy: Share | None = None
    tensor: Share | None = None
    pcie_sent_Bps: Rate | None = None
    pcie_received_Bps: Rate | None = None
    nvlink_sent_Bps: Rate | None = None
    nvlink_received_Bps: Rate | None = None


class ActivityMeter:
    """Watches one GPU from :meth:`begin` to :meth:`finish`, in a thread of its own.

    If a call hangs in the driver, that thread stays, and no other is started while it lives. The
    job then has no activity, and nobody waits for it.

    Thread safety: one thread calls it.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._thread: threading.Thread | None = None
        self._watch = _Watch()

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that is watched, as soon as NVML has listed it."""
        return self._watch.gpu

    def begin(self, choose: Choice) -> None:
        """Start watching the GPU that ``choose`` picks; drop a measurement under way."""
        self._watch.stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(FINISH_S)
            if self._thread.is_alive():
                return
        self._watch = _Watch()
        arguments = (self._library, choose, self._watch)
        self._thread = threading.Thread(
            target=_run, args=arguments, name="crux-activity", daemon=True
        )
        self._thread.start()

    def finish(self, timeout_s: float = FINISH_S) -> DeviceActivity | None:
        """Stop watching; None if NVML said nothing, or not in time."""
        thread = self._thread
        self._watch.stop.set()
        if thread is None:
            return None
        thread.join(timeout_s)
        if thread.is_alive():
            return None
        self._thread = None
        return self._watch.activity


@dataclass(slots=True)
class _Watch:
    """One measurement, until ``stop`` is set."""

    stop: threading.Event = field(default_factory=threading.Event)
    gpu: Gpu | None = None
    activity: DeviceActivity | None = None


def _run(library: Any, choose: Choice, watch: _Watch) -> None:
    try:
        with session(library) as nvml:
            gpu = watch.gpu = choose(read_gpus(library))
            # The counters of the whole GPU say nothing about one instance.
            if gpu is None or gpu.mig:
                return
            handle = nvml.nvmlDeviceGetHandleByPciBusId(gpu.pci_address)
            by_gpm = _by_gpm(nvml, handle, watch.stop)
            watch.activity = by_gpm or _by_polling(nvml, handle, watch.stop)
    except Exception as error:
        log.debug("no activity: %s", error)


def _by_gpm(nvml: Any, handle: Any, stop: threading.Event) -> DeviceActivity | None:
    """The difference of two samples of the counters, one now and one when ``stop`` is set."""
    try:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return None
        with _sample(nvml, handle) as first:
            stop.wait()
            with _sample(nvml, handle) as second:
                values = _metrics(nvml, first, second)
    except Exception as error:
        log.debug("no GPM: %s", error)
        return None
    return DeviceActivity(source="gpm", **values) if values else None


@contextmanager
def _sample(nvml: Any, handle: Any) -> Iterator[Any]:
    sample = nvml.nvmlGpmSampleAlloc()
    try:
        nvml.nvmlGpmSampleGet(handle, sample)
        yield sample
    finally:
        nvml.nvmlGpmSampleFree(sample)


def _metrics(nvml: Any, first: Any, second: Any) -> dict[str, float]:
    asked = nvml.c_nvmlGpmMetricsGet_t()
    asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(GPM_METRICS)
    asked.sample1, asked.sample2 = first, second
    for i, (metric, _) in enumerate(GPM_METRICS.values()):
        asked.metrics[i].metricId = getattr(nvml, metric)
    nvml.nvmlGpmMetricsGet(asked)
    found = {}
    for i, (name, (_, unit)) in enumerate(GPM_METRICS.items()):
        answer = asked.metrics[i]
        if answer.nvmlReturn == nvml.NVML_SUCCESS and 0 <= answer.value < float("inf"):
            found[name] = _fitting(name, answer.value * unit)
    return found


def _by_polling(nvml: Any, handle: Any, stop: threading.Event) -> DeviceActivity | None:
    counters = {
        "pcie_sent_Bps": nvml.NVML_PCIE_UTIL_TX_BYTES,
        "pcie_received_Bps": nvml.NVML_PCIE_UTIL_RX_BYTES,
    }
    polled = defaultdict[str, list[float]](list)
    while not stop.wait(POLL_S):
        polled["busy"].append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu * 0.01)
        try:
            for name, counter in counters.items():
                rate_Bps = nvml.nvmlDeviceGetPcieThroughput(handle, counter) * KILOBYTE
                polled[name].append(rate_Bps)
        except Exception as error:
            log.debug("no PCIe rates: %s", error)
    means = {name: _fitting(name, statistics.fmean(values)) for name, values in polled.items()}
    return DeviceActivity(source="utilization", **means) if means else None


def _fitting(field: str, value: float) -> float:
    """Counters are read one after the other, so a share can come out above one."""
    return value if field.endswith("_Bps") else min(1.0, max(0.0, value))
