"""Groups that keep torch's own backends, and are recorded by torch's hooks (torch 2.15 and newer).

c10d has hooks around each operation of a group, but none around a block of coalesced ones, so the
two methods that open and close a block are patched. docs/frameworks.md says what this is good for.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Collection
from typing import Any

from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d

_log = logging.getLogger(__name__)
#: What records each group, by type of device.
_recording: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def suffices(backend: Any) -> bool:
    """Whether torch's hooks tell all that the recorder needs of a stock backend's operations.

    They do if it reports the end of its operations with their durations, as nccl2 does. Gloo does
    not, and ProcessGroupNCCL neither.
    """
    from crux_torch import _C

    hooked: Any = getattr(_C, "HookedGroup", None)
    known = hooked is not None and hasattr(c10d, "_register_pg_in_world")
    return known and isinstance(backend, Backend) and bool(hooked.suffices(backend))


def install(classes: Collection[type], recorder: Any) -> None:
    """Record every group that torch makes from now on over a stock backend of these ``classes``.

    Does nothing in a torch without hooks.
    """
    module: Any = c10d
    group_class = module.ProcessGroup
    register = getattr(module, "_register_pg_in_world", None)
    if register is None or not hasattr(group_class, "register_pre_hook"):
        return

    @functools.wraps(register)
    def register_and_record(group: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _record(group, classes, recorder)
        except Exception as error:
            _log.warning("a process group is not recorded: %s", error)
        return register(group, *args, **kwargs)

    module._register_pg_in_world = register_and_record
    start, end = group_class._start_coalescing, group_class._end_coalescing

    def _start_coalescing(self: Any, device: Any) -> None:
        start(self, device)
        if (recording := _recording_of(self, device)) is not None:
            recording.start_block()

    def _end_coalescing(self: Any, device: Any) -> Any:
        recording = _recording_of(self, device)
        if recording is None:
            return end(self, device)
        recording.end_block()
        try:
            work = end(self, device)
        except BaseException:
            recording.block_failed()
            raise
        recording.block_ended(work)
        return work

    group_class._start_coalescing, group_class._end_coalescing = _start_coalescing, _end_coalescing


def _recording_of(group: Any, device: Any) -> Any:
    found = _recording.get(group) if _recording else None
    return None if found is None else found.get(device.type)


def _record(group: Any, classes: Collection[type], recorder: Any) -> None:
    from crux_torch import _C

    if type(group) is not c10d.ProcessGroup:
        return  # made by another package, with operations of its own
    backends = {device.type: group._get_backend(device) for device in group._device_types}
    for device, backend in backends.items():
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it once more.
        stock = getattr(backend, "wrapped_pg", backend)
        if type(stock) in classes and suffices(stock):
            alone = all(other is backend for other in backends.values())
            made = _C.HookedGroup.attach(group, stock, device, alone, recorder())
            _recording.setdefault(group, {})[device] = made
