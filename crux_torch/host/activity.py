"""How busy a GPU is over a measurement: by GPM's counters, else by NVML's utilization rates."""

from __future__ import annotations

import logging
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from crux_torch.host.nvml import Gpu, read_gpus, session

log = logging.getLogger(__name__)

#: Picks a GPU out of all of the host.
Choice = Callable[[Sequence[Gpu]], Gpu | None]
#: Seconds between two polls; NVML's rates are means over a fraction of a second.
POLL_S = 0.5
#: Seconds that the end of a measurement waits for the counters.
FINISH_S = 0.5
MIB = float(1 << 20)
KILOBYTE = 1e3

#: Fields of :class:`DeviceActivity`: GPM's metric, and what one of its units is.
GPM_METRICS = {
    "busy": ("NVML_GPM_METRIC_SM_UTIL", 0.01),
    "tensor": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    "pcie_sent_Bps": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    "pcie_received_Bps": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
    "nvlink_sent_Bps": ("NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB),
    "nvlink_received_Bps": ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB),
}


Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]


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
        """Start watching the GPU that ``choose`` picks; what was under way is dropped."""
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
    """One measurement: what ends it, and what it has found."""

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
