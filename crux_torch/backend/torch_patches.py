"""The internals of torch.distributed that this package reads or replaces: all of them are here.

Each says why it is needed, and in which releases of torch it matters (2.11 is the oldest that is
supported). Replacements are made once in a process, and pass on to what they replace.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

#: c10d without types: most of what follows is unknown to its stubs.
_c10d: Any = c10d
#: Whether every stock backend is a plugin with a creator (since 2.14). Before, c10d made Gloo, NCCL
#: and XCCL inline, so this package makes them as c10d did.
HAS_CREATORS = hasattr(c10d.Backend, "_ensure_backend_registered")
#: Whether groups have hooks around each operation (since 2.15).
HAS_HOOKS = hasattr(c10d, "_register_pg_in_world") and hasattr(
    c10d.ProcessGroup, "register_pre_hook"
)
#: Torch's own classes, with the class that replaces each.
_stand_ins: dict[type, type] = {}
_in_stock = threading.local()


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """A context in which, on this thread, replaced classes and creators make torch's backends."""
    depth = getattr(_in_stock, "depth", 0)
    _in_stock.depth = depth + 1
    try:
        yield
    finally:
        _in_stock.depth = depth


def is_stock() -> bool:
    """Returns True within :func:`stock`."""
    return bool(getattr(_in_stock, "depth", 0))


# Read


def plugin(name: str) -> Any:
    """Returns c10d's entry for a backend, with ``creator_fn`` and ``extended_api``, or None.

    ``Backend._plugins``: to call and to replace creators. Stock backends have one since 2.14.
    """
    return c10d.Backend._plugins.get(name.upper())


def set_creator(name: str, creator: Callable[..., Any]) -> None:
    """Replaces the creator of a plugin (``Backend._plugins``)."""
    c10d.Backend._plugins[name.upper()] = c10d.Backend._plugins[name.upper()]._replace(
        creator_fn=creator
    )


def ensure_registered(name: str) -> None:
    """Makes torch register a stock backend that it registers when first used (since 2.14)."""
    if HAS_CREATORS:
        _c10d.Backend._ensure_backend_registered(name)


def split_from(ranks: list[int]) -> tuple[Any, int]:
    """Returns the backend that c10d splits a communicator of ``ranks`` from, or None, and a color.

    ``_get_split_source`` and ``_process_group_color``: for NCCL made inline (before 2.14).
    """
    source = None
    if ranks and dist.is_initialized():
        world = _c10d._get_default_group()
        if world.bound_device_id:
            source = _c10d._get_split_source(world)
    return source, c10d._process_group_color(ranks) if source is not None else 0


def group_backends(group: Any) -> dict[torch.device, Any]:
    """Returns a group's backends by device (``ProcessGroup._device_types``, ``_get_backend``)."""
    return {device: group._get_backend(device) for device in group._device_types}


def gloo_options(gloo: Any, *, keep_devices: bool) -> Any:
    """Returns options for another Gloo with as many threads.

    Attributes of ``ProcessGroupGloo._Options`` have no public name. Devices end with their backend
    unless the script made them.
    """
    options = type(gloo)._Options()
    options._threads = gloo.options._threads
    if keep_devices:
        options._devices = gloo.options._devices
    return options


def timeout_s(backend: Any) -> float | None:
    """Returns the timeout of a backend's operations in seconds (``options._timeout``), if any."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds())


def symmetric_memory() -> str | None:
    """Returns the kind of symmetric memory of this process (``_SymmetricMemory``), if known.

    Has no public getter. NCCL's kind binds memory to a communicator.
    """
    memory: Any = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    # torch answers without a device, too.
    kind = None if memory is None else memory.get_backend(torch.device("cuda"))
    return None if kind is None else str(kind)


# Replaced


def replace_class(stock_class: type, stand_in: type) -> None:
    """Puts a class in the place of one of torch's: scripts make backends by calling it."""
    _stand_ins[stock_class] = stand_in
    for module in (c10d, dist):
        if getattr(module, stock_class.__name__, None) is stock_class:
            setattr(module, stock_class.__name__, stand_in)


def stock_classes() -> Collection[type]:
    """Returns torch's classes that were replaced."""
    return _stand_ins.keys()


def shown_class(backend: Any, own: type) -> type:
    """Returns the ``__class__`` of a delegating backend: the stand-in for its inner backend's."""
    try:
        return _stand_ins.get(type(backend.default_inner), own)
    except RuntimeError:
        return own  # it has ended


def on_backend_registered(call: Callable[[str], None]) -> None:
    """Calls back with the name of every backend that is registered from now on.

    ``Backend.register_backend``: another package, or torch since 2.14, may register one late.
    """
    register_backend = c10d.Backend.register_backend

    def register_and_tell(name: str, *args: Any, **kwargs: Any) -> None:
        register_backend(name, *args, **kwargs)
        call(name.lower())

    _c10d.Backend.register_backend = staticmethod(register_and_tell)


def on_world_destroyed(call: Callable[[], None]) -> None:
    """Calls back when ``destroy_process_group()`` has ended the last group; c10d has no hook."""
    stock_function = c10d.destroy_process_group

    @functools.wraps(stock_function)
    def destroy_process_group(group: Any = None) -> None:
        stock_function(group)
        if not dist.is_initialized():
            call()

    c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group


