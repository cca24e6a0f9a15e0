"""The inner backends of a process group, which torch's own classes make.

``csrc/process_group`` implements what every c10d backend has. All other attributes come from the
current inner backend (:func:`attribute`). If one changes something there, the next inner backend of
a handover (docs/understand/handover.md) gets the same change.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from crux_torch.backend import listener, torch_patches
from crux_torch.backend.tcp_sockets import Ownership
from crux_torch.errors import CruxError, SettingsError
from crux_torch.settings import Settings, process_settings

NAME = "crux"
#: The sockets of every inner backend of this process.
OWNED_SOCKETS = Ownership(nccl_sockets=lambda: listener().nccl_sockets())

#: Traffic classes that communicators of this process were given by the job's level.
_given_classes: set[int] = set()


def settings() -> Settings:
    """Returns the settings; the defaults if one is invalid, which the agent reports."""
    try:
        return process_settings()
    except SettingsError:
        return Settings()


def is_delegating(backend: Any) -> bool:
    """Returns True if it is one of this package's backends."""
    from crux_torch import _C

    return isinstance(backend, _C.DelegatingBackend)


def handovers_of(backend: Any) -> list[Any]:
    """Returns what holds a delegating backend's inner backends (``_C.Handover``)."""
    return backend.handovers  # type: ignore[no-any-return]


def default_handover(backend: Any) -> Any:
    """Returns the holder for the accelerator if there is one, else for the CPU."""
    found = handovers_of(backend)
    return next((each for each in found if each.device != "cpu"), found[0])


def turn(backend: Any) -> AbstractContextManager[Any]:
    """Gives the inner backend to split a group from; counts as a collective of all ranks.

    Otherwise ranks in a handover could split from different ones.
    """
    return default_handover(backend).turn()  # type: ignore[no-any-return]


def kind_of(backend: Any) -> str:
    """Returns a stock backend's kind: ``nccl`` for all of NCCL's classes (``nccl2``, ...)."""
    name = str(backend.name())
    return "nccl" if name.startswith("nccl") else name


def may_hand_over(backend: Any) -> bool:
    """Returns True if a stock backend's connections may be made anew while its group lives."""
    chosen = settings().switch_groups
    if chosen == "auto":
        return kind_of(backend) != "nccl" or listener().needs_handover()
    return chosen == "all"


def must_wrap(backend: Any) -> bool:
    """Returns True if hooks can't serve a group: it may be handed over, or wait on links."""
    return may_hand_over(backend) or settings().links != ("none",)


def accelerator() -> str | None:
    """Returns the type of the accelerator that this process can use, if any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else str(found.type)


def backend_for(device: str) -> str | None:
    """Returns the name of the stock backend for a type of device; None if it can't be made."""
    name = c10d.Backend.default_device_backend_map.get(device)
    if name is None or name == NAME:
        return None
    torch_patches.ensure_registered(name)
    if name.startswith("nccl") and not dist.is_nccl_available():
        return None
    return name if torch_patches.plugin(name) is not None or name in _INLINE else None


class Devices(list[str]):
    """The types of device that ``crux`` serves, looked up whenever torch asks.

    Another package may add the accelerator after ``crux`` was registered.
    """

    def _now(self) -> list[str]:
        found = accelerator()
        new = found is not None and not list.__contains__(self, found) and backend_for(found)
        return [*list.__iter__(self), found] if found is not None and new else self[:]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __contains__(self, device: object) -> bool:
        return device in self._now()

    def __len__(self) -> int:
        return len(self._now())


# The first inner backends, made as torch makes them


def create(name: str, opts: Any, options: Any, plugin: Any = None) -> Any:
    """Returns a stock backend.

    Args:
        name: that c10d knows it by.
        opts: c10d's ``_DistributedBackendOptions``; it may name a delegating backend to split from.
        options: the script's, or None.
        plugin: that makes it; default: the one that c10d has now.
    """
    torch_patches.ensure_registered(name)
    plugin = plugin or torch_patches.plugin(name)
    with torch_patches.stock(), _stock_split_source(name, opts):
        if plugin is None:
            return _INLINE[name](opts, options)
        if plugin.extended_api:
            return plugin.creator_fn(opts, options)
        return plugin.creator_fn(opts.store, opts.group_rank, opts.group_size, opts.timeout)


@contextlib.contextmanager
def _stock_split_source(name: str, opts: Any) -> Iterator[None]:
    """Within it ``opts`` name the stock backend to split from. Gloo's creator does not split."""
    source = getattr(opts, "split_from", None)
    if name == "gloo" or not is_delegating(source):
        yield
        return
    try:
        with turn(source) as inner:
            opts.split_from = inner
            yield
    finally:
        opts.split_from = source


def _create_gloo(opts: Any, options: Any) -> Any:
    made = c10d.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, timeout=opts.timeout)
    _name_group(made.options, opts)
    return made


