"""Makes the next inner backend of a group: like the current one, over new connections."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from crux_torch.c10d import inner_backends
from crux_torch.errors import CruxError

#: Arguments: the current backend, an empty store, a timeout for making the next one, and the
#: options that the script gave for the first one, if any.
Maker = Callable[[Any, Any, timedelta, Any], Any]


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
    stock, wanted = type(current), current.options
    options = copy.copy(wanted)
    options.split_from = None
    # Only the first communicator of a process may leave them out for the world.
    if not options.global_ranks_in_group:
        options.global_ranks_in_group = list(range(current.size()))
    options.config.traffic_class = inner_backends.scripts_class(wanted, script_options)
    options = inner_backends.with_nccl_class(options)
    native = store.native(timeout) if hasattr(store, "native") else store
    # Without it, a rank that fails leaves the others in NCCL for as long as the job lives.
    options.config.blocking = 0
    if not inner_backends.connects_when_made(stock):
        return stock(native, current.rank(), current.size(), options)
    options._timeout = timeout
    made = stock(native, current.rank(), current.size(), options, current.bound_device_id)
    made.set_timeout(wanted._timeout)
    return made


def obstacle(current: Any) -> str:
    """Why no backend like it can be made, in words; empty if one can."""
    kind = inner_backends.kind_of(current)
    if kind not in MAKERS:
        return f"a backend of the kind {current.name()!r} can't be made anew"
    if kind != "nccl":
        return ""
    if _symmetric_memory() == "NCCL":
        return "symmetric memory is bound to NCCL's communicators"
    if inner_backends.connects_when_made(type(current)):
        return "" if current.bound_device_id else "a NCCL group without a bound device"
    # The allocator keeps a communicator that was shut down in its list, and then fails.
    registered = _registers_all_memory()
    return "all memory is registered with NCCL's communicators" if registered else ""


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
        CruxError: there is an :func:`obstacle`.
        RuntimeError: c10d could not make it, in time or at all.
    """
    if why := obstacle(current):
        raise CruxError(why)
    return MAKERS[inner_backends.kind_of(current)](current, store, timeout, script_options)