def accept_in_monitored_barrier(name: str) -> None:
    """Makes ``monitored_barrier`` accept a backend: before 2.14 it accepts the name ``gloo`` only.

    Newer torch asks for a CPU backend instead of a name.
    """
    if HAS_CREATORS:
        return
    stock_function = c10d.monitored_barrier

    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        if c10d._rank_not_in_group(group) or dist.get_backend(group) != name:
            return stock_function(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d._get_default_timeout(dist.Backend("gloo"))
        members: Any = group or c10d._get_default_group()
        return members.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def unwrap_split_sources(
    is_ours: Callable[[Any], bool], inner_of: Callable[[Any], AbstractContextManager[Any]]
) -> None:
    """Makes c10d split communicators from NCCL's own class, the only one that NCCL accepts.

    ``_get_split_source``: every rank of the world asks it before a split, also ranks outside the
    new group. ``ProcessGroupNCCL.Options.split_from``: a script may set it.

    Args:
        is_ours: tells a delegating backend.
        inner_of: gives its inner backend.
    """
    get_split_source = _c10d._get_split_source

    def unwrapped(*args: Any, **kwargs: Any) -> Any:
        source = get_split_source(*args, **kwargs)
        if is_stock() or not is_ours(source):
            return source
        with inner_of(source) as inner:
            return inner

    _c10d._get_split_source = unwrapped
    if not dist.is_nccl_available():
        return
    options = c10d.ProcessGroupNCCL.Options
    stock_property: Any = options.split_from

    def set_split_from(self: Any, source: Any) -> None:
        stock_property.fset(self, source.default_inner if is_ours(source) else source)

    options.split_from = property(stock_property.fget, set_split_from)  # type: ignore[assignment]


def leave_debug_groups(is_ours: Callable[[Any], bool]) -> None:
    """Keeps ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` working, which wraps backends once more.

    ``_create_process_group_wrapper``: the Gloo over which it checks fingerprints stays torch's.

    ``ProcessGroup._register_backend``: a Gloo that it wraps gets another type than GLOO, because
    torch's C++ (DDP's logger) casts what a group has of type GLOO to ProcessGroupGloo, and crashes.
    The group's only backend gets CUSTOM. Beside another backend it gets UNDEFINED: c10d keeps one
    backend of each type in a group, and the other may be CUSTOM.
    """
    create = _c10d._create_process_group_wrapper

    @functools.wraps(create)
    def create_process_group_wrapper(*args: Any, **kwargs: Any) -> Any:
        with stock():
            return create(*args, **kwargs)

    _c10d._create_process_group_wrapper = create_process_group_wrapper
    group_class: Any = c10d.ProcessGroup
    register_backend = group_class._register_backend
    types = c10d.ProcessGroup.BackendType

    def kind_in(group: Any, backend: Any) -> Any:
        if group.name() == "gloo":
            group._set_default_backend(types.CUSTOM)
            return types.CUSTOM
        known = any(each is backend for each in group_backends(group).values())
        return types.CUSTOM if known and group.name() == "custom" else types.UNDEFINED

    def _register_backend(group: Any, device: Any, kind: Any, *backend: Any) -> None:
        if kind == types.GLOO:
            if backend and is_ours(getattr(backend[0], "wrapped_pg", None)):
                kind = kind_in(group, backend[0])
            elif group.name() == "undefined":
                # torch 2.11 sets none for several devices once any package's backend is known.
                group._set_default_backend(types.GLOO)
        register_backend(group, device, kind, *backend)

    group_class._register_backend = _register_backend


def on_group_registered(
    call: Callable[[Any], None], block_of: Callable[[Any, Any], Any | None]
) -> None:
    """Calls back with every group that torch registers from now on, and around coalesced blocks.

    ``_register_pg_in_world``: since 2.15, which has hooks around each operation of a group. It has
    none around a block of coalesced ones, hence ``_start_coalescing`` and ``_end_coalescing``.
    Does nothing in an older torch.

    Args:
        block_of: gives what to call at the ends of a block in a group on a device, or None.
    """
    group_class: Any = c10d.ProcessGroup
    if not HAS_HOOKS:
        return
    register = _c10d._register_pg_in_world

    @functools.wraps(register)
    def register_and_tell(group: Any, *args: Any, **kwargs: Any) -> Any:
        call(group)
        return register(group, *args, **kwargs)

    _c10d._register_pg_in_world = register_and_tell
    start, end = group_class._start_coalescing, group_class._end_coalescing

    def _start_coalescing(self: Any, device: Any) -> None:
        start(self, device)
        if (block := block_of(self, device)) is not None:
            block.start_block()

    def _end_coalescing(self: Any, device: Any) -> Any:
        block = block_of(self, device)
        if block is None:
            return end(self, device)
        block.end_block()
        try:
            work = end(self, device)
        except BaseException:
            block.block_failed()
            raise
        block.block_ended(work)
        return work

    group_class._start_coalescing, group_class._end_coalescing = _start_coalescing, _end_coalescing
