"""A job's priority level as the DSCP of its connections (paper §4.3), their rate, and ECN bits.

The operator's table gives the DSCP value of each level (docs/operate/classes.md). It goes into the
upper six bits of the IPv4 TOS or the IPv6 traffic class. The lower two carry ECN (RFC 3168): those
of a socket stay, those of a queue pair are chosen here. On a cluster that runs DCQCN they have to
say ECT, like ``NCCL_IB_TC=106`` (DSCP 26 and ECT(0)), so that switches mark packets instead of
dropping them. If the devices don't run DCQCN, they must stay 0, because senders would not react to
marks.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from crux_torch.apply.transport import Transport, TransportError
from crux_torch.backend.tcp_sockets import Endpoint, Ownership, TcpSocket
from crux_torch.host.interfaces import SYSFS, RdmaDevice, RdmaPort, entries, read_devices, text

DSCP_MASK = 0xFC
ECN_MASK = 0x03
ECT0 = 2
MAX_DSCP = 63
#: A rate for :meth:`Transport.set_socket` that takes the limit away.
UNLIMITED = 0
#: RDMA-CM's default class, one file for each port; readable by root.
CONFIGFS = Path("/sys/kernel/config/rdma_cm")


def dscp_of_level(level: int | None, dscp_map: Sequence[int]) -> int | None:
    """Returns the DSCP value of a priority level; None without a level or a value for it.

    Args:
        dscp_map: DSCP value of each level, from level 0 upwards; empty: not marked.
    """
    if level is None or not 0 <= level < len(dscp_map) or not 0 <= dscp_map[level] <= MAX_DSCP:
        return None
    return dscp_map[level]


@dataclass(frozen=True, slots=True)
class SocketMark:
    """Class and rate of one connection, in force, requested, and before Crux touched it.

    Attributes:
        before, target, tos: TOS or traffic class; None if unreadable, or not requested.
        errno: of the call that failed, or 0.
        before_rate_Bps, target_rate_Bps, rate_Bps: likewise the limit; None also for no limit.
    """

    inode: int
    local: Endpoint
    peer: Endpoint | None
    before: int | None
    target: int | None
    tos: int | None
    errno: int = 0
    before_rate_Bps: int | None = None
    target_rate_Bps: int | None = None
    rate_Bps: int | None = None

    @property
    def applied(self) -> bool:
        """True if class and rate are those requested."""
        classed = self.target is None or (
            self.tos is not None and not (self.tos ^ self.target) & DSCP_MASK
        )
        paced = self.target_rate_Bps in (None, self.rate_Bps or UNLIMITED)
        return self.errno == 0 and classed and paced


@dataclass(frozen=True, slots=True)
class ClassReport:
    """The traffic class and the rates that this process has now.

    Attributes:
        level: priority level in force, None for the network's default.
        marks: one for each connection that Crux marked, tried to mark, or could not revert.
        error: reason why the last request was not carried out, or empty.
        rates_Bps: limits in bytes per second, by the inodes of the connections that have one.
    """

    level: int | None = None
    dscp: int | None = None
    marks: tuple[SocketMark, ...] = ()
    error: str = ""
    rates_Bps: Mapping[int, int] = field(default_factory=dict)

    @property
    def applied(self) -> int:
        """Connections with the requested class and rate."""
        return sum(mark.applied for mark in self.marks)

    @property
    def refused(self) -> int:
        """Connections without them."""
        return len(self.marks) - self.applied


class TrafficClass:
    """Marks the inner backends' connections with class and rate, and takes both back.

    Its methods never raise, and return the state in force. A forked child starts anew, so it never
    reverts its parent's connections.

    Thread safety: any thread may call every method; a lock orders them.

    Args:
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
        """
        if level is None:
            return self.revert()
        with self._lock:
            dscp = dscp_of_level(level, dscp_map)
            if dscp is None:
                return self._failed(f"level {level} has no DSCP value in {tuple(dscp_map)}")
            self._report = ClassReport(level, dscp, rates_Bps=self._report.rates_Bps)
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
        """Returns the state that the last call left."""
        return self._report

    def _failed(self, error: str) -> ClassReport:
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
    target_rate_Bps = rate_Bps
    if rate_Bps is None and earlier is not None and earlier.target_rate_Bps is not None:
        target_rate_Bps = earlier.before_rate_Bps or UNLIMITED
    done = setter.set_socket(sock.fd, sock.inode, dscp, target_rate_Bps)
    if done.errno == errno.ENOENT:
        return None
    ecn = (done.before_tos or 0) & ECN_MASK
    return SocketMark(
        inode=sock.inode,
        local=sock.local,
        peer=sock.peer,
        before=done.original_tos if earlier is None else earlier.before,
        target=None if dscp is None else dscp << 2 | ecn,
        tos=done.after_tos,
        errno=done.errno,
        before_rate_Bps=done.original_rate_Bps if earlier is None else earlier.before_rate_Bps,
        target_rate_Bps=target_rate_Bps,
        rate_Bps=done.after_rate_Bps,
    )


def _restore(setter: Transport, sock: TcpSocket, mark: SocketMark) -> SocketMark | None:
    """Undo one mark; None if nothing is left to undo."""
    now = setter.set_socket(sock.fd, sock.inode)
    if now.errno:
        return None if now.errno == errno.ENOENT else replace(mark, errno=now.errno)
    dscp: int | None = None
    target_rate_Bps: int | None = None
    tos = now.before_tos
    if mark.before is not None and mark.tos is not None and tos is not None:
        changed_since = (tos ^ mark.tos) & DSCP_MASK
        dscp = None if changed_since else mark.before >> 2
    if mark.target_rate_Bps is not None and now.before_rate_Bps == mark.rate_Bps:
        target_rate_Bps = mark.before_rate_Bps or UNLIMITED
    done = setter.set_socket(sock.fd, sock.inode, dscp, target_rate_Bps)
    undone = replace(
        mark,
        target=None if dscp is None else dscp << 2 | (tos or 0) & ECN_MASK,
        tos=done.after_tos,
        errno=done.errno,
        target_rate_Bps=target_rate_Bps,
        rate_Bps=done.after_rate_Bps,
    )
    return None if undone.applied or done.errno == errno.ENOENT else undone


@dataclass(frozen=True, slots=True)
class Ecn:
    """The ECN bits to use (0, 1 or 2), and their source in words."""

    bits: int
    why: str


def choose_ecn(
    setting: str, devices: Sequence[RdmaDevice], sysfs: Path = SYSFS, configfs: Path = CONFIGFS
) -> Ecn:
    """Returns the ECN bits for this host's queue pairs: ``setting``, unless it is ``auto``.

    With ``auto``, the first of these that an active RoCE port has: the bits of the class that
    NVIDIA's driver forces (``tc/PORT/traffic_class``); those of RDMA-CM's default class; ECT(0) if
    the port reacts to congestion notifications (``ecn/roce_rp/enable``). 0 if none has one, or if
    an InfiniBand port is active.
    """
    ports = [(device, port) for device in devices for port in device.ports if port.active]
    if any(port.link_layer == "InfiniBand" for _, port in ports):
        return Ecn(0, "InfiniBand has no ECN bits, and NCCL takes the service level from them")
    if setting != "auto":
        return Ecn(int(setting), "CRUX_ROCE_ECN")
    for device, port in ports:
        found = _port_ecn(device, port, sysfs, configfs)
        if found is not None:
            return found
    return Ecn(0, "no RoCE port is known to be configured for ECN")


@functools.cache
def process_ecn() -> Ecn:
    """Returns the choice for this process's settings and host, looked up once."""
    # The lab of emulated devices reads this module in a Python without msgspec.
    from crux_torch.settings import process_settings

    return choose_ecn(process_settings().roce_ecn, read_devices())


def _port_ecn(device: RdmaDevice, port: RdmaPort, sysfs: Path, configfs: Path) -> Ecn | None:
    of_device = sysfs / "class/infiniband" / device.name
    forced = of_device / "tc" / str(port.number) / "traffic_class"
    by_default = configfs / device.name / "ports" / str(port.number) / "default_roce_tos"
    for file in (forced, by_default):
        traffic_class = class_in(file)
        # Only switches write 3.
        if traffic_class is not None and traffic_class & ECN_MASK in (1, ECT0):
            return Ecn(traffic_class & ECN_MASK, f"{file} is {traffic_class}")
    if port.interface is not None:
        enabled = sysfs / "class/net" / port.interface / "ecn/roce_rp/enable"
        if any(text(priority).strip() == "1" for priority in entries(enabled)):
            return Ecn(ECT0, f"{port.interface} reacts to congestion notifications (DCQCN)")
    return None


def class_in(file: Path) -> int | None:
    """Returns the class in an attribute of the driver (``106``, ``Global tclass=106``), or None."""
    number = text(file).partition("\n")[0].rpartition("=")[2].strip()
    return int(number) if number.isdecimal() and int(number) <= 255 else None
