"""The libnccl that torch brought, used without a GPU.

``python nccl_wheel.py NAME…`` prints, in a process of its own, what NCCL reads from its files.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path


def library() -> Path | None:
    """The libnccl that torch loads, or None."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder, "nccl", "lib", "libnccl.so.2")
        if path.is_file():
            return path
    return None


def conf(names: list[str]) -> dict[str, str | None]:
    """The variables as NCCL has set them, once it has read its files."""
    path = library()
    assert path is not None
    nccl = ctypes.CDLL(str(path))
    identity = (ctypes.c_char * 128)()
    assert nccl.ncclGetUniqueId(identity) == 0
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = {name: getenv(name.encode()) for name in names}
    return {name: None if value is None else value.decode() for name, value in found.items()}


if __name__ == "__main__":
    print(json.dumps(conf(sys.argv[1:])))
