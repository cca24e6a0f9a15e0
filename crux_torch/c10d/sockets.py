"""Finds the TCP sockets that are open in this process.

The descriptors belong to other libraries, whose threads close and open them at any time. So a
socket is named by its inode, which no other socket gets while it is open. It is only touched
through a duplicate descriptor, whose inode is read after the duplicate was made.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from dataclasses import dataclass, replace

#: An address without its zone, and a port. An IPv4-mapped address is written as IPv4.
Endpoint = tuple[str, int]

FD_DIR = "/proc/self/fd"
_IPV4_MAPPED = "::ffff:"


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One TCP socket of this process.

    Attributes:
        fd: its descriptor when it was found; may belong to another socket by now.
        inode: the socket's identity for as long as it is open.
        family: ``AF_INET`` or ``AF_INET6``.
        local: its own endpoint.
        peer: the other end; None for a listening socket.
    """

    fd: int
    inode: int
    family: int
    local: Endpoint
    peer: Endpoint | None

    @property
    def listening(self) -> bool:
        return self.peer is None

    @property
    def sends_ipv6(self) -> bool:
        """Whether its packets are IPv6: an ``AF_INET6`` socket may be connected over IPv4."""
        return self.family == socket.AF_INET6 and ":" in self.local[0]


def endpoint(address: tuple[object, ...]) -> Endpoint:
    """The endpoint in what ``getsockname`` or ``getpeername`` returned."""
    ip, port = str(address[0]), int(str(address[1]))
    mapped = ip.startswith(_IPV4_MAPPED) and "." in ip
    return (ip[len(_IPV4_MAPPED) :] if mapped else ip), port


def borrow(fd: int, inode: int) -> socket.socket | None:
    """A duplicate of the socket ``inode`` to read and set options on; the caller closes it at once.

    Returns None if ``fd`` does not name that socket any more. The duplicate shares its file status
    flags with the owner's descriptor, so never change its blocking mode or timeout.

    Raises:
        OSError: no descriptor is left for the duplicate.
    """
    try:
        duplicate = os.dup(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
    try:
        if os.fstat(duplicate).st_ino == inode:
            # Without SOCK_NONBLOCK here, Python would apply socket.setdefaulttimeout() to the
            # shared status flags and so make the owner's blocking socket non-blocking.
            return socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, duplicate)
    except BaseException:
        os.close(duplicate)
        raise
    os.close(duplicate)
    return None


class SocketTable:
    """This process's TCP sockets by inode; remembers them from one scan to the next.

    Not safe for use by several threads at once.
    """

    def __init__(self) -> None:
        self._known: dict[int, TcpSocket | None] = {}

    def scan(self) -> dict[int, TcpSocket]:
        """The connected and the listening TCP sockets that are open now.

        A known socket costs one ``fstat``. Only new ones are inspected.

        Raises:
            OSError: the descriptors can't be listed (no /proc, or no descriptor left).
        """
        known = self._known
        seen: dict[int, TcpSocket | None] = {}
        undecided: set[int] = set()
        for name in os.listdir(FD_DIR):
            fd = int(name)
            try:
                status = os.fstat(fd)
            except OSError:
                continue
            inode = status.st_ino
            if not stat.S_ISSOCK(status.st_mode) or inode in seen or inode in undecided:
                continue
            if inode in known:
                entry = known[inode]
                if entry is not None and entry.fd != fd:
                    entry = replace(entry, fd=fd)
                seen[inode] = entry
                continue
            final, entry = _inspect(fd, inode)
            if final:
                seen[inode] = entry
            else:
                undecided.add(inode)
        self._known = seen
        return {inode: entry for inode, entry in seen.items() if entry is not None}


def _inspect(fd: int, inode: int) -> tuple[bool, TcpSocket | None]:
    """Whether this is final, and the socket. One that is not connected yet may still change."""
    try:
        sock = borrow(fd, inode)
        if sock is None:
            return False, None
        with sock:
            family = int(sock.family)
            is_tcp = (
                family in (socket.AF_INET, socket.AF_INET6)
                and sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
                and sock.proto == socket.IPPROTO_TCP
            )
            if not is_tcp:
                return True, None
            peer = None
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                peer = endpoint(sock.getpeername())
            return True, TcpSocket(fd, inode, family, endpoint(sock.getsockname()), peer)
    except OSError:
        return False, None
