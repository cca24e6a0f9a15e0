"""A fake accelerator and a fake NCCL, for tests on machines without a GPU.

    import fake_gpu

    ok, reason = fake_gpu.available()          # else skip with the reason
    fake_gpu.load()                            # builds once per torch, registers, idempotent
    torch.empty(4, device="fakegpu:1")         # eight devices; memory is the host's
    dist.init_process_group("fakenccl", ...)   # or "cpu:gloo,fakegpu:fakenccl"

**The device.** ``fakegpu`` is torch's PrivateUse1, and ``torch.accelerator`` and ``torch.fakegpu``
know it. Streams are threads with queues, events have monotonic timestamps (``enable_timing=True``
for ``elapsed_time``). Operators run on the CPU's kernels, on the same memory, at the call: they
first wait for the current stream, as everything on the host does. What runs *later*, as kernels
do: ``sleep(seconds)``, ``fill_(tensor, value)``, ``add_(tensor, value)``, and collectives.

**The fake NCCL** runs every operation really, through Gloo, as a task of a stream: the
communicator's own, or the current one for ``async_op=False``. ``Work.wait()`` blocks the current
stream, never the host. ``configure(...)``, for the process groups that are made afterwards:
``legacy`` (False: torch's nccl2, with completion hooks where this torch has them, and a handle for
every operation; True: ProcessGroupNCCL, with ``registerOnCompletionHook``, and no handle, ``None``,
for ``async_op=False``), ``watchdog_period_s`` (what has ended is seen, and hooks run, as late as
that), ``timing`` (as TORCH_NCCL_ENABLE_TIMING), ``strict_hooks`` (completion hooks run while
another thread holds the GIL). ``NcclOptions`` has ``config.traffic_class``, ``split_from``,
``is_high_priority_stream``, ``_timeout``... ``backend.counters`` counts connects, splits,
registrations, aborts.

**Faults**, on this process's ranks: ``inject(kind, op="ALLREDUCE", seconds=, count=, rank=)`` with
kind ``delay`` (the kernel takes longer), ``late`` (the data is there, the end comes later),
``hold`` (until ``release()`` or abort), ``error`` (it fails on the device), ``refuse`` (issuing
raises).

**What was done**: ``operations()`` is the log of what the fake was given and when it ran (op,
sequence, current_stream and stream, tag, bytes, timeout_ms, thread, issue_ns, start_ns, end_ns on
CLOCK_MONOTONIC); ``calls()`` counts the methods of handles by who called them: ``script`` or the
file name of a library that is not torch's.

**What was done wrong**: ``violations()``, a list of (kind, text); ``clear()`` empties it, the log
and the calls.

``work_synchronize``, ``work_get_future``  a library that isn't torch's called them: they block the
    current stream (get_future only on nccl2). Where a backend's own handle passes the script's call
    on, put the script's call inside ``with script_call():``.
``host_sync``  a library that isn't torch's made the host wait for a stream, an event or a device.
``timing_event_in_capture``  a timing event was recorded on a stream that is being captured.
``capture_unsafe_call``  an event, a stream or a handle was queried, or waited for by the host,
    while any stream of the process was being captured: CUDA's default capture mode is global, and
    this both raises and breaks the capture, whichever thread does it, unless the thread is in
    another mode (``fake_gpu_exchange_capture_mode``, for cudaThreadExchangeStreamCaptureMode).
``capture_isolation``  a captured stream waits for work outside of the capture.
``hook_takes_gil`` (with ``strict_hooks``), ``hook_calls_back``  what completion hooks must not do.
``null_result``  a handle of ProcessGroupNCCL's coalesced operations was asked for its outputs: it
    keeps none, and dereferences a null pointer.
``use_after_free``  an operation ran on memory that its owner had freed, and that the device's
    allocator may have given to someone else.
``device_error``  a task on a stream threw.

**Captures**: ``with capture() as graph: ...``, then ``graph.replay()`` any number of times. Within
it the current stream runs nothing and keeps everything; streams that wait for it join, and have to
be waited for before it ends. Not captured: what runs at the call (see above).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import build, device_module
from .build import available

__all__ = [
    "DEVICE",
    "NCCL",
    "add_",
    "available",
    "calls",
    "capture",
    "clear",
    "configure",
    "drain",
    "fill_",
    "has_completion_hooks",
    "inject",
    "load",
    "nccl_options",
    "now_ns",
    "operations",
    "release",
    "script_call",
    "settings",
    "sleep",
    "tells_captures",
    "violations",
]

DEVICE = device_module.NAME
NCCL = "fakenccl"
#: Gloo's own limit, far beyond those of the communicators that run on it.
GLOO_TIMEOUT = timedelta(minutes=5)


@functools.cache
def load() -> Any:
    """Builds what is out of date, registers the device and the backend; returns the C++ module."""
    native = build.native()
    torch.utils.rename_privateuse1_backend(DEVICE)
    native.register_device()
    torch._register_device_module(DEVICE, device_module.make(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    native.set_gloo_factory(_make_gloo)
    dist.Backend.register_backend(NCCL, _create_nccl, extended_api=True, devices=[DEVICE])
    _introduce_capture_mode(native)
    atexit.register(native.drain, 5.0)
    return native


def _introduce_capture_mode(native: Any) -> None:
    """Tell the extension under test what stands in for cudaThreadExchangeStreamCaptureMode."""
    try:
        from crux_torch import _C
    except ImportError:
        return
    if not hasattr(_C, "set_capture_mode_exchange"):  # an extension that was built before it
        return
    exchange = ctypes.CDLL(native.__file__).fake_gpu_exchange_capture_mode
    _C.set_capture_mode_exchange(ctypes.cast(exchange, ctypes.c_void_p).value or 0)


def _make_gloo(store: Any, rank: int, size: int) -> Any:
    # Not the name in c10d's namespace, which others may have replaced.
    gloo = torch._C._distributed_c10d.ProcessGroupGloo
    return gloo(dist.PrefixStore("fakenccl", store), rank, size, GLOO_TIMEOUT)


def _create_nccl(opts: Any, backend_options: Any) -> Any:
    """As torch's creators of NCCL backends do it."""
    native = load()
    legacy = native.settings()["legacy"]
    options = backend_options if backend_options is not None else native.NcclOptions()
    if not isinstance(options, native.NcclOptions):
        raise TypeError(f"expected options of {native.NcclOptions}, got {type(options)}")
    options._timeout = opts.timeout
    options.global_ranks_in_group = opts.global_ranks_in_group
    options.group_name = opts.group_id
    split_from = getattr(opts, "split_from", None)
    if split_from:
        if not isinstance(split_from, native.Nccl):
            raise AssertionError("Expected split_from to be the fake NCCL")
        if not legacy:
            return split_from.split(opts.store, opts.global_ranks_in_group, options)
        options.split_from = split_from
        options.split_color = c10d._process_group_color(opts.global_ranks_in_group)
    return native.Nccl(opts.store, opts.group_rank, opts.group_size, options)


