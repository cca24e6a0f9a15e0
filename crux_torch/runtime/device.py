"""The device of this rank: which it is, what it could do, how busy it is while it is measured."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from crux_torch.fabric.nvml import Gpu
from crux_torch.fabric.nvml_activity import ActivityMeter
from crux_torch.fabric.nvml_device import CudaDevice, current_device, is_only_device, own_gpu
from crux_torch.fabric.peak import flops_in_use, peak_flops, tensor_seconds
from crux_torch.profile.device import DeviceUse

log = logging.getLogger(__name__)


class OwnDevice:
    """What a rank tells of its device; nothing on a CPU.

    The training thread says which device it has chosen (:meth:`note`); all else happens on other
    threads, and NVML's calls on one of their own.

    Args:
        device_flops: FLOP/s of the device, where its user says it; 0: look it up.
        library: stands in for the module ``pynvml``.
        env: with CUDA_VISIBLE_DEVICES.
    """

    def __init__(
        self, device_flops: float = 0.0, library: Any = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._told_flops = device_flops
        self._env = os.environ if env is None else env
        self._activity = ActivityMeter(library)
        self._cuda: CudaDevice | None = None

    def note(self, torch: Any = None) -> None:
        """Take down the CUDA device of the calling thread, the one that trains; once.

        Raises nothing.
        """
        if self._cuda is None:
            try:
                self._cuda = current_device(torch)
            except Exception as error:
                log.debug("no CUDA device: %s", error)

    def begin(self, torch: Any = None) -> None:
        """Start to watch how busy the device is."""
        if self._cuda is None and is_only_device(torch):
            self.note(torch)
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
        return DeviceUse(
            name=cuda.name[:256] or "unknown",
            gpu=None if gpu is None else gpu.index,
            flops=told or flops_in_use(cuda.name, by_dtype) or 0.0,
            peak_flops=told or peak_flops(cuda.name) or 0.0,
            tensor_s=tensor_seconds(cuda.name, by_dtype) if by_dtype and not told else None,
            activity=activity,
        )

    def _choose(self, gpus: Sequence[Gpu]) -> Gpu | None:
        cuda = self._cuda
        return None if cuda is None else own_gpu(gpus, cuda.ordinal, cuda.uuid, self._env)
