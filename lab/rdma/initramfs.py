"""The guest's first file system: a static busybox, kernel modules in loading order, and ``init``.

Written here because it takes neither ``cpio`` nor ``depmod``: a package of a kernel holds no
``modules.dep``, so the order comes from what every module says of itself.
"""

from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from lab.rdma.kernel import Kernel
from lab.rdma.requirement import LabUnavailableError

_FOLDERS = ("bin", "dev", "proc", "sys", "modules", "host", "overlay", "root")
_CONSOLE = (5, 1)


def build(kernel: Kernel, modules: Iterable[str], busybox: bytes, init: bytes) -> bytes:
    """The archive, with ``modules`` and everything that they depend on.

    Raises:
        LabUnavailableError: ``kernel`` has no such module.
    """
    loaded = _in_loading_order(kernel, modules)
    entries = [(name, stat.S_IFDIR | 0o755, b"", (0, 0)) for name in _FOLDERS]
    entries += [
        ("dev/console", stat.S_IFCHR | 0o600, b"", _CONSOLE),
        ("bin/busybox", stat.S_IFREG | 0o755, busybox, (0, 0)),
        ("bin/sh", stat.S_IFLNK | 0o777, b"busybox", (0, 0)),
        ("init", stat.S_IFREG | 0o755, init, (0, 0)),
    ]
    entries += [
        (f"modules/{name}.ko", stat.S_IFREG | 0o644, code, (0, 0)) for name, code in loaded.items()
    ]
    order = "".join(f"{name}\n" for name in loaded).encode()
    entries.append(("modules/order", stat.S_IFREG | 0o644, order, (0, 0)))
    entries.append(("TRAILER!!!", 0, b"", (0, 0)))
    return b"".join(_entry(number, *entry) for number, entry in enumerate(entries, start=1))


def _entry(inode: int, name: str, mode: int, data: bytes, device: tuple[int, int]) -> bytes:
    # The "newc" format of cpio: a header of hexadecimal fields, each part padded to four bytes.
    path = name.encode() + b"\0"
    fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def _in_loading_order(kernel: Kernel, modules: Iterable[str]) -> dict[str, bytes]:
    files = {_key(path.name): path for path in kernel.modules.rglob("*.ko*")}
    builtin = {
        _key(Path(line).name) for line in (kernel.modules / "modules.builtin").read_text().split()
    }
    loaded: dict[str, bytes] = {}

    def load(name: str) -> None:
        if name in builtin or name in loaded:
            return
        if name not in files:
            raise LabUnavailableError(f"kernel {kernel.release} has no module {name}")
        code = files[name].read_bytes()
        if files[name].suffix == ".xz":
            code = lzma.decompress(code)
        depends = re.search(rb"\0depends=([^\0]*)\0", code)
        for needed in depends[1].decode().split(",") if depends and depends[1] else ():
            load(_key(needed))
        loaded[name] = code

    for module in modules:
        load(_key(module))
    return loaded


def _key(file: str) -> str:
    return file.split(".")[0].replace("-", "_")
