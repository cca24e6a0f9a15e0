"""Takes the place of torch's stock backends while Crux is attached.

A script gets a stock backend from a plugin's creator, from a class, or by splitting a group. While
Crux is attached, each gives a delegating backend over the stock one, under the stock one's name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d

from crux_torch.c10d import events, hooked, inner_backends, passed_on
from crux_torch.c10d.delegating import delegate, recorder
from crux_torch.c10d.switch import GROUPS

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
_pybind_type: Any = type(Backend)


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
        make = functools.partial(cls.__base__, *args, **kwargs)
        given = dict(zip(("store", "rank", "size", "options"), args, strict=False)) | kwargs
        place = given.get("store"), given.get("rank"), given.get("size")
        if inner_backends.is_stock() or None in place:
            return make()
        options, name = given.get("options"), CLASSES[cls.__name__]
        if options is not None and inner_backends.takes_class(name, options):
            classed = inner_backends.with_nccl_class(options)
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


#: The stand-in for each stock class.
_of_stock: dict[type, StandIn] = {}


def shown_class(backend: Any, own: type) -> type:
    """The ``__class__`` of a delegating backend: the stand-in for its inner backend's class."""
    try:
        return _of_stock.get(type(backend.default_inner), own)
    except RuntimeError:
        return own  # it has ended


def _wrapped(
    name: str,
    place: tuple[Any, ...],
    options: Any,
    make: Callable[[], Any],
    *,
    in_group: bool = True,
) -> Any:
    """What ``make`` makes, wrapped.

    It stays unwrapped if wrapping fails, if it is not a backend, or if it may never switch or wait
    on links and torch's hooks suffice to record it.

    Args:
        place: the store, rank and size that it is made with.
        in_group: whether c10d makes it for a group, and not the script for itself.
    """
    born = GROUPS.generation
    with inner_backends.OWNED_SOCKETS.watching(*place):
        inner = make()
    if not isinstance(inner, Backend):
        return inner
    try:
        inners = dict.fromkeys(devices_of(name), inner)
        if in_group and not inner_backends.must_wrap(inner) and hooked.suffices(inner):
            events.group_was_made(place[0], place[1], place[2], inners.keys())
            return inner
        return delegate(inner.name(), inners, place[0], born=born, options=options)
    except Exception as error:
        _log.warning("a process group stays with the stock backend: %s", error)
        return inner


def devices_of(name: str) -> list[str]:
    """The types of device that a backend of the name is asked to serve."""
    devices = list(c10d.Backend.backend_capability[name])
    found = inner_backends.accelerator()
    return devices if found is None or found in devices else [*devices, found]


def _stand_in_for_creator(name: str) -> None:
    """Let the plugin of that name wrap what its creator makes, unless it does already."""
    plugin = c10d.Backend._plugins.get(name.upper())
    if plugin is None or hasattr(plugin.creator_fn, "stands_in"):
        return

    @functools.wraps(plugin.creator_fn)
    def create(*args: Any, **kwargs: Any) -> Any:
        if inner_backends.is_stock():
            return plugin.creator_fn(*args, **kwargs)
        if not plugin.extended_api:
            store, rank, size, *_ = args
            with inner_backends.stock():
                make = functools.partial(plugin.creator_fn, *args, **kwargs)
                return _wrapped(name, (store, rank, size), None, make)
        opts, options = args
        classed = options
        if inner_backends.takes_class(name, options):
            classed = inner_backends.with_nccl_class(options, opts.group_id)
        place = opts.store, opts.group_rank, opts.group_size
        make = functools.partial(inner_backends.create, name, opts, classed, plugin)
        return _wrapped(name, place, options, make)

    create.stands_in = True  # type: ignore[attr-defined]
    c10d.Backend._plugins[name.upper()] = plugin._replace(creator_fn=create)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``_get_split_source`` return NCCL's own class, the only one that NCCL accepts.

    Every rank of the world asks before it splits, also those outside the new group.
    """

    def get_split_source(*args: Any, **kwargs: Any) -> Any:
        source = function(*args, **kwargs)
        if inner_backends.is_stock() or not inner_backends.is_delegating(source):
            return source
        with passed_on.turn(source) as inner:
            return inner

    return get_split_source


def _suspending(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves the Gloo alone over which ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` checks fingerprints."""

    @functools.wraps(function)
    def create_process_group_wrapper(*args: Any, **kwargs: Any) -> Any:
        with inner_backends.stock():
            return function(*args, **kwargs)

    return create_process_group_wrapper


