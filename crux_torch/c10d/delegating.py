"""Makes the backend that passes every operation on and records it."""

from __future__ import annotations

from typing import Any

from crux_torch.c10d import events, inner_backends
from crux_torch.c10d.switch import GROUPS
from crux_torch.errors import CruxError


def recorder() -> Any:
    """The recorder of this process (``crux_torch._C.Recorder``), made at the first call."""
    from crux_torch import _C

    return _C.process_recorder(inner_backends.settings().records)


def delegate(
    name: str, inners: dict[str, Any], store: Any, *, born: int, options: Any = None
) -> Any:
    """A delegating backend.

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
    if name == "gloo" and not backend.stand_as_gloo(_gloo_options(first)):
        raise CruxError("this torch's ProcessGroupGloo is laid out in another way")
    if getattr(options, "use_pg_for_symm_mem_rendezvous", False):
        backend.setUsePgForSymmMemRendezvous(True)
    if inner_backends.settings().switch_groups == "none":
        for switch in backend.switches:
            switch.refuse("CRUX_SWITCH_GROUPS is none")
    GROUPS.group_was_made(backend, store, born, options)
    events.group_was_made(store, first.rank(), first.size(), inners.keys())
    return backend


def _gloo_options(gloo: Any) -> Any:
    """Options with as many threads, but without the devices, which end with their backend."""
    options = type(gloo)._Options()
    options._threads = gloo.options._threads
    return options
