"""The network interfaces and RDMA ports of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from crux_torch.host.rdma import read_devices
from crux_torch.host.sysfs import SYSFS, entries, numa_node, number, pci_address, text

#: ARPHRD_LOOPBACK of <linux/if_arp.h>.
LOOPBACK_TYPE = "772"
MEGABIT_Bps = 1e6 / 8
#: <linux/sockios.h>
SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface, or a port of an RDMA device that has none.

    Attributes:
        name: interface (``eth0``) or device and port (``mlx5_0/1``).
        speed_Bps: bytes per second each way; None if it is unknown or the link is down.
        pci_address, numa_node: None for an interface without a device, or if unknown.
    """

    name: str
    speed_Bps: float | None
    rdma_device: str | None = None
    pci_address: str | None = None
    numa_node: int | None = None


def read_nics(sysfs: Path = SYSFS) -> tuple[Nic, ...]:
    """The interfaces and RDMA ports in ``sysfs``, loopback left out, by name."""
    ports = [(device, port) for device in read_devices(sysfs) for port in device.ports]
    device_of = {port.interface: device.name for device, port in ports if port.interface}
    nics = []
    for entry in entries(sysfs / "class" / "net"):
        if text(entry / "type").strip() == LOOPBACK_TYPE:
            continue
        speed_Mbps = number(text(entry / "speed"))
        nics.append(
            Nic(
                name=entry.name,
                speed_Bps=speed_Mbps * MEGABIT_Bps if speed_Mbps and speed_Mbps > 0 else None,
                rdma_device=device_of.get(entry.name),
                pci_address=pci_address(entry / "device"),
                numa_node=numa_node(entry / "device"),
            )
        )
    for device, port in ((d, port) for d, port in ports if port.interface is None):
        where = device.pci_address, device.numa_node
        nics.append(Nic(f"{device.name}/{port.number}", port.rate_Bps, device.name, *where))
    return tuple(nics)


def interface_of(address: str) -> str | None:
    """The interface of this host that has ``address``; None if none does, or it is IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def moved_bytes(interface: str, sysfs: Path = SYSFS) -> tuple[int, int] | None:
    """Bytes that ``interface`` has sent and received so far; None if it does not tell."""
    statistics = sysfs / "class" / "net" / interface / "statistics"
    sent, received = number(text(statistics / "tx_bytes")), number(text(statistics / "rx_bytes"))
    return None if sent is None or received is None else (int(sent), int(received))
