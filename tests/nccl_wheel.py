"""The libnccl that torch brought, used without a GPU.

Run as a script it drives, in a process of its own, functions of that library that need no device:
``python nccl_wheel.py conf NAME…`` and ``python nccl_wheel.py profiler``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_SYMTAB = 2


def library() -> Path | None:
    """The libnccl that torch loads, or None."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder, "nccl", "lib", "libnccl.so.2")
        if path.is_file():
            return path
    return None


def symbols(path: Path) -> dict[str, int]:
    """Address of each symbol, those that are not exported included, where they were left in."""
    image = memoryview(path.read_bytes())
    section_offset = int.from_bytes(image[40:48], "little")
    entry_size, count = struct.unpack_from("<HH", image, 58)
    sections = [_SECTION.unpack_from(image, section_offset + i * entry_size) for i in range(count)]
    found: dict[str, int] = {}
    for section in sections:
        if section[1] != _SHT_SYMTAB:
            continue
        _, _, _, _, offset, size, link, _, _, _ = section
        strings = bytes(image[sections[link][4] : sections[link][4] + sections[link][5]])
        for name, info, _, index, value, _ in _SYMBOL.iter_unpack(image[offset : offset + size]):
            if index and info & 15 in (1, 2):
                found[strings[name : strings.index(b"\0", name)].decode()] = value
    return found


class Internals:
    """Functions of a loaded libnccl by their mangled names, exported or not."""

    def __init__(self, path: Path) -> None:
        self._nccl = ctypes.CDLL(str(path))
        self._addresses = symbols(path)
        known = ctypes.cast(self._nccl.ncclGetVersion, ctypes.c_void_p).value
        assert known is not None
        self._base = known - self._addresses["ncclGetVersion"]

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(self._base + self._addresses[name])

    def value(self, name: str, kind: Any) -> Any:
        return kind.from_address(self._base + self._addresses[name]).value

    def send_progress(self) -> int:
        """Address of the function by which NCCL tells that an operation sends to the network."""
        transport = self._base + self._addresses["netTransport"]
        return int(ctypes.c_uint64.from_address(transport + _SEND_PROGRESS_OFFSET).value)

    def version(self) -> int:
        version = ctypes.c_int()
        assert self._nccl.ncclGetVersion(ctypes.byref(version)) == 0
        return version.value


def conf(names: list[str]) -> dict[str, str | None]:
    """What NCCL makes of its files: the variables, once it has read them."""
    path = library()
    assert path is not None
    nccl = ctypes.CDLL(str(path))
    identity = (ctypes.c_char * 128)()
    assert nccl.ncclGetUniqueId(identity) == 0
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = {name: getenv(name.encode()) for name in names}
    return {name: None if value is None else value.decode() for name, value in found.items()}


#: Each byte of what stands in for NCCL's records. As an activation mask it asks for ProxyOp and
#: ProxyStep events; as a pid it is another process's, so no address in the record is followed.
_FILL = 0x18
_COMMUNICATOR_BYTES = 8 << 20
_ARGUMENTS_BYTES = 1 << 20
#: The first operation's record in the arguments is before this, whatever the release.
_AFTER_FIRST_BYTES = 4096
#: Of ``ncclTransport``: its name, ``canConnect``, and seven functions of ``send`` before this one.
_SEND_PROGRESS_OFFSET = 8 + 8 + 7 * 8
_SEND_WAIT, _RECEIVE_FLUSH = 9, 11


def profiler() -> dict[str, Any]:
    """NCCL's own functions load the plugin and report one transfer of a proxy to it.

    ``ncclProfilerPluginInit`` gets a communicator of zeros, which is what it copies the name and
    the ranks from; the functions of the proxy get arguments that are all ``_FILL``, but for what
    says that the operation sends.
    """
    from crux_torch.apply.nccl_profiler import NcclProfiler

    path = library()
    assert path is not None
    nccl = Internals(path)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    communicator = ctypes.create_string_buffer(_COMMUNICATOR_BYTES)
    before = NcclProfiler.loaded() is not None
    result = nccl.function("_Z22ncclProfilerPluginInitP8ncclComm", number, pointer)(communicator)
    plugin = NcclProfiler.loaded()
    if plugin is None:
        return {"version": nccl.version(), "init": result, "before": before, "loaded": False}

    def arguments(after_first: bytes) -> Any:
        first = bytes([_FILL]) * _AFTER_FIRST_BYTES
        rest = after_first * ((_ARGUMENTS_BYTES - len(first)) // len(after_first))
        return ctypes.create_string_buffer(first + rest, _ARGUMENTS_BYTES)

    sends = arguments(nccl.send_progress().to_bytes(8, "little"))
    receives = arguments(bytes([_FILL]))
    args = "P13ncclProxyArgs"

    def call(name: str, proxy_arguments: Any, *values: int) -> None:
        kinds = [number, pointer] + [number] * len(values)
        assert nccl.function(name, number, *kinds)(0, proxy_arguments, *values) == 0

    record = f"_Z37ncclProfilerRecordProxyStepEventStatei{args}i24ncclProfilerEventState_t"
    for direction, operation, state in (
        ("Send", sends, _SEND_WAIT),
        ("Recv", receives, _RECEIVE_FLUSH),
    ):
        call(f"_Z29ncclProfilerStartProxyOpEventi{args}", operation)
        call(f"_Z35ncclProfilerStart{direction}ProxyStepEventi{args}i", operation, 0)
        call(record, operation, 0, state)
        call(f"_Z30ncclProfilerStopProxyStepEventi{args}i", operation, 0)
        call(f"_Z28ncclProfilerStopProxyOpEventi{args}", operation)
    forwarded = plugin.forwarded()
    opened = plugin.communicators()
    # All that NCCL needs to end it is the context that the plugin gave, which is in there.
    finalize = nccl.function("_Z26ncclProfilerPluginFinalizeP8ncclComm", number, pointer)
    finalized = finalize(communicator)
    return {
        "version": nccl.version(),
        "init": result,
        "before": before,
        "loaded": True,
        "mask": nccl.value("ncclProfilerEventMask", ctypes.c_int),
        "sends": forwarded.sends,
        "sent_bytes": forwarded.sent_bytes,
        "receives": forwarded.receives,
        "received_bytes": forwarded.received_bytes,
        "untracked": plugin.totals().untracked,
        "opened": [one.ended for one in opened],
        "finalized": finalized,
        # NCCL closes the library now; what it counted stays.
        "ended": [one.ended for one in plugin.communicators()],
        "kept_bytes": plugin.totals().sent_bytes,
    }


if __name__ == "__main__":
    # Imports of the package must not need torch, nor attach to anything.
    os.environ.pop("CRUX_ATTACH", None)
    what, *rest = sys.argv[1:]
    print(json.dumps(conf(rest) if what == "conf" else profiler()))
