"""The network interfaces and RDMA devices of this host, by sysfs, rtnetlink and pyverbs.

Any file of sysfs may be missing, empty or unreadable: the fact is then None or empty, never an
error. Limits of queue pairs come through pyverbs, if it is installed (its release has to fit the
host's libibverbs) and the device can be opened.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import logging
import re
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: More than any attribute of sysfs holds: one page.
MAX_BYTES = 65536
GIGABIT_Bps = 1e9 / 8
MEGABIT_Bps = 1e6 / 8
KILOBIT_Bps = 1e3 / 8
#: GID tables have some hundreds of entries, nearly all of them empty.
MAX_GIDS = 4096
MAX_PORTS = 255
_NUMBER = re.compile(r"[0-9]{1,5}")
#: ARPHRD_LOOPBACK of <linux/if_arp.h>.
LOOPBACK_TYPE = "772"
#: <linux/rtnetlink.h>, <linux/netlink.h>, <linux/if_addr.h>
RTM_NEWADDR, RTM_GETADDR, NLMSG_DONE, NLMSG_ERROR = 20, 22, 3, 2
NLM_F_REQUEST_DUMP = 0x301
IFA_ADDRESS, IFA_LOCAL = 1, 2
_NLMSGHDR = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_IFADDRMSG = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface
_RTATTR = struct.Struct("=HH")  # length, type
#: The kernel answers at once.
NETLINK_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


def entries(folder: Path) -> list[Path]:
    """Returns the entries of ``folder``, by name; none if it can't be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def text(file: Path) -> str:
    """Returns the content, empty on failure: devices that are down refuse with EINVAL."""
    try:
        with file.open("rb") as attribute:
            return attribute.read(MAX_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def number(written: str) -> float | None:
    """Returns the number in ``written``, or None."""
    try:
        return float(written)
    except ValueError:
        return None


def target_parts(link: Path) -> tuple[str, ...]:
    """Returns the parts of the path that ``link`` leads to; empty if it leads nowhere."""
    try:
        return link.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return ()


def pci_address(device: Path) -> str | None:
    """Returns the PCI function of a ``device`` link; None for a virtual device.

    The link may point below the function, to a device on a driver's own bus (virtio, subfunctions).
    """
    parts = reversed(target_parts(device))
    return next((part for part in parts if _PCI_ADDRESS.fullmatch(part)), None)


def as_sysfs_writes(address: str) -> str:
    """Returns a PCI address as sysfs writes it: NVML and CUDA use eight digits for the domain."""
    return re.sub(r"^0{1,4}(?=[0-9a-f]{4,}:)", "", address.lower())


def numa_node(device: Path) -> int | None:
    """Returns the NUMA node that a ``device`` is attached to, if known."""
    node = number(text(device / "numa_node"))
    return int(node) if node is not None and 0 <= node < 4096 else None


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of a port.

    Attributes:
        index: its place in the port's table (``-x`` of perftest, NCCL_IB_GID_INDEX).
        address: IPv6 as text; with RoCE the interface's address, IPv4 as ``::ffff:a.b.c.d``.
        kind: ``RoCE v2``, ``IB/RoCE v1``, or empty if the kernel doesn't say.
        interface: the network interface that it came from, if known.
    """

    index: int
    address: str
    kind: str = ""
    interface: str | None = None

    @property
    def ip(self) -> str:
        """The address in a host's spelling: IPv4 if it is one."""
        parsed = ipaddress.IPv6Address(self.address)
        return str(parsed.ipv4_mapped or parsed)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of a device.

    Attributes:
        link_layer: ``Ethernet`` (RoCE), ``InfiniBand``, or empty if unknown.
        rate_Bps: bytes per second each way; None if unknown.
        gids: its addresses, by index, without the empty entries of the table.
    """

    number: int
    link_layer: str = ""
    active: bool = False
    rate_Bps: float | None = None
    interface: str | None = None
    gids: tuple[Gid, ...] = ()

    @property
    def routable(self) -> tuple[Gid, ...]:
        """The addresses of RoCE v2, which uses UDP, so a source port selects a path."""
        return tuple(gid for gid in self.gids if gid.kind == "RoCE v2")


@dataclass(frozen=True, slots=True)
class Limits:
    """Most queue pairs of a device, and the lowest and highest rate limit of an RC one."""

    queue_pairs: int
    rate_limit_Bps: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One RDMA device.

    Attributes:
        name: as verbs know it, such as ``mlx5_0``.
        driver: of the kernel, such as ``mlx5_core``; empty for a virtual device.
        pci_address: None for a virtual device.
    """

    name: str
    driver: str = ""
    pci_address: str | None = None
    numa_node: int | None = None
    ports: tuple[RdmaPort, ...] = ()
    limits: Limits | None = None

    @property
    def is_mlx5(self) -> bool:
        """True if the calls of ``mlx5dv`` can work on it."""
        return self.driver.startswith("mlx5")


def rdma_devices(sysfs: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """Returns the devices of this host, with their limits if pyverbs works."""
    devices = read_devices(sysfs)
    limits = verbs_limits() if devices else {}
    return tuple(replace(device, limits=limits.get(device.name)) for device in devices)


def read_devices(sysfs: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """Returns the devices in ``sysfs``, by name."""
    return tuple(_device(entry) for entry in entries(sysfs / "class" / "infiniband"))


def verbs_limits(load: Callable[[str], Any] = importlib.import_module) -> dict[str, Limits]:
    """Returns the limits of each device that this process may open; empty without pyverbs."""
    try:
        device: Any = load("pyverbs.device")
        try:
            enums: Any = load("pyverbs.enums")
        except ImportError:
            # From rdma-core 48 on.
            enums = load("pyverbs.libibverbs_enums")
        names = [listed.name.decode() for listed in device.get_device_list()]
    # pyverbs raises its own errors, and a mismatch with the host's libibverbs shows as any.
    except Exception as error:
        log.debug("no pyverbs: %s", error)
        return {}
    found = {}
    for name in names:
        try:
            with device.Context(name=name) as context:
                found[name] = _limits(context, enums)
        except Exception as error:
            log.debug("%s can't be opened: %s", name, error)
    return found


def _limits(context: Any, enums: Any) -> Limits:
    pacing = context.query_device_ex().packet_pacing_caps
    fastest_kbps = int(pacing.qp_rate_limit_max)
    rate = None
    if fastest_kbps and int(pacing.supported_qpts) >> int(enums.IBV_QPT_RC) & 1:
        rate = (int(pacing.qp_rate_limit_min) * KILOBIT_Bps, fastest_kbps * KILOBIT_Bps)
    return Limits(int(context.query_device().max_qp), rate)


def _device(entry: Path) -> RdmaDevice:
    place = entry / "device"
    return RdmaDevice(
        name=entry.name,
        driver="".join(target_parts(place / "driver")[-1:]),
        pci_address=pci_address(place),
        numa_node=numa_node(place),
        ports=tuple(_ports(entry)),
    )


def _ports(entry: Path) -> Iterator[RdmaPort]:
    """The ports of a device; without a GID table a port takes the device's interface in its turn.

    A device that is no PCI function, such as Soft-RoCE, names its one interface as its ``parent``.
    """
    interfaces = [found.name for found in entries(entry / "device" / "net")]
    interfaces = interfaces or text(entry / "parent").split()
    numbered = (port for port in _numbered(entry / "ports") if 1 <= port[0] <= MAX_PORTS)
    for i, (port_number, folder) in enumerate(numbered):
        gids = tuple(_gids(folder))
        named = sorted({gid.interface for gid in gids if gid.interface})
        rate_Gbps = number(text(folder / "rate").split(" ", 1)[0])
        yield RdmaPort(
            number=port_number,
            link_layer=text(folder / "link_layer").strip(),
            active=text(folder / "state").split(":")[0].strip() == "4",
            rate_Bps=rate_Gbps * GIGABIT_Bps if rate_Gbps and 0 < rate_Gbps < 1e9 else None,
            interface=next(iter([*named, *interfaces[i : i + 1]]), None),
            gids=gids,
        )


def _gids(port: Path) -> Iterator[Gid]:
    for index, file in _numbered(port / "gids")[:MAX_GIDS]:
        try:
            address = ipaddress.IPv6Address(text(file).strip())
        except ValueError:
            continue
        # An unused entry is zero, or a link-local prefix without an interface identifier.
        if not int(address) & (1 << 64) - 1:
            continue
        attributes = port / "gid_attrs"
        yield Gid(
            index=index,
            # One spelling for all releases of Python, which differ for mapped addresses.
            address=f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address),
            kind=text(attributes / "types" / str(index)).strip(),
            interface=text(attributes / "ndevs" / str(index)).strip() or None,
        )


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The numbered entries of ``folder``, in that order."""
    found = [(file.name, file) for file in entries(folder)]
    return sorted((int(name), file) for name, file in found if _NUMBER.fullmatch(name))


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
    """Returns the interfaces and RDMA ports in ``sysfs``, loopback left out, by name."""
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


def own_addresses() -> tuple[str, ...]:
    """Returns the addresses of all interfaces in this network namespace; none if it fails."""
    return tuple(dict.fromkeys(address for _, address in _interface_addresses()))


def addresses_by_interface() -> dict[str, tuple[str, ...]]:
    """Returns the addresses of each interface in this network namespace; none if it fails."""
    found: dict[str, tuple[str, ...]] = {}
    for index, address in _interface_addresses():
        with contextlib.suppress(OSError):
            name = socket.if_indextoname(index)
            found[name] = (*found.get(name, ()), address)
    return found


def interface_of(address: str) -> str | None:
    """Returns the interface of this host that has ``address``; None if none does."""
    index = next((i for i, found in _interface_addresses() if found == address), None)
    try:
        return None if index is None else socket.if_indextoname(index)
    except OSError:
        return None


def _interface_addresses() -> list[tuple[int, str]]:
    """The index of the interface and the address of each, by rtnetlink; none if it fails."""
    found: list[tuple[int, str]] = []
    size = _NLMSGHDR.size + _IFADDRMSG.size
    request = _NLMSGHDR.pack(size, RTM_GETADDR, NLM_F_REQUEST_DUMP, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
            kernel.settimeout(NETLINK_TIMEOUT_S)
            kernel.send(request + _IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
            while True:
                raw = kernel.recv(1 << 16)
                while raw:
                    length, kind, *_ = _NLMSGHDR.unpack_from(raw)
                    if kind in (NLMSG_DONE, NLMSG_ERROR) or length < _NLMSGHDR.size:
                        return found
                    if kind == RTM_NEWADDR:
                        found += _parse_address(raw[_NLMSGHDR.size : length])
                    raw = raw[_aligned(length) :]
    except (OSError, struct.error, ValueError):
        return []


def _parse_address(raw: bytes) -> list[tuple[int, str]]:
    family, _, _, _, index = _IFADDRMSG.unpack_from(raw)
    raw = raw[_IFADDRMSG.size :]
    attributes: dict[int, bytes] = {}
    while len(raw) >= _RTATTR.size:
        length, kind = _RTATTR.unpack_from(raw)
        attributes[kind] = raw[_RTATTR.size : length]
        raw = raw[max(_aligned(length), _RTATTR.size) :]
    # Of a point-to-point link, IFA_ADDRESS is the other end's.
    own = attributes.get(IFA_LOCAL, attributes.get(IFA_ADDRESS))
    return [] if own is None else [(index, socket.inet_ntop(family, own))]


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def moved_bytes(interface: str) -> tuple[int, int] | None:
    """Returns the bytes that ``interface`` has sent and received; None if it does not tell."""
    statistics = SYSFS / "class" / "net" / interface / "statistics"
    sent, received = number(text(statistics / "tx_bytes")), number(text(statistics / "rx_bytes"))
    return None if sent is None or received is None else (int(sent), int(received))