def _registering(register_backend: Callable[..., None]) -> Callable[..., None]:
    """Registers a Gloo that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps under another type than GLOO.

    torch's C++, for example DDP's logger, casts what a group has of type GLOO to ProcessGroupGloo,
    and crashes where that is the wrapper. If it is the group's only backend it gets the type
    CUSTOM. Beside another backend it gets UNDEFINED: c10d keeps one backend of each type in a
    group, and the other may be CUSTOM.
    """
    types = c10d.ProcessGroup.BackendType

    def kind_in(group: Any, backend: Any) -> Any:
        if group.name() == "gloo":
            group._set_default_backend(types.CUSTOM)
            return types.CUSTOM
        known = any(group._get_backend(device) is backend for device in group._device_types)
        return types.CUSTOM if known and group.name() == "custom" else types.UNDEFINED

    def _register_backend(group: Any, device: Any, kind: Any, *backend: Any) -> None:
        if kind == types.GLOO:
            if backend and inner_backends.is_delegating(getattr(backend[0], "wrapped_pg", None)):
                kind = kind_in(group, backend[0])
            elif group.name() == "undefined":
                # torch 2.11 sets none for several devices once any package's backend is known.
                group._set_default_backend(types.GLOO)
        register_backend(group, device, kind, *backend)

    return _register_backend


def _splitting_from(options: Any) -> None:
    """Lets a script set ``split_from`` of NCCL's options to a delegating backend."""
    stock = options.split_from

    def split_from(self: Any, source: Any) -> None:
        stock.fset(self, source.default_inner if inner_backends.is_delegating(source) else source)

    options.split_from = property(stock.fget, split_from)


def install(also: Collection[str] = ()) -> None:
    """Stand in for torch's stock backends and those in ``also``, in groups made from now on."""
    names = {*BACKENDS, *also}
    for name in names:
        _stand_in_for_creator(name)
    if is_installed():
        return
    for class_name in CLASSES:
        stock = getattr(c10d, class_name, None)
        if stock is None:
            continue
        namespace = {"__module__": stock.__module__, "__doc__": stock.__doc__}
        stand_in = _of_stock[stock] = StandIn(class_name, (stock,), namespace)
        for module in (c10d, dist):
            if getattr(module, class_name, None) is stock:
                setattr(module, class_name, stand_in)
    register_backend = c10d.Backend.register_backend

    def register_and_stand_in(name: str, *args: Any, **kwargs: Any) -> None:
        register_backend(name, *args, **kwargs)
        if name.lower() in names:
            _stand_in_for_creator(name.lower())

    backend_class: Any = c10d.Backend
    backend_class.register_backend = staticmethod(register_and_stand_in)
    for function, instead in (
        ("_get_split_source", _unwrapped),
        ("_create_process_group_wrapper", _suspending),
    ):
        setattr(c10d, function, instead(getattr(c10d, function)))
    group_class: Any = c10d.ProcessGroup
    group_class._register_backend = _registering(group_class._register_backend)
    hooked.install(_of_stock.keys(), recorder)
    if dist.is_nccl_available():
        _splitting_from(c10d.ProcessGroupNCCL.Options)


def is_installed() -> bool:
    """Whether :func:`install` is in force."""
    return isinstance(getattr(c10d, "ProcessGroupGloo", None), StandIn)
