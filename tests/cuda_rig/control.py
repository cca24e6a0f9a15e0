"""Within a program on the rig: faults that meet its operations, and what it has called.

Operations of NCCL are ``init``, ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``,
``reduce``, ``send`` and ``receive``. A fault is ``delay`` (it takes so much longer), ``hold`` (it
lasts until :func:`release`, or until its communicator is aborted), ``error`` (it fails on the
device, or making a communicator does) or ``refuse`` (the call fails).
"""

from __future__ import annotations

import ctypes
import functools
import gc
from typing import Any

#: The fields of an operation, in the order in which the library gives them.
FIELDS = ("op", "communicator", "rank", "size", "peer", "type", "reduction", "count", "bytes",
          "stream", "captured", "first_thread", "issue_ns", "start_ns", "end_ns")  # fmt: skip
#: Those that two runs of one program have alike.
SAME = ("op", "rank", "size", "peer", "type", "reduction", "count", "captured", "first_thread")
#: What is done to communicators and memory.
NO_OPERATIONS = frozenset({"init", "split", "destroy", "abort", "register", "deregister", "window"})
#: Calls that make the host wait for the device.
WAITS = ("cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize")
EVER = 1 << 40


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None)
    for name in ("rig_calls", "rig_issued"):
        getattr(library, name).restype = ctypes.c_void_p
    text = ctypes.c_char_p
    library.rig_inject.argtypes = [text, text, ctypes.c_double, ctypes.c_int64]
    return library


def _text(pointer: int) -> list[list[str]]:
    text = ctypes.string_at(pointer).decode()
    _library().free(ctypes.c_void_p(pointer))
    return [line.split("\t") for line in text.splitlines()]


def inject(kind: str, op: str = "", seconds: float = 0.0, count: int = 1) -> None:
    """A fault for the next ``count`` operations of this process, or those called ``op``."""
    if kind == "hold":
        # The end of a process group waits for the device: garbage that holds one must go before.
        gc.collect()
    _library().rig_inject(kind.encode(), op.encode(), seconds, count)


def release() -> None:
    """Lets go of what ``hold`` holds, and forgets the faults that are left."""
    _library().rig_release()


def share(path: str) -> None:
    """From now on delays take longer while those of other processes last that share the file.

    Args:
        path: a file of at least 4 bytes, zeros at first; empty: delays take what they take alone.
    """
    if _library().rig_share(path.encode()) != 0:
        raise OSError(f"{path} can't be mapped")


def clear() -> None:
    """Forgets what was called."""
    _library().rig_clear()


def issued() -> list[dict[str, Any]]:
    """What NCCL was asked for, in order; ``start_ns`` and ``end_ns`` are CLOCK_MONOTONIC."""
    found = []
    for op, *numbers in _text(_library().rig_issued()):
        found.append({"op": op, **dict(zip(FIELDS[1:], map(int, numbers), strict=True))})
    return found


def operations() -> list[dict[str, Any]]:
    """The same without communicators that were made, split and ended."""
    return [each for each in issued() if each["op"] not in NO_OPERATIONS]


def beside() -> list[tuple[str, str]]:
    """Communicators that were made or freed while a kernel of NCCL ran: what, and which kernel."""
    all_ = issued()
    kernels = [each for each in all_ if each["op"] not in NO_OPERATIONS and each["start_ns"] >= 0]
    return [
        (each["op"], kernel["op"])
        for each in all_
        if each["op"] in ("init", "destroy", "abort")
        for kernel in kernels
        if kernel["start_ns"] < each["end_ns"] and each["start_ns"] < kernel["end_ns"]
    ]


def calls(thread: str = "first") -> dict[str, int]:
    """Calls of CUDA that make the host or a stream wait, and timing events that were made.

    Args:
        thread: ``first``, that of the program, or ``other``.
    """
    found = {}
    for name, count in _text(_library().rig_calls()):
        which, _, call = name.partition(" ")
        if which == thread:
            found[call] = int(count)
    return found
