"""The kinds of device that a job runs on: a GPU with NCCL, the fakes of tests/fake_gpu, the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CUDA, FAKE, GLOO = "cuda", "fake", "gloo"
OLD_TORCH = torch.__version__.startswith("2.11")
#: Which of torch's backends the fake NCCL is like, ``legacy`` or ``nccl2``; by default as torch's.
FLAVOUR = "CRUX_FAKE_NCCL"


def _flavour() -> str:
    return "nccl2" if hasattr(torch._C._distributed_c10d, "ProcessGroupNCCL2") else "legacy"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of device.

    Attributes:
        name: CUDA, FAKE or GLOO, which is the CPU.
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
    def is_cuda(self) -> bool:
        return self.name == CUDA

    def prepare(self, rank: int) -> torch.device:
        """Make this process ready for the device and choose it; before any process group."""
        if self.name == GLOO:
            return torch.device("cpu")
        if self.name == FAKE:
            fake().load()
            fake().configure(legacy=os.environ.get(FLAVOUR, _flavour()) == "legacy")
        device = torch.device(self.device_type, 0 if self.shared else rank)
        torch.accelerator.set_device_index(device.index)
        return device

    def synchronize(self, device: torch.device) -> None:
        if self.name != GLOO:
            torch.accelerator.synchronize(device)

    def sleep(self, seconds: float) -> None:
        """Enqueue a kernel on the current stream that takes about so long."""
        if self.is_cuda:
            # Private, but what torch's own tests of streams use; cycles at about 1 to 2 GHz.
            torch.cuda._sleep(int(seconds * 1.5e9))
        else:
            fake().sleep(seconds)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """Within it the current stream is captured; yields what replays it afterwards."""
        if not self.is_cuda:
            with fake().capture() as captured:
                yield captured.replay
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph.replay


def fake() -> Any:
    """The package of the fake device and the fake NCCL."""
    import fake_gpu

    return fake_gpu


def cuda() -> Kind:
    return Kind(CUDA, "cuda", "nccl", torch.cuda.get_device_name(0), shared=True)


def fakes() -> Kind:
    return Kind(FAKE, "fakegpu", "fakenccl", "a fake GPU", shared=False)


def gloo() -> Kind:
    return Kind(GLOO, "cpu", "gloo", "the CPU", shared=True)


def named(name: str) -> Kind:
    """The kind of that name."""
    return {CUDA: cuda, FAKE: fakes, GLOO: gloo}[name]()


def has_cuda() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def present() -> Kind:
    """What this machine has: a GPU, or the fakes.

    Raises:
        LookupError: neither.
    """
    if has_cuda():
        return cuda()
    try:
        possible, why_not = fake().available()
    except ImportError as error:
        possible, why_not = False, str(error)
    if not possible:
        raise LookupError(f"no GPU, and no fake one: {why_not}")
    # Built here, where it may take its time, rather than in ranks that have to start in time.
    fake().load()
    return fakes()
