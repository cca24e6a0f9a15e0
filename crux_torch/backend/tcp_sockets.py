"""Finds this process's TCP sockets, and which of them belong to the inner backends.

The descriptors belong to other libraries, whose threads close and open them at any time. So a
socket is named by its inode, which no other socket gets while it is open. It is only touched
through a duplicate descriptor, whose inode is read after the duplicate was made.

Gloo opens one listener for each device of a process group, and each of its connections has such a
listener at one end. So a connection is ours if its local end is one of our listeners or its remote
end is one of a peer's. The ranks of a group publish their listeners in its store, and we read them
there. If they can't be read, we take the sockets that appeared while the group was made.

Under ``TORCH_GLOO_LAZY_INIT=1`` a peer may publish its listener only after this rank has made the
group. Of a connection between the two, only the accepting end then knows that it is ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

#: An address without its zone, and a port. An IPv4-mapped address is written as IPv4.
Endpoint = tuple[str, int]

FD_DIR = "/proc/self/fd"
_IPV4_MAPPED = "::ffff:"
MAX_DEVICES = 16
#: Each value holds a number for each rank, so all ranks' reading grows with the cube of the size.
MAX_RANKS = 128
_MAX_HOST_BYTES = 1024
_LENGTH = struct.Struct("=Q")

_log = logging.getLogger(__name__)


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


def endpoint(address: tuple[object, ...]) -> Endpoint:
    """Returns the endpoint in the result of ``getsockname`` or ``getpeername``."""
    ip, port = str(address[0]), int(str(address[1]))
    mapped = ip.startswith(_IPV4_MAPPED) and "." in ip
    return (ip[len(_IPV4_MAPPED) :] if mapped else ip), port


def borrow(fd: int, inode: int) -> socket.socket | None:
    """Returns a duplicate of the socket ``inode`` to read and set options on; close it at once.

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

    Thread safety: none; its owner calls it under a lock.
    """

    def __init__(self) -> None:
        self._known: dict[int, TcpSocket | None] = {}

    def scan(self) -> dict[int, TcpSocket]:
        """Returns the connected and the listening TCP sockets that are open now, by inode.

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
    """Returns (False if it may still connect, the socket or None if it is no TCP socket)."""
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


