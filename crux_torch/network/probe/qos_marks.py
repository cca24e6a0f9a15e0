"""Finds where on the way a DSCP value changes: routers quote the header as it reached them.

A packet whose TTL runs out comes back in the router's answer (ICMP time exceeded, RFC 792, RFC
4443). Linux tells an ordinary socket who answered, but not the quoted header: that takes a raw
socket, and so CAP_NET_RAW.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from crux_torch.network.probe.packets import limit_hops

_ICMP_FILTER = (255, 1)  # SOL_RAW, ICMP_FILTER of linux/icmp.h
_TIME_EXCEEDED, _TIME_EXCEEDED_6 = 11, 3
_IPV4_HEADER, _IPV6_HEADER, _UDP_HEADER = 20, 40, 8
_ATTEMPTS, _WAIT_S = 4, 0.2
_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class Quote:
    """The header of a datagram, as a router quotes it."""

    traffic_class: int
    destination: str
    ports: tuple[int, int]
    length: int


def parse_quote(packet: bytes, version: int) -> Quote | None:
    """Returns the datagram that an ICMP message quotes; None if it is something else.

    Args:
        packet: as a raw socket gives it: IPv4's with the outer header, IPv6's without.
        version: of IP.
    """
    if version == 4:
        outer = (packet[0] & 15) * 4 if packet else 0
        icmp = packet[outer:]
        if outer < _IPV4_HEADER or not icmp or icmp[0] != _TIME_EXCEEDED:
            return None
        inner = icmp[8:]
        size = (inner[0] & 15) * 4 if inner else 0
        whole = size >= _IPV4_HEADER and len(inner) >= size + _UDP_HEADER
        if not whole or inner[0] >> 4 != 4 or inner[9] != socket.IPPROTO_UDP:
            return None
        traffic_class, destination = inner[1], inner[16:20]
    else:
        inner, size = packet[8:], _IPV6_HEADER
        if len(inner) < size + _UDP_HEADER or packet[0] != _TIME_EXCEEDED_6:
            return None
        if inner[0] >> 4 != 6 or inner[6] != socket.IPPROTO_UDP:
            return None
        traffic_class = int.from_bytes(inner[:2], "big") >> 4 & 0xFF
        destination = inner[24:40]
    source_port, port, length, _ = struct.unpack_from("!4H", inner, size)
    return Quote(traffic_class, str(ip_address(destination)), (source_port, port), length)


#: By TTL: the router that answered, and the DSCP value in the header that reached it.
Quotes = Mapping[int, tuple[str, int]]


def changed_between(dscp: int, quotes: Quotes, source: str, destination: str) -> tuple[str, str]:
    """Returns the two nodes between which ``dscp`` became another value, as seen by ``quotes``.

    Nodes between them did not answer. If all routers saw ``dscp``, it changed after the last.
    """
    before = source
    for ttl in sorted(quotes):
        address, seen = quotes[ttl]
        if seen != dscp:
            return before, address
        before = address
    return before, destination


def lost_between(quotes: Quotes, others: Quotes, source: str, destination: str) -> tuple[str, str]:
    """Returns the two nodes between which all packets of a class get lost.

    Args:
        quotes: of this class.
        others: of a class that arrives, on the same way: the routers that do answer.
    """
    last = max(quotes, default=0)
    before = quotes[last][0] if quotes else source
    beyond = (others[ttl][0] for ttl in sorted(others) if ttl > last)
    return before, next(beyond, destination)


def read_quotes(
    senders: Mapping[int, socket.socket], ttls: Iterable[int], payload: bytes, until: float
) -> dict[int, dict[int, tuple[str, int]]]:
    """Asks each router on the way for the header that reached it.

    Args:
        senders: by level, a connected datagram socket with that level's class.
        ttls: hops to ask about.
        payload: first bytes of each packet; its length tells level and hop.
        until: what time.monotonic() will be when all ends.

    Returns:
        The quotes of each level.

    Raises:
        PermissionError: it takes CAP_NET_RAW.
    """
    asked = {
        _UDP_HEADER + len(payload) + 1 + n: (level, ttl)
        for n, (level, ttl) in enumerate((level, ttl) for level in senders for ttl in ttls)
    }
    found: dict[int, dict[int, tuple[str, int]]] = {level: {} for level in senders}
    if not asked:
        return found
    with _raw(next(iter(senders.values()))) as raw:
        for attempt in range(_ATTEMPTS):
            missing = [k for k, (level, ttl) in asked.items() if ttl not in found[level]]
            for length in missing:
                level, ttl = asked[length]
                _send(senders[level], ttl, payload.ljust(length - _UDP_HEADER, b"\0"))
            deadline = min(until, time.monotonic() + _WAIT_S * 2**attempt)
            while missing and (left := deadline - time.monotonic()) > 0:
                _take(raw, left, senders, asked, found)
                missing = [k for k in missing if asked[k][1] not in found[asked[k][0]]]
            if not missing or time.monotonic() >= until:
                break
    return found


def _raw(sender: socket.socket) -> socket.socket:
    """A raw socket that hears of expired packets only."""
    is_4 = sender.family == socket.AF_INET
    protocol = socket.IPPROTO_ICMP if is_4 else socket.IPPROTO_ICMPV6
    raw = socket.socket(sender.family, socket.SOCK_RAW | socket.SOCK_NONBLOCK, protocol)
    if is_4:
        raw.setsockopt(*_ICMP_FILTER, struct.pack("=I", 0xFFFFFFFF ^ 1 << _TIME_EXCEEDED))
    else:
        kept = 0xFFFFFFFF ^ 1 << _TIME_EXCEEDED_6
        raw.setsockopt(socket.IPPROTO_ICMPV6, 1, struct.pack("=8I", kept, *[0xFFFFFFFF] * 7))
    return raw


def _send(sender: socket.socket, ttl: int, data: bytes) -> None:
    limit_hops(sender, ttl)
    try:
        sender.send(data)
    except OSError:
        pass  # lost in this host's queue as it could be in any other
    finally:
        limit_hops(sender, -1)


def _take(
    raw: socket.socket,
    wait_s: float,
    senders: Mapping[int, socket.socket],
    asked: Mapping[int, tuple[int, int]],
    found: dict[int, dict[int, tuple[str, int]]],
) -> None:
    """Note an answer, if one comes within ``wait_s``."""
    if not select.select([raw], [], [], wait_s)[0]:
        return
    try:
        packet, (router, *_) = raw.recvfrom(_LONGEST)
    except OSError:
        return
    quote = parse_quote(packet, 4 if raw.family == socket.AF_INET else 6)
    if quote is None or quote.length not in asked:
        return
    level, ttl = asked[quote.length]
    here, there = senders[level].getsockname(), senders[level].getpeername()
    if quote.ports == (here[1], there[1]) and quote.destination == there[0]:
        found[level].setdefault(ttl, (router.partition("%")[0], quote.traffic_class >> 2))
