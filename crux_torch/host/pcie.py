"""The PCIe tree of this host by sysfs: links, switches, distances, and access control services."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from pathlib import Path
from typing import Literal

from crux_torch.host.interfaces import SYSFS, Nic, entries, numa_node, number, target_parts, text

#: Access control services (PCI Express Base 6.0, §7.7.11): the capability's number, its control
#: register, and the bits there that redirect peer-to-peer requests and completions.
CAPABILITY = 0x000D
CONTROL = 6
REDIRECTS = 0x04 | 0x08
FIRST_EXTENDED = 0x100
CONFIG_BYTES = 4096
Kind = Literal["bridge", "gpu", "nic", "nvswitch", "other"]

#: Bits of payload for each bit on the wire, by transfer rate in GT/s: 8b/10b, 128b/130b, and from
#: 64 GT/s on 256-byte flits of which 14 bytes are CRC and FEC (PCI Express Base 6.0, §4.2.3).
ENCODING = dict.fromkeys((2.5, 5.0), 8 / 10) | dict.fromkeys((8.0, 16.0, 32.0), 128 / 130)
ENCODING |= {64.0: 242 / 256}
#: Share of the rate after encoding that NCCL assumes as payload: 12 GB/s for PCIe 3.0 x16.
PAYLOAD = 0.75
#: Rate between sockets. NCCL assumes 6 to 40 GB/s, depending on the CPU; 10 for Skylake.
SOCKETS_Bps = 10e9
#: Widths that a link can have; a device that does not know reports 0, 63 or 255.
WIDTHS = (1, 2, 4, 8, 12, 16, 32)

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
NVIDIA, AMD = 0x10DE, 0x1002
#: More functions than any host has; further ones are ignored.
MAX_DEVICES = 1 << 16


class Distance(IntEnum):
    """Distance of two devices: the classes of NCCL and of ``nvidia-smi topo -m``.

    NCCL treats ``NODE`` as ``PHB``.
    """

    LOC = 0  # the same device
    PIX = 1  # one PCIe switch or bridge
    PXB = 2  # several PCIe switches, no host bridge
    PHB = 3  # one host bridge
    NODE = 4  # two host bridges of one NUMA node
    SYS = 5  # between NUMA nodes


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A link's rate, in 1e9 transfers per second and lane, and its width."""

    speed_GTps: float
    lanes: int

    @property
    def Bps(self) -> float:
        """Bytes per second of one direction after encoding, headers of packets included."""
        return self.speed_GTps * 1e9 * ENCODING[self.speed_GTps] * self.lanes / 8

    def __str__(self) -> str:
        return f"{self.speed_GTps:g} GT/s x{self.lanes}"


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A PCIe link, named by the lowest function at its lower end, which has this ``address``.

    Attributes:
        name: the same in every process; letters, digits and ``-:.``.
        capacity_Bps: bytes per second of each direction; None if sysfs does not say. It is the rate
            that the link runs at. For a GPU's own link it is the most that both ends support,
            because a GPU slows its link down while it is idle.
        current, most: the rate now, and the highest that both ends support.
    """

    name: str
    address: str
    capacity_Bps: float | None
    current: LinkRate | None = None
    most: LinkRate | None = None

    @property
    def narrow(self) -> bool:
        """True if the link was trained with fewer lanes than both of its ends have."""
        return bool(self.current and self.most and self.current.lanes < self.most.lanes)

    @property
    def slow(self) -> bool:
        """True if it runs at a lower rate than both ends support; an idle GPU's link does."""
        return bool(self.current and self.most and self.current.speed_GTps < self.most.speed_GTps)


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One PCI function.

    Attributes:
        address: ``DOMAIN:BUS:DEVICE.FUNCTION`` as sysfs writes it.
        kind: by its class code; ``gpu`` is any accelerator.
        root: the root bus above it (``pci0000:3a``).
        bridges: addresses of the bridges between the root bus and it, from the root down.
        current, most: the rate of its upward link now, and the highest that its end supports; None
            if unknown.
    """

    address: str
    kind: Kind
    root: str
    bridges: tuple[str, ...] = ()
    current: LinkRate | None = None
    most: LinkRate | None = None
    numa_node: int | None = None


class PcieTree:
    """The PCI functions of a host and the links between them.

    sysfs shows bridges, not switches. docs/understand/host.md says how links follow from them: one
    joins the first to the second on the way down, one the third to the fourth, and the last to the
    device.
    """

    def __init__(self, devices: Mapping[str, PciDevice]) -> None:
        self.devices = dict(devices)
        self._bus: dict[tuple[str, tuple[str, ...]], list[PciDevice]] = {}
        for address in sorted(self.devices):
            device = self.devices[address]
            self._bus.setdefault((device.root, device.bridges), []).append(device)

    @classmethod
    def read(cls, sysfs: Path = SYSFS) -> PcieTree:
        """Returns the tree in ``sysfs``; empty if there is no PCI bus or it can't be read."""
        found = (_device(entry) for entry in entries(sysfs / "bus/pci/devices")[:MAX_DEVICES])
        return cls({device.address: device for device in found if device is not None})

    @property
    def obstacle(self) -> str | None:
        """Reason why the paths between devices are unknown, in words; None if they are known."""
        ends = self.of_kind("gpu", "nic")
        if not self.devices:
            return "no PCI devices in sysfs"
        if not ends:
            return "no GPU and no NIC on the PCI bus"
        if not any(self.devices[end].bridges for end in ends):
            return "all GPUs and NICs sit on a root bus themselves, as a virtual machine shows them"
        return None

    def of_kind(self, *kinds: Kind) -> tuple[str, ...]:
        """Returns the addresses of the devices of these kinds, in order."""
        return tuple(a for a, device in sorted(self.devices.items()) if device.kind in kinds)

    def links_above(self, address: str) -> tuple[PcieLink, ...]:
        """Returns the links from a device to the root complex, its own first; empty if unknown."""
        device = self.devices.get(address)
        if device is None:
            return ()
        chain = (*device.bridges, address)
        ends = [self.devices.get(chain[i]) for i in range(1, len(chain), 2)]
        links = [self._link_of_bus(end) for end in ends if end is not None]
        if len(chain) % 2 and device.kind != "bridge" and device.current is not None:
            # A device on a root bus has no link, but one that is passed through to a virtual
            # machine still reports the rate of its own.
            links.append(_link(address, device.kind == "gpu", device.current, device.most))
        return tuple(reversed(links))

    def links(self) -> tuple[PcieLink, ...]:
        """Returns every link above a GPU, a NIC or an NVSwitch, once."""
        found: dict[str, PcieLink] = {}
        for end in self.of_kind("gpu", "nic", "nvswitch"):
            found |= {link.name: link for link in self.links_above(end)}
        return tuple(found[name] for name in sorted(found))

    def path(self, a: str, b: str) -> tuple[PcieLink, ...]:
        """Returns the links that traffic between two devices crosses, from ``a`` to ``b``.

        Peer traffic turns at the lowest switch above both. Between two root ports, the path crosses
        the root complex; links between sockets are not PCIe links and are not listed. Empty if a
        PCI address is unknown, if both are functions of one device, or if no link between them is
        known (see :attr:`obstacle`).
        """
        if a not in self.devices or b not in self.devices:
            return ()
        up, down = self.links_above(a), self.links_above(b)
        shared = {link.name for link in up} & {link.name for link in down}
        return (
            *(link for link in up if link.name not in shared),
            *(link for link in reversed(down) if link.name not in shared),
        )

    def distance(self, a: str, b: str) -> Distance:
        """Returns the distance of ``a`` and ``b``; raises KeyError if one is not in the tree."""
        first, second = self.devices[a], self.devices[b]
        if first.root != second.root:
            # Where firmware names no NUMA node there is one.
            same = (first.numa_node or 0) == (second.numa_node or 0)
            return Distance.NODE if same else Distance.SYS
        if a.rpartition(".")[0] == b.rpartition(".")[0]:
            return Distance.LOC
        above = zip(first.bridges, second.bridges, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], above))
        if not common:
            return Distance.PHB
        below = sum((len(device.bridges) - common) // 2 for device in (first, second))
        at_turn = 1 if common % 2 == 0 else 0
        return Distance.PIX if at_turn + below <= 1 else Distance.PXB

    def nics_of(self, gpu: str, nics: Sequence[Nic]) -> tuple[Nic, ...]:
        """Returns the NICs with the widest path to a GPU, and among them the nearest.

        As in NCCL (``ncclTopoGetLocal``). Empty if the GPU or all NICs are not in the tree.
        """
        ranked: dict[tuple[float, Distance], list[Nic]] = {}
        for nic in nics:
            if gpu in self.devices and nic.pci_address in self.devices:
                key = self._reach(gpu, nic.pci_address, nic.speed_Bps or 0.0)
                ranked.setdefault(key, []).append(nic)
        return tuple(ranked[min(ranked)]) if ranked else ()

    def _reach(self, gpu: str, nic: str, speed_Bps: float) -> tuple[float, Distance]:
        """Rank of a NIC for a GPU: the smaller the better."""
        distance = self.distance(gpu, nic)
        rates = [link.capacity_Bps for link in self.path(gpu, nic)]
        width_Bps = min([speed_Bps, *(PAYLOAD * rate for rate in rates if rate is not None)])
        if distance == Distance.SYS:
            width_Bps = min(width_Bps, SOCKETS_Bps)
        return -width_Bps, Distance.PHB if distance == Distance.NODE else distance

    def nic_of(self, gpu: str, nics: Sequence[Nic]) -> Nic | None:
        """Returns the NIC of a GPU's traffic: NCCL's choice unless a variable overrides it.

        GPUs that have the same nearest NICs share them evenly, in the order of their addresses.
        """
        nearest = self.nics_of(gpu, nics)
        if len(nearest) < 2:
            return nearest[0] if nearest else None
        peers = [g for g in self.of_kind("gpu") if self.nics_of(g, nics) == nearest]
        place = peers.index(gpu) if gpu in peers else 0
        return nearest[place % len(nearest)]

    def _link_of_bus(self, end: PciDevice) -> PcieLink:
        """The link whose lower end is ``end``, with all functions that share its bus."""
        functions = self._bus[end.root, end.bridges]
        upper = self.devices.get(end.bridges[-1])
        lower = next((d for d in functions if d.current is not None), functions[0])
        most = _least([lower.most, upper.most if upper else None])
        idles = any(device.kind == "gpu" for device in functions)
        return _link(functions[0].address, idles, lower.current, most)


def _link(
    address: str, idles_slower: bool, current: LinkRate | None, most: LinkRate | None
) -> PcieLink:
    rate = (most or current) if idles_slower else (current or most)
    return PcieLink(f"pcie-{address}", address, rate.Bps if rate else None, current, most)


def _least(rates: Iterable[LinkRate | None]) -> LinkRate | None:
    """The most that ends with these rates support together."""
    known = [(rate.speed_GTps, rate.lanes) for rate in rates if rate is not None]
    return LinkRate(*map(min, zip(*known, strict=True))) if known else None


def _device(entry: Path) -> PciDevice | None:
    parts = target_parts(entry)
    roots = [i for i, part in enumerate(parts) if _ROOT.fullmatch(part)]
    chain = [p for p in parts[roots[0] :] if _ADDRESS.fullmatch(p)] if roots else []
    if not chain or chain[-1] != parts[-1]:
        return None
    return PciDevice(
        address=chain[-1],
        kind=_kind(_hexadecimal(entry / "class"), _hexadecimal(entry / "vendor")),
        root=parts[roots[0]],
        bridges=tuple(chain[:-1]),
        current=_rate(entry, "current"),
        most=_rate(entry, "max"),
        numa_node=numa_node(entry),
    )


def _kind(class_code: int, vendor: int) -> Kind:
    """PCI Code and ID Assignment: base class and subclass; a BMC's display is no accelerator."""
    group = class_code >> 8
    if group == 0x0604:
        return "bridge"
    display = group == 0x0300 and vendor in (NVIDIA, AMD)
    if display or group in (0x0302, 0x0380) or group >> 8 == 0x12:
        return "gpu"
    if group >> 8 == 0x02:
        return "nic"
    return "nvswitch" if group == 0x0680 and vendor == NVIDIA else "other"


def _rate(entry: Path, which: str) -> LinkRate | None:
    speed = number(text(entry / f"{which}_link_speed").partition(" ")[0])
    lanes = number(text(entry / f"{which}_link_width"))
    if speed not in ENCODING or lanes not in WIDTHS:
        return None
    return LinkRate(speed, int(lanes))


def _hexadecimal(file: Path) -> int:
    try:
        return int(text(file), 16)
    except ValueError:
        return 0


def redirecting_ports(
    tree: PcieTree, ends: Iterable[str], sysfs: Path = SYSFS
) -> tuple[str, ...] | None:
    """Returns the bridges above ``ends`` that send peer traffic up to the root complex.

    PCI addresses, ascending; None if the configuration of any can't be read, which needs
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
