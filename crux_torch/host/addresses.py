"""The IP addresses of this machine, and what tells it from other machines."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from crux_torch.host.sysfs import text

#: <linux/rtnetlink.h>, <linux/netlink.h>, <linux/if_addr.h>
RTM_NEWADDR, RTM_GETADDR, NLMSG_DONE, NLMSG_ERROR = 20, 22, 3, 2
NLM_F_REQUEST_DUMP = 0x301
IFA_ADDRESS, IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ABOUT = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
#: Seconds for the kernel's answer, which is immediate.
TIMEOUT_S = 1.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/net")


def own_addresses() -> tuple[str, ...]:
    """The addresses of all interfaces in this network namespace; none if the kernel tells none."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as asked:
            asked.settimeout(TIMEOUT_S)
            size = _HEADER.size + _ABOUT.size
            head = _HEADER.pack(size, RTM_GETADDR, NLM_F_REQUEST_DUMP, 1, 0)
            asked.send(head + _ABOUT.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
            found: list[str] = []
            while _read(asked.recv(1 << 16), found):
                pass
            return tuple(dict.fromkeys(found))
    except (OSError, struct.error, ValueError):
        return ()


def machine_id() -> str:
    """The same for all processes of one machine until it boots anew; empty if nobody tells."""
    return text(BOOT_ID).strip()


def network_id() -> str:
    """The same for all processes of this machine's network namespace; empty if nobody tells."""
    try:
        return str(os.stat(NAMESPACE).st_ino)
    except OSError:
        return ""


def _read(raw: bytes, found: list[str]) -> bool:
    """Add the addresses in one datagram to ``found``; True if more will come."""
    while raw:
        length, kind, *_ = _HEADER.unpack_from(raw)
        if kind in (NLMSG_DONE, NLMSG_ERROR) or length < _HEADER.size:
            return False
        if kind == RTM_NEWADDR:
            found.extend(_address(raw[_HEADER.size : length]))
        raw = raw[_aligned(length) :]
    return True


def _address(raw: bytes) -> list[str]:
    family = _ABOUT.unpack_from(raw)[0]
    raw = raw[_ABOUT.size :]
    told: dict[int, bytes] = {}
    while len(raw) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(raw)
        told[kind] = raw[_ATTRIBUTE.size : length]
        raw = raw[max(_aligned(length), _ATTRIBUTE.size) :]
    # Of a point-to-point link, IFA_ADDRESS is the other end's.
    own = told.get(IFA_LOCAL, told.get(IFA_ADDRESS))
    return [] if own is None else [socket.inet_ntop(family, own)]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
