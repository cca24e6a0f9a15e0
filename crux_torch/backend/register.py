"""Registers the backend ``crux``, and attaches Crux to torch's own backends.

A script gets a stock backend from a plugin's creator, from a class, or by splitting a group. While
Crux is attached, each gives a delegating backend over the stock one, under the stock one's name. It
passes every operation on and records it: see ``csrc/process_group/delegating_backend.h``.

A group that needs no such backend keeps torch's own, and torch's hooks record it (since 2.15;
docs/start/frameworks.md).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d

from crux_torch.backend import inner_backends, listener, torch_patches
from crux_torch.backend.handover import GROUPS
from crux_torch.backend.inner_backends import NAME, OWNED_SOCKETS
from crux_torch.errors import CruxError

#: The names that scripts ask for stock backends by.
BACKENDS = ("gloo", "nccl", "nccl2", "nccl-lazy", "nccl-legacy", "xccl")
#: The stock classes, with the names whose devices they serve.
CLASSES = {
    "ProcessGroupGloo": "gloo",
    "ProcessGroupNCCL": "nccl",
    "ProcessGroupNCCL2": "nccl",
    "ProcessGroupNCCLLazy": "nccl",
    "ProcessGroupXCCL": "xccl",
}

_log = logging.getLogger(__name__)
#: What records each group by hooks, by type of device.
_recording: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_pybind_type: Any = type(Backend)


def register() -> None:
    """Adds the backend ``crux`` to torch.distributed; calling it again changes nothing.

    Raises:
        CruxError: another package holds the name.
    """
    plugin = torch_patches.plugin(NAME)
    if plugin is None:
        # An accelerator of another package is served, too, but not by default.
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        c10d.Backend.backend_capability[NAME] = inner_backends.Devices(["cpu", "cuda"])
        torch_patches.accept_in_monitored_barrier(NAME)
        torch_patches.on_world_destroyed(_world_ended)
    elif plugin.creator_fn is not _create:
        raise CruxError(
            f'the backend name "{NAME}" is taken by {plugin.creator_fn!r}: '
            "uninstall the other package, or use crux_torch.attach() with a stock backend's name"
        )


def _create(opts: Any, options: Any) -> Any:
    """The creator behind ``init_process_group("crux")``: Gloo, and what the accelerator has."""
    inners: dict[str, Any] = {}
    born = GROUPS.generation
    if dist.is_gloo_available():
        with OWNED_SOCKETS.watching(opts.store, opts.group_rank, opts.group_size):
            inners["cpu"] = inner_backends.create("gloo", opts, options)
    device = inner_backends.accelerator()
    name = None if device is None else inner_backends.backend_for(device)
    if device is not None and name == "gloo" and inners:
        inners[device] = inners["cpu"]
    elif device is not None and name is not None:
        classed = inner_backends.with_nccl_class(name, options, opts.group_id)
        inners[device] = inner_backends.create(name, opts, classed)
    if not inners:
        raise CruxError('backend "crux" needs Gloo or NCCL, and this torch has neither')
    if inner_backends.settings().disable and list(inners) == ["cpu"]:
        return inners["cpu"]
    return delegate(NAME, inners, opts.store, born=born, options=options)


def _world_ended() -> None:
    """Have the threads of this package end within ``destroy_process_group()``."""
    GROUPS.drop_ended()
    listener().world_ended()


def attach(also: Collection[str] = ()) -> None:
    """Makes every process group that is created from now on record, under its backend's name.

    Idempotent; does nothing if ``CRUX_DISABLE`` is set. Groups that exist are left as they are.

    Args:
        also: other packages' backends to record.
    """
    register()
    if inner_backends.settings().disable:
        return
    # If the extension is missing, fail now and not when the first group is made.
    recorder()
    names = {*BACKENDS, *also}
    for name in names:
        _wrap_creator(name)
    if is_attached():
        return
    for class_name in CLASSES:
        if (stock := getattr(c10d, class_name, None)) is not None:
            namespace = {"__module__": stock.__module__, "__doc__": stock.__doc__}
            torch_patches.replace_class(stock, StandIn(class_name, (stock,), namespace))
    torch_patches.on_backend_registered(lambda name: _wrap_creator(name) if name in names else None)
    torch_patches.unwrap_split_sources(inner_backends.is_delegating, inner_backends.turn)
    torch_patches.leave_debug_groups(inner_backends.is_delegating)
    record_by_hooks()


def is_attached() -> bool:
    """Returns True once :func:`attach` is in force."""
    return isinstance(getattr(c10d, "ProcessGroupGloo", None), StandIn)


class StandIn(_pybind_type):  # type: ignore[misc]
    """Metaclass of what stands in for a stock class.

    A stand-in derives from its class, adds nothing to it, and is the ``__class__`` of a delegating
    backend over it. Calling it makes the stock backend and wraps it. A script's own subclass
    derives from the stock class.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not any(isinstance(base, StandIn) for base in bases):
            return super().__new__(mcs, name, bases, namespace)
        plain = tuple(base.__base__ if isinstance(base, StandIn) else base for base in bases)
        return type(plain[0])(name, plain, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("store", "rank", "size", "options"), args, strict=False)) | kwargs
        place = given.get("store"), given.get("rank"), given.get("size")
        if torch_patches.is_stock() or None in place:
            return cls.__base__(*args, **kwargs)
        options, name = given.get("options"), CLASSES[cls.__name__]
        if options is not None:
            classed = inner_backends.with_nccl_class(name, options)
            if len(args) > 3:
                args = (*args[:3], classed, *args[4:])
            else:
                kwargs["options"] = classed
        make = functools.partial(cls.__base__, *args, **kwargs)
        return _wrapped(name, place, options, make, in_group=False)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__base__)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__base__)


