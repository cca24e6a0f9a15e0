"""The far end of ``crux qos check``: says which probes arrived, when, and with which DSCP value.

The two ends meet over TCP; probes are datagrams to the same port. Nothing is sent but what was
asked for over TCP, and no process sees the load: a filter in the kernel drops it.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from crux_torch.network.probe.packets import family_of

PORT = 29414
#: First bytes of a datagram; only the first kind reaches a program.
PROBE, LOAD, TRACE = b"cqs1", b"cqs2", b"cqs3"
#: A probe: kind, nonce of the session, number.
PROBE_FORMAT = struct.Struct("!4sII")
#: First bytes on the TCP connection: nonce, and the port that probes come from.
HELLO = struct.Struct("!8sIH")
MAGIC = b"cruxqos1"
READY, ASK = b"+", b"?"
#: The answer to ``ASK``: a count, and the packets that this host has dropped since it started; then
#: as many arrivals: number, traffic class, CLOCK_REALTIME in nanoseconds.
ANSWER, ARRIVAL = struct.Struct("!IQ"), struct.Struct("!IBq")

#: Bounds of a session: probes, and seconds.
MAX_PROBES = 200_000
SESSION_S = 180.0
#: Time for a peer to say or take in the next bytes.
PATIENCE_S = 10.0
_RECEIVE_BYTES = 1 << 20
_RING_COUNTERS = ("rx_missed_errors", "rx_fifo_errors", "rx_over_errors")

# asm-generic/socket.h, linux/in.h, linux/in6.h.
_SO_TIMESTAMPNS = 35
_SO_ATTACH_FILTER = 26
_RECEIVE_CLASS = {
    socket.AF_INET: (socket.IPPROTO_IP, 13),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 66),
}
#: (level, type) of the control message that holds the traffic class of a datagram.
_CLASS = {(socket.IPPROTO_IP, 1), (socket.IPPROTO_IPV6, 67)}
_TIMESPEC = struct.Struct("@qq")
#: Classic BPF: load the word behind the UDP header; keep the datagram if it is ``PROBE``.
_FILTER = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, 8),
        (0x15, 0, 1, int.from_bytes(PROBE, "big")),
        (0x06, 0, 0, 0xFFFF),
        (0x06, 0, 0, 0),
    )
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One probe at the far end: its number, its traffic class, and CLOCK_REALTIME there."""

    number: int
    traffic_class: int
    at_ns: int


def listen(
    port: int = PORT,
    limit_s: float = 600.0,
    sessions: int | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Serves one peer after the other; returns the number of sessions.

    Args:
        limit_s: after which no more peer is served; a session ends then, too.
        sessions: after which it returns; None: when time is up.
        on_ready: called once peers can connect.

    Raises:
        OSError: the port can't be used.
    """
    until = time.monotonic() + limit_s
    served = 0
    with _listener(port) as listener:
        on_ready()
        while served != sessions and (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                control, _ = listener.accept()
            except TimeoutError:
                break
            with control, contextlib.suppress(OSError, ValueError):
                served += _serve(control, min(until, time.monotonic() + SESSION_S))
    return served


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _serve(control: socket.socket, until: float) -> bool:
    """Serve one peer to its end; False if it does not speak this protocol."""
    control.settimeout(PATIENCE_S)
    magic, nonce, source_port = HELLO.unpack(receive_exactly(control, HELLO.size))
    if magic != MAGIC or not source_port:
        return False
    here, peer = control.getsockname(), control.getpeername()
    with _datagrams(_plain(here[0]), here[1], _plain(peer[0]), source_port) as probes:
        control.sendall(READY)
        arrivals: list[bytes] = []
        taken = 0
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([control, probes], [], [], left)
            if probes in ready:
                # Before an answer, which is to name all that has come.
                new = _take(probes, nonce, MAX_PROBES - taken)
                taken += len(new)
                arrivals += (ARRIVAL.pack(*arrival) for arrival in new)
            elif control in ready:
                if control.recv(1) != ASK:
                    break
                control.sendall(ANSWER.pack(len(arrivals), dropped()) + b"".join(arrivals))
                arrivals.clear()
    return True


def _datagrams(here: str, port: int, peer: str, source_port: int) -> socket.socket:
    """A socket that gets probes of this peer alone, with their class and time of arrival."""
    family = family_of(here)
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        program = ctypes.create_string_buffer(_FILTER, len(_FILTER))
        attached = struct.pack("@HP", len(_FILTER) // 8, ctypes.addressof(program))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        sock.setsockopt(*_RECEIVE_CLASS[family], 1)
        sock.bind((here, port))
        sock.connect((peer, source_port))
    except BaseException:
        sock.close()
        raise
    return sock


def _take(probes: socket.socket, nonce: int, most: int) -> list[tuple[int, int, int]]:
    """The arrivals that wait on the socket, ``most`` of them."""
    found = []
    for _ in range(max(most, 1)):
        try:
            data, control, _, _ = probes.recvmsg(PROBE_FORMAT.size, 256)
        except OSError:
            break
        if len(data) < PROBE_FORMAT.size or not most:
            continue
        _, session, number = PROBE_FORMAT.unpack(data)
        traffic_class, at_ns = _told(control)
        if session == nonce and traffic_class is not None and at_ns is not None:
            found.append((number, traffic_class, at_ns))
    return found


def _told(control: list[tuple[int, int, bytes]]) -> tuple[int | None, int | None]:
    """Traffic class and time of arrival, as the kernel tells them."""
    traffic_class = at_ns = None
    for level, kind, data in control:
        if (level, kind) in _CLASS and data:
            # One byte for IPv4, an integer for IPv6.
            traffic_class = int.from_bytes(data, sys.byteorder) & 0xFF
        elif (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack_from(data)
            at_ns = seconds * 1_000_000_000 + nanoseconds
    return traffic_class, at_ns


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Returns the next ``size`` bytes of a connection.

    Raises:
        OSError: it ends before, or its timeout passes.
    """
    found = bytearray()
    while len(found) < size:
        part = sock.recv(size - len(found))
        if not part:
            raise ConnectionError("the peer has closed the connection")
        found += part
    return bytes(found)


def dropped(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> int:
    """Returns the packets that reached this host and were dropped because it was too slow.

    Those are full receive rings of its interfaces, and full backlogs of its processors.
    """
    counts = [0]
    files = (sysfs / "class/net").glob("*/statistics/rx_*_errors")
    for file in (one for one in files if one.name in _RING_COUNTERS):
        with contextlib.suppress(OSError, ValueError):
            counts.append(int(file.read_text()))
    with contextlib.suppress(OSError, ValueError, IndexError):
        backlogs = (proc / "net/softnet_stat").read_text().splitlines()
        counts += [int(line.split()[1], 16) for line in backlogs]
    return sum(counts) % (1 << 64)


def arrivals_from(control: socket.socket) -> tuple[list[Arrival], int]:
    """Asks the far end for the arrivals since the last time, and for what it has dropped so far.

    Raises:
        OSError: it does not answer as it should.
    """
    control.sendall(ASK)
    count, lost = ANSWER.unpack(receive_exactly(control, ANSWER.size))
    if count > MAX_PROBES:
        raise ConnectionError(f"the far end claims {count} arrivals, limit {MAX_PROBES}")
    raw = receive_exactly(control, count * ARRIVAL.size)
    return [Arrival(*values) for values in ARRIVAL.iter_unpack(raw)], lost


def _plain(address: str) -> str:
    """``address`` without IPv6's wrapping of IPv4, and without a zone."""
    found = ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)
