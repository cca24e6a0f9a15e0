"""What a switch does on a device while its rank's training waits: each step in bounded time.

NCCL allocates, connects and frees by calls that may wait for the whole device. Beside a collective
that waits for a peer they hang. docs/switching.md tells what is done about it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from crux_torch.errors import CruxError

T = TypeVar("T")

#: Bytes that the last communicator took on each device, as far as that was seen.
_taken: dict[int | None, int] = {}
#: Seconds that a process waits at its end, at most, for calls that were left to themselves.
END_S = 10.0
_left: list[threading.Thread] = []


def within(limit_s: float, call: Callable[[], T], device: torch.device, otherwise: str) -> T:
    """What ``call`` returns, from a thread of its own whose current device is ``device``.

    A call that takes longer is left to itself until the process ends.

    Raises:
        CruxError: it takes longer than ``limit_s`` seconds; ``otherwise`` says what that means.
        Exception: what it raises.
    """
    from crux_torch import _C

    returned: list[T] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            with _current(device):
                # What is asked of CUDA would break another thread's capture of a graph.
                _C.tolerate_captures(device.type)
                returned.append(call())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="crux-switch-device", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not returned:
        _left[:] = [each for each in _left if each.is_alive()] + [thread]
        raise CruxError(f"{otherwise} in {limit_s:.3g} s")
    return returned[0]


@atexit.register
def _wait_for_those_left() -> None:
    """A call of torch that returned while Python ends would abort the process.

    Such a call of NCCL mostly waits for a peer, and returns once that one has ended: for two peers
    that end together, too late.
    """
    deadline_s = time.monotonic() + END_S
    for thread in _left:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in _left):
        from crux_torch import _C

        _C.park_late_threads()


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return (
        contextlib.nullcontext()
        if device.type == "cpu"
        else torch.accelerator.device_index(device.index)
    )


def wait_until_idle(device: torch.device, limit_s: float) -> None:
    """Wait for all that was issued to the device; raises CruxError."""
    synchronize = torch.get_device_module(device).synchronize
    within(limit_s, lambda: synchronize(device), device, f"{device} did not become idle")


def require_room(device: torch.device) -> None:
    """Raise CruxError if less memory is free on the device than the last communicator took."""
    free, wanted = _free(device), _taken.get(device.index, 0)
    if free is not None and free < wanted:
        raise CruxError(f"{free} bytes are free on {device}; the last communicator took {wanted}")


def make_connected(make: Callable[[], Any], device: torch.device, limit_s: float) -> Any:
    """The inner backend that ``make`` makes, once an operation has connected it.

    Raises:
        CruxError: that takes longer, or went wrong.
        RuntimeError: c10d could not make it.
    """
    before = _free(device)
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
            end(unfinished, device, limit_s)
        raise
    if before is not None:
        _taken[device.index] = max(0, before - (_free(device) or 0))
    return backend


def end(backend: Any, device: torch.device, limit_s: float) -> None:
    """Abort an inner backend that was never used."""
    with contextlib.suppress(Exception):
        within(limit_s, backend.abort, device, "it was not ended")


def _free(device: torch.device) -> int | None:
    info = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if info is None else int(info(device)[0])
