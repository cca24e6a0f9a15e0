"""A stand-in for the module ``pynvml``: its functions over made-up GPUs.

Constants, structures and errors are the real module's own, and a function that is not written here
is absent, so that code written against this fake uses nothing that nvidia-ml-py does not have;
``tests/host/test_nvml.py`` holds the signatures against the installed one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    """One GPU: what its functions answer; None where it answers "not supported"."""

    name: str = "NVIDIA H100 80GB HBM3"
    address: str = "00000000:1B:00.0"
    uuid: str = "GPU-0"
    memory_bytes: int | None = 80 << 30
    mig: bool | None = False
    mig_uuids: Sequence[str] = ()
    gpm: Mapping[int, float] | None = None
    gpm_refuses: int | None = None
    busy_percent: int | None = None
    pcie_KBps: int | None = None
    capability: tuple[int, int] | None = (9, 0)
    #: By link: whether it is active, the peer's address, the peer's kind; None for one that is
    #: not supported.
    nvlinks: Sequence[tuple[bool, str, int] | None] = ()
    peers: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    #: Ids of the processes that compute on it.
    processes: Sequence[int] | None = ()


def error(code: int) -> pynvml.NVMLError:
    return pynvml.NVMLError(code)


NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


class FakeNvml:
    """The module.

    Args:
        gpus: by index.
        broken: functions that fail with "unknown error".
        hanging: functions that do not return before :attr:`let_go` is set.
    """

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        *,
        broken: Sequence[str] = (),
        hanging: Sequence[str] = (),
    ) -> None:
        self._gpus = list(gpus)
        self._broken, self._hanging = set(broken), set(hanging)
        self.let_go = threading.Event()
        self.sessions = 0
        self.samples: set[int] = set()
        self._made = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name[4:5].isupper():
            if name in self._broken:
                return _fails
            if name in self._hanging:
                self.let_go.wait(30)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "c_nvml")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._gpus[index]

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> FakeGpu:
        for gpu in self._gpus:
            if gpu.address.lower().endswith(pciBusId):
                return gpu
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu | str) -> str:
        return handle if isinstance(handle, str) else handle.uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[Any]:
        return [pynvml.c_nvmlProcessInfo_t(pid=pid) for pid in _there(handle.processes)]

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, version: Any = None) -> Any:
        return pynvml.c_nvmlMemory_t(total=_there(handle.memory_bytes))

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:
        return pynvml.nvmlPciInfo_t(busId=handle.address.encode())

    def nvmlDeviceGetMigMode(self, device: FakeGpu) -> list[int]:
        return [int(_there(device.mig))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeGpu) -> int:
        return 7 if device.mig else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> str:
        if index >= len(device.mig_uuids):
            raise error(pynvml.NVML_ERROR_NOT_FOUND)
        return device.mig_uuids[index]

    def nvmlDeviceGetNvLinkState(self, device: FakeGpu, link: int) -> int:
        if link >= len(device.nvlinks):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(_there(device.nvlinks[link])[0])

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        return _there(handle.capability)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: FakeGpu, link: int) -> Any:
        return pynvml.nvmlPciInfo_t(busId=_there(device.nvlinks[link])[1].encode())

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: FakeGpu, link: int) -> int:
        return _there(handle.nvlinks[link])[2]

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: FakeGpu, device2: FakeGpu) -> int:
        return _there(device1.peers.get(self._gpus.index(device2)))[0]

    def nvmlDeviceGetP2PStatus(self, device1: FakeGpu, device2: FakeGpu, p2pIndex: int) -> int:
        ctypes.c_uint(p2pIndex)
        return _there(device1.peers.get(self._gpus.index(device2)))[1]

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        return pynvml.c_nvmlUtilization_t(gpu=_there(handle.busy_percent))

    def nvmlDeviceGetPcieThroughput(self, device: FakeGpu, counter: int) -> int:
        return _there(device.pcie_KBps)

    def nvmlGpmQueryDeviceSupport(self, device: FakeGpu) -> Any:
        return pynvml.c_nvmlGpmSupport_t(isSupportedDevice=int(device.gpm is not None))

    def nvmlGpmSampleAlloc(self) -> Any:
        self._made += 1
        self.samples.add(self._made)
        return ctypes.cast(ctypes.c_void_p(self._made), pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleGet(self, device: FakeGpu, gpmSample: Any) -> Any:
        assert _number(gpmSample) in self.samples
        if device.gpm_refuses is not None:
            raise error(device.gpm_refuses)
        self._sampled = device
        return gpmSample

    def nvmlGpmSampleFree(self, gpmSample: Any) -> None:
        self.samples.remove(_number(gpmSample))

    def nvmlGpmMetricsGet(self, metricsGet: Any) -> Any:
        assert metricsGet.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        first, second = _number(metricsGet.sample1), _number(metricsGet.sample2)
        assert first in self.samples
        assert second in self.samples
        assert first < second
        for i in range(metricsGet.numMetrics):
            metric = metricsGet.metrics[i]
            value = (self._sampled.gpm or {}).get(metric.metricId)
            metric.nvmlReturn = NOT_SUPPORTED if value is None else pynvml.NVML_SUCCESS
            metric.value = 0.0 if value is None else value
        return metricsGet


def _number(sample: Any) -> int:
    return ctypes.cast(sample, ctypes.c_void_p).value or 0


def _there(value: Any) -> Any:
    if value is None:
        raise error(NOT_SUPPORTED)
    return value


def _fails(*_: Any) -> Any:
    raise error(pynvml.NVML_ERROR_UNKNOWN)