def _create_nccl(opts: Any, options: Any) -> Any:
    stock_class: Any = c10d.ProcessGroupNCCL
    if options is None:
        options = stock_class.Options()
        options.is_high_priority_stream = False
    elif not isinstance(options, stock_class.Options):
        raise AssertionError(
            "Expected backend_options argument to be of type ProcessGroupNCCL.Options"
        )
    elif options._timeout != opts.timeout:
        warnings.warn(
            "backend_options._timeout was specified, "
            "but timeout kwarg has a default value that will always override it. ",
            stacklevel=2,
        )
    options._timeout = opts.timeout
    _name_group(options, opts)
    # Ranks outside the group take part in the split, whatever name the group has.
    source, color = torch_patches.split_from(opts.global_ranks_in_group)
    with turn(source) if is_delegating(source) else contextlib.nullcontext(source) as inner:
        if inner is not None:
            options.split_from, options.split_color = inner, color
        return stock_class(opts.store, opts.group_rank, opts.group_size, options)


def _create_xccl(opts: Any, options: Any) -> Any:
    stock_class: Any = c10d.ProcessGroupXCCL
    options = _name_group(stock_class.Options(), opts)
    options._timeout = opts.timeout
    return stock_class(opts.store, opts.group_rank, opts.group_size, options)


def _name_group(options: Any, opts: Any) -> Any:
    options.global_ranks_in_group = opts.global_ranks_in_group
    options.group_name = opts.group_id
    return options


#: Makes a backend as ``_new_process_group_helper`` did before torch had creators.
_INLINE: dict[str, Callable[[Any, Any], Any]] = (
    {}
    if torch_patches.HAS_CREATORS
    else {"gloo": _create_gloo, "nccl": _create_nccl, "xccl": _create_xccl}
)


# The traffic class of NCCL's communicators


def with_nccl_class(name: str, options: Any, group: str = "") -> Any:
    """Returns a script's options, with the class of the job's level if it has one.

    Args:
        name: of the backend that they are for; other options than NCCL's have no class.
        group: name of the group if it is not in the options yet.
    """
    if options is None:
        has_class = name.startswith("nccl") and dist.is_nccl_available()
    else:
        has_class = hasattr(getattr(options, "config", None), "traffic_class")
    configured = settings()
    if not has_class or configured.disable or not configured.nccl_class:
        return options
    classed = listener().nccl_options(options, c10d.ProcessGroupNCCL.Options, group)
    if classed is not options:
        _given_classes.add(classed.config.traffic_class)
    return classed


def scripts_class(options: Any, script_options: Any) -> int:
    """Returns the traffic class that the script chose for a communicator.

    Args:
        options: that the communicator has.
        script_options: that the script gave, if known. A split group has its parent's class.
    """
    undefined = int(type(options)().config.traffic_class)
    if script_options is not None:
        return int(script_options.config.traffic_class)
    own = int(options.config.traffic_class)
    return undefined if own in _given_classes else own


# The next inner backend of a handover


def connects_when_made(stock_class: type) -> bool:
    """Returns True if a NCCL class takes its device, and makes its communicator at once."""
    return stock_class.__name__ in ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy")


def like_gloo(current: Any, store: Any, timeout: timedelta, script_options: Any) -> Any:
    """Returns a ProcessGroupGloo on devices of its own, or on those that the script chose.

    Gloo chooses the interfaces of its own devices.
    """
    stock_class, rank, size = type(current), current.rank(), current.size()
    if isinstance(script_options, stock_class._Options):
        options = torch_patches.gloo_options(current, keep_devices=True)
        options._timeout = timeout
        made = stock_class(store, rank, size, options)
    else:
        made = stock_class(store, rank, size, timeout=timeout)
    made.options.global_ranks_in_group = current.options.global_ranks_in_group
    made.options.group_name = current.options.group_name
    made._set_default_timeout(current.options._timeout)
    return made


def like_nccl(current: Any, store: Any, timeout: timedelta, script_options: Any) -> Any:
    """Returns a NCCL backend of the current one's class, on the same device
    (docs/understand/handover.md).

    It is not split from another one, because a split shares its parent's connections.
    """
    stock_class, rank, size = type(current), current.rank(), current.size()
    options = copy.copy(current.options)
    options.split_from = None
    # Only the first communicator of a process may leave them out for the world.
    if not options.global_ranks_in_group:
        options.global_ranks_in_group = list(range(size))
    options.config.traffic_class = scripts_class(current.options, script_options)
    options = with_nccl_class("nccl", options)
    native = store.native(timeout) if hasattr(store, "native") else store
    # Without it, a rank that fails leaves the others in NCCL for as long as the job lives.
    options.config.blocking = 0
    if not connects_when_made(stock_class):
        return stock_class(native, rank, size, options)
    options._timeout = timeout
    made = stock_class(native, rank, size, options, current.bound_device_id)
    made.set_timeout(current.options._timeout)
    return made


