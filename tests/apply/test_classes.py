"""Marking and reverting connections, with plain sockets in place of the inner backend's."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from dscp_maps import CLASS_SELECTORS
from loopback import has_ipv6

from crux_torch.apply.dscp import ClassReport, TrafficClass
from crux_torch.apply.transport import SocketSetting, Transport, TransportError
from crux_torch.backend.tcp_sockets import Ownership, SocketTable, TcpSocket

LEVEL = 5
TOS = CLASS_SELECTORS[LEVEL] << 2
SO_MAX_PACING_RATE = 47


class FixedOwnership(Ownership):
    """Owns exactly the sockets named to it."""

    def __init__(self, *sockets: socket.socket) -> None:
        super().__init__()
        self.inodes = {os.fstat(s.fileno()).st_ino for s in sockets}

    def owned(self) -> list[TcpSocket]:
        return [s for s in SocketTable().scan().values() if s.inode in self.inodes]


class FakeKernel:
    """One socket whose ECN bits can be chosen, and which may refuse to be set."""

    def __init__(self, ecn: int = 0) -> None:
        self.tos = self.original = ecn
        self.refuses = False

    def set_socket(
        self, fd: int, inode: int, dscp: int | None = None, rate_Bps: int | None = None
    ) -> SocketSetting:
        before, error = self.tos, 0
        if dscp is not None:
            if self.refuses:
                error = errno.EPERM
            else:
                self.tos = dscp << 2 | before & 3
        return SocketSetting(error, self.original, before, self.tos)


@contextlib.contextmanager
def _pair(host: str = "127.0.0.1", mapped: bool = False) -> Iterator[list[socket.socket]]:
    family = socket.AF_INET6 if mapped or ":" in host else socket.AF_INET
    bind = "::" if mapped else host
    with (
        socket.create_server((bind, 0), family=family, dualstack_ipv6=mapped) as listener,
        socket.create_connection((host, listener.getsockname()[1])) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            yield [client, accepted]


@pytest.fixture
def pair():
    with _pair() as both:
        yield both


@pytest.fixture
def ours(pair):
    return pair[0]


@pytest.fixture
def others(pair):
    return pair[1]


@pytest.fixture
def traffic_class(ours):
    return TrafficClass(FixedOwnership(ours))


def _tos(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)


def _tclass(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)


def _pacing(sock: socket.socket) -> int | None:
    raw = sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)
    rate_Bps = int.from_bytes(raw, sys.byteorder)
    return None if rate_Bps == 2**64 - 1 else rate_Bps


def test_marks_only_what_is_owned_and_reverts_it(ours, others, traffic_class):
    report = traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    assert (report.level, report.dscp) == (LEVEL, CLASS_SELECTORS[LEVEL])
    assert (report.applied, report.refused, report.error) == (1, 0, "")
    assert report.marks[0].local == ours.getsockname()
    assert (_tos(ours), _tos(others)) == (TOS, 0)
    [mine] = [c for c in Transport.load().connections() if c.id == report.marks[0].inode]
    assert (mine.dscp, mine.how, mine.error) == (report.dscp, "live_option", 0)
    assert traffic_class.status() == report
    assert traffic_class.revert().marks == ()
    assert _tos(ours) == 0
    assert traffic_class.status().level is None


@pytest.mark.skipif(not has_ipv6(), reason="::1 can't be bound on this machine")
def test_ipv6_gets_its_traffic_class():
    with _pair("::1") as (ours, _others):
        traffic_class = TrafficClass(FixedOwnership(ours))
        assert traffic_class.apply_level(LEVEL, CLASS_SELECTORS).applied == 1
        assert _tclass(ours) == TOS
        traffic_class.revert()
        assert _tclass(ours) == 0


def test_an_ipv4_mapped_connection_gets_tos():
    with _pair("127.0.0.1", mapped=True) as (_client, accepted):
        assert accepted.family == socket.AF_INET6
        traffic_class = TrafficClass(FixedOwnership(accepted))
        assert traffic_class.apply_level(LEVEL, CLASS_SELECTORS).applied == 1
        assert _tos(accepted) == TOS


def test_reverts_to_what_was_there_before_and_keeps_it_over_several_levels(ours):
    ours.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x28)
    traffic_class = TrafficClass(FixedOwnership(ours))
    for level in (1, 7, 7, 0):
        report = traffic_class.apply_level(level, CLASS_SELECTORS)
        assert _tos(ours) == CLASS_SELECTORS[level] << 2
        assert report.marks[0].before == 0x28
    traffic_class.apply_level(None, CLASS_SELECTORS)
    assert _tos(ours) == 0x28
    assert traffic_class.revert().marks == ()
    assert _tos(ours) == 0x28


def test_keeps_the_ecn_bits(ours):
    # Linux keeps the ECN bits of a TCP socket for itself, so a fake kernel has to show them.
    kernel = FakeKernel(ecn=3)
    traffic_class = TrafficClass(FixedOwnership(ours), lambda: kernel)
    report = traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    assert (report.applied, report.marks[0].target) == (1, TOS | 3)
    assert kernel.tos == TOS | 3
    assert traffic_class.revert().marks == ()
    assert kernel.tos == 3


def test_marks_again_what_lost_its_class_when_the_level_is_applied_again(ours, traffic_class):
    traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    ours.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0)
    traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    assert _tos(ours) == TOS


def test_reverting_leaves_a_class_that_others_chose_since(ours, traffic_class):
    traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    ours.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x48)
    assert traffic_class.revert().marks == ()
    assert _tos(ours) == 0x48


def test_refresh_marks_later_connections_and_nothing_without_a_level():
    with _pair() as (first, _), _pair() as (second, _):
        ownership = FixedOwnership(first)
        traffic_class = TrafficClass(ownership)
        traffic_class.refresh()
        assert _tos(first) == 0
        traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
        ownership.inodes.add(os.fstat(second.fileno()).st_ino)
        assert traffic_class.refresh().applied == 2
        assert _tos(second) == TOS
        traffic_class.revert()
        traffic_class.refresh()
        assert (_tos(first), _tos(second)) == (0, 0)


def test_a_reused_descriptor_is_not_touched(ours, others, traffic_class):
    traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    others.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, TOS)
    os.dup2(others.fileno(), ours.fileno())
    assert traffic_class.revert().marks == ()
    assert _tos(others) == TOS


def test_a_refusal_is_reported_with_its_errno_and_tried_again(ours):
    kernel = FakeKernel()
    traffic_class = TrafficClass(FixedOwnership(ours), lambda: kernel)
    kernel.refuses = True
    report = traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    assert (report.applied, report.refused) == (0, 1)
    assert report.marks[0].errno == errno.EPERM
    assert kernel.tos == 0
    kernel.refuses = False
    assert traffic_class.refresh().applied == 1
    assert kernel.tos == TOS
    kernel.refuses = True
    report = traffic_class.revert()
    assert (report.level, report.refused) == (None, 1)
    assert kernel.tos == TOS
    kernel.refuses = False
    assert traffic_class.revert().marks == ()
    assert kernel.tos == 0


def paced(sock: socket.socket, rate_Bps: int) -> dict[int, int]:
    return {os.fstat(sock.fileno()).st_ino: rate_Bps}


def test_a_rate_limits_and_is_taken_back(ours, others, traffic_class):
    report = traffic_class.apply_rates(paced(ours, 5_000_000))
    assert (report.rates_Bps, report.applied) == (paced(ours, 5_000_000), 1)
    assert (report.level, report.error) == (None, "")
    assert (_pacing(ours), _pacing(others)) == (5_000_000, None)
    report = traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    assert (report.rates_Bps, report.applied) == (paced(ours, 5_000_000), 1)
    assert (_tos(ours), _pacing(ours)) == (TOS, 5_000_000)
    assert traffic_class.apply_rates({}).applied == 1
    assert (_tos(ours), _pacing(ours)) == (TOS, None)
    traffic_class.apply_rates(paced(ours, 7_000_000))
    assert traffic_class.revert() == ClassReport()
    assert (_tos(ours), _pacing(ours)) == (0, None)


def test_a_rate_returns_to_the_limit_that_was_there_unless_others_changed_it(ours):
    inode = os.fstat(ours.fileno()).st_ino
    ours.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 9_000_000)
    traffic_class = TrafficClass(FixedOwnership(ours))
    assert traffic_class.apply_rates(paced(ours, 5_000_000)).applied == 1
    traffic_class.revert()
    assert _pacing(ours) == 9_000_000
    traffic_class.apply_rates(paced(ours, 5_000_000))
    ours.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 6_000_000)
    assert traffic_class.revert().marks == ()
    assert _pacing(ours) == 6_000_000
    assert Transport.load().set_socket(ours.fileno(), inode).original_rate_Bps == 9_000_000


@pytest.mark.parametrize("rate_Bps", [0, -1])
def test_what_is_no_rate_changes_nothing_and_says_so(rate_Bps, ours, traffic_class):
    traffic_class.apply_rates(paced(ours, 5_000_000))
    report = traffic_class.apply_rates(paced(ours, rate_Bps))
    assert str(rate_Bps) in report.error
    assert (report.rates_Bps, _pacing(ours)) == (paced(ours, 5_000_000), 5_000_000)


def test_without_the_library_the_report_says_so_and_nothing_is_touched():
    def missing() -> Transport:
        raise TransportError("libcrux_transport.so: build it")

    with _pair() as (ours, _):
        traffic_class = TrafficClass(FixedOwnership(ours), missing)
        report = traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
        assert (report.applied, report.refused) == (0, 0)
        assert report.error == "libcrux_transport.so: build it"
        assert "build it" in traffic_class.apply_rates(paced(ours, 1000)).error
        assert "build it" in traffic_class.refresh().error
        assert _tos(ours) == 0
        assert traffic_class.revert() == ClassReport()


@pytest.mark.parametrize(
    ("level", "dscp_map"), [(8, CLASS_SELECTORS), (-1, CLASS_SELECTORS), (0, ()), (1, (0, 64))]
)
def test_a_level_without_a_dscp_changes_nothing_and_says_so(level, dscp_map, ours, traffic_class):
    traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    report = traffic_class.apply_level(level, dscp_map)
    assert str(level) in report.error
    assert (report.level, _tos(ours)) == (LEVEL, TOS)


def test_sockets_that_cannot_be_listed_are_reported(monkeypatch, ours):
    ownership = FixedOwnership(ours)
    traffic_class = TrafficClass(ownership)

    def fails():
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(ownership, "owned", fails)
    report = traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    assert "too many open files" in report.error
    assert traffic_class.revert().error == ""


def test_a_forked_child_leaves_its_parents_connections_alone(ours, traffic_class):
    traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    # Held as if another thread were marking at the moment of the fork.
    traffic_class._lock.acquire()
    child = os.fork()
    if child == 0:
        traffic_class.revert()
        os._exit(0 if traffic_class.status().level is None else 1)
    traffic_class._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _tos(ours) == TOS


def test_threads_may_apply_refresh_and_revert_at_once(ours, traffic_class):
    failures = []

    def work(step) -> None:
        try:
            for _ in range(100):
                step()
        except Exception as error:
            failures.append(error)

    steps = [
        lambda: traffic_class.apply_level(LEVEL, CLASS_SELECTORS),
        traffic_class.refresh,
        traffic_class.revert,
    ]
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    traffic_class.revert()
    assert _tos(ours) == 0
