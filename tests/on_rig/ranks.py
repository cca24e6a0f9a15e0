"""Ranks of torch's NCCL process groups as threads of a process on the rig, each with a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import on_threads
import pytest
import torch
import torch.distributed as dist
from cuda_rig import control
from torch._C import _distributed_c10d as c10d

from crux_torch import _C

SIZE = 2
#: torch's classes by what the tests call them.
CLASSES = {
    name: getattr(c10d, of)
    for name, of in (("nccl2", "ProcessGroupNCCL2"), ("legacy", "ProcessGroupNCCL"))
    if hasattr(c10d, of)
}
FLAVOURS = pytest.mark.parametrize("flavour", CLASSES)


def both(body: Callable[[int], object]) -> None:
    """``body(rank)`` on a thread for each rank, on its own device; raises what either raised."""

    def on_its_device(rank: int) -> None:
        torch.cuda.set_device(rank)
        body(rank)

    on_threads.both(on_its_device)


def make(flavour: str, store: Any, rank: int, size: int, *, timeout_s: float = 600.0) -> Any:
    """A process group of torch's own."""
    options = CLASSES[flavour].Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.global_ranks_in_group = list(range(size))
    options.group_name = "test"
    return CLASSES[flavour](store, rank, size, options)


def alone(flavour: str, **options: Any) -> Any:
    """One of a single rank."""
    return make(flavour, dist.HashStore(), 0, 1, **options)


def pair(flavour: str, **options: Any) -> list[Any]:
    """Two ranks."""
    store, made = dist.HashStore(), [None] * SIZE

    def body(rank: int) -> None:
        made[rank] = make(flavour, store, rank, SIZE, **options)

    both(body)
    return made


def crux(inner: Any, recorder: Any = None) -> Any:
    """The backend under test over ``inner``, as crux_torch.backend.register makes it."""
    recorder = recorder or _C.process_recorder(65536)
    made = _C.DelegatingBackend("nccl", inner.rank(), inner.size(), recorder)
    made.add_inner("cuda", inner)
    return made


def ones(rank: int = 0, n: int = 1000) -> torch.Tensor:
    return torch.ones(n, device=f"cuda:{rank}")


def all_reduce(backend: Any, tensor: torch.Tensor, *, asynchronous: bool = True) -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    return backend.allreduce([tensor], options)


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def sleep(seconds: float) -> None:
    """A kernel on the current stream that takes ``seconds``."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def synchronize() -> None:
    for rank in range(torch.cuda.device_count()):
        torch.cuda.synchronize(rank)


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Nothing injected or logged, and at the end nothing held."""
    torch.cuda.set_device(0)
    control.release()
    control.clear()
    yield
    control.release()
