"""Traces the way to a peer, and the path of a live connection without touching it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Literal

from crux_torch.network.probe.packets import (
    Answer,
    ErrorQueue,
    Hops,
    PortTaken,
    Probe,
    ProbeError,
    Transport,
    ask,
    family_of,
    limit_hops,
    queue_errors,
    read_error,
)

#: Port of traceroute: hardly anyone listens there, so the peer itself answers.
_CLOSED_PORT = 33434
#: Probes of one TTL that :func:`sound` sends before it knows how far the peer is.
SOUND_ATTEMPTS = 3
_ATTEMPTS_MORE = 2
#: TTLs that are asked about at once. If all of them stay silent, nobody is looked for beyond.
_STRIDE = 4

Ends = tuple[str, int]

_SO_ATTACH_FILTER = 26
#: A classic BPF program of one instruction, "return 0": drop everything.
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
_TCP_ACK = 0x10
_LIVE_TRACE_ATTEMPTS = 4
#: Hops that are counted at most, seconds for an answer to a first probe (the second has twice as
#: long), and for everything.
_MAX_TTL = 16
_ANSWER_WAIT_S = 0.2
_TIME_LIMIT_S = 5.0

_NEEDS_RAW = (
    "it needs CAP_NET_RAW to send a packet with the ports of an open socket: run as root, or in a "
    "container with NET_RAW, or give the capability to the program with "
    "`setcap cap_net_raw+ep PROGRAM`"
)
_SILENT = (
    "no router answered: they don't report expired packets, limit how many they report, or a "
    "firewall drops the answers (ICMP time exceeded)"
)


@dataclass(slots=True)
class Depth:
    """The routers on the way to a peer.

    Attributes:
        distance: the smallest TTL at which packets were seen to reach the peer; None if it does
            not answer. A peer limits its answers too, so it may be nearer.
        routers: the router that answered at each TTL before.
    """

    distance: int | None = None
    routers: dict[int, str] = field(default_factory=dict)
    sent: int = 0
    answered: int = 0

    @property
    def ttls(self) -> tuple[int, ...]:
        """TTLs that surely end at a router, not at the peer: up to the last that answered.

        Not up to the peer's distance: if its answer to a smaller TTL was lost, it is nearer.
        """
        return tuple(range(1, max(self.routers, default=0) + 1))


def sound(source: str, destination: str, max_ttl: int, answer_wait_s: float, until: float) -> Depth:
    """Counts the routers between two addresses, by datagrams with a TTL of 1, 2, ...

    Args:
        answer_wait_s: for an answer to a first probe; twice as long for a second.
        until: what time.monotonic() will be when all ends.

    Raises:
        ProbeError: nobody answered, or as :meth:`ErrorQueue.send`.
    """
    depth = Depth()
    refusal = None
    with ErrorQueue(source, destination, "udp", _CLOSED_PORT) as packets:
        for first in range(1, max_ttl + 1, _STRIDE):
            ttls = range(first, min(first + _STRIDE, max_ttl + 1))
            answers = ask(packets, 0, ttls, answer_wait_s, until, SOUND_ATTEMPTS)
            depth.routers |= _of_kind("hop", answers)
            if ends := _of_kind("destination", answers):
                # Either routers that answer once a second, as Linux does by default, or the peer's
                # own lost answers: only patience tells.
                silent = range(max(depth.routers, default=0) + 1, min(ends))
                answers |= ask(packets, 0, silent, 4 * answer_wait_s, until, _ATTEMPTS_MORE)
            refusal = next((a for a in answers.values() if a.kind == "refusal"), refusal)
            heard = {ttl: a for ttl, a in answers.items() if a.kind != "refusal"}
            depth.answered += len(heard)
            depth.distance = min(_of_kind("destination", answers), default=None)
            depth.routers |= _of_kind("hop", answers)
            if ends or not heard or time.monotonic() >= until:
                break
        depth.sent = packets.sent
    if depth.answered:
        return depth
    if refusal is not None:
        raise ProbeError(
            errno.EHOSTUNREACH,
            f"{destination} can't be reached: {refusal.address} says {refusal.detail}. Is the "
            "address right, and the peer up?",
        )
    raise ProbeError(
        errno.ETIMEDOUT,
        f"nobody on the way to {destination} answered {depth.sent} probes: the routers don't "
        "report expired packets, or a firewall drops the answers (ICMP time exceeded, and "
        "port unreachable from the peer). If only the peer is silent, give the hops (--ttl)",
    )


def _of_kind(kind: str, answers: dict[int, Answer]) -> dict[int, str]:
    return {ttl: answer.address for ttl, answer in answers.items() if answer.kind == kind}


def resolve(name: str) -> str:
    """Returns the address of a peer given by address or name: the resolver's first."""
    with contextlib.suppress(ValueError):
        return str(ip_address(name))
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        said = f"{name!r} is no address and no known name: {error}"
        raise ProbeError(errno.ENOENT, said) from None
    return str(found[0][4][0])


