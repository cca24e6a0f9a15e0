"""NCCL's own network code, driven through the table of functions that its core calls it by."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Literal

from lab.nccl.library import Library, NcclError, check

Name = Literal["ncclNetSocket", "ncclNetIb"]
#: The order of the table in NCCL 2.28 to 2.32 (ncclNet_v11_t, ncclNet_v12_t).
_NAMES = """
name init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush
test closeSend closeRecv closeListen getDeviceMr irecvConsumed makeVDevice finalize setNetAttr
"""
TABLE = _NAMES.split()
_HANDLE_BYTES = 128
_PROPERTIES_BYTES = 512
HOST_MEMORY = 1
_LIMIT_S = 60.0
_UNDEFINED_CLASS = -1
_Pointer = ctypes.c_void_p


class Net:
    """One communicator's use of a network, as ``ncclCommInitRank`` begins it.

    Args:
        traffic_class: of the communicator's configuration; None for NCCL's default.
    """

    def __init__(self, library: Library, name: Name, traffic_class: int | None = None) -> None:
        self._functions = dict(zip(TABLE, library.words(name), strict=True))
        # The only call to CUDA outside GPU memory: which device a thread is for.
        library.detour("cudaGetDevice", _device_0, 1)
        logger = library.address("_Z12ncclDebugLog17ncclDebugLogLevelmPKciS1_z")
        config = (ctypes.c_int * 1)(_UNDEFINED_CLASS if traffic_class is None else traffic_class)
        self._context = _Pointer()
        self._call("init", ctypes.byref(self._context), 1, config, _Pointer(logger), None)

    def devices(self) -> list[str]:
        """Names, in NCCL's order."""
        count = ctypes.c_int()
        self._call("devices", ctypes.byref(count))
        names = []
        for device in range(count.value):
            properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
            self._call("getProperties", device, properties)
            names.append(ctypes.cast(properties, ctypes.POINTER(ctypes.c_char_p))[0].decode())
        return names

    def listen(self, device: int) -> tuple[bytes, Any]:
        """What the other end needs to connect, and what accepts it."""
        handle, listener = ctypes.create_string_buffer(_HANDLE_BYTES), _Pointer()
        self._call("listen", self._context, device, handle, ctypes.byref(listener))
        return handle.raw, listener

    def connector(self, device: int, handle: bytes) -> Callable[[], Any]:
        """To be called until it gives a sender."""
        kept, sender, offload = ctypes.create_string_buffer(handle), _Pointer(), _Pointer()

        def attempt() -> Any:
            made = ctypes.byref(sender), ctypes.byref(offload)
            self._call("connect", self._context, device, kept, *made)
            return sender if sender.value else None

        return attempt

    def acceptor(self, listener: Any) -> Callable[[], Any]:
        """To be called until it gives a receiver."""
        receiver, offload = _Pointer(), _Pointer()

        def attempt() -> Any:
            self._call("accept", listener, ctypes.byref(receiver), ctypes.byref(offload))
            return receiver if receiver.value else None

        return attempt

    def send(self, sender: Any, data: bytes) -> Callable[[], Any]:
        """To be called until it gives the number of bytes that were sent."""
        buffer = ctypes.create_string_buffer(data, len(data))
        memory = self._registered(sender, buffer)
        return self._transfer(
            lambda request: self._call(
                "isend", sender, buffer, ctypes.c_size_t(len(data)), 0, memory, None, request
            ),
            lambda size: (self._call("deregMr", sender, memory), size)[1],
        )

    def receive(self, receiver: Any, size: int) -> Callable[[], Any]:
        """To be called until it gives what was received."""
        buffer = ctypes.create_string_buffer(size)
        memory = self._registered(receiver, buffer)
        data, handles = (_Pointer * 1)(ctypes.addressof(buffer)), (_Pointer * 1)(memory.value)
        sizes, tags, profiled = (ctypes.c_size_t * 1)(size), (ctypes.c_int * 1)(), (_Pointer * 1)()
        arguments = data, sizes, tags, handles, profiled
        return self._transfer(
            lambda request: self._call("irecv", receiver, 1, *arguments, request),
            lambda size: (self._call("deregMr", receiver, memory), buffer.raw[:size])[1],
        )

    def close(self, sender: Any = None, receiver: Any = None, listener: Any = None) -> None:
        for name, what in (("Send", sender), ("Recv", receiver), ("Listen", listener)):
            if what is not None:
                self._call(f"close{name}", what)

    def finalize(self) -> None:
        self._call("finalize", self._context)

    def _registered(self, connection: Any, buffer: Any) -> Any:
        memory, size = _Pointer(), ctypes.c_size_t(len(buffer))
        self._call("regMr", connection, buffer, size, HOST_MEMORY, ctypes.byref(memory))
        return memory

    def _transfer(
        self, start: Callable[[Any], None], end: Callable[[int], Any]
    ) -> Callable[[], Any]:
        request = _Pointer()

        def attempt() -> Any:
            if not request.value:
                start(ctypes.byref(request))
                return None
            done, sizes = ctypes.c_int(), (ctypes.c_int * 8)()
            self._call("test", request, ctypes.byref(done), sizes)
            return end(sizes[0]) if done.value else None

        return attempt

    def _call(self, name: str, *arguments: Any) -> None:
        function = ctypes.CFUNCTYPE(ctypes.c_int)(self._functions[name])
        check(name, function(*arguments))


def finished(*attempts: Callable[[], Any], limit_s: float = _LIMIT_S) -> list[Any]:
    """What each of these gives at last, as NCCL's service thread waits for it: by asking again.

    Raises:
        NcclError: NCCL refuses one, or they take too long.
    """
    results: list[Any] = [None] * len(attempts)
    deadline = time.monotonic() + limit_s
    while any(result is None for result in results):
        if time.monotonic() > deadline:
            raise NcclError(f"no end after {limit_s} s")
        for i, attempt in enumerate(attempts):
            if results[i] is None:
                results[i] = attempt()
    return results


def _device_0(out: int) -> int:
    ctypes.c_int.from_address(out).value = 0
    return 0
