"""Which way a connection that exists takes, found without touching it."""

from __future__ import annotations

import ctypes
import errno
import random
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from crux_torch.fabric.error_queue import (
    ErrorQueue,
    Probe,
    ProbeError,
    family_of,
    limit_hops,
    queue_errors,
    read_error,
)
from crux_torch.fabric.path_map import Hops, Transport, WantedHop, passes
from crux_torch.fabric.probe_depth import sound

Ends = tuple[str, int]

_SO_ATTACH_FILTER = 26
#: A classic BPF program of one instruction, "return 0": drop everything.
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
_TCP_ACK = 0x10
_REMEMBER_S, _MOST_REMEMBERED = 60.0, 4096
_depths: dict[tuple[str, str, int], tuple[float, tuple[int, ...]]] = {}
_ATTEMPTS = 4

_NEEDS_RAW = (
    "it needs CAP_NET_RAW to send a packet with the ports of an open socket: run as root, or in a "
    "container with NET_RAW, or give the capability to the program with "
    "`setcap cap_net_raw+ep PROGRAM`"
)


@dataclass(frozen=True, slots=True)
class Trace:
    """The way of one connection, in the direction from ``local`` to ``peer``.

    Attributes:
        local: address and port at this end.
        peer: address and port at the other end.
        protocol: ``tcp`` or ``udp``.
        hops: who answered at each TTL; empty where it can't be told.
        method: ``raw``: a packet with the connection's own ports from a raw socket; ``socket``: a
            datagram from an ordinary socket on the same port; ``none``: see ``reason``.
        reason: why it can't be told, and what it would need; empty where it was.
    """

    local: Ends
    peer: Ends
    protocol: Transport
    hops: Hops = ()
    method: Literal["raw", "socket", "none"] = "none"
    reason: str = ""

    def passes(self, hops: Sequence[WantedHop]) -> bool | None:
        """Whether the connection passes ``hops``; None where that can't be told."""
        answers = dict(self.hops)
        if any(answers.get(ttl) is None for ttl, _ in hops):
            return None
        return passes(self.hops, hops)


def trace_connection(
    local: Ends,
    peer: Ends,
    protocol: Transport = "tcp",
    *,
    ttls: Sequence[int] | None = None,
    max_ttl: int = 16,
    answer_wait_s: float = 0.2,
    time_limit_s: float = 5.0,
) -> Trace:
    """Which way the packets of a live connection take.

    For TCP one segment for each hop leaves from a raw socket with the connection's own addresses
    and ports, and a TTL that ends before the peer. It harms nothing: it carries no data, only an
    ACK with random numbers; its checksum is wrong, which no router looks at; so even if it did
    arrive, the peer would drop it before it looked the connection up (and with a right checksum
    answer with a challenge ACK at most, RFC 5961). This host's own TCP ignores the ICMP error for a
    sequence number that is not on its way.

    For UDP, RoCEv2 too, whose source ports no socket holds, a datagram leaves from an ordinary
    socket with the same ports; where a socket does hold the port, from a raw one as above.

    Never raises for what the network or missing rights withhold: the result then says so.

    Args:
        local: address and port at this end.
        peer: address and port at the other end.
        protocol: ``tcp`` or ``udp``.
        ttls: hops to ask about; by default all routers on the way, counted first.
        max_ttl: hops to count at most.
        answer_wait_s: for an answer to a first probe; twice as long for a second.
        time_limit_s: for everything.

    Raises:
        ValueError: no addresses, or ports out of bounds.
    """
    here = (str(ip_address(local[0])), local[1])
    there = (str(ip_address(peer[0])), peer[1])
    if not (0 < here[1] < 65536 and 0 < there[1] < 65536):
        raise ValueError(f"ports {here[1]} and {there[1]}; expected 1 to 65535")
    until = time.monotonic() + time_limit_s
    try:
        asked = (
            tuple(sorted(set(ttls)))
            if ttls is not None
            else _routers_between(here[0], there[0], max_ttl, answer_wait_s, until)
        )
        if not asked:
            return Trace(here, there, protocol, (), "socket", "no router is on the way")
        if protocol == "udp":
            hops = _ask_by_socket(here, there, asked, answer_wait_s, until)
            if hops is not None:
                return _result(here, there, protocol, hops, "socket")
        hops = _ask_raw(here, there, protocol, asked, answer_wait_s, until)
    except PermissionError:
        return Trace(here, there, protocol, reason=_NEEDS_RAW)
    except OSError as error:
        return Trace(here, there, protocol, reason=error.strerror or str(error))
    return _result(here, there, protocol, hops, "raw")


def _routers_between(
    local: str, peer: str, max_ttl: int, answer_wait_s: float, until: float
) -> tuple[int, ...]:
    """As :attr:`Depth.ttls`; remembered for a minute, because a peer limits its answers."""
    now = time.monotonic()
    known = _depths.get((local, peer, max_ttl))
    if known is None or now - known[0] > _REMEMBER_S:
        known = (now, sound(local, peer, max_ttl, answer_wait_s, until).ttls)
        if len(_depths) >= _MOST_REMEMBERED:
            _depths.clear()
        _depths[local, peer, max_ttl] = known
    return known[1]