def source_address(destination: str) -> str:
    """Returns the address that this host's routes choose for packets to ``destination``."""
    with socket.socket(family_of(destination), socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((destination, _CLOSED_PORT))
        except OSError as error:
            why = os.strerror(error.errno or 0)
            said = f"no route to {destination} ({why}): see `ip route get {destination}`"
            raise ProbeError(error.errno, said) from None
        return str(sock.getsockname()[0])


@dataclass(frozen=True, slots=True)
class ConnectionTrace:
    """The path of one connection, in the direction from ``local`` to ``peer``.

    Attributes:
        hops: the answers; empty if the path could not be found.
        method: ``raw``: a packet with the connection's own ports from a raw socket; ``socket``: a
            datagram from an ordinary socket on the same port; ``none``: see ``reason``.
        reason: obstacle to finding the path, and its remedy; empty if it was found.
    """

    local: Ends
    peer: Ends
    protocol: Transport
    hops: Hops = ()
    method: Literal["raw", "socket", "none"] = "none"
    reason: str = ""


def trace_connection(
    local: Ends, peer: Ends, protocol: Transport = "tcp", *, ttls: Sequence[int] | None = None
) -> ConnectionTrace:
    """Finds the path of a live connection's packets.

    For TCP, one segment for each hop leaves from a raw socket with the connection's own addresses
    and ports. docs/understand/paths.md says why it harms nothing. For UDP (RoCEv2 too, whose source
    ports no socket holds) a datagram leaves from an ordinary socket with the same ports; if a
    socket does hold the port, from a raw one.

    Never raises for what the network or missing rights withhold: ``reason`` then says so.

    Args:
        ttls: hops to ask about; by default all routers on the way, counted first.

    Raises:
        ValueError: no addresses, or ports out of bounds.
    """
    here = (str(ip_address(local[0])), local[1])
    there = (str(ip_address(peer[0])), peer[1])
    if not (0 < here[1] < 65536 and 0 < there[1] < 65536):
        raise ValueError(f"ports {here[1]} and {there[1]}; expected 1 to 65535")
    until = time.monotonic() + _TIME_LIMIT_S
    trace = ConnectionTrace(here, there, protocol)
    try:
        if ttls is None:
            ttls = sound(here[0], there[0], _MAX_TTL, _ANSWER_WAIT_S, until).ttls
        if not ttls:
            return replace(trace, method="socket", reason="no router is on the way")
        method, answers = _ask_any(here, there, protocol, sorted(set(ttls)), until)
    except PermissionError:
        return replace(trace, reason=_NEEDS_RAW)
    except OSError as error:
        return replace(trace, reason=error.strerror or str(error))
    addresses = {ttl: a.address for ttl, a in answers.items() if a.kind != "refusal"}
    if not addresses:
        return replace(trace, reason=_SILENT)
    hops = tuple((ttl, addresses.get(ttl)) for ttl in sorted(set(ttls)))
    return replace(trace, hops=hops, method=method)


def _ask_any(
    local: Ends, peer: Ends, protocol: Transport, ttls: Sequence[int], until: float
) -> tuple[Literal["raw", "socket"], dict[int, Answer]]:
    """Ask by an ordinary socket if the port is free, else by a raw one."""
    if protocol == "udp":
        answers: dict[int, Answer] = {}
        try:
            with ErrorQueue(local[0], peer[0], "udp", peer[1]) as packets:
                # One after the other: two sockets can't have the same port.
                for ttl in ttls:
                    answers |= ask(
                        packets, local[1], [ttl], _ANSWER_WAIT_S, until, _LIVE_TRACE_ATTEMPTS
                    )
            return "socket", answers
        except PortTaken:
            pass
    with _RawPackets(local, peer, protocol) as raw:
        return "raw", ask(raw, local[1], ttls, _ANSWER_WAIT_S, until, _LIVE_TRACE_ATTEMPTS)


class _RawPackets:
    """Packets with the addresses and ports of a connection that exists."""

    def __init__(self, local: Ends, peer: Ends, protocol: Transport) -> None:
        self._local, self._peer, self._protocol = local, peer, protocol
        self._asked: dict[bytes, Probe] = {}
        number = socket.IPPROTO_TCP if protocol == "tcp" else socket.IPPROTO_UDP
        self._socket = socket.socket(family_of(peer[0]), socket.SOCK_RAW, number)

    def __enter__(self) -> _RawPackets:
        sock = self._socket
        try:
            sock.setblocking(False)
            # A raw socket gets a copy of every segment from the peer: drop them unseen.
            program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
            filter_ = struct.pack("@HP", 1, ctypes.addressof(program))
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
            queue_errors(sock)
            sock.bind((self._local[0], 0))
            sock.connect((self._peer[0], 0))
        except BaseException:
            sock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, probe: Probe) -> bool:
        make = _segment if self._protocol == "tcp" else _datagram
        packet = make(self._local, self._peer, probe.ttl)
        self._asked[packet[:8]] = probe
        limit_hops(self._socket, probe.ttl)
        self._clear_error()
        try:
            self._socket.send(packet)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                said = f"this host forbids packets like {self._socket!r}: see its firewall"
                raise ProbeError(error.errno, said) from None
            if error.errno not in (errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.EAGAIN):
                raise
        return True

    def receive(self, timeout_s: float) -> list[Answer]:
        poll = select.poll()
        poll.register(self._socket, select.POLLERR)
        poll.poll(timeout_s * 1000)
        self._clear_error()
        answers = []
        while (queued := read_error(self._socket)) is not None:
            probe = self._asked.get(queued.quoted[:8])
            if probe is not None and queued.kind != "refusal":
                answers.append(Answer(probe, queued.address, queued.kind))
        return answers

    def forget(self, probe: Probe) -> None:
        """A late answer counts as well."""

    def _clear_error(self) -> None:
        """The kernel reports the error that a packet provoked to the next send too."""
        self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _segment(local: Ends, peer: Ends, _ttl: int) -> bytes:
    """A TCP segment without data; its random sequence number tells it from others."""
    sequence, acknowledged = random.getrandbits(32), random.getrandbits(32)
    fields = (local[1], peer[1], sequence, acknowledged, 5 << 4, _TCP_ACK, 0)
    checksum = _wrong_checksum(local, peer, socket.IPPROTO_TCP, struct.pack("!HHIIBBH4x", *fields))
    return struct.pack("!HHIIBBHHH", *fields, checksum, 0)


def _datagram(local: Ends, peer: Ends, ttl: int) -> bytes:
    """A UDP datagram as long as its TTL, so that the quoted header tells which one it was."""
    data = bytes(ttl)
    header = struct.pack("!HHH", local[1], peer[1], 8 + len(data))
    checksum = _wrong_checksum(local, peer, socket.IPPROTO_UDP, header + bytes(2) + data)
    return header + struct.pack("!H", checksum) + data


def _wrong_checksum(local: Ends, peer: Ends, protocol: int, packet: bytes) -> int:
    """The internet checksum (RFC 1071) of ``packet`` with one bit wrong; never 0, UDP's "none"."""
    ends = ip_address(local[0]).packed + ip_address(peer[0]).packed
    data = ends + struct.pack("!II", len(packet), protocol) + packet
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF) ^ 1 or 2