def has_completion_hooks() -> bool:
    """Whether this torch has completion hooks; then nccl2's flavour has them too."""
    return "-DFAKE_GPU_HAS_SUPPORTSCOMPLETIONHOOKS" in build.macros()


def tells_captures() -> bool:
    """Whether this torch lets a device that isn't CUDA's say that its stream captures."""
    guard = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
    return "isStreamCapturing" in guard.read_text()


def nccl_options(*, is_high_priority_stream: bool = False) -> Any:
    """Options for ``pg_options``; the fake's ``ProcessGroupNCCL.Options``."""
    return load().NcclOptions(is_high_priority_stream)


def configure(**settings: Any) -> None:
    """Settings of the process groups that are made from now on; see the package's docstring."""
    load().configure(**settings)


def settings() -> dict[str, Any]:
    return load().settings()


def sleep(seconds: float) -> None:
    """A kernel on the current stream that takes ``seconds``."""
    load().sleep(seconds)


def fill_(tensor: torch.Tensor, value: float) -> None:
    """A kernel on the current stream that fills ``tensor``."""
    load().fill(tensor, value)


def add_(tensor: torch.Tensor, value: float) -> None:
    """A kernel on the current stream that adds ``value`` to ``tensor``."""
    load().add(tensor, value)


def inject(kind: str, **which: Any) -> None:
    """A fault that meets the next operations of this process; see the package's docstring."""
    load().inject(kind, **which)


def release() -> None:
    """Lets go of what ``hold`` holds, and forgets the faults that are left."""
    load().release()


def operations() -> list[dict[str, Any]]:
    """What the fake NCCL was given since ``clear()``, in order of issue."""
    return load().operations()


def calls() -> dict[tuple[str, str], int]:
    """Calls of handles' methods since ``clear()``, by method and caller."""
    return load().calls()


def violations() -> list[tuple[str, str]]:
    """What was done that is forbidden, since ``clear()``: kind and text."""
    return load().violations()


def clear() -> None:
    load().clear()


def now_ns() -> int:
    """CLOCK_MONOTONIC, as the timestamps in ``operations()``."""
    return load().now_ns()


def drain(seconds: float = 10.0) -> bool:
    """Whether all streams come to rest within ``seconds``."""
    return load().drain(seconds)


@contextlib.contextmanager
def script_call() -> Iterator[None]:
    """Calls that reach the fake through the backend under test are the script's own in here."""
    held = load().script_call()
    try:
        yield
    finally:
        del held


@contextlib.contextmanager
def capture() -> Iterator[Any]:
    """Captures the current stream; yields what can be replayed, by ``.replay()``."""
    native = load()
    graph = native.begin_capture()
    try:
        yield graph
    except BaseException:
        with contextlib.suppress(RuntimeError):
            native.end_capture(graph)
        raise
    native.end_capture(graph)