#: By kind. Arguments: the current backend, an empty store, a timeout for making the next one, and
#: the options that the script gave for the first one, if any.
MAKERS: dict[str, Callable[[Any, Any, timedelta, Any], Any]] = {
    "gloo": like_gloo,
    "nccl": like_nccl,
}


def obstacle(current: Any) -> str:
    """Returns why no backend like it can be made; empty if one can."""
    kind = kind_of(current)
    if kind not in MAKERS:
        return f"a backend of the kind {current.name()!r} can't be made anew"
    if kind != "nccl":
        return ""
    if torch_patches.symmetric_memory() == "NCCL":
        return "symmetric memory is bound to NCCL's communicators"
    if connects_when_made(type(current)):
        return "" if current.bound_device_id else "a NCCL group without a bound device"
    # torch's allocator then keeps a communicator that was shut down in its list, and fails.
    names = (f"{prefix}NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK" for prefix in ("TORCH_", ""))
    value = next((os.environ[name] for name in names if name in os.environ), "")
    registers = value.lower() in ("y", "yes", "1", "t", "true")
    return "all memory is registered with NCCL's communicators" if registers else ""


def make_next(current: Any, store: Any, timeout: timedelta, script_options: Any = None) -> Any:
    """Returns the next inner backend; see :data:`MAKERS` for the arguments.

    Raises:
        CruxError: there is an :func:`obstacle`.
        RuntimeError: c10d could not make it, in time or at all.
    """
    if why := obstacle(current):
        raise CruxError(why)
    return MAKERS[kind_of(current)](current, store, timeout, script_options)


# What only the stock classes have


def attribute(backend: Any, name: str) -> Any:
    """Returns an attribute that a delegating backend does not have itself; C++ calls it.

    Raises:
        AttributeError: the stock backend does not have it either.
    """
    value = getattr(backend.default_inner, name)
    if name in _BINDS:
        default_handover(backend).refuse(_BINDS[name])
    change = _CHANGES.get(name)
    return value if change is None else functools.partial(change, backend)


def _register_mem_pool(backend: Any, pool: Any, symm: bool = False) -> None:
    handover = default_handover(backend)
    if symm:
        # All ranks make the windows together, and these are bound to the communicator.
        handover.refuse("symmetric memory is bound to the inner backend")
        handover.backend.register_mem_pool(pool, symm)
    else:
        handover.configure(_pool(pool), lambda inner: inner.register_mem_pool(pool))
        if type(handover.backend).__name__ == "ProcessGroupNCCL":
            # After it has shut a communicator down, torch's allocator still has the communicator's
            # pools, and the next segment of such a pool fails.
            handover.refuse("registered memory stays with a ProcessGroupNCCL's communicator")


def _deregister_mem_pool(backend: Any, pool: Any) -> None:
    handover = default_handover(backend)
    handover.forget(_pool(pool))
    handover.apply(lambda inner: inner.deregister_mem_pool(pool))


def _pool(pool: Any) -> str:
    return f"memory pool {pool.id}"


def _set_enable_nan_check(backend: Any, enable_nan_check: bool) -> None:
    default_handover(backend).configure(
        "nan check", lambda inner: inner._set_enable_nan_check(enable_nan_check)
    )


def _add_ephemeral_timeout(backend: Any, timeout: Any) -> None:
    default_handover(backend).apply(lambda inner: inner._add_ephemeral_timeout(timeout))


def _perform_nocolor_split(backend: Any, device: Any) -> None:
    with turn(backend) as inner:
        inner.perform_nocolor_split(device)


def _start_time_estimate(backend: Any) -> None:
    default_handover(backend).backend._start_time_estimate()
    # Only this rank simulates, so its operations must not count for a handover.
    backend._set_estimating(True)


def _end_time_estimate(backend: Any) -> float:
    backend._set_estimating(False)
    return float(default_handover(backend).backend._end_time_estimate())


#: Attributes after which the current inner backend must be kept, and why.
_BINDS = dict.fromkeys(
    ("_comm_ptr", "comm_ptr"), "the communicator's address was given to the script"
)
#: Attributes that change an inner backend, or must use the same one on all ranks.
_CHANGES: dict[str, Callable[..., Any]] = {
    "_add_ephemeral_timeout": _add_ephemeral_timeout,
    # Of ProcessGroupNCCL alone before torch 2.12; later c10d asks every backend.
    "_end_time_estimate": _end_time_estimate,
    "_set_default_timeout": lambda backend, timeout: backend.set_timeout(timeout),
    "_set_enable_nan_check": _set_enable_nan_check,
    "_start_time_estimate": _start_time_estimate,
    "deregister_mem_pool": _deregister_mem_pool,
    "perform_nocolor_split": _perform_nocolor_split,
    "register_mem_pool": _register_mem_pool,
}
