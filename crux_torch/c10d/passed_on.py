"""Attributes that only the stock classes have, for Python.

``csrc/process_group`` implements what every c10d backend has. All other attributes come from the
current inner backend. If one changes something there, the next inner backend of a switch
(docs/switching.md) gets the same change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def attribute(backend: Any, name: str) -> Any:
    """The attribute ``name`` of a delegating backend, which does not have it itself.

    Raises:
        AttributeError: the stock backend does not have it either.
    """
    value = getattr(backend.default_inner, name)
    binds = _BINDS.get(name)
    if binds is not None:
        default_switch(backend).refuse(binds)
    changes = _CHANGES.get(name)
    return value if changes is None else functools.partial(changes, backend)


def turn(backend: Any) -> AbstractContextManager[Any]:
    """Gives the inner backend to split a group from; counts as a collective of all ranks.

    Otherwise ranks that are about to switch could split from different ones.
    """
    return default_switch(backend).turn()  # type: ignore[no-any-return]


def default_switch(backend: Any) -> Any:
    """The ``InnerSwitch`` of the accelerator where there is one, else the CPU's."""
    switches = backend.switches
    return next((s for s in switches if s.device != "cpu"), switches[0])


def _register_mem_pool(backend: Any, pool: Any, symm: bool = False) -> None:
    switch = default_switch(backend)
    if symm:
        # All ranks make the windows together, and these are bound to the communicator.
        switch.refuse("symmetric memory is bound to the inner backend")
        switch.backend.register_mem_pool(pool, symm)
    else:
        switch.configure(_pool(pool), lambda inner: inner.register_mem_pool(pool))
        if type(switch.backend).__name__ == "ProcessGroupNCCL":
            # After it has shut a communicator down, torch's allocator still has the communicator's
            # pools, and the next segment of such a pool fails.
            switch.refuse("registered memory stays with a ProcessGroupNCCL's communicator")


def _deregister_mem_pool(backend: Any, pool: Any) -> None:
    switch = default_switch(backend)
    switch.forget(_pool(pool))
    switch.apply(lambda inner: inner.deregister_mem_pool(pool))


def _pool(pool: Any) -> str:
    return f"memory pool {pool.id}"


def _set_enable_nan_check(backend: Any, enable_nan_check: bool) -> None:
    default_switch(backend).configure(
        "nan check", lambda inner: inner._set_enable_nan_check(enable_nan_check)
    )


def _add_ephemeral_timeout(backend: Any, timeout: Any) -> None:
    default_switch(backend).apply(lambda inner: inner._add_ephemeral_timeout(timeout))


def _perform_nocolor_split(backend: Any, device: Any) -> None:
    with turn(backend) as inner:
        inner.perform_nocolor_split(device)


def _start_time_estimate(backend: Any) -> None:
    default_switch(backend).backend._start_time_estimate()
    # Only this rank simulates, so its operations must not count for a switch.
    backend._set_estimating(True)


def _end_time_estimate(backend: Any) -> float:
    backend._set_estimating(False)
    return float(default_switch(backend).backend._end_time_estimate())


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