def _result(
    local: Ends, peer: Ends, protocol: Transport, hops: Hops, method: Literal["raw", "socket"]
) -> Trace:
    if any(address for _, address in hops):
        return Trace(local, peer, protocol, hops, method)
    return Trace(
        local,
        peer,
        protocol,
        reason="no router answered: they don't report expired packets, limit how many, or a "
        "firewall drops the answers (ICMP time exceeded)",
    )


def _ask_by_socket(
    local: Ends, peer: Ends, ttls: Sequence[int], answer_wait_s: float, until: float
) -> Hops | None:
    """None where the source port is taken by a socket of this host."""
    hops: list[tuple[int, str | None]] = []
    with ErrorQueue(local[0], peer[0], "udp", peer[1]) as packets:
        for ttl in ttls:
            probe, address = Probe(local[1], ttl), None
            for attempt in range(_ATTEMPTS):
                left = until - time.monotonic()
                if left <= 0 or address is not None:
                    break
                if not packets.send(probe):
                    return None
                for answer in packets.receive(min(left, answer_wait_s * 2**attempt)):
                    address = answer.address if answer.kind != "refusal" else None
                packets.forget(probe)
            hops.append((ttl, address))
    return tuple(hops)


def _ask_raw(
    local: Ends,
    peer: Ends,
    protocol: Transport,
    ttls: Sequence[int],
    answer_wait_s: float,
    until: float,
) -> Hops:
    number = socket.IPPROTO_TCP if protocol == "tcp" else socket.IPPROTO_UDP
    answers: dict[int, str] = {}
    with socket.socket(family_of(peer[0]), socket.SOCK_RAW, number) as sock:
        sock.setblocking(False)
        # A raw socket gets a copy of every segment from the peer: drop them unseen.
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        filter_ = struct.pack("@HP", 1, ctypes.addressof(program))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
        queue_errors(sock)
        sock.bind((local[0], 0))
        sock.connect((peer[0], 0))
        for attempt in range(_ATTEMPTS):
            asked: dict[bytes, int] = {}
            for ttl in ttls:
                if ttl in answers:
                    continue
                packet = (_segment if protocol == "tcp" else _datagram)(local, peer, ttl)
                asked[packet[:8]] = ttl
                limit_hops(sock, ttl)
                _send_past_errors(sock, packet)
            deadline = min(until, time.monotonic() + answer_wait_s * 2**attempt)
            while len(answers) < len(ttls) and (left := deadline - time.monotonic()) > 0:
                _wait_for_error(sock, left)
                while (queued := read_error(sock)) is not None:
                    ttl_asked = asked.get(queued.quoted[:8])
                    if ttl_asked is not None and queued.kind != "refusal":
                        answers[ttl_asked] = queued.address
            if len(answers) == len(ttls) or time.monotonic() >= until:
                break
    return tuple((ttl, answers.get(ttl)) for ttl in ttls)


def _wait_for_error(sock: socket.socket, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLERR)
    poll.poll(timeout_s * 1000)
    sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _send_past_errors(sock: socket.socket, packet: bytes) -> None:
    """The error that an earlier packet provoked is reported to the next send, once."""
    sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    try:
        sock.send(packet)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise ProbeError(
                error.errno, f"this host forbids packets like {sock!r}: see its firewall"
            ) from None
        if error.errno not in (errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.EAGAIN):
            raise


def _segment(local: Ends, peer: Ends, ttl: int) -> bytes:
    """A TCP segment of no data and no use; its sequence number tells it from others."""
    sequence, acknowledged = random.getrandbits(32), random.getrandbits(32)
    fields = (local[1], peer[1], sequence, acknowledged, 5 << 4, _TCP_ACK, 0)
    checksum = _wrong_checksum(local, peer, socket.IPPROTO_TCP, struct.pack("!HHIIBBH4x", *fields))
    return struct.pack("!HHIIBBHHH", *fields, checksum, 0)


def _datagram(local: Ends, peer: Ends, ttl: int) -> bytes:
    """A UDP datagram of which the header alone tells by its length which TTL it had."""
    data = bytes(ttl)
    header = struct.pack("!HHH", local[1], peer[1], 8 + len(data))
    checksum = _wrong_checksum(local, peer, socket.IPPROTO_UDP, header + bytes(2) + data)
    return header + struct.pack("!H", checksum) + data


def _wrong_checksum(local: Ends, peer: Ends, protocol: int, packet: bytes) -> int:
    """The internet checksum (RFC 1071) of ``packet`` but for one bit; never 0, "none" in UDP."""
    ends = ip_address(local[0]).packed + ip_address(peer[0]).packed
    data = ends + struct.pack("!II", len(packet), protocol) + packet
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    right = ~total & 0xFFFF
    return right ^ 1 or 2
