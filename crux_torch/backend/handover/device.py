"""Steps of a handover on a device while its rank's training waits: each in bounded time.

NCCL allocates, connects and frees by calls that may wait for the whole device. Beside a collective
that waits for a peer they hang (docs/understand/handover.md).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from crux_torch.errors import CruxError
from crux_torch.threads import call_in_thread

T = TypeVar("T")

#: Seconds that a process waits at its end, at most, for calls that were left to themselves.
END_S = 10.0
#: Bytes that the last communicator took on each device, as far as that was seen.
_taken: dict[int | None, int] = {}
#: Calls that took too long and were left to themselves.
_left: set[Future[Any]] = set()


def within(limit_s: float, call: Callable[[], T], device: torch.device, late: str) -> T:
    """Returns what ``call`` returns, from a thread whose current device is ``device``.

    Raises:
        CruxError: it takes longer than ``limit_s`` seconds; ``late`` says what that means.
        Exception: it raises.
    """
    from crux_torch import _C

    def on_device() -> T:
        with (
            contextlib.nullcontext()
            if device.type == "cpu"
            else torch.accelerator.device_index(device.index)
        ):
            # What is asked of CUDA would break another thread's capture of a graph.
            _C.tolerate_captures(device.type)
            return call()

    future = call_in_thread(on_device, "crux-device")
    if not concurrent.futures.wait([future], limit_s).done:
        _left.add(future)
        future.add_done_callback(_left.discard)
        raise CruxError(f"{late} in {limit_s:.3g} s")
    return future.result()


@atexit.register
def _wait_for_those_left() -> None:
    """Such a call of NCCL mostly waits for a peer, and returns once that one has ended."""
    concurrent.futures.wait(set(_left), END_S)


def wait_until_idle(device: torch.device, limit_s: float) -> None:
    """Waits for all that was issued to the device; raises CruxError."""
    synchronize = torch.get_device_module(device).synchronize
    within(limit_s, lambda: synchronize(device), device, f"{device} did not become idle")


def require_room(device: torch.device) -> None:
    """Raises CruxError if less memory is free on the device than the last communicator took."""
    free, needed = _free_bytes(device), _taken.get(device.index, 0)
    if free is not None and free < needed:
        raise CruxError(f"{free} bytes are free on {device}; the last communicator took {needed}")


def make_connected(make: Callable[[], Any], device: torch.device, limit_s: float) -> Any:
    """Returns the inner backend that ``make`` makes, once an operation has connected it.

    Raises:
        CruxError: that takes longer, or went wrong.
        RuntimeError: c10d could not make it.
    """
    before = _free_bytes(device)
    made: list[Any] = []
    given_up = threading.Event()

    def connected() -> Any:
        made.append(backend := make())
        if given_up.is_set():
            backend.abort()
        tensor = torch.ones(1, device=device)
        backend.allreduce([tensor]).wait()
        if (total := tensor.item()) != backend.size():
            raise CruxError(f"the new connections summed {backend.size()} ones to {total:g}")
        return backend

    try:
        backend = within(limit_s, connected, device, "the new connections were not made")
    except Exception:
        given_up.set()
        for unfinished in made:
            abort(unfinished, device, limit_s)
        raise
    if before is not None:
        _taken[device.index] = max(0, before - (_free_bytes(device) or 0))
    return backend


def abort(backend: Any, device: torch.device, limit_s: float) -> None:
    """Aborts an inner backend that was never used."""
    with contextlib.suppress(Exception):
        within(limit_s, backend.abort, device, "it was not ended")


def _free_bytes(device: torch.device) -> int | None:
    info = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if info is None else int(info(device)[0])
