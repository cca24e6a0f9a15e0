"""Access control services of PCIe ports: whether they send peer traffic up to the root complex."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from crux_torch.host.pcie import PcieTree
from crux_torch.host.sysfs import SYSFS

#: PCI Express Base 6.0, §7.7.11: the capability's number, its control register, and the bits there
#: that redirect peer-to-peer requests and completions.
CAPABILITY = 0x000D
CONTROL = 6
REDIRECTS = 0x04 | 0x08
FIRST_EXTENDED = 0x100
CONFIG_BYTES = 4096


def redirecting_ports(
    tree: PcieTree, ends: Iterable[str], sysfs: Path = SYSFS
) -> tuple[str, ...] | None:
    """The bridges above the PCI addresses ``ends`` that keep peer traffic from turning there.

    Their addresses, ascending; None if the configuration of any can't be read, which needs
    CAP_SYS_ADMIN.
    """
    bridges = {b for end in ends if end in tree.devices for b in tree.devices[end].bridges}
    found = {bridge: _redirects(sysfs / "bus/pci/devices" / bridge) for bridge in bridges}
    if None in found.values():
        return None
    return tuple(sorted(bridge for bridge, redirects in found.items() if redirects))


def _redirects(device: Path) -> bool | None:
    try:
        with (device / "config").open("rb") as file:
            config = file.read(CONFIG_BYTES)
    except OSError:
        return None
    if len(config) < CONFIG_BYTES:
        # Without the privilege the kernel shows the first 64 bytes; conventional PCI has 256.
        return None
    at, seen = FIRST_EXTENDED, set()
    while at >= FIRST_EXTENDED and at not in seen and at + 4 <= CONFIG_BYTES:
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == CAPABILITY:
            control = config[at + CONTROL : at + CONTROL + 2]
            return bool(int.from_bytes(control, "little") & REDIRECTS)
        at = header >> 20 & 0xFFC
    return False
