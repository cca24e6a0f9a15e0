"""Made-up sysfs trees: servers as their makers publish them, and what virtual machines show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crux_torch.host.nvml import Gpu
from crux_torch.host.pcie import PcieTree

GEN4, GEN5 = "16.0 GT/s PCIe", "32.0 GT/s PCIe"
BRIDGE, GPU, NIC, NVSWITCH, VGA = 0x060400, 0x030200, 0x020700, 0x068000, 0x030000


@dataclass(frozen=True)
class Entry:
    """One PCI function: its place below ``/sys/devices``, and what its attributes say."""

    place: str
    class_code: int
    vendor: int = 0x10DE
    speed: str = GEN4
    width: int = 16
    max_speed: str = ""
    max_width: int = 0
    numa_node: int = 0

    @property
    def address(self) -> str:
        return self.place.rpartition("/")[2]


def write(sysfs: Path, devices: Iterable[Entry]) -> Path:
    """Write the tree; returns ``sysfs``."""
    bus = sysfs / "bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    for entry in devices:
        folder = sysfs / "devices" / entry.place
        folder.mkdir(parents=True, exist_ok=True)
        attributes = {
            "class": f"{entry.class_code:#08x}",
            "vendor": f"{entry.vendor:#06x}",
            "numa_node": entry.numa_node,
            "current_link_speed": entry.speed,
            "current_link_width": entry.width,
            "max_link_speed": entry.max_speed or entry.speed,
            "max_link_width": entry.max_width or entry.width,
        }
        for name, value in attributes.items():
            (folder / name).write_text(f"{value}\n")
        (bus / entry.address).symlink_to(folder)
    return sysfs


def read(sysfs: Path, devices: Iterable[Entry]) -> PcieTree:
    """The tree that a host with these devices shows; it is written to ``sysfs`` first."""
    return PcieTree.read(write(sysfs, devices))


def gpus_at(tree: PcieTree, **changes: Any) -> tuple[Gpu, ...]:
    """An H100 for each GPU on the bus, as NVML lists it."""
    facts: dict[str, Any] = {"peak_flops": 1979e12, **changes}
    return tuple(
        Gpu(i, "NVIDIA H100 80GB HBM3", f"GPU-{i}", 80 << 30, address, **facts)
        for i, address in enumerate(tree.of_kind("gpu"))
    )


def switch(place: str, bus: int, ports: int, **attributes: object) -> tuple[list[Entry], list[str]]:
    """A PCIe switch below the port at ``place``: its functions, and the places of its slots.

    Its upstream port is on bus ``bus``, its downstream ports on the next one, and the slot of port
    n on the bus ``bus + 2 + n``.
    """
    up = f"{place}/0000:{bus:02x}:00.0"
    found, slots = [Entry(up, BRIDGE, 0x1000, **attributes)], []  # type: ignore[arg-type]
    for port in range(ports):
        down = f"{up}/0000:{bus + 1:02x}:{port:02x}.0"
        found.append(Entry(down, BRIDGE, 0x1000, **attributes))  # type: ignore[arg-type]
        slots.append(f"{down}/0000:{bus + 2 + port:02x}:00.0")
    return found, slots


def hgx_h100() -> list[Entry]:
    """Eight GPUs, each with a NIC of its own on a Gen 5 switch, four NVSwitches, a BMC."""
    found = []
    for i in range(8):
        numa, base = i // 4, 0x10 + 0x18 * i
        port = f"pci0000:{base:02x}/0000:{base:02x}:01.0"
        found.append(Entry(port, BRIDGE, 0x8086, GEN5, numa_node=numa))
        ports, slots = switch(port, base + 1, 2, speed=GEN5, numa_node=numa)
        found += ports
        found.append(Entry(slots[0], NIC, 0x15B3, GEN5, numa_node=numa))
        found.append(Entry(slots[1], GPU, speed=GEN5, numa_node=numa))
    port = "pci0000:00/0000:00:01.0"
    found.append(Entry(port, BRIDGE, 0x8086, numa_node=0))
    ports, slots = switch(port, 1, 4, numa_node=0)
    found += ports
    found += [Entry(slot, NVSWITCH, speed="5.0 GT/s PCIe", width=2, numa_node=0) for slot in slots]
    found.append(Entry("pci0000:00/0000:00:1c.0/0000:09:00.0", VGA, 0x1A03, "", 0))
    found.append(Entry("pci0000:00/0000:00:1c.0", BRIDGE, 0x8086, "2.5 GT/s PCIe", 1))
    return found


def dgx_a100() -> list[Entry]:
    """Eight GPUs and eight NICs on four switches, each of which parts into two more.

    Two GPUs and two NICs share a switch's way to the CPU, and a GPU and a NIC are two switches
    apart: PXB.
    """
    found = []
    for i in range(4):
        numa, base = i // 2, 0x10 + 0x30 * i
        port = f"pci0000:{base:02x}/0000:{base:02x}:01.0"
        found.append(Entry(port, BRIDGE, 0x1022, numa_node=numa))
        ports, slots = switch(port, base + 1, 2, numa_node=numa)
        found += ports
        for j, kind in enumerate((GPU, NIC)):
            below = slots[j].rpartition("/")[0]
            inner, ends = switch(below, base + 5 + 5 * j, 2, numa_node=numa)
            found += inner
            vendor = 0x10DE if kind == GPU else 0x15B3
            found += [Entry(end, kind, vendor, numa_node=numa) for end in ends]
    return found


def azure_vm() -> list[Entry]:
    """Two GPUs and a NIC, each a PCI domain of its own under VMBus, without rates."""
    bus = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500-000{0}-0000-3130-444531444532"
    return [
        Entry(f"{bus.format(1)}/pci0001:00/0001:00:00.0", GPU, speed="Unknown", width=0),
        Entry(f"{bus.format(2)}/pci0002:00/0002:00:00.0", GPU, speed="Unknown", width=0),
        Entry(f"{bus.format(3)}/pci0101:00/0101:00:00.0", NIC, 0x15B3, "Unknown", 0),
    ]


def flat_vm() -> list[Entry]:
    """A passed-through GPU that tells its own rate, beside a paravirtual NIC that has none."""
    return [
        Entry("pci0000:00/0000:00:03.0", 0x020000, 0x1AF4, "", 0, numa_node=-1),
        Entry("pci0000:00/0000:00:05.0", GPU, speed=GEN5, numa_node=-1),
    ]
