"""NCCL's own communicators of several processes on one machine, without a GPU.

Each rank takes the others for other hosts and reaches them over sockets, and connects its rings at
once: bootstrap, topology, channels and service threads are NCCL's. Kernels do nothing, so that no
collective may be started.
"""

from __future__ import annotations

import ctypes
import os
import time

from lab import nccl_ranks
from lab.nccl.cuda import HostCuda
from lab.nccl.library import Library, NcclError, check

#: Rings are connected when the communicator is made, and memory is what cudaMalloc gives.
_AT_ONCE = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_CUMEM_ENABLE": "0"}
IN_PROGRESS = 7


class Identity(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as NCCL 2.14 had it, which later releases take."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def prepare(library: Library, rank: int, interface: str, bus_id: str = "0000:3a:00.0") -> None:
    """Makes this process a rank of its own host, before its first communicator."""
    os.environ.update(nccl_ranks.environment("lab", rank, interface) | _AT_ONCE)
    HostCuda(library, [bus_id])


def identity(library: Library) -> bytes:
    """What all ranks of a communicator are to know, made by its first one."""
    made = Identity()
    check("ncclGetUniqueId", library.exported.ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def begin(
    library: Library, handle: ctypes.c_void_p, size: int, identity: Identity, rank: int
) -> int:
    """Begins to make a communicator, without waiting for it."""
    config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, blocking=0)
    make = library.exported.ncclCommInitRankConfig
    make.argtypes = ctypes.c_void_p, ctypes.c_int, Identity, ctypes.c_int, ctypes.c_void_p
    begun: int = make(ctypes.byref(handle), size, identity, rank, ctypes.byref(config))
    return begun


class Communicator:
    """One of a communicator's ranks, which waits for the others for ``limit_s``.

    Raises:
        NcclError: NCCL can't make it, or not in time; then it was aborted.
    """

    def __init__(
        self, library: Library, identity: bytes, size: int, rank: int, limit_s: float = 60.0
    ) -> None:
        self._nccl = library.exported
        self._handle = ctypes.c_void_p()
        known = Identity.from_buffer_copy(identity)
        begun = begin(library, self._handle, size, known, rank)
        self._wait("ncclCommInitRankConfig", begun, limit_s)

    def split(self, color: int, key: int, limit_s: float = 60.0) -> Communicator:
        """The part of the communicator whose ranks name the same color."""
        part = object.__new__(type(self))
        part._nccl, part._handle = self._nccl, ctypes.c_void_p()
        made = ctypes.byref(part._handle)
        begun = self._nccl.ncclCommSplit(self._handle, color, key, made, None)
        self._wait("ncclCommSplit", begun, limit_s)
        part._wait("ncclCommSplit", 0, limit_s)
        return part

    def destroy(self, limit_s: float = 60.0) -> None:
        begun = self._nccl.ncclCommFinalize(self._handle)
        self._wait("ncclCommFinalize", begun, limit_s)
        check("ncclCommDestroy", self._nccl.ncclCommDestroy(self._handle))

    def abort(self) -> None:
        check("ncclCommAbort", self._nccl.ncclCommAbort(self._handle))

    def _wait(self, what: str, result: int, limit_s: float) -> None:
        state, deadline = ctypes.c_int(result), time.monotonic() + limit_s
        while state.value in (0, IN_PROGRESS):
            asked = self._nccl.ncclCommGetAsyncError(self._handle, ctypes.byref(state))
            check("ncclCommGetAsyncError", asked)
            if state.value == 0:
                return
            if time.monotonic() > deadline:
                self.abort()
                raise NcclError(f"{what}: no end after {limit_s} s")
            time.sleep(0.01)
        self.abort()
        check(what, state.value)
