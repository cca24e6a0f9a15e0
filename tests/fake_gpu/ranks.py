"""Ranks of the fake NCCL as threads of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fake_gpu

#: No test waits longer for anything.
LIMIT_S = 300.0


def filled(value: float = 1.0, n: int = 4) -> torch.Tensor:
    """``n`` times ``value``, on this thread's current device."""
    return torch.full((n,), value, device=fake_gpu.DEVICE)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for ``condition``.

    Raises:
        AssertionError: ``what`` never came.
    """
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.001)


@contextlib.contextmanager
def fresh_device(**settings: Any) -> Iterator[None]:
    """Nothing injected or logged, ``settings`` of the fake NCCL, and at the end nothing under way.

    Raises:
        AssertionError: a stream never came to rest.
    """
    fake_gpu.load()
    fake_gpu.release()
    fake_gpu.configure(**settings)
    fake_gpu.clear()
    torch.accelerator.set_device_index(0)
    yield
    fake_gpu.release()
    assert fake_gpu.drain(), "a stream never came to rest"


def make_backend(store: Any, rank: int, size: int, *, timeout_s: float = 30.0) -> Any:
    """A communicator of its own, on this thread's current device."""
    options = fake_gpu.nccl_options()
    options._timeout = timedelta(seconds=timeout_s)
    options.group_name = "test"
    return fake_gpu.load().Nccl(store, rank, size, options)


def in_threads(size: int, function: Callable[[int, Any], Any], **options: Any) -> list[Any]:
    """``function(rank, backend)`` on a thread for each rank; rank r has device r.

    Raises:
        Exception: the first that a rank raised.
        TimeoutError: a rank came to no end; its communicator is aborted.
    """
    store = dist.HashStore()
    backends: list[Any] = []
    lock = threading.Lock()

    def rank_main(rank: int) -> Any:
        torch.accelerator.set_device_index(rank)
        backend = make_backend(store, rank, size, **options)
        with lock:
            backends.append(backend)
        return function(rank, backend)

    pool = ThreadPoolExecutor(size)
    try:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
        return [future.result(timeout=LIMIT_S) for future in futures]
    finally:
        for backend in backends:
            backend.abort()
        pool.shutdown(wait=False, cancel_futures=True)
