"""The RDMA devices of this host: ports, addresses, limits.

sysfs lists every device, without a library. Limits and rates of queue pairs come through pyverbs,
if it is installed (its release has to fit the host's libibverbs) and the device can be opened. What
is missing or malformed is None or empty, never an error.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crux_torch.host.sysfs import SYSFS, entries, numa_node, number, pci_address, text

log = logging.getLogger(__name__)

GIGABIT_Bps = 1e9 / 8
KILOBIT_Bps = 1e3 / 8
#: GID tables have some hundreds of entries, nearly all of them empty.
MAX_GIDS = 4096
MAX_PORTS = 255
_NUMBER = re.compile(r"[0-9]{1,5}")


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
        """The address as a host writes it: IPv4 if it is one."""
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
        """The addresses of RoCE v2. It uses UDP, so a source port selects a path."""
        return tuple(gid for gid in self.gids if gid.kind == "RoCE v2")


@dataclass(frozen=True, slots=True)
class Limits:
    """How many queue pairs a device can have, and lowest and highest rate limit of an RC one."""

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
        """Whether the calls of ``mlx5dv`` can work on it."""
        return self.driver.startswith("mlx5")


def rdma_devices(sysfs: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """The devices of this host, with their limits if pyverbs works."""
    devices = read_devices(sysfs)
    limits = verbs_limits() if devices else {}
    return tuple(replace(device, limits=limits.get(device.name)) for device in devices)


def read_devices(sysfs: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """The devices in ``sysfs``, by name."""
    return tuple(_device(entry) for entry in entries(sysfs / "class" / "infiniband"))


def verbs_limits(load: Callable[[str], Any] = importlib.import_module) -> dict[str, Limits]:
    """The limits of each device that this process may open; empty without pyverbs."""
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
        driver=_link_name(place / "driver"),
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
    """What is in ``folder`` under a number, in that order."""
    found = [(file.name, file) for file in entries(folder)]
    return sorted((int(name), file) for name, file in found if _NUMBER.fullmatch(name))


def _link_name(link: Path) -> str:
    try:
        return link.resolve(strict=True).name
    except (OSError, RuntimeError):
        return ""
