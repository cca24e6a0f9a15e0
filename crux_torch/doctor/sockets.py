"""What this process may do with its sockets: DSCP, source ports, rates, error queue."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path

from crux_torch.doctor.check import Check, Part
from crux_torch.settings import PortRange, Settings

#: Of asm-generic/socket.h and linux/in.h, which the socket module does not name.
SO_MAX_PACING_RATE = 47
IP_RECVERR = 11
RATE_Bps = 10_000_000
ANSWER_WAIT_S = 0.5
#: Ports of the range that are tried before it counts as taken.
PORTS_TRIED = 64
IPV4_SYSCTL = Path("/proc/sys/net/ipv4")


def classes(settings: Settings) -> Iterator[Check]:
    """Checks that this process may set every DSCP of ``CRUX_DSCP_MAP``, if there is one."""
    if not settings.dscp_map:
        return
    families = (
        ("IPv4", socket.AF_INET, socket.IPPROTO_IP, socket.IP_TOS),
        ("IPv6", socket.AF_INET6, socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    )
    for name, family, protocol, option in families:
        part = Part(f"DSCP on {name}", f"priorities have no effect on {name} connections")
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                for dscp in settings.dscp_map:
                    probe.setsockopt(protocol, option, dscp << 2)
                    if probe.getsockopt(protocol, option) >> 2 != dscp:
                        raise OSError(f"the kernel ignores DSCP {dscp}")
        except OSError as error:
            yield part.missing(str(error), f"allow {name} and setsockopt() in this container")
        else:
            yield part.ok(f"can be set to {', '.join(map(str, settings.dscp_map))}")


def source_ports(settings: Settings, sysctl: Path = IPV4_SYSCTL) -> Check:
    """Whether source ports of ``CRUX_PORTS`` can be bound, and who else uses that range."""
    name, ports = "source ports", settings.ports
    if not settings.paths:
        part = Part(name, "connections do not follow the plan's paths")
        return part.missing("switched off: CRUX_PATHS=0", "unset CRUX_PATHS")
    part = Part(name, "TCP connections take the path that ECMP gives them")
    error = ""
    for port in range(ports.first, min(ports.last + 1, ports.first + PORTS_TRIED)):
        try:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError as refusal:
            error = str(refusal)
        else:
            break
    else:
        remedy = "set CRUX_PORTS to a range that is free"
        return part.missing(f"{ports}: none can be bound: {error}", remedy)
    shared = _overlap(ports, sysctl / "ip_local_port_range")
    if not shared:
        return part.ok(f"{ports} can be bound")
    part = Part(name, "fewer ports are free, so a port for a path is found later or not at all")
    return part.missing(
        f"{ports} can be bound, but the kernel also assigns {shared} to other sockets",
        f"change CRUX_PORTS, or sysctl net.ipv4.ip_local_reserved_ports={ports}",
    )


def _overlap(ports: PortRange, file: Path) -> PortRange | None:
    """The part of ``ports`` from which the kernel assigns ephemeral ports."""
    try:
        first, last = map(int, file.read_text().split())
        reserved = file.with_name("ip_local_reserved_ports").read_text()
    except (OSError, ValueError):
        return None
    if str(ports) in reserved.strip().split(","):
        return None
    first, last = max(first, ports.first), min(last, ports.last)
    return PortRange(first, last) if first <= last else None


def pacing() -> Check:
    """Whether the rate of a connection can be limited."""
    part = Part("SO_MAX_PACING_RATE", "the rates of connections can't be limited")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, RATE_Bps)
            if probe.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) != RATE_Bps:
                raise OSError("the kernel ignores the rate")
    except OSError as error:
        return part.missing(str(error), "use a real Linux kernel, 3.13 or newer (not gVisor)")
    return part.ok("the rates of live connections can be limited")


def probing() -> Check:
    """Whether a socket's error queue reports an ICMP error, tried on loopback."""
    cost = "paths can't be probed, so connections do not follow the plan's paths"
    part = Part("error queue", cost)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
            probe.connect(("127.0.0.1", _closed_port()))
            probe.send(b"")
            poll = select.poll()
            poll.register(probe, 0)
            if not poll.poll(ANSWER_WAIT_S * 1000):
                raise OSError("no ICMP error came back over loopback")
            _, _, flags, _ = probe.recvmsg(1, 512, socket.MSG_ERRQUEUE)
            if not flags & socket.MSG_ERRQUEUE:
                raise OSError("the error queue is empty")
    except OSError as error:
        remedy = "allow setsockopt(IP_RECVERR) and ICMP in this container (seccomp, firewall)"
        return part.missing(str(error), remedy)
    return part.ok("sockets receive the answers of routers (IP_RECVERR)")


def _closed_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port
