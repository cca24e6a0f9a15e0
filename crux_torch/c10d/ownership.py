"""Which of this process's TCP sockets belong to the inner backends.

Gloo opens one listener for each device of a process group, and each of its connections has such a
listener at one end. So a connection is ours if its local end is one of our listeners or its remote
end is one of a peer's. The ranks of a group publish their listeners to each other, and we read them
there. If they can't be read, we take the sockets that appeared while the group was made.

Under ``TORCH_GLOO_LAZY_INIT=1`` a peer may publish its listener only after this rank has made the
group. Of a connection between the two, only the accepting end then knows that it is ours.

NCCL's are those that its library made. Whoever listens to :mod:`crux_torch.c10d.events` knows them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator

from crux_torch.c10d import events, gloo_rendezvous
from crux_torch.c10d.gloo_rendezvous import ReadableStore
from crux_torch.c10d.sockets import Endpoint, SocketTable, TcpSocket, borrow

logger = logging.getLogger(__name__)


class Ownership:
    """Knows the inner backends' sockets; safe to use from several threads.

    A forked child starts from nothing: the sockets it inherits stay its parent's.

    Args:
        store_ports: ports of rendezvous stores, whose connections are never claimed.
        made_by_nccl: gives the inodes of NCCL's connections.
    """

    def __init__(
        self,
        store_ports: Iterable[int] = (),
        made_by_nccl: Callable[[], Collection[int]] = events.made_by_nccl,
    ) -> None:
        self._store_ports = set(store_ports)
        self._made_by_nccl = made_by_nccl
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
        """Claim the sockets that the body opens by making one inner process group.

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
            ports = self._store_ports | gloo_rendezvous.store_ports(store)
            with self._lock:
                self._claim(before, own, peers, complete, ports)
        except Exception as error:
            logger.warning(
                "Crux can't tell a group's sockets, which stay unmarked: %s", error, exc_info=True
            )

    def owned(self) -> list[TcpSocket]:
        """The inner backends' connections that are open now, those made since included.

        Raises:
            OSError: where this process's descriptors can't be listed.
        """
        # Asked before the scan, so that the scan has all of them that are still open.
        of_nccl = self._made_by_nccl()
        with self._lock:
            return self._owned(self._table.scan(), of_nccl)

    def own_listeners(self) -> list[Endpoint]:
        """Where the inner backends listen now.

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
            logger.warning("Crux can't see this process's sockets: %s", error)
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
    """Our published listeners, the peers' listeners, and whether every peer has published."""
    none: frozenset[Endpoint] = frozenset()
    if store is None:
        return none, none, False
    try:
        own = frozenset(gloo_rendezvous.listeners_of(store, rank))
        if not own or size > gloo_rendezvous.MAX_RANKS:
            return own, none, False
        found = [gloo_rendezvous.listeners_of(store, r) for r in range(size) if r != rank]
        return own, frozenset(e for listeners in found for e in listeners), all(found)
    except Exception as error:
        logger.info("the addresses of a group's ranks can't be read from its store: %s", error)
        return none, none, False


def _is_gloos(sock: TcpSocket) -> bool:
    """Whether it has the options that gloo sets, which few libraries set together.

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