class ReadableStore(Protocol):
    """The part of ``torch.distributed.Store`` that is needed; neither call waits for a key."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


def published_listener(value: bytes) -> Endpoint | None:
    """Returns the endpoint that gloo wrote for one rank; None if the format is not the known one.

    The value holds a host name and a ``struct sockaddr_storage``, each after its length as a 64-bit
    integer.
    """
    try:
        (host_bytes,) = _LENGTH.unpack_from(value)
        if host_bytes > _MAX_HOST_BYTES:
            return None
        offset = 2 * _LENGTH.size + host_bytes
        (family,) = struct.unpack_from("=H", value, offset)
        (port,) = struct.unpack_from("!H", value, offset + 2)
        if family == socket.AF_INET:
            (packed,) = struct.unpack_from("4s", value, offset + 4)
        elif family == socket.AF_INET6:
            (packed,) = struct.unpack_from("16s", value, offset + 8)
        else:
            return None
        return endpoint((socket.inet_ntop(family, packed), port))
    except (struct.error, ValueError):
        return None


def listeners_of(store: ReadableStore, rank: int) -> list[Endpoint]:
    """Returns where ``rank`` listens (``<device>/<rank>``); raises what the store does."""
    found = []
    for device in range(MAX_DEVICES):
        key = f"{device}/{rank}"
        if not store.check([key]):
            break
        listener = published_listener(bytes(store.get(key)))
        if listener is not None:
            found.append(listener)
    return found


def store_ports(store: object) -> set[int]:
    """Returns the ports of the TCP stores below ``store`` and its prefixes."""
    ports = set()
    for _ in range(16):
        port = getattr(store, "port", None)
        if isinstance(port, int):
            ports.add(port)
        store = getattr(store, "underlying_store", None)
        if store is None:
            break
    return ports


class Ownership:
    """The inner backends' sockets of this process.

    A forked child starts from nothing: the sockets it inherits stay its parent's.

    Thread safety: any thread may call any method. One lock guards the table and what was claimed;
    it is held while descriptors are read, never while a group is made.

    Args:
        store_ports: ports of rendezvous stores, whose connections are never claimed.
        nccl_sockets: gives the inodes of the connections that NCCL's library made.
    """

    def __init__(
        self, store_ports: Iterable[int] = (), nccl_sockets: Callable[[], Collection[int]] = tuple
    ) -> None:
        self._store_ports = set(store_ports)
        self._nccl_sockets = nccl_sockets
        self._forget()
        itself = weakref.ref(self)

        def forget_in_child() -> None:
            if (ownership := itself()) is not None:
                ownership._forget()

        os.register_at_fork(after_in_child=forget_in_child)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._table = SocketTable()
        # The peers' listeners by the inode of our own. Both are forgotten when the group ends,
        # because another program may get those ports then.
        self._groups: dict[int, frozenset[Endpoint]] = {}
        self._connections: set[int] = set()

    @contextlib.contextmanager
    def watching(
        self, store: ReadableStore | None = None, rank: int = 0, size: int = 0
    ) -> Iterator[None]:
        """Claims the sockets that the body opens by making one inner process group.

        Raises nothing of its own and holds no lock in the body. If the body raises, nothing is
        claimed.

        Args:
            store: of the group, with its prefix. Without it, only the socket options that gloo sets
                tell the group's sockets from those that other threads open meanwhile.
            rank, size: of the group.
        """
        before = self._inodes()
        yield
        if before is None:
            return
        try:
            own, peers, complete = _published(store, rank, size)
            ports = self._store_ports | store_ports(store)
            with self._lock:
                self._claim(before, own, peers, complete, ports)
        except Exception as error:
            _log.warning(
                "Crux can't tell a group's sockets, which stay unmarked: %s", error, exc_info=True
            )

    def owned(self) -> list[TcpSocket]:
        """Returns the inner backends' open connections, those made since ``watching`` included.

        Raises:
            OSError: where this process's descriptors can't be listed.
        """
        # Asked before the scan, so that the scan has all of them that are still open.
        of_nccl = self._nccl_sockets()
        with self._lock:
            return self._owned(self._table.scan(), of_nccl)

    def own_listeners(self) -> list[Endpoint]:
        """Returns where the inner backends listen now.

        Raises:
            OSError: where this process's descriptors can't be listed.
        """
        with self._lock:
            sockets = self._table.scan()
            return sorted(sockets[i].local for i in self._groups if i in sockets)

    def _inodes(self) -> set[int] | None:
        try:
            with self._lock:
                return set(self._table.scan())
        except OSError as error:
            _log.warning("Crux can't see this process's sockets: %s", error)
            return None

    def _claim(
        self,
        before: set[int],
        own: frozenset[Endpoint],
        peers: frozenset[Endpoint],
        complete: bool,
        ports: set[int],
    ) -> None:
        sockets = self._table.scan()
        listeners = [s for s in sockets.values() if s.listening and s.local in own]
        exact = bool(listeners) and complete
        if not listeners:
            listeners = [
                s
                for i, s in sockets.items()
                if s.listening and i not in before and s.local[1] not in ports and _is_gloos(s)
            ]
        for listener in listeners:
            self._groups[listener.inode] = self._groups.get(listener.inode, frozenset()) | peers
        if exact:
            return
        for inode, s in sockets.items():
            if inode in before or s.peer is None or ports & {s.local[1], s.peer[1]}:
                continue
            if _is_gloos(s):
                self._connections.add(inode)

    def _owned(self, sockets: dict[int, TcpSocket], of_nccl: Collection[int]) -> list[TcpSocket]:
        self._groups = {i: peers for i, peers in self._groups.items() if i in sockets}
        own = {sockets[i].local for i in self._groups}
        peers = frozenset[Endpoint]().union(*self._groups.values())
        self._connections = {
            i
            for i, s in sockets.items()
            if s.peer is not None and (i in self._connections or s.local in own or s.peer in peers)
        }
        connected = (i for i in of_nccl if i in sockets and sockets[i].peer is not None)
        return [sockets[i] for i in sorted(self._connections.union(connected))]


def _published(
    store: ReadableStore | None, rank: int, size: int
) -> tuple[frozenset[Endpoint], frozenset[Endpoint], bool]:
    """Returns our published listeners, the peers', and True if every peer has published."""
    none: frozenset[Endpoint] = frozenset()
    if store is None:
        return none, none, False
    try:
        own = frozenset(listeners_of(store, rank))
        if not own or size > MAX_RANKS:
            return own, none, False
        found = [listeners_of(store, r) for r in range(size) if r != rank]
        return own, frozenset(e for listeners in found for e in listeners), all(found)
    except Exception as error:
        _log.info("the addresses of a group's ranks can't be read from its store: %s", error)
        return none, none, False


def _is_gloos(sock: TcpSocket) -> bool:
    """Returns True if it has the options that gloo sets, which few libraries set together.

    Gloo does not mark its descriptors close-on-exec and reuses addresses. Its connections have
    TCP_NODELAY and the group's timeout for receiving.
    """
    try:
        borrowed = borrow(sock.fd, sock.inode)
        if borrowed is None:
            return False
        with borrowed:
            # The flag belongs to the owner's descriptor, not to the duplicate.
            closes_on_exec = fcntl.fcntl(sock.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            if closes_on_exec or not borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                return False
            if sock.listening:
                return True
            timeout = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
            return any(timeout) and bool(
                borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
    except OSError:
        return False
