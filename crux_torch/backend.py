"""The ``crux`` backend: registration, creation around the stock backends, standing in for them.

``register()`` adds the name ``crux`` to torch.distributed. ``attach()`` goes further: the script's
own ``init_process_group("nccl" | "gloo" | None)`` gets a backend that records, under the name it
asked for. Both change nothing in what an operation does: see
``csrc/process_group/delegating_backend.h``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from crux_torch import runtime
from crux_torch.apply import nccl
from crux_torch.apply.ownership import Ownership
from crux_torch.apply.switch import GROUPS
from crux_torch.errors import CruxError, SettingsError
from crux_torch.settings import Settings

NAME = "crux"
#: The stock classes that ``attach`` stands in for, with the names that scripts know them by.
STOCK_CLASSES = {
    "ProcessGroupGloo": "gloo",
    "ProcessGroupNCCL": "nccl",
    "ProcessGroupNCCL2": "nccl",
    "ProcessGroupNCCLLazy": "nccl",
}

#: The sockets of every inner backend of this process.
OWNED_SOCKETS = Ownership()
GROUPS.watching = OWNED_SOCKETS.watching
GROUPS.on_connected = runtime.connections_were_made

_log = logging.getLogger(__name__)
_suspended = threading.local()


def recorder() -> Any:
    """The recorder of this process (``crux_torch._C.Recorder``), made at the first call."""
    from crux_torch import _C

    return _C.process_recorder(_settings().records)


def _settings() -> Settings:
    """The settings; where one can't be used, the defaults: the runtime says so and stays off."""
    try:
        return Settings.from_env()
    except SettingsError:
        return Settings()


def _delegate(
    name: str, inners: dict[str, Any], store: Any, *, born: int, options: Any = None
) -> Any:
    """A backend over ``inners``.

    Args:
        name: that it answers to.
        inners: for each type of device.
        store: that they were made with.
        born: the newest switch that was requested before they were made.
        options: that the script gave for them.
    """
    from crux_torch import _C

    first = next(iter(inners.values()))
    backend = _C.DelegatingBackend(name, first.rank(), first.size(), recorder())
    for device, inner in inners.items():
        backend.add_inner(device, inner)
    GROUPS.group_was_made(backend, store, born, options)
    runtime.group_was_made(store, first.rank(), first.size(), inners.keys())
    return backend


@contextlib.contextmanager
def _stock() -> Iterator[None]:
    """Within it the stock classes are what they always were, in this thread."""
    depth = getattr(_suspended, "depth", 0)
    _suspended.depth = depth + 1
    try:
        yield
    finally:
        _suspended.depth = depth


def _create_gloo(opts: Any, backend_options: Any) -> Any:
    plugin = c10d.Backend._plugins.get("GLOO")
    if plugin is not None:
        return plugin.creator_fn(opts, backend_options)
    # Before the stock backends became plugins their creation was inlined in c10d.
    gloo = c10d.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, timeout=opts.timeout)
    gloo.options.global_ranks_in_group = opts.global_ranks_in_group
    gloo.options.group_name = opts.group_id
    return gloo


def with_nccl_class(options: Any, group: str = "") -> Any:
    """The options for a NCCL communicator, with the class of the job's level where it has one.

    Args:
        options: the script's, or None.
        group: name of the group, where it is not in the options yet.
    """
    settings = _settings()
    if settings.disable or not settings.nccl_class:
        return options
    new = c10d.ProcessGroupNCCL.Options
    return nccl.with_class(options, runtime.planned_dscp(), new=new, owner=group)


def _create_nccl(opts: Any, backend_options: Any) -> Any:
    backend_options = with_nccl_class(backend_options, opts.group_id)
    split_from = getattr(opts, "split_from", None)
    if split_from is not None:
        opts.split_from = getattr(split_from, "default_inner", split_from)
    plugin = c10d.Backend._plugins.get("NCCL")
    if plugin is not None:
        return plugin.creator_fn(opts, backend_options)
    options = backend_options or c10d.ProcessGroupNCCL.Options()
    options._timeout = opts.timeout
    options.global_ranks_in_group = opts.global_ranks_in_group
    options.group_name = opts.group_id
    return c10d.ProcessGroupNCCL(opts.store, opts.group_rank, opts.group_size, options)


def _create(opts: Any, backend_options: Any) -> Any:
    """The creator behind ``init_process_group("crux")``: one backend over Gloo, and NCCL if any."""
    for name in ("gloo", "nccl"):
        ensure = getattr(c10d.Backend, "_ensure_backend_registered", None)
        if ensure is not None:
            ensure(name)
    inners: dict[str, Any] = {}
    born = GROUPS.generation
    with _stock():
        if dist.is_gloo_available():
            with OWNED_SOCKETS.watching(opts.store, opts.group_rank, opts.group_size):
                inners["cpu"] = _create_gloo(opts, backend_options)
        if torch.cuda.is_available() and dist.is_nccl_available():
            inners["cuda"] = _create_nccl(opts, backend_options)
    if not inners:
        raise CruxError('backend "crux" needs Gloo or NCCL, and this torch has neither')
    if _settings().disable and list(inners) == ["cpu"]:
        return inners["cpu"]
    return _delegate(NAME, inners, opts.store, born=born, options=backend_options)


