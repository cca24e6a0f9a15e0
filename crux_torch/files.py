"""Reads and writes files that a user names: bounded, and never something that blocks."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import stat
import tempfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

MIB = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"


def read_file(path: str | os.PathLike[str], limit_bytes: int, *, unpack: bool = False) -> bytes:
    """Returns the content of a regular file.

    A FIFO, a socket or a device is refused without reading it, so no call waits for a writer.

    Args:
        path: the file.
        limit_bytes: the most bytes to return, also after unpacking.
        unpack: True to unpack a file that begins like one of gzip's.

    Raises:
        OSError: the file can't be read, is no regular file, is too large, or is no gzip file
            although it begins like one; ``strerror`` says which.
    """
    name = os.fspath(path)
    with open_regular(name) as file:
        if os.fstat(file.fileno()).st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"it holds more than {size_text(limit_bytes)}", name)
        # It may grow while it is read.
        held = file.read(limit_bytes)
    if unpack and held.startswith(GZIP_MAGIC):
        held = _unpacked(held, limit_bytes, name)
    return held


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Returns the regular file ``path``, opened for reading.

    Raises:
        OSError: it can't be opened, or is a FIFO, a socket, a device or a folder.
    """
    name = os.fspath(path)
    # Without O_NONBLOCK, opening a FIFO waits for its writer.
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise OSError(errno.EINVAL, f"expected a regular file, not {kind}", name)
    return open(descriptor, "rb")


def _unpacked(held: bytes, limit_bytes: int, name: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(held)) as packed:
            content = packed.read(limit_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise OSError(errno.EINVAL, f"expected what gzip packed: {error}", name) from None
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it unpacks to more than {size_text(limit_bytes)}", name)
    return content


def parse_json(held: bytes) -> Any:
    """Returns the value that the JSON text ``held`` stands for.

    Raises:
        ValueError: the text is no JSON (NaN and Infinity are none), or is nested too deeply.
    """
    try:
        return msgspec.json.decode(held)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def write_file(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Writes a file whole or not at all: a full disk leaves the old content.

    Args:
        path: the file; what a symbolic link points to is replaced, not the link.
        content: text is written as UTF-8.

    Raises:
        OSError: it can't be written.
    """
    target = Path(os.path.realpath(path))
    raw = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        # A terminal, a pipe or /dev/null has no old content to keep.
        target.write_bytes(raw)
        return
    descriptor, partial = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(raw)
            mode = target.stat().st_mode if target.exists() else 0o666 & ~_umask()
            os.fchmod(descriptor, stat.S_IMODE(mode))
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


def size_text(size_bytes: int) -> str:
    """Returns a size in MiB, or in bytes where it is smaller."""
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes} bytes"
