"""A job's priority level as the DSCP of its live connections (paper §4.3), and their rate.

The operator's table gives the DSCP value of each level (docs/classes.md). It goes into the upper
six bits of the IPv4 TOS or the IPv6 traffic class; the lower two carry ECN and stay.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from crux_torch.apply.transport import Transport, TransportError
from crux_torch.c10d.ownership import Ownership
from crux_torch.c10d.sockets import Endpoint, TcpSocket

DSCP_MASK = 0xFC
ECN_MASK = 0x03
#: What :meth:`Transport.set_socket` takes for no limit.
UNLIMITED = 0


@dataclass(frozen=True, slots=True)
class SocketMark:
    """What was done to one connection.

    Attributes:
        before: TOS or traffic class that it had before Crux touched it; None if unreadable.
        wanted: what Crux asked for; None if it left the class alone.
        tos: what the kernel holds, read back afterwards; None if unreadable.
        errno: of the call that failed, or 0.
        before_rate_Bps, wanted_rate_Bps, rate_Bps: likewise the limit; None also for no limit.
    """

    inode: int
    local: Endpoint
    peer: Endpoint | None
    before: int | None
    wanted: int | None
    tos: int | None
    errno: int = 0
    before_rate_Bps: int | None = None
    wanted_rate_Bps: int | None = None
    rate_Bps: int | None = None

    @property
    def applied(self) -> bool:
        classed = self.wanted is None or (
            self.tos is not None and not (self.tos ^ self.wanted) & DSCP_MASK
        )
        paced = self.wanted_rate_Bps is None or (self.rate_Bps or UNLIMITED) == self.wanted_rate_Bps
        return self.errno == 0 and classed and paced


@dataclass(frozen=True, slots=True)
class ClassReport:
    """The traffic class and the rates that this process has now.

    Attributes:
        level: priority level in force, None for the network's default.
        marks: one for each connection that Crux marked, tried to mark, or could not revert.
        error: why the last request could not be carried out, or empty.
        rates_Bps: limits in bytes per second, by the inodes of the connections that have one.
    """

    level: int | None = None
    dscp: int | None = None
    marks: tuple[SocketMark, ...] = ()
    error: str = ""
    rates_Bps: Mapping[int, int] = field(default_factory=dict)

    @property
    def applied(self) -> int:
        """Connections that carry what was wanted."""
        return sum(mark.applied for mark in self.marks)

    @property
    def refused(self) -> int:
        """Connections that do not."""
        return len(self.marks) - self.applied


class TrafficClass:
    """Marks the inner backends' connections with class and rate, and takes both back.

    Its methods never raise, may be called from any thread, and return what is in force. A forked
    child starts anew, so it never reverts its parent's connections.

    Args:
        ownership: knows the inner backend's sockets.
        transport: gives the library that marks; raises TransportError if there is none.
    """

    def __init__(
        self, ownership: Ownership, transport: Callable[[], Transport] = Transport.load
    ) -> None:
        self._ownership = ownership
        self._transport = transport
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
        """Give every connection the class of ``level``, also those marked before.

        Args:
            level: an index into ``dscp_map``, else nothing changes and the report says so; None
                reverts class and rate.
            dscp_map: DSCP value (0 to 63) of each level, from level 0 upwards.
        """
        if level is None:
            return self.revert()
        with self._lock:
            if not 0 <= level < len(dscp_map) or not 0 <= dscp_map[level] <= 63:
                return self._failed(f"level {level} has no DSCP value in {tuple(dscp_map)}")
            rates_Bps = self._report.rates_Bps
            self._report = ClassReport(level, dscp_map[level], rates_Bps=rates_Bps)
            return self._mark(everything=True)

    def apply_rates(self, rates_Bps: Mapping[int, int]) -> ClassReport:
        """Limit what connections send, in bytes per second; the kernel paces them.

        Those that are not named get their earlier limit back. A rate that is not positive changes
        nothing and is reported.

        Args:
            rates_Bps: by the inodes of connections.
        """
        with self._lock:
            wrong = next((rate for rate in rates_Bps.values() if rate <= 0), None)
            if wrong is not None:
                return self._failed(f"{wrong} bytes per second is no rate")
            self._report = replace(self._report, rates_Bps=dict(rates_Bps), marks=(), error="")
            return self._mark(everything=True)

    def refresh(self) -> ClassReport:
        """Mark connections that appeared since, and try those again that refused."""
        with self._lock:
            if self._report.dscp is None and not self._report.rates_Bps:
                return self._report
            return self._mark(everything=False)

    def revert(self) -> ClassReport:
        """Give each connection back what it had, unless others have changed it since."""
        with self._lock:
            error = ""
            try:
                setter = self._transport() if self._marks else None
            except TransportError as failed:
                setter, error = None, str(failed)
            if setter is not None:
                tried = {i: (s, _restore(setter, s, mark)) for i, (s, mark) in self._marks.items()}
                self._marks = {i: (s, left) for i, (s, left) in tried.items() if left is not None}
            marks = tuple(mark for _, mark in self._marks.values())
            self._report = ClassReport(marks=marks, error=error)
            return self._report

    def status(self) -> ClassReport:
        """What the last call left in force."""
        return self._report

    def _failed(self, error: str) -> ClassReport:
        """The report of before, with why the request could not be carried out."""
        self._report = replace(self._report, error=error)
        return self._report

    def _mark(self, everything: bool) -> ClassReport:
        dscp, rates_Bps = self._report.dscp, self._report.rates_Bps
        try:
            setter = self._transport()
            owned = self._ownership.owned()
        except TransportError as error:
            return self._failed(str(error))
        except OSError as error:
            return self._failed(f"this process's sockets: {error}")
        settled = not self._report.refused and not self._report.error
        if not everything and settled and self._marks.keys() == {s.inode for s in owned}:
            return self._report
        marks = {}
        for sock in owned:
            _, mark = self._marks.get(sock.inode, (sock, None))
            if mark is None or everything or not mark.applied:
                mark = _set(setter, sock, dscp, rates_Bps.get(sock.inode), mark)
            if mark is not None:
                marks[sock.inode] = (sock, mark)
        self._marks = marks
        self._report = replace(self._report, marks=tuple(m for _, m in marks.values()), error="")
        return self._report


def _set(
    setter: Transport,
    sock: TcpSocket,
    dscp: int | None,
    rate_Bps: int | None,
    earlier: SocketMark | None,
) -> SocketMark | None:
    """Mark one connection; None if it was closed meanwhile."""
    wanted_rate_Bps = rate_Bps
    if rate_Bps is None and earlier is not None and earlier.wanted_rate_Bps is not None:
        wanted_rate_Bps = earlier.before_rate_Bps or UNLIMITED
    done = setter.set_socket(sock.fd, sock.inode, dscp, wanted_rate_Bps)
    if done.errno == errno.ENOENT:
        return None
    ecn = (done.before_tos or 0) & ECN_MASK
    return SocketMark(
        inode=sock.inode,
        local=sock.local,
        peer=sock.peer,
        before=done.original_tos if earlier is None else earlier.before,
        wanted=None if dscp is None else dscp << 2 | ecn,
        tos=done.after_tos,
        errno=done.errno,
        before_rate_Bps=done.original_rate_Bps if earlier is None else earlier.before_rate_Bps,
        wanted_rate_Bps=wanted_rate_Bps,
        rate_Bps=done.after_rate_Bps,
    )


def _restore(setter: Transport, sock: TcpSocket, mark: SocketMark) -> SocketMark | None:
    """Undo one mark; None if nothing is left to undo."""
    now = setter.set_socket(sock.fd, sock.inode)
    if now.errno:
        return None if now.errno == errno.ENOENT else replace(mark, errno=now.errno)
    wanted: int | None = None
    wanted_rate_Bps: int | None = None
    tos = now.before_tos
    if mark.before is not None and mark.tos is not None and tos is not None:
        changed_since = (tos ^ mark.tos) & DSCP_MASK
        wanted = None if changed_since else mark.before & DSCP_MASK | tos & ECN_MASK
    if mark.wanted_rate_Bps is not None and now.before_rate_Bps == mark.rate_Bps:
        wanted_rate_Bps = mark.before_rate_Bps or UNLIMITED
    dscp = None if wanted is None else wanted >> 2
    done = setter.set_socket(sock.fd, sock.inode, dscp, wanted_rate_Bps)
    undone = replace(mark, wanted=wanted, tos=done.after_tos, errno=done.errno)
    undone = replace(undone, wanted_rate_Bps=wanted_rate_Bps, rate_Bps=done.after_rate_Bps)
    return None if undone.applied or done.errno == errno.ENOENT else undone
