"""The device of this rank: which it is, what it could do, how busy it is while it is measured."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from crux_torch.fabric.nvml import Gpu
from crux_torch.fabric.nvml_activity import ActivityMeter
from crux_torch.fabric.nvml_device import CudaDevice, own_gpu
from crux_torch.fabric.peak import flops_in_use, peak_flops, tensor_seconds
from crux_torch.profile.device import DeviceUse
from crux_torch.runtime.link_routes import OwnDevice

log = logging.getLogger(__name__)


class DeviceMeter:
    """What a rank tells of its device; nothing on a CPU.

    NVML's calls happen on a thread of their own.

    Args:
        own: the CUDA device that this process trains on.
        device_flops: FLOP/s of the device, where its user says it; 0: look it up.
        library: stands in for the module ``pynvml``.
        env: of this process.
        torch: stands in for the module.

    Attributes:
        last: what the last measurement told; None before it, and on a CPU.
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
        self._told_flops = device_flops
        self._env = os.environ if env is None else env
        self._activity = ActivityMeter(library)
        self._torch = torch
        self._cuda: CudaDevice | None = None
        self.last: DeviceUse | None = None

    def look(self) -> None:
        """Ask the training thread, which calls this, for its device. Raises nothing."""
        try:
            self._own.look()
        except Exception as error:
            log.debug("no CUDA device: %s", error)

    def begin(self) -> None:
        """Start to watch how busy the device is. Raises nothing."""
        try:
            self._cuda = self._device()
        except Exception as error:
            log.debug("no CUDA device: %s", error)
        if self._cuda is not None:
            self._activity.begin(self._choose)

    def finish(self, by_dtype: Mapping[str, float]) -> DeviceUse | None:
        """What there is to tell of the device; None where no CUDA device is used.

        Args:
            by_dtype: FLOPs of an iteration by data type; empty where none were counted.
        """
        cuda = self._cuda
        if cuda is None:
            return None
        activity, gpu = self._activity.finish(), self._activity.gpu
        told = self._told_flops
        self.last = DeviceUse(
            name=cuda.name[:256] or "unknown",
            gpu=None if gpu is None else gpu.index,
            flops=told or flops_in_use(cuda.name, by_dtype) or 0.0,
            peak_flops=told or peak_flops(cuda.name) or 0.0,
            tensor_s=tensor_seconds(cuda.name, by_dtype) if by_dtype and not told else None,
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
