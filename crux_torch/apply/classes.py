"""A job's priority level as the DSCP of its live connections (paper §4.3).

A level is one traffic class of the network; the operator's table gives its DSCP value. That goes
into the upper six bits of the IPv4 TOS or the IPv6 traffic class of each connection of the inner
backend; the lower two carry ECN and stay.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crux_torch.apply.ownership import Ownership
from crux_torch.apply.sockets import Endpoint, TcpSocket, borrow

DSCP_MASK = 0xFC
ECN_MASK = 0x03


@dataclass(frozen=True, slots=True)
class SocketMark:
    """What was done to one connection.

    Attributes:
        inode: the socket's identity.
        local: this process's endpoint.
        peer: the other endpoint.
        before: TOS or traffic class that it had before Crux touched it; None if unreadable.
        wanted: what Crux asked for.
        tos: what the kernel holds, read back afterwards; None if unreadable.
        errno: of the call that failed, or 0.
    """

    inode: int
    local: Endpoint
    peer: Endpoint | None
    before: int | None
    wanted: int
    tos: int | None
    errno: int = 0

    @property
    def applied(self) -> bool:
        return self.errno == 0 and self.tos is not None and not (self.tos ^ self.wanted) & DSCP_MASK


@dataclass(frozen=True, slots=True)
class ClassReport:
    """How the traffic class stands in this process.

    Attributes:
        level: priority level in force, None for the network's default.
        dscp: its DSCP value.
        marks: one for each connection that Crux marked, tried to mark, or could not revert.
        error: why the last request could not be carried out, or empty.
    """

    level: int | None = None
    dscp: int | None = None
    marks: tuple[SocketMark, ...] = ()
    error: str = ""

    @property
    def applied(self) -> int:
        """Connections that carry what was wanted."""
        return sum(mark.applied for mark in self.marks)

    @property
    def refused(self) -> int:
        """Connections that do not."""
        return len(self.marks) - self.applied


class TrafficClass:
    """Marks the inner backend's connections with the class of a level, and takes it back.

    Its methods never raise, may be called from any thread, and return what is in force. A forked
    child starts from nothing and so never reverts its parent's connections.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._forget()
        itself = weakref.ref(self)

        def forget_in_child() -> None:
            if (traffic_class := itself()) is not None:
                traffic_class._forget()

        os.register_at_fork(after_in_child=forget_in_child)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[int, tuple[TcpSocket, SocketMark]] = {}
        self._report = ClassReport()

    def apply_level(self, level: int | None, dscp_map: Sequence[int]) -> ClassReport:
        """Gives every connection the class of ``level``; each is checked even if marked before.

        Args:
            level: priority level, an index into ``dscp_map``; None reverts.
            dscp_map: DSCP value (0 to 63) of each level, from level 0 upwards. A level that it
                does not cover changes nothing and is reported.
        """
        if level is None:
            return self.revert()
        with self._lock:
            if not 0 <= level < len(dscp_map) or not 0 <= dscp_map[level] <= 63:
                error = f"level {level} has no DSCP value in {tuple(dscp_map)}"
                self._report = replace(self._report, error=error)
                return self._report
            self._report = ClassReport(level, dscp_map[level])
            return self._mark(everything=True)

    def refresh(self) -> ClassReport:
        """Marks the connections that appeared since, and tries again those that refused."""
        with self._lock:
            if self._report.dscp is None:
                return self._report
            return self._mark(everything=False)

    def revert(self) -> ClassReport:
        """Gives each connection back what it had before; one changed by others since is left."""
        with self._lock:
            left = {}
            for inode, (sock, mark) in self._marks.items():
                undone = _restore(sock, mark)
                if undone is not None:
                    left[inode] = (sock, undone)
            self._marks = left
            self._report = ClassReport(marks=tuple(mark for _, mark in left.values()))
            return self._report

    def status(self) -> ClassReport:
        """What the last call left in force."""
        return self._report

    def _mark(self, everything: bool) -> ClassReport:
        dscp = self._report.dscp
        assert dscp is not None
        try:
            owned = self._ownership.owned()
        except OSError as error:
            self._report = replace(self._report, error=f"this process's sockets: {error}")
            return self._report
        settled = not self._report.refused and not self._report.error
        if not everything and settled and self._marks.keys() == {s.inode for s in owned}:
            return self._report
        marks = {}
        for sock in owned:
            _, mark = self._marks.get(sock.inode, (sock, None))
            if mark is None or everything or not mark.applied:
                mark = _set_dscp(sock, dscp, mark)
            if mark is not None:
                marks[sock.inode] = (sock, mark)
        self._marks = marks
        self._report = replace(
            self._report, marks=tuple(mark for _, mark in marks.values()), error=""
        )
        return self._report


def _option(sock: TcpSocket) -> tuple[int, int]:
    """The option that decides the class of its packets; over IPv4 that is TOS in both families."""
    if sock.sends_ipv6:
        return socket.IPPROTO_IPV6, socket.IPV6_TCLASS
    return socket.IPPROTO_IP, socket.IP_TOS


def _set_dscp(sock: TcpSocket, dscp: int, earlier: SocketMark | None) -> SocketMark | None:
    """Marks one connection; None where it was closed meanwhile."""
    option = _option(sock)
    before = None if earlier is None else earlier.before
    mark = SocketMark(sock.inode, sock.local, sock.peer, before, dscp << 2, None)
    try:
        borrowed = borrow(sock.fd, sock.inode)
        if borrowed is None:
            return None
        with borrowed:
            current = borrowed.getsockopt(*option)
            mark = replace(mark, before=current if before is None else before, tos=current)
            mark = replace(mark, wanted=dscp << 2 | current & ECN_MASK)
            if current != mark.wanted:
                borrowed.setsockopt(*option, mark.wanted)
            return replace(mark, tos=borrowed.getsockopt(*option))
    except OSError as error:
        return replace(mark, errno=error.errno or 0)


def _restore(sock: TcpSocket, mark: SocketMark) -> SocketMark | None:
    """Undoes one mark; None where nothing is left to undo."""
    if mark.before is None or mark.tos is None:
        return None
    option = _option(sock)
    try:
        borrowed = borrow(sock.fd, sock.inode)
        if borrowed is None:
            return None
        with borrowed:
            current = borrowed.getsockopt(*option)
            if (current ^ mark.tos) & DSCP_MASK:
                return None
            mark = replace(mark, wanted=mark.before & DSCP_MASK | current & ECN_MASK)
            if current != mark.wanted:
                borrowed.setsockopt(*option, mark.wanted)
            mark = replace(mark, tos=borrowed.getsockopt(*option), errno=0)
    except OSError as error:
        return replace(mark, errno=error.errno or 0)
    return None if mark.applied else mark
