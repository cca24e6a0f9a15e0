"""Packets with a small TTL from ordinary sockets, and the routers' answers to them.

docs/understand/paths.md says how; ip(7) and ipv6(7) have the options.
``csrc/transport/syn_probe.h`` does the same inside the ``connect()`` of a job, where no Python may
run.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf
from typing import Literal, Protocol

from crux_torch.errors import CruxError

Transport = Literal["tcp", "udp"]
#: The answers to one source port: (TTL, who answered there, None if nobody did), by TTL.
Hops = tuple[tuple[int, str | None], ...]
Kind = Literal["hop", "destination", "refusal"]


class ProbeError(CruxError, OSError):
    """Probing is impossible. Says why, for which destination, and what to do about it."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class PortTaken(ProbeError):
    """A socket of this host uses the source port."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A packet that leaves from ``port`` (0: any) with this TTL."""

    port: int
    ttl: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a probe.

    Attributes:
        address: its sender.
        kind: ``hop``: a router, where the TTL ran out; ``destination``: the packet arrived there;
            ``refusal``: a router or this host does not forward it.
        detail: of a refusal, in words.
    """

    probe: Probe
    address: str
    kind: Kind
    detail: str = ""


class Packets(Protocol):
    """Sends probes and hears answers."""

    def send(self, probe: Probe) -> bool:
        """Send; False if the source port is taken."""

    def receive(self, timeout_s: float) -> list[Answer]:
        """The answers that come within ``timeout_s``; returns as soon as there are any."""

    def forget(self, probe: Probe) -> None:
        """Wait no longer for an answer to ``probe``."""


def ask(
    packets: Packets,
    port: int,
    ttls: Iterable[int],
    answer_wait_s: float,
    until: float,
    attempts: int,
) -> dict[int, Answer]:
    """Ask about all TTLs at once, until each answers; nobody is asked beyond the destination.

    Args:
        port: source port; 0: any.
        answer_wait_s: for an answer to the first attempt; each later one waits twice as long.
        until: what time.monotonic() will be when all ends.
        attempts: at most, for each TTL.

    Raises:
        PortTaken: a socket of this host uses ``port``.
    """
    answers: dict[int, Answer] = {}

    def missing() -> list[int]:
        end = min((t for t, answer in answers.items() if answer.kind == "destination"), default=inf)
        return [ttl for ttl in ttls if ttl not in answers and ttl < end]

    for attempt in range(attempts):
        probes = [Probe(port, ttl) for ttl in missing()]
        for probe in probes:
            if not packets.send(probe):
                raise PortTaken(f"port {port} is taken")
        deadline = min(until, time.monotonic() + answer_wait_s * 2**attempt)
        while missing() and (left := deadline - time.monotonic()) > 0:
            answers |= {answer.probe.ttl: answer for answer in packets.receive(left)}
        for probe in probes:
            packets.forget(probe)
        if not missing() or time.monotonic() >= until:
            break
    return answers


#: By address family: the level of its options, and the options of hop limit and error queue
#: (IP_RECVERR and IPV6_RECVERR of linux/in.h and linux/in6.h).
_OPTIONS = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TTL, 11),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 25),
}
_QUEUED = {(level, queue) for level, _, queue in _OPTIONS.values()}
_ORIGIN_ICMP, _ORIGIN_ICMP6 = 2, 3
#: struct sock_extended_err: errno, origin, type, code, pad, info, data.
_EXTENDED_ERROR = struct.Struct("=IBBBBII")
_TIME_EXCEEDED = {_ORIGIN_ICMP: 11, _ORIGIN_ICMP6: 3}
_UNREACHABLE = {_ORIGIN_ICMP: 3, _ORIGIN_ICMP6: 1}
#: RFC 792, RFC 1812 and RFC 4443.
_REASONS = {
    (_ORIGIN_ICMP, 3, 0): "network unreachable",
    (_ORIGIN_ICMP, 3, 1): "host unreachable",
    (_ORIGIN_ICMP, 3, 4): "packet too big",
    (_ORIGIN_ICMP, 3, 9): "network administratively prohibited",
    (_ORIGIN_ICMP, 3, 10): "host administratively prohibited",
    (_ORIGIN_ICMP, 3, 13): "administratively prohibited",
    (_ORIGIN_ICMP6, 1, 0): "no route to destination",
    (_ORIGIN_ICMP6, 1, 1): "administratively prohibited",
    (_ORIGIN_ICMP6, 1, 3): "address unreachable",
}

_PAYLOAD = struct.Struct("!8sBHI")
_MARK = b"cruxprob"
_NO_LINGER = struct.pack("ii", 1, 0)
#: The probe is on its way, or lost in this host's queue as it could be in any other.
_SENT_ANYWAY = (errno.EINPROGRESS, errno.EAGAIN, errno.ENOBUFS)


@dataclass(frozen=True, slots=True)
class QueuedError:
    """One entry of an error queue: its sender, its meaning, and the packet that it quotes."""

    kind: Kind
    address: str
    detail: str
    quoted: bytes


class ErrorQueue:
    """Probes of one destination port that are on their way, a socket each.

    A source port has one probe on its way at a time: two sockets can't have the same ends.

    Thread safety: none, one thread uses it.

    Args:
        source: address of this host that probes leave from.
    """

    def __init__(self, source: str, destination: str, protocol: Transport, port: int) -> None:
        self.sent = 0
        self.source, self.destination = source, destination
        self.protocol, self.port = protocol, port
        self._flight: dict[int, tuple[socket.socket, Probe]] = {}
        self._by_probe: dict[Probe, int] = {}
        self._nonce = int.from_bytes(os.urandom(4), "big")
        self._at_once: list[Answer] = []
        self._poll = select.epoll()

    def __enter__(self) -> ErrorQueue:
        return self

    def __exit__(self, *_: object) -> None:
        for probe in list(self._by_probe):
            self.forget(probe)
        self._poll.close()

    def send(self, probe: Probe) -> bool:
        """Send ``probe``; False if its source port is taken, so that no new connection can use it.

        Raises:
            ProbeError: no route, not this host's address, forbidden by this host's firewall, or
                no more sockets.
        """
        kind = socket.SOCK_STREAM if self.protocol == "tcp" else socket.SOCK_DGRAM
        try:
            sock = socket.socket(family_of(self.destination), kind | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise ProbeError(error.errno, f"can't open a socket to probe: {error}") from None
        sent = False
        try:
            sent = self._bind(sock, probe) and self._emit(sock, probe)
        finally:
            if not sent:
                sock.close()
        if not sent:
            return False
        events = select.EPOLLERR | (select.EPOLLOUT if self.protocol == "tcp" else 0)
        self._poll.register(sock.fileno(), events)
        self._flight[sock.fileno()] = (sock, probe)
        self._by_probe[probe] = sock.fileno()
        self.sent += 1
        return True

    def receive(self, timeout_s: float) -> list[Answer]:
        """The answers that are there, after at most ``timeout_s``; each ends its probe."""
        answers, self._at_once = self._at_once, []
        ready = self._poll.poll(0.0 if answers else max(0.0, timeout_s))
        read = (self._read(*self._flight[fd]) for fd, _ in ready)
        answers += [answer for answer in read if answer is not None]
        for answer in answers:
            self.forget(answer.probe)
        return answers

    def forget(self, probe: Probe) -> None:
        """Wait no longer for the answer to ``probe``."""
        fd = self._by_probe.pop(probe, None)
        if fd is None:
            return
        sock, _ = self._flight.pop(fd)
        self._poll.unregister(fd)
        if self.protocol == "tcp":
            # Were it accepted after all, this ends it at once and leaves no TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        sock.close()

    def _bind(self, sock: socket.socket, probe: Probe) -> bool:
        if self.protocol == "tcp":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_hops(sock, probe.ttl)
        queue_errors(sock)
        try:
            sock.bind((self.source, probe.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            said = f"can't send from {self.source} port {probe.port}: {error.strerror}"
            expected = "expected an address of this host, and a port that it may use"
            raise ProbeError(error.errno, f"{said}; {expected}") from None
        return True

    def _emit(self, sock: socket.socket, probe: Probe) -> bool:
        try:
            sock.connect((self.destination, self.port))
            if self.protocol == "udp":
                sock.send(self._payload(probe))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return False
            if error.errno == errno.ECONNREFUSED:
                self._at_once.append(Answer(probe, self.destination, "destination"))
            elif error.errno not in _SENT_ANYWAY:
                raise self._explain(error) from None
        return True

    def _payload(self, probe: Probe) -> bytes:
        return _PAYLOAD.pack(_MARK, probe.ttl, probe.port, self._nonce)

    def _explain(self, error: OSError) -> ProbeError:
        to = f"{self.destination} port {self.port}"
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            command = f"ip route get {self.destination} from {self.source}"
            said = f"no route from {self.source} to {to}: see `{command}`"
        elif error.errno in (errno.EPERM, errno.EACCES):
            said = f"this host forbids {self.protocol} to {to}: see its firewall's output rules"
        else:
            said = f"can't send to {to}: {error.strerror}"
        return ProbeError(error.errno, said)

    def _read(self, sock: socket.socket, probe: Probe) -> Answer | None:
        queued = read_error(sock)
        if queued is not None:
            # An earlier probe from this port is not this one. A router may quote the header alone.
            mine, quoted = self._payload(probe), queued.quoted
            if self.protocol == "udp" and len(quoted) >= len(mine) and not quoted.startswith(mine):
                return None
            arrived = queued.kind == "hop" and queued.address == self.destination
            kind = "destination" if arrived else queued.kind
            return Answer(probe, queued.address, kind, queued.detail)
        if self.protocol == "udp":
            return None
        status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status in (0, errno.ECONNREFUSED):
            return Answer(probe, self.destination, "destination")
        return Answer(probe, self.source, "refusal", os.strerror(status))


def family_of(address: str) -> socket.AddressFamily:
    """Returns the address family of an IP address."""
    return socket.AF_INET if ip_address(address).version == 4 else socket.AF_INET6


def limit_hops(sock: socket.socket, ttl: int) -> None:
    """Let packets of ``sock`` pass at most ``ttl`` - 1 routers."""
    level, hop_limit, _ = _OPTIONS[sock.family]
    sock.setsockopt(level, hop_limit, ttl)


def queue_errors(sock: socket.socket) -> None:
    """Put the ICMP errors that ``sock`` provokes on its error queue, with their senders."""
    level, _, queue = _OPTIONS[sock.family]
    sock.setsockopt(level, queue, 1)


def read_error(sock: socket.socket) -> QueuedError | None:
    """Takes the next ICMP error from the queue of ``sock``; None if it is empty."""
    while True:
        try:
            quoted, control, _, _ = sock.recvmsg(512, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return None
        for level, kind, data in control:
            if (level, kind) in _QUEUED and (found := _parse(data, quoted)) is not None:
                return found


def _parse(data: bytes, quoted: bytes) -> QueuedError | None:
    _, origin, kind, code, _, _, _ = _EXTENDED_ERROR.unpack_from(data)
    if origin not in _TIME_EXCEEDED:
        return None
    if origin == _ORIGIN_ICMP:
        address, port_unreachable = socket.inet_ntop(socket.AF_INET, data[20:24]), 3
    else:
        address, port_unreachable = socket.inet_ntop(socket.AF_INET6, data[24:40]), 4
    if kind == _TIME_EXCEEDED[origin]:
        return QueuedError("hop", address, "", quoted)
    if kind == _UNREACHABLE[origin] and code == port_unreachable:
        return QueuedError("destination", address, "", quoted)
    reason = _REASONS.get((origin, kind, code), "unreachable")
    return QueuedError("refusal", address, f"{reason} (ICMP type {kind} code {code})", quoted)
