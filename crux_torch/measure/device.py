"""The device that a rank computes on, and its activity while the rank is measured."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from crux_torch.host.activity import ActivityMeter, CudaDevice, DeviceActivity, OwnDevice, own_gpu
from crux_torch.host.nvml import Gpu, flops_in_use, peak_flops, tensor_flops, tensor_seconds
from crux_torch.measure.profile import Name, NonNegative

_log = logging.getLogger(__name__)


class DeviceUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's device, and the load that its work puts on it.

    Attributes:
        name: model, as the driver reports it.
        gpu: its number among the host's GPUs in the order of their PCI addresses, where known.
        flops: FLOP/s that it could do in the data types in use; 0 where that is not known.
        peak_flops: FLOP/s that it could do in its fastest data type; bounds what the rank may
            claim; 0 where it is not known.
        tensor_s: seconds of an iteration that the counted FLOPs take tensor cores at their peak;
            None where none were counted or the peak is not known.
        tensor_flops: FLOP/s that its tensor cores could do; 0 where that is not known.
        activity: of its measurement; None where the device has no counters.
    """

    name: Name
    gpu: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] | None = None
    flops: NonNegative = 0.0
    peak_flops: NonNegative = 0.0
    tensor_s: NonNegative | None = None
    tensor_flops: NonNegative = 0.0
    activity: DeviceActivity | None = None


class DeviceMeter:
    """Measures this rank's CUDA device; a rank on a CPU has none.

    Args:
        device_flops: FLOP/s of the device, if the user gave it; 0: look it up.
        library, env, torch: stand in for ``pynvml``, this process's environment and ``torch``.
    """

    def __init__(
        self,
        own: OwnDevice,
        device_flops: float = 0.0,
        library: Any = None,
        env: Mapping[str, str] | None = None,
        torch: Any = None,
    ) -> None:
        self._own = own
        self._given_flops = device_flops
        self._env = os.environ if env is None else env
        self._activity = ActivityMeter(library)
        self._torch = torch
        self._cuda: CudaDevice | None = None
        #: Result of the last measurement; None before it, and on a CPU.
        self.last: DeviceUse | None = None

    def look(self) -> None:
        """Ask the training thread, which calls this, for its device. Raises nothing."""
        try:
            self._own.look()
        except Exception as error:
            _log.debug("no CUDA device: %s", error)

    def begin(self) -> None:
        """Start to watch how busy the device is. Raises nothing."""
        try:
            self._cuda = self._device()
        except Exception as error:
            _log.debug("no CUDA device: %s", error)
        if self._cuda is not None:
            self._activity.begin(self._choose)

    def finish(self, by_dtype: Mapping[str, float]) -> DeviceUse | None:
        """The device's use since :meth:`begin`; None if no CUDA device is used.

        Args:
            by_dtype: FLOPs of an iteration by data type; empty if none were counted.
        """
        cuda = self._cuda
        if cuda is None:
            return None
        activity, gpu = self._activity.finish(), self._activity.gpu
        given = self._given_flops
        self.last = DeviceUse(
            name=cuda.name[:256] or "unknown",
            gpu=None if gpu is None else gpu.index,
            flops=given or flops_in_use(cuda.name, by_dtype) or 0.0,
            peak_flops=given or peak_flops(cuda.name) or 0.0,
            tensor_s=tensor_seconds(cuda.name, by_dtype) if by_dtype and not given else None,
            tensor_flops=given or tensor_flops(cuda.name, by_dtype) or 0.0,
            activity=activity,
        )
        return self.last

    def _device(self) -> CudaDevice | None:
        torch = self._torch or sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        found = self._own.device(torch.cuda.device_count(), self._env)
        if found is None or found.name:
            return found
        return replace(found, name=torch.cuda.get_device_properties(found.ordinal).name)

    def _choose(self, gpus: Sequence[Gpu]) -> Gpu | None:
        cuda = self._cuda
        return None if cuda is None else own_gpu(gpus, cuda.ordinal, cuda.uuid, self._env)
