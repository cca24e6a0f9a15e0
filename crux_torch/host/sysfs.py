"""Reading sysfs: any file may be missing, empty or unreadable."""

from __future__ import annotations

import re
from pathlib import Path

SYSFS = Path("/sys")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: More than any attribute of sysfs holds: one page.
MAX_BYTES = 65536


def entries(folder: Path) -> list[Path]:
    """What is in ``folder``, by name; empty if it can't be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def text(file: Path) -> str:
    """The content, or empty: reading an attribute of a device that is down fails with EINVAL."""
    try:
        with file.open("rb") as attribute:
            return attribute.read(MAX_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def number(written: str) -> float | None:
    """The number that ``written`` is, or None."""
    try:
        return float(written)
    except ValueError:
        return None


def pci_address(device: Path) -> str | None:
    """The PCI function of a ``device`` link; None for a virtual device.

    The link may point below the function, to a device on a driver's own bus (virtio, subfunctions).
    """
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return None
    return next((part for part in reversed(parts) if _PCI_ADDRESS.fullmatch(part)), None)


def as_sysfs_writes(address: str) -> str:
    """A PCI address in sysfs's spelling: NVML and CUDA write the domain with eight digits."""
    return re.sub(r"^0{1,4}(?=[0-9a-f]{4,}:)", "", address.lower())


def numa_node(device: Path) -> int | None:
    """The NUMA node that a ``device`` is attached to, if known."""
    node = number(text(device / "numa_node"))
    return int(node) if node is not None and 0 <= node < 4096 else None
