"""What this machine must have before the lab can run, and what to do where it has not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

#: Programs of the host, which the guest sees too, and the Debian packages that hold them.
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "rdma": "iproute2",
    "tcpdump": "tcpdump",
    "ib_write_bw": "perftest",
    "ucx_perftest": "ucx-utils",
    "ibv_rc_pingpong": "ibverbs-utils",
}
#: Userland drivers of verbs; rxe's is the one that counts.
PROVIDER = "libibverbs/librxe-rdmav*.so"
#: What it takes on top: an unpacked kernel and its modules, the captures.
NEEDED_BYTES = 1 << 30


class LabUnavailableError(RuntimeError):
    """This machine can't run the lab: what is missing, and how to get it."""


def check(cache: Path) -> None:
    """Look for everything that the lab takes from this machine; ``cache`` is where it will write.

    Raises:
        LabUnavailableError: something is not there.
    """
    if os.uname().machine != "x86_64":
        raise LabUnavailableError(f"the lab's kernel is for x86_64, not {os.uname().machine}")
    missing = {package for name, package in PROGRAMS.items() if not _program(name)}
    if not any(folder.glob(PROVIDER) for folder in Path("/usr/lib").glob("*-linux-gnu")):
        missing.add("ibverbs-providers")
    if missing:
        raise LabUnavailableError(f"not installed: {' '.join(sorted(missing))}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
    except OSError as error:
        raise LabUnavailableError(f"{cache}: {error.strerror}") from None
    if free < NEEDED_BYTES:
        raise LabUnavailableError(f"{cache}: {free >> 20} MiB free of {NEEDED_BYTES >> 20} needed")


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
