"""What the kernel lets this process do with its sockets: classes, source ports, rates, errors."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path

from crux_torch.doctor.check import Check
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
    """Whether this process may mark its packets with every DSCP of the map."""
    families = (
        ("IPv4", socket.AF_INET, socket.IPPROTO_IP, socket.IP_TOS),
        ("IPv6", socket.AF_INET6, socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    )
    for name, family, protocol, option in families:
        part = f"DSCP on {name}"
        cost = f"priorities have no effect on {name} connections"
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                for dscp in settings.dscp_map:
                    probe.setsockopt(protocol, option, dscp << 2)
                    if probe.getsockopt(protocol, option) >> 2 != dscp:
                        raise OSError(f"DSCP {dscp} does not stay set")
        except OSError as error:
            remedy = f"allow {name} and setsockopt in this container"
            yield Check(part, "missing", str(error), cost, remedy)
        else:
            marks = ", ".join(map(str, settings.dscp_map))
            yield Check(part, "ok", f"can be set to {marks}")


def source_ports(settings: Settings, sysctl: Path = IPV4_SYSCTL) -> Iterator[Check]:
    """Whether the range of source ports can be bound, and who else takes ports from it."""
    part, ports = "source ports", settings.ports
    cost = "TCP connections keep the path that their source port happens to hash to"
    if not settings.paths:
        found = "switched off: CRUX_PATHS=0"
        yield Check(part, "missing", found, "the plan's paths are not taken", "unset CRUX_PATHS")
        return
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
        remedy = "choose a range that is free: CRUX_PORTS"
        yield Check(part, "missing", f"{ports}: none can be bound: {error}", cost, remedy)
        return
    shared = _overlap(ports, sysctl / "ip_local_port_range")
    if shared:
        yield Check(
            part,
            "missing",
            f"{ports} can be bound, but the kernel gives out {shared} itself",
            "fewer ports to choose from, so a wanted path is found later or not at all",
            f"choose another range, or sysctl net.ipv4.ip_local_reserved_ports={ports}",
        )
    else:
        yield Check(part, "ok", f"{ports} can be bound")


def _overlap(ports: PortRange, file: Path) -> PortRange | None:
    """What the kernel's ephemeral range has in common with ``ports``, less what is reserved."""
    try:
        first, last = map(int, file.read_text().split())
        reserved = file.with_name("ip_local_reserved_ports").read_text()
    except (OSError, ValueError):
        return None
    if str(ports) in reserved.strip().split(","):
        return None
    shared = PortRange(max(first, ports.first), min(last, ports.last))
    return shared if shared.first <= shared.last else None


def pacing() -> Iterator[Check]:
    """Whether a connection can be held to a rate."""
    part = "SO_MAX_PACING_RATE"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, RATE_Bps)
            if probe.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) != RATE_Bps:
                raise OSError("a rate does not stay set")
    except OSError as error:
        cost = "rates of connections can't be limited"
        remedy = "a Linux kernel of its own (3.13 or newer), not an emulated one"
        yield Check(part, "missing", str(error), cost, remedy)
    else:
        yield Check(part, "ok", "rates of live connections can be limited")


def probing() -> Iterator[Check]:
    """Whether an ICMP error comes back on a socket's error queue: loopback's own, here."""
    part = "error queue"
    cost = "paths can't be probed: they are known only by CRUX_TOPOLOGY and a named hash"
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
        yield Check(part, "missing", str(error), cost, remedy)
    else:
        yield Check(part, "ok", "routers' answers reach ordinary sockets (IP_RECVERR)")


def _closed_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port
