"""Programs that ``LD_PRELOAD`` can't reach, told by their file before they are started."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from crux_torch.apply.transport import LIBRARY
from crux_torch.errors import CruxError

_PT_INTERP = 3
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
#: Begins the build information of Go's linker (``debug/buildinfo``), also in stripped programs.
_GO = b"\xff Go buildinf:"
_MAX_SHEBANG_BYTES = 256
#: Scripts may name scripts; the kernel follows as many (``exec_binprm``).
_MAX_SCRIPTS = 5


class Unreachable(CruxError, OSError):
    """The program does not exist, or would run without the preloaded library.

    Attributes:
        is_absent: True if there is no such program.
    """

    def __init__(self, message: str, is_absent: bool = False) -> None:
        super().__init__(message)
        self.is_absent = is_absent


def find_program(name: str, env: Mapping[str, str]) -> str:
    """Returns the path of the program ``name``, which loads preloaded libraries.

    A script is judged by its interpreter. Programs that it starts later are not looked at.

    Raises:
        Unreachable: there is no such program, or it would not load them; the message says why.
    """
    found = shutil.which(name, path=env.get("PATH"))
    if found is None:
        raise Unreachable(f"{name}: not found, or not executable", is_absent=True)
    file = Path(found)
    for _ in range(_MAX_SCRIPTS):
        try:
            obstacle, interpreter = _look(file)
        except OSError as error:
            raise Unreachable(f"{file}: {error.strerror}") from None
        if obstacle:
            raise Unreachable(f"{file} can't be marked: {obstacle}")
        if interpreter is None:
            return found
        file = interpreter
    raise Unreachable(f"{name}: too many scripts name one another")


def _look(file: Path) -> tuple[str, Path | None]:
    """The reason why ``file`` would not load libraries, or empty; a script's interpreter."""
    with file.open("rb") as opened:
        start = opened.read(_MAX_SHEBANG_BYTES)
        if start[:2] == b"#!":
            words = start[2:].split(b"\n")[0].split()
            return ("", Path(os.fsdecode(words[0]))) if words else ("it names no interpreter", None)
        if start[:4] != b"\x7fELF":
            return "it is neither an ELF program nor a script", None
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as image:
            try:
                return _elf_obstacle(image) or _privilege(file), None
            except struct.error:
                return "its ELF header is damaged", None


def _elf_obstacle(image: mmap.mmap) -> str:
    with LIBRARY.open("rb") as library:
        ours = library.read(20)
    # Class, byte order, and the machine.
    if image[4:6] != ours[4:6] or image[18:20] != ours[18:20]:
        return f"it is for another machine than {LIBRARY.name}"
    loader = _loader(image)
    if loader is None:
        return "it is statically linked, so it loads no library"
    if b"ld-musl" in loader:
        return f"it runs on musl, and {LIBRARY.name} on glibc"
    if image.find(_GO) >= 0:
        return "it is a Go program, which calls the kernel without libc"
    return ""


def _loader(image: mmap.mmap) -> bytes | None:
    """The path of the dynamic loader; None without one."""
    (table,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for i in range(count):
        kind, _, offset, _, _, length, _, _ = _PROGRAM_HEADER.unpack_from(image, table + i * size)
        if kind == _PT_INTERP:
            return image[offset : offset + length]
    return None


def _privilege(file: Path) -> str:
    """Privileges that make the loader ignore ``LD_PRELOAD`` (``AT_SECURE``, ld.so(8))."""
    status = file.stat()
    changes_user = status.st_mode & stat.S_ISUID and status.st_uid != os.getuid()
    changes_group = status.st_mode & stat.S_ISGID and status.st_gid != os.getgid()
    if changes_user or changes_group:
        return "it is setuid or setgid, so the loader ignores LD_PRELOAD"
    if os.getuid() != 0 and "security.capability" in os.listxattr(file):
        return "it has file capabilities, so the loader ignores LD_PRELOAD"
    return ""
