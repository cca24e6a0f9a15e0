"""A libnccl in this process: its symbols, exported or not, and detours around its functions."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: A file with another libnccl than the installed one.
LIBRARY_ENV = "CRUX_LAB_LIBNCCL"
_CACHE = Path(__file__).resolve().parents[2] / "build" / "nccl"
_WHEEL = "nvidia-nccl-cu"
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_SYMTAB = 2
_OBJECT, _FUNCTION = 1, 2
_READ_WRITE_EXECUTE = 7
#: movabs rax, ADDRESS; jmp rax
_JUMP = struct.Struct("<2sQ2s")


class NcclUnavailableError(RuntimeError):
    """There is no libnccl that the lab can drive: why."""


class NcclError(RuntimeError):
    """NCCL refused a call: which, and with what."""


def installed() -> Path:
    """The libnccl that torch loads, or the one that ``CRUX_LAB_LIBNCCL`` names.

    Raises:
        NcclUnavailableError: there is none that the lab can drive.
    """
    return _drivable(Path(os.environ.get(LIBRARY_ENV) or _of_the_wheel()))


def released(version: str) -> Path:
    """The libnccl of that release: the installed one, or one that pip downloads once.

    Raises:
        NcclUnavailableError: there is none to be had.
    """
    wheels = (one for one in importlib.metadata.distributions() if one.name.startswith(_WHEEL))
    wheel = next(wheels, None)
    if wheel is None or wheel.version == version:
        return installed()
    folder = _CACHE / version
    if not folder.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
            wanted = f"{wheel.name}=={version}"
            argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
            done = subprocess.run([*argv, f"{scratch}/all", wanted], capture_output=True, text=True)
            if done.returncode:
                raise NcclUnavailableError(f"pip gives no {wanted}: {done.stderr[-200:]}")
            Path(scratch, "all").rename(folder)
    return _drivable(folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2")


def _drivable(path: Path) -> Path:
    if os.uname().machine != "x86_64":
        raise NcclUnavailableError("detours are written for x86_64")
    if not path.is_file():
        raise NcclUnavailableError(f"{path} is no file")
    if "ncclNetSocket" not in symbols(path):
        raise NcclUnavailableError(f"{path} was stripped of its symbols")
    return path


def _of_the_wheel() -> Path:
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        if (path := Path(folder, "nccl", "lib", "libnccl.so.2")).is_file():
            return path
    raise NcclUnavailableError("torch brought no libnccl")


@functools.cache
def symbols(path: Path) -> dict[str, tuple[int, int]]:
    """Of each function and object, exported or not: offset and size; empty if stripped."""
    found: dict[str, tuple[int, int]] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        start = int.from_bytes(image[40:48], "little")
        size, count = struct.unpack_from("<HH", image, 58)
        sections = [_SECTION.unpack_from(image, start + i * size) for i in range(count)]
        for _, kind, _, _, offset, length, link, *_ in sections:
            if kind != _SHT_SYMTAB:
                continue
            names = image[sections[link][4] : sections[link][4] + sections[link][5]]
            entries = _SYMBOL.iter_unpack(image[offset : offset + length])
            for name, info, _, section, value, bytes_ in entries:
                if section and info & 15 in (_OBJECT, _FUNCTION):
                    text = names[name : names.index(b"\0", name)].decode()
                    found[text] = value, bytes_
    return found


class Library:
    """The libnccl of ``path``, loaded; one in a process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exported = ctypes.CDLL(str(path))
        self.symbols = symbols(path)
        known = ctypes.cast(self.exported.ncclGetVersion, ctypes.c_void_p).value or 0
        self._base = known - self.symbols["ncclGetVersion"][0]
        self.kept: list[Any] = []  # NCCL's threads call them until the process ends

    def address(self, name: str) -> int:
        return self._base + self.symbols[name][0]

    def words(self, name: str) -> Any:
        """The object ``name`` as an array of addresses."""
        count = self.symbols[name][1] // ctypes.sizeof(ctypes.c_uint64)
        return (ctypes.c_uint64 * count).from_address(self.address(name))

    @property
    def version(self) -> str:
        number = ctypes.c_int()
        check("ncclGetVersion", self.exported.ncclGetVersion(ctypes.byref(number)))
        major, rest = divmod(number.value, 10000)
        return f"{major}.{rest // 100}.{rest % 100}"

    def detour(self, name: str, function: Callable[..., int], arguments: int) -> None:
        """From now on ``function`` answers for NCCL's own ``name``.

        It gets so many words as Python's integers, and returns one.
        """
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)
        self.kept.append(Detour(self.address(name), kind(function)))


class Detour:
    """A jump at the beginning of a function, to ``target``, which is a function of ctypes."""

    def __init__(self, address: int, target: Any) -> None:
        self._address, self._target = address, target  # callers may come until the process ends
        self._original = ctypes.string_at(address, _JUMP.size)
        page = address & -mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(page), 2 * mmap.PAGESIZE, _READ_WRITE_EXECUTE):
            raise OSError(ctypes.get_errno(), f"{address:#x} can't be written over")
        self.put()

    def put(self) -> None:
        to = ctypes.cast(self._target, ctypes.c_void_p).value or 0
        self._write(_JUMP.pack(b"\x48\xb8", to, b"\xff\xe0"))

    def lift(self) -> None:
        """The function is its own again."""
        self._write(self._original)

    def _write(self, code: bytes) -> None:
        ctypes.memmove(self._address, code, len(code))


def check(what: str, result: int) -> None:
    """
    Raises:
        NcclError: ``result`` says that ``what`` failed.
    """
    if result:
        raise NcclError(f"{what}: ncclResult {result}")
