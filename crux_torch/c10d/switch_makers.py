"""Makes the next inner backend of a group: like the current one, over new connections."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from crux_torch.c10d import inner_backends
from crux_torch.errors import CruxError

#: Arguments: the current backend, an empty store, a timeout for making the next one, and the
#: options that the script gave for the first one, if any.
Maker = Callable[[Any, Any, timedelta, Any], Any]

#: Bytes that the last communicator took on each device, as far as that was seen.
_taken: dict[int, int] = {}


def like_gloo(current: Any, store: Any, timeout: timedelta, script_options: Any) -> Any:
    """A ProcessGroupGloo on devices of its own, or on the devices that the script chose.

    Gloo chooses the interfaces of its own devices.
    """
    stock = type(current)
    wanted = current.options
    if isinstance(script_options, stock._Options):
        options = stock._Options()
        options._devices, options._threads = wanted._devices, wanted._threads
        options._timeout = timeout
        made = stock(store, current.rank(), current.size(), options)
    else:
        made = stock(store, current.rank(), current.size(), timeout=timeout)
    made.options.global_ranks_in_group = wanted.global_ranks_in_group
    made.options.group_name = wanted.group_name
    made._set_default_timeout(wanted._timeout)
    return made


def like_nccl(current: Any, store: Any, timeout: timedelta, script_options: Any) -> Any:
    """A NCCL backend of the current one's class, on the same device (docs/switching.md).

    It is not split from another one, because the connections of a split share its parent's
    resources.
    """
    if _symmetric_memory() == "NCCL":
        raise CruxError("symmetric memory is bound to NCCL's communicators")
    stock = type(current)
    if not inner_backends.connects_when_made(stock) and _registers_all_memory():
        # The allocator keeps a communicator that was shut down in its list, and then fails.
        raise CruxError("all memory is registered with NCCL's communicators")
    wanted = current.options
    options = copy.copy(wanted)
    options.split_from = None
    # Only the first communicator of a process may leave them out for the world.
    if not options.global_ranks_in_group:
        options.global_ranks_in_group = list(range(current.size()))
    options.config.traffic_class = inner_backends.scripts_class(wanted, script_options)
    options = inner_backends.with_nccl_class(options)
    native = store.native(timeout) if hasattr(store, "native") else store
    if not inner_backends.connects_when_made(stock):
        return stock(native, current.rank(), current.size(), options)
    device = current.bound_device_id
    if device is None:
        raise CruxError("a NCCL group without a bound device")
    options._timeout = timeout
    # Without it, a rank that fails leaves the others in NCCL for as long as the job lives.
    options.config.blocking = 0
    with torch.accelerator.device_index(device.index), _room_on(device):
        made = stock(native, current.rank(), current.size(), options, device)
    made.set_timeout(wanted._timeout)
    return made


@contextlib.contextmanager
def _room_on(device: torch.device) -> Iterator[None]:
    """Within it a communicator is made on the current device.

    Raises:
        CruxError: less memory is free than the last one took.
    """
    from crux_torch import _C

    # What NCCL asks of CUDA breaks another thread's capture of a graph otherwise.
    _C.tolerate_captures(device.type)
    info = getattr(torch.get_device_module(device), "mem_get_info", None)
    free = 0 if info is None else info(device)[0]
    wanted = _taken.get(device.index, 0)
    if info is not None and free < wanted:
        raise CruxError(f"{free} bytes are free on {device}; the last communicator took {wanted}")
    yield
    if info is not None:
        _taken[device.index] = max(0, free - info(device)[0])


def _registers_all_memory() -> bool:
    """Whether torch registers every segment of its allocator with every ProcessGroupNCCL."""
    names = (f"{prefix}NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK" for prefix in ("TORCH_", ""))
    said = next((os.environ[name] for name in names if name in os.environ), "")
    return said.lower() in ("y", "yes", "1", "t", "true")


def _symmetric_memory() -> str | None:
    """The kind of symmetric memory that this process uses on its accelerator, if it is known."""
    memory: Any = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    # torch answers without a device, too.
    kind = None if memory is None else memory.get_backend(torch.device("cuda"))
    return None if kind is None else str(kind)


MAKERS: dict[str, Maker] = {"gloo": like_gloo, "nccl": like_nccl}


def make_next(current: Any, store: Any, timeout: timedelta, script_options: Any = None) -> Any:
    """The next inner backend; its arguments are those of :data:`Maker`.

    Raises:
        CruxError: a backend of this kind can't be made anew.
        RuntimeError: c10d could not make it, in time or at all.
    """
    maker = MAKERS.get(inner_backends.kind_of(current))
    if maker is None:
        raise CruxError(f"a backend of the kind {current.name()!r} can't be made anew")
    return maker(current, store, timeout, script_options)
