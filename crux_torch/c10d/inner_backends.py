"""The inner backends of a process group, made by the stock creators.

This file covers the differences between versions of torch. Since 2.14 every stock backend is a
plugin whose creator makes it. Before, ``_new_process_group_helper`` made Gloo, NCCL and XCCL.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from crux_torch.c10d import events, passed_on
from crux_torch.c10d.ownership import Ownership
from crux_torch.errors import SettingsError
from crux_torch.settings import Settings

NAME = "crux"
#: The sockets of every inner backend of this process.
OWNED_SOCKETS = Ownership()
#: Whether stock backends are plugins. Their creators get the backend to split from.
HAS_CREATORS = hasattr(c10d.Backend, "_ensure_backend_registered")

_stock = threading.local()
#: Traffic classes that communicators of this process were given by the job's level.
_given_classes: set[int] = set()


def settings() -> Settings:
    """The settings; the defaults if one is invalid, which the runtime reports."""
    try:
        return Settings.from_env()
    except SettingsError:
        return Settings()


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """Within it, in this thread, the stand-ins for stock backends make stock backends."""
    depth = getattr(_stock, "depth", 0)
    _stock.depth = depth + 1
    try:
        yield
    finally:
        _stock.depth = depth


def is_stock() -> bool:
    """Whether this thread is within :func:`stock`."""
    return bool(getattr(_stock, "depth", 0))


def is_delegating(backend: Any) -> bool:
    """Whether it is one of this package's backends."""
    from crux_torch import _C

    return isinstance(backend, _C.DelegatingBackend)


def kind_of(backend: Any) -> str:
    """The name of a stock backend's kind: ``nccl`` for all of NCCL's classes (``nccl2``, ...)."""
    name = str(backend.name())
    return "nccl" if name.startswith("nccl") else name


def may_switch(backend: Any) -> bool:
    """Whether a stock backend's connections may have to be made anew while its group lives."""
    chosen = settings().switch_groups
    if chosen == "auto":
        return kind_of(backend) != "nccl" or events.needs_switches()
    return chosen == "all"


def must_wrap(backend: Any) -> bool:
    """Whether a stock backend of a group can't keep its place: it may switch, or wait on links."""
    return may_switch(backend) or settings().links != ("none",)


def accelerator() -> str | None:
    """The type of the accelerator that this process can use, if any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else str(found.type)


def backend_for(device: str) -> str | None:
    """Name of the stock backend that c10d maps a type of device to; None if it can't be made."""
    name = c10d.Backend.default_device_backend_map.get(device)
    if name is None or name == NAME:
        return None
    _ensure_registered(name)
    if name.startswith("nccl") and not dist.is_nccl_available():
        return None
    return name if name.upper() in c10d.Backend._plugins or name in _INLINE else None


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


def create(name: str, opts: Any, options: Any, plugin: Any = None) -> Any:
    """A stock backend.

    Args:
        name: that c10d knows it by.
        opts: c10d's ``_DistributedBackendOptions``; it may name a delegating backend to split from.
        options: the script's, or None.
        plugin: that makes it; default: the one that c10d has now.
    """
    _ensure_registered(name)
    plugin = plugin or c10d.Backend._plugins.get(name.upper())
    with stock(), _splitting(name, opts):
        if plugin is None:
            return _INLINE[name](opts, options)
        if plugin.extended_api:
            return plugin.creator_fn(opts, options)
        return plugin.creator_fn(opts.store, opts.group_rank, opts.group_size, opts.timeout)


@contextlib.contextmanager
def _splitting(name: str, opts: Any) -> Iterator[None]:
    """Within it ``opts`` name the stock backend to split from. Gloo's creator does not split."""
    source = getattr(opts, "split_from", None)
    if name == "gloo" or not is_delegating(source):
        yield
        return
    try:
        with passed_on.turn(source) as inner:
            opts.split_from = inner
            yield
    finally:
        opts.split_from = source


def with_nccl_class(options: Any, group: str = "") -> Any:
    """The script's options for a communicator, with the class of the job's level if it has one.

    ``group`` is its group's name if that is not in the options yet.
    """
    configured = settings()
    if configured.disable or not configured.nccl_class:
        return options
    classed = events.with_nccl_class(options, c10d.ProcessGroupNCCL.Options, group)
    if classed is not options:
        _given_classes.add(classed.config.traffic_class)
    return classed


def scripts_class(options: Any, script_options: Any) -> int:
    """The traffic class that the script chose for a communicator.

    Args:
        options: that the communicator has.
        script_options: that the script gave, if known. A split group has its parent's class.
    """
    undefined = int(type(options)().config.traffic_class)
    if script_options is not None:
        return int(script_options.config.traffic_class)
    own = int(options.config.traffic_class)
    return undefined if own in _given_classes else own


def connects_when_made(stock_class: type) -> bool:
    """Whether a NCCL class takes the device that it is for, and makes its communicator at once."""
    return stock_class.__name__ in ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy")


def takes_class(name: str, options: Any) -> bool:
    """Whether a backend's options have room for a traffic class, as NCCL's have."""
    if options is None:
        return name.startswith("nccl") and dist.is_nccl_available()
    return hasattr(getattr(options, "config", None), "traffic_class")


def _ensure_registered(name: str) -> None:
    backends: Any = c10d.Backend
    if HAS_CREATORS:
        backends._ensure_backend_registered(name)


def _create_gloo(opts: Any, options: Any) -> Any:
    made = c10d.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, timeout=opts.timeout)
    made.options.global_ranks_in_group = opts.global_ranks_in_group
    made.options.group_name = opts.group_id
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
    options.global_ranks_in_group = opts.global_ranks_in_group
    options.group_name = opts.group_id
    with _split_source(opts) as source:
        if source is not None:
            options.split_from = source
            options.split_color = c10d._process_group_color(opts.global_ranks_in_group)
        return stock_class(opts.store, opts.group_rank, opts.group_size, options)


@contextlib.contextmanager
def _split_source(opts: Any) -> Iterator[Any]:
    """What torch splits the communicator from.

    Ranks outside the group take part in the split, whatever name the group has.
    """
    source: Any = None
    if opts.global_ranks_in_group and dist.is_initialized():
        world: Any = c10d._get_default_group()
        if world.bound_device_id:
            find: Any = c10d._get_split_source
            source = find(world)
    if is_delegating(source):
        with passed_on.turn(source) as inner:
            yield inner
    else:
        yield source


def _create_xccl(opts: Any, options: Any) -> Any:
    stock_class: Any = c10d.ProcessGroupXCCL
    options = stock_class.Options()
    options.global_ranks_in_group = opts.global_ranks_in_group
    options.group_name = opts.group_id
    options._timeout = opts.timeout
    return stock_class(opts.store, opts.group_rank, opts.group_size, options)


#: Makes a backend as ``_new_process_group_helper`` did before torch had creators.
_INLINE: dict[str, Callable[[Any, Any], Any]] = (
    {} if HAS_CREATORS else {"gloo": _create_gloo, "nccl": _create_nccl, "xccl": _create_xccl}
)
