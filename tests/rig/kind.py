"""The kinds of device that a job runs on: a GPU with NCCL, the rig without one, the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import cuda_rig
import torch

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CUDA, RIG, GLOO = "cuda", "rig", "gloo"
OLD_TORCH = torch.__version__.startswith("2.11")
#: torch's variable that says which of its classes ``nccl`` is.
NCCL2 = "TORCH_DIST_USE_NCCL2"
LEGACY = {NCCL2: "0"}


def is_legacy() -> bool:
    """Whether this process's ``nccl`` is ProcessGroupNCCL."""
    return OLD_TORCH or os.environ.get(NCCL2) == "0"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of device.

    Attributes:
        name: CUDA, RIG or GLOO, which is the CPU.
        device_type: torch's name of it.
        backend: the stock backend, as scripts name it.
        model: the device's name.
        shared: whether all ranks are on the first device.
    """

    name: str
    device_type: str
    backend: str
    model: str
    shared: bool

    @property
    def is_gpu(self) -> bool:
        """Whether it is a real one."""
        return self.name == CUDA

    def environment(self, env: Mapping[str, str], ranks: int) -> dict[str, str]:
        """What a process of such a job is started with, beside ``env``."""
        return cuda_rig.environment(env, 1 if self.shared else ranks) if self.name == RIG else {}

    def prepare(self, rank: int) -> torch.device:
        """Choose this process's device."""
        if self.name == GLOO:
            return torch.device("cpu")
        device = torch.device(self.device_type, 0 if self.shared else rank)
        torch.accelerator.set_device_index(device.index)
        return device

    def synchronize(self, device: torch.device) -> None:
        if self.name != GLOO:
            torch.accelerator.synchronize(device)

    def sleep(self, seconds: float) -> None:
        """Enqueue a kernel on the current stream that takes about so long."""
        # Private, but what torch's own tests of streams use; cycles at about 1 to 2 GHz.
        torch.cuda._sleep(int(seconds * 1.5e9))

    @contextlib.contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """Within it the current stream is captured; yields what replays it afterwards."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph.replay


def cuda() -> Kind:
    return Kind(CUDA, "cuda", "nccl", torch.cuda.get_device_name(0), shared=True)


def rig() -> Kind:
    return Kind(RIG, "cuda", "nccl", "the rig", shared=True)


def gloo() -> Kind:
    return Kind(GLOO, "cpu", "gloo", "the CPU", shared=True)


def named(name: str) -> Kind:
    """The kind of that name."""
    return {CUDA: cuda, RIG: rig, GLOO: gloo}[name]()


def has_cuda() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def present() -> Kind:
    """What this machine has: a GPU, or the rig.

    Raises:
        LookupError: neither.
    """
    if has_cuda():
        return cuda()
    possible, why_not = cuda_rig.available()
    if not possible:
        raise LookupError(f"no GPU, and {why_not}")
    # Here, where it may take its time, rather than in ranks that have to start in time.
    cuda_rig.build()
    return rig()