def register() -> None:
    """Add the backend ``crux`` to torch.distributed; calling it again changes nothing.

    Raises:
        CruxError: another package holds the name.
    """
    plugin = c10d.Backend._plugins.get(NAME.upper())
    if plugin is None:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _accept_in_monitored_barrier()
    elif plugin.creator_fn is not _create:
        raise CruxError(
            f'the backend name "{NAME}" is taken by {plugin.creator_fn!r}: '
            "uninstall the other package, or use crux_torch.attach() with a stock backend's name"
        )


def _accept_in_monitored_barrier() -> None:
    """Let ``monitored_barrier`` through where torch knows only the name ``gloo``.

    Newer torch asks for a CPU backend instead of a name, and has nothing to let through.
    """
    if getattr(c10d.Backend, "_ensure_backend_registered", None) is not None:
        return
    stock = c10d.monitored_barrier

    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        member = not c10d._rank_not_in_group(group)
        if not member or dist.get_backend(group) != NAME:
            return stock(group, timeout, wait_all_ranks)
        timeout = timeout if timeout is not None else c10d._get_default_timeout("gloo")
        members: Any = group or c10d._get_default_group()
        return members.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


class _StandIn(type):
    """Metaclass of the stand-in for a stock class inside torch's c10d module.

    Calling it makes the stock backend and wraps it; ``isinstance`` and attributes are the stock's.
    """

    stock: type
    public_name: str
    devices: tuple[str, ...]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if getattr(_suspended, "depth", 0):
            return cls.stock(*args, **kwargs)
        born, options = GROUPS.generation, args[3] if len(args) > 3 else None
        if cls.public_name == "nccl" and len(args) > 3:
            args = (*args[:3], with_nccl_class(args[3]), *args[4:])
        with OWNED_SOCKETS.watching(*args[:3]):
            inner = cls.stock(*args, **kwargs)
        try:
            inners = dict.fromkeys(cls.devices, inner)
            return _delegate(cls.public_name, inners, args[0], born=born, options=options)
        except Exception as error:
            _log.warning("a process group stays with the stock backend: %s", error)
            return inner

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, cls.stock):
            return True
        return isinstance(getattr(instance, "default_inner", None), cls.stock)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.stock)

    def __getattr__(cls, attribute: str) -> Any:
        return getattr(cls.stock, attribute)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """``_get_split_source`` hands the parent to NCCL, which takes its own class only."""

    def get_split_source(*args: Any, **kwargs: Any) -> Any:
        source = function(*args, **kwargs)
        return getattr(source, "default_inner", source)

    return get_split_source


def _suspending(function: Callable[..., Any]) -> Callable[..., Any]:
    """With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch checks fingerprints over a Gloo of its own."""

    def create_process_group_wrapper(*args: Any, **kwargs: Any) -> Any:
        with _stock():
            return function(*args, **kwargs)

    return create_process_group_wrapper


def _registering(register_backend: Callable[..., None]) -> Callable[..., None]:
    """torch's C++ takes whatever bears the type GLOO for a ProcessGroupGloo, without asking.

    DDP's logger does so. A stand-in for Gloo is registered as CUSTOM, as any backend of another
    package; names stay what they are.
    """
    types = c10d.ProcessGroup.BackendType

    def _register_backend(group: Any, device: Any, kind: Any, *backend: Any) -> None:
        inside = getattr(backend[0], "wrapped_pg", backend[0]) if backend else None
        if kind == types.GLOO and hasattr(inside, "default_inner"):
            # torch 2.11 leaves a group of several devices without a default backend as soon as
            # any package has registered one.
            if group.name() in ("gloo", "undefined"):
                group._set_default_backend(types.CUSTOM)
            kind = types.CUSTOM
        register_backend(group, device, kind, *backend)

    return _register_backend


def attach() -> None:
    """Make every process group that is created from now on record, under its own backend's name.

    Idempotent; does nothing where ``CRUX_DISABLE`` is set. Groups that exist are left as they are.
    """
    register()
    if _settings().disable or is_attached():
        return
    # Without its extension there is nothing to attach: better now than at the first group.
    recorder()
    for class_name, public_name in STOCK_CLASSES.items():
        stock = getattr(c10d, class_name, None)
        if stock is None:
            continue
        devices = tuple(c10d.Backend.backend_capability[public_name])
        namespace = {"stock": stock, "public_name": public_name, "devices": devices}
        setattr(c10d, class_name, _StandIn(class_name, (), namespace))
    c10d._get_split_source = _unwrapped(c10d._get_split_source)
    c10d._create_process_group_wrapper = _suspending(c10d._create_process_group_wrapper)
    groups: Any = c10d.ProcessGroup
    groups._register_backend = _registering(groups._register_backend)


def is_attached() -> bool:
    """Whether :func:`attach` is in force."""
    return isinstance(getattr(c10d, "ProcessGroupGloo", None), _StandIn)