def _wrap_creator(name: str) -> None:
    """Lets the plugin of that name wrap what its creator makes, unless it does already."""
    plugin = torch_patches.plugin(name)
    if plugin is None or hasattr(plugin.creator_fn, "stands_in"):
        return

    @functools.wraps(plugin.creator_fn)
    def create(*args: Any, **kwargs: Any) -> Any:
        if torch_patches.is_stock():
            return plugin.creator_fn(*args, **kwargs)
        if not plugin.extended_api:
            store, rank, size, *_ = args
            with torch_patches.stock():
                make = functools.partial(plugin.creator_fn, *args, **kwargs)
                return _wrapped(name, (store, rank, size), None, make)
        opts, options = args
        classed = inner_backends.with_nccl_class(name, options, opts.group_id)
        place = opts.store, opts.group_rank, opts.group_size
        make = functools.partial(inner_backends.create, name, opts, classed, plugin)
        return _wrapped(name, place, options, make)

    create.stands_in = True  # type: ignore[attr-defined]
    torch_patches.set_creator(name, create)


def _wrapped(
    name: str,
    place: tuple[Any, Any, Any],
    options: Any,
    make: Callable[[], Any],
    *,
    in_group: bool = True,
) -> Any:
    """Returns what ``make`` makes, wrapped.

    It stays unwrapped if wrapping fails, if it is not a backend, or if it is never handed over or
    waits on links and torch's hooks suffice to record it.

    Args:
        place: the store, rank and size that it is made with.
        in_group: whether c10d makes it for a group, and not the script for itself.
    """
    store, rank, size = place
    born = GROUPS.generation
    with OWNED_SOCKETS.watching(store, rank, size):
        inner = make()
    if not isinstance(inner, Backend):
        return inner
    try:
        devices = list(c10d.Backend.backend_capability[name])
        found = inner_backends.accelerator()
        if found is not None and found not in devices:
            devices.append(found)
        inners = dict.fromkeys(devices, inner)
        if in_group and not inner_backends.must_wrap(inner) and hooks_suffice(inner):
            listener().group_made(store, rank, size, inners.keys())
            return inner
        return delegate(inner.name(), inners, store, born=born, options=options)
    except Exception as error:
        _log.warning("a process group stays with the stock backend: %s", error)
        return inner


def recorder() -> Any:
    """Returns the recorder of this process (``_C.Recorder``), made at the first call."""
    from crux_torch import _C

    return _C.process_recorder(inner_backends.settings().records)


def delegate(
    name: str, inners: dict[str, Any], store: Any, *, born: int, options: Any = None
) -> Any:
    """Returns a delegating backend.

    Args:
        name: that it answers to.
        inners: the inner backend for each type of device.
        store, options: that they were made with, and that the script gave for them.
        born: the newest generation that was requested before they were made.

    Raises:
        CruxError: torch's C++ would take it for a ProcessGroupGloo, and can't.
    """
    from crux_torch import _C

    first = next(iter(inners.values()))
    backend = _C.DelegatingBackend(name, first.rank(), first.size(), recorder())
    for device, inner in inners.items():
        backend.add_inner(device, inner)
    if name == "gloo":
        gloo_options = torch_patches.gloo_options(first, keep_devices=False)
        if not backend.stand_as_gloo(gloo_options):
            raise CruxError("this torch's ProcessGroupGloo is laid out in another way")
    if getattr(options, "use_pg_for_symm_mem_rendezvous", False):
        backend.setUsePgForSymmMemRendezvous(True)
    if inner_backends.settings().switch_groups == "none":
        for handover in inner_backends.handovers_of(backend):
            handover.refuse("CRUX_SWITCH_GROUPS is none")
    GROUPS.add(backend, store, born, options)
    listener().group_made(store, first.rank(), first.size(), inners.keys())
    return backend


def hooks_suffice(backend: Any) -> bool:
    """Returns True if torch's hooks tell all that the recorder needs of a backend's operations.

    They do if it reports the end of its operations with their durations, as nccl2 does. Gloo does
    not, and ProcessGroupNCCL neither.
    """
    from crux_torch import _C

    hooked: Any = getattr(_C, "HookedGroup", None)
    known = hooked is not None and torch_patches.HAS_HOOKS
    return known and isinstance(backend, Backend) and bool(hooked.suffices(backend))


def record_by_hooks() -> None:
    """Records every group that torch makes from now on over a stock backend by its hooks."""
    torch_patches.on_group_registered(_record, _recording_of)


def _recording_of(group: Any, device: Any) -> Any:
    found = _recording.get(group) if _recording else None
    return None if found is None else found.get(device.type)


def _record(group: Any) -> None:
    from crux_torch import _C

    if type(group) is not c10d.ProcessGroup:
        return  # made by another package, with operations of its own
    try:
        backends = torch_patches.group_backends(group)
        for device, backend in backends.items():
            # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it once more.
            stock = getattr(backend, "wrapped_pg", backend)
            if type(stock) in torch_patches.stock_classes() and hooks_suffice(stock):
                alone = all(other is backend for other in backends.values())
                made = _C.HookedGroup.attach(group, stock, device.type, alone, recorder())
                _recording.setdefault(group, {})[device.type] = made
    except Exception as error:
        _log.warning("a process group is not recorded: %s", error)
