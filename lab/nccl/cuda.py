"""What NCCL asks of CUDA and NVML while it makes a communicator, answered from host memory.

NCCL brings its own copy of CUDA's runtime, whose functions are detoured to these. Memory of the
device is memory of the process; everything is done at once; a kernel does nothing, so collectives
never end.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lab.nccl.library import Library

_UNSUPPORTED, _UNSUPPORTED_NVML = 801, 3
_VERSION = 13000
_COMPUTE_CAPABILITY = (9, 0)
#: Attributes of a device by their numbers in cudaDeviceAttr, those that are not 0.
_ATTRIBUTES = {
    1: 1024,  # threads per block
    16: 132,  # multiprocessors
    41: 1,  # one address space with the host
    75: _COMPUTE_CAPABILITY[0],
    76: _COMPUTE_CAPABILITY[1],
    97: 227 << 10,  # shared memory of a block, at most
    116: 1,  # NICs reach its memory
}
_DONE_AT_ONCE = """
cudaGetLastError cudaPeekAtLastError cudaDeviceSynchronize cudaFuncSetAttribute
cudaStreamDestroy cudaStreamSynchronize cudaStreamQuery cudaStreamWaitEvent cudaFuncGetAttributes
cudaEventDestroy cudaEventRecord cudaEventQuery cudaEventSynchronize cudaMemPoolSetAttribute
cudaThreadExchangeStreamCaptureMode cudaHostRegister cudaHostUnregister cudaMemPoolDestroy
cudaLaunchHostFunc cudaLaunchKernel cudaLaunchKernelExC cudaDeviceGetStreamPriorityRange
"""
_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = ctypes.c_size_t, ctypes.c_size_t
_libc.free.argtypes = (ctypes.c_void_p,)
_PAGE = 4096
#: In cudaDeviceProp, after a name, an UUID, a LUID and a mask.
_TOTAL_MEMORY_AT = 288
_Driver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int)


class HostCuda:
    """Devices whose memory is the host's.

    Args:
        bus_ids: their PCI addresses.
    """

    def __init__(self, library: Library, bus_ids: Sequence[str]) -> None:
        self._bus_ids = [bus_id.encode() for bus_id in bus_ids]
        # By the thread: Python forgets what is local to a thread of NCCL's when a call returns.
        self._device: dict[int, int] = {}
        self._driver_functions: dict[str, Any] = {}
        # What NCCL asks the driver itself and needs to know; it does without all else.
        self._drivers: dict[str, Callable[..., int]] = {
            "cuCtxGetCurrent": _sets(1),
            "cuDeviceGet": _sets(0),
            "cuDeviceGetAttribute": _sets(0),
            "cuDeviceGetUuid": self._uuid,
        }
        answers: dict[str, tuple[Callable[..., int], int]] = {
            "cudaGetDevice": (self._get_device, 1),
            "cudaSetDevice": (self.set_device, 1),
            "cudaGetDeviceCount": (_sets(len(bus_ids)), 1),
            "cudaDriverGetVersion": (_sets(_VERSION), 1),
            "cudaRuntimeGetVersion": (_sets(_VERSION), 1),
            "cudaDeviceGetAttribute": (self._attribute, 3),
            "cudaDeviceGetPCIBusId": (self._pci_bus_id, 3),
            "cudaDeviceCanAccessPeer": (_sets(0), 1),
            "cudaMalloc": (self._allocate, 2),
            "cudaHostAlloc": (self._allocate, 3),
            "cudaMallocHost": (self._allocate, 2),
            "cudaMallocAsync": (self._allocate, 3),
            "cudaFree": (self._free, 1),
            "cudaFreeHost": (self._free, 1),
            "cudaFreeAsync": (self._free, 2),
            "cudaMemcpy": (self._copy, 4),
            "cudaMemcpyAsync": (self._copy, 5),
            "cudaMemset": (self._fill, 3),
            "cudaMemsetAsync": (self._fill, 4),
            "cudaStreamCreateWithFlags": (self._handle, 2),
            "cudaStreamCreateWithPriority": (self._handle, 3),
            "cudaEventCreateWithFlags": (self._handle, 2),
            "cudaHostGetDevicePointer": (self._same_address, 3),
            "cudaStreamIsCapturing": (self._no_capture, 2),
            "cudaStreamGetCaptureInfo": (self._no_capture, 2),
            "cudaMemGetInfo": (self._memory, 2),
            "cudaMemPoolCreate": (self._handle, 2),
            "cudaGetDeviceProperties": (self._properties, 2),
            "cudaMallocFromPoolAsync": (self._allocate, 4),
            "cudaGetErrorString": (_error_text, 1),
            "cudaGetDriverEntryPoint": (self._driver, 4),
            "cudaGetDriverEntryPointByVersion": (self._driver_of_version, 5),
        }
        done = (lambda *_: 0), 0
        for name in _DONE_AT_ONCE.split():
            answers[name] = done
        nvml = {
            "ncclNvmlDeviceGetHandleByPciBusId": (lambda _, out: _set(out, 1, ctypes.c_void_p), 2),
            "ncclNvmlDeviceGetCudaComputeCapability": (self._capability, 3),
            "ncclNvmlDeviceGetIndex": (lambda _, out: _set(out, 0), 2),
            "ncclNvmlGetCCStatus": (done[0], 0),
            "ncclNvmlEnsureInitialized": (done[0], 0),
        }
        for symbol in library.symbols:
            if re.fullmatch(r"cuda[A-Z]\w+", symbol) and not symbol.endswith(("_ptsz", "_ptds")):
                library.detour(symbol, *answers.get(symbol, (_refuses(_UNSUPPORTED), 0)))
            elif re.match(r"_Z\d+ncclNvml", symbol) and "." not in symbol:
                name = next((n for n in nvml if symbol.startswith(f"_Z{len(n)}{n}")), None)
                library.detour(symbol, *(nvml[name] if name else (_refuses(_UNSUPPORTED_NVML), 0)))

    def _driver_of_version(self, name: int, out: int, _version: int, _flags: int, how: int) -> int:
        return self._driver(name, out, _flags, how)

    def _driver(self, name: int, out: int, _flags: int, how: int) -> int:
        """The driver's functions that NCCL finds: one knows a context, the others refuse."""
        text = ctypes.string_at(name).decode()
        if text not in self._driver_functions:
            self._driver_functions[text] = _Driver(self._drivers.get(text, _refuses(_UNSUPPORTED)))
        address = ctypes.cast(self._driver_functions[text], ctypes.c_void_p).value or 0
        return _set(out, address, ctypes.c_void_p) or _set(how, 0)

    def _attribute(self, out: int, attribute: int, _device: int) -> int:
        return _set(out, _ATTRIBUTES.get(attribute & 0xFFFFFFFF, 0))

    def _capability(self, _device: int, major: int, minor: int) -> int:
        return _set(major, _COMPUTE_CAPABILITY[0]) or _set(minor, _COMPUTE_CAPABILITY[1])

    def set_device(self, device: int) -> int:
        self._device[threading.get_ident()] = device
        return 0

    def _get_device(self, out: int) -> int:
        return _set(out, self._device.get(threading.get_ident(), 0))

    def _pci_bus_id(self, out: int, size: int, device: int) -> int:
        text = self._bus_ids[device & 0xFFFFFFFF] + b"\0"
        ctypes.memmove(out, text, len(text))
        return 0

    def _uuid(self, out: int, device: int) -> int:
        name = os.environ.get("NCCL_HOSTID", "").encode() + self._bus_ids[device]
        ctypes.memmove(out, hashlib.sha256(name).digest(), 16)
        return 0

    def _allocate(self, out: int, size: int, *_: int) -> int:
        whole = -(-max(size, 1) // _PAGE) * _PAGE
        return _set(out, _libc.aligned_alloc(_PAGE, whole), ctypes.c_void_p)

    def _free(self, address: int, *_: int) -> int:
        _libc.free(address)
        return 0

    def _copy(self, to: int, source: int, size: int, *_: int) -> int:
        ctypes.memmove(to, source, size)
        return 0

    def _fill(self, to: int, value: int, size: int, *_: int) -> int:
        ctypes.memset(to, value & 0xFF, size)
        return 0

    def _handle(self, out: int, *_: int) -> int:
        return self._allocate(out, 1)

    def _same_address(self, out: int, address: int, _flags: int) -> int:
        return _set(out, address, ctypes.c_void_p)

    def _no_capture(self, _stream: int, status: int) -> int:
        return _set(status, 0)

    def _properties(self, out: int, _device: int) -> int:
        return _set(out + _TOTAL_MEMORY_AT, 1 << 34, ctypes.c_size_t)

    def _memory(self, free: int, total: int) -> int:
        return _set(free, 1 << 34, ctypes.c_size_t) or _set(total, 1 << 34, ctypes.c_size_t)


def _refuses(error: int) -> Callable[..., int]:
    return lambda *_: error


def _sets(value: int) -> Callable[..., int]:
    return lambda out, *_: _set(out, value)


def _set(out: int, value: int, kind: type = ctypes.c_int) -> int:
    kind.from_address(out).value = value
    return 0


_ERROR_TEXT = ctypes.create_string_buffer(b"refused by the lab's CUDA")


def _error_text(_error: int) -> int:
    return ctypes.addressof(_ERROR_TEXT)
