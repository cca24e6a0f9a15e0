"""Finding this process's TCP sockets, and what gloo's ranks publish about their listeners."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from descriptors import open_descriptors
from hypothesis import given
from hypothesis import strategies as st
from loopback import has_ipv6

from crux_torch.backend import tcp_sockets
from crux_torch.backend.tcp_sockets import SocketTable, TcpSocket, borrow, endpoint


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


@contextlib.contextmanager
def _connection(host: str = "127.0.0.1", family: int = socket.AF_INET) -> Iterator[list]:
    """A listener, a client, and the connection that the listener accepted."""
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            yield [listener, client, accepted]


def test_finds_listeners_and_both_ends_of_a_connection():
    with _connection() as (listener, client, accepted):
        found = SocketTable().scan()
        assert found[_inode(listener)].listening
        assert found[_inode(client)] == TcpSocket(
            client.fileno(),
            _inode(client),
            socket.AF_INET,
            client.getsockname(),
            listener.getsockname(),
        )
        assert found[_inode(accepted)].peer == client.getsockname()


def test_passes_over_what_is_not_tcp():
    left, right = socket.socketpair()
    with (
        left,
        right,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        open(os.devnull) as file,
    ):
        udp.connect(("127.0.0.1", 9))
        found = SocketTable().scan()
        inodes = {_inode(left), _inode(right), _inode(udp), os.fstat(file.fileno()).st_ino}
        assert not inodes & set(found)


def test_an_ipv4_mapped_connection_is_written_as_ipv4():
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            found = SocketTable().scan()
            end = found[_inode(accepted)]
            assert end.family == socket.AF_INET6
            assert end.peer == client.getsockname()


@pytest.mark.skipif(not has_ipv6(), reason="::1 can't be bound on this machine")
def test_an_ipv6_connection_is_found():
    with _connection("::1", socket.AF_INET6) as (_, client, _accepted):
        assert SocketTable().scan()[_inode(client)].local[0] == "::1"


def test_a_socket_that_connects_later_is_found_then():
    table = SocketTable()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client,
    ):
        assert _inode(client) not in table.scan()
        client.connect(listener.getsockname())
        assert table.scan()[_inode(client)].peer == listener.getsockname()


def test_a_closed_socket_is_forgotten_and_its_descriptor_seen_anew():
    table = SocketTable()
    with _connection() as (listener, client, _accepted):
        fd, inode = client.fileno(), _inode(client)
        assert inode in table.scan()
        client.close()
        replacement = socket.create_connection(listener.getsockname())
        with replacement:
            if replacement.fileno() != fd:
                os.dup2(replacement.fileno(), fd)
            found = table.scan()
            assert inode not in found
            assert _inode(replacement) in found
            assert borrow(fd, inode) is None
            if replacement.fileno() != fd:
                os.close(fd)


def test_an_unchanged_socket_is_not_looked_into_again(monkeypatch):
    table = SocketTable()
    with _connection() as (_, client, _accepted):
        table.scan()
        inspected = []
        real = tcp_sockets._inspect
        monkeypatch.setattr(
            tcp_sockets, "_inspect", lambda fd, i: (inspected.append(i), real(fd, i))[1]
        )
        found = table.scan()
        assert _inode(client) in found
        assert not set(inspected) & set(found)


def test_borrowing_leaves_the_owners_blocking_mode_under_a_default_timeout():
    before = socket.getdefaulttimeout()
    with _connection() as (_, client, _accepted):
        client.setblocking(True)
        fd, inode = client.fileno(), _inode(client)
        try:
            socket.setdefaulttimeout(5.0)
            # The trap is real: a plain duplicate turns the owner's descriptor non-blocking.
            with socket.socket(fileno=os.dup(fd)):
                assert not os.get_blocking(fd)
            os.set_blocking(fd, True)
            borrowed = borrow(fd, inode)
            assert borrowed is not None
            with borrowed:
                assert os.get_blocking(fd)
            SocketTable().scan()
            assert os.get_blocking(fd)
        finally:
            socket.setdefaulttimeout(before)


def test_borrowing_leaks_no_descriptor():
    with _connection() as (_, client, _accepted):
        fd, inode = client.fileno(), _inode(client)
        table = SocketTable()
        table.scan()
        before = open_descriptors()
        for _ in range(50):
            table.scan()
            SocketTable().scan()
            assert borrow(fd, inode + 1) is None
            borrowed = borrow(fd, inode)
            assert borrowed is not None
            borrowed.close()
        assert open_descriptors() <= before
    assert borrow(1 << 20, inode) is None


def test_scans_while_another_thread_opens_and_closes():
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            with _connection():
                pass

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        table = SocketTable()
        with _connection() as (_, client, _accepted):
            for _ in range(300):
                assert table.scan()[_inode(client)].local == client.getsockname()
    finally:
        stop.set()
        thread.join(60)


def _published(host: bytes, family: int, ip: str, port: int, ranks: int) -> bytes:
    packed = socket.inet_pton(family, ip)
    flow = b"\0" * 4 if family == socket.AF_INET6 else b""
    address = struct.pack("=H", family) + struct.pack("!H", port) + flow + packed
    address = address.ljust(128, b"\xaa") + struct.pack("=q", -1)
    value = struct.pack("=Q", len(host)) + host + struct.pack("=Q", len(address)) + address
    return value + b"".join(struct.pack("=q", r) for r in range(ranks))


@given(
    host=st.binary(max_size=64),
    ip=st.one_of(
        st.ip_addresses(v=4).map(lambda a: (socket.AF_INET, str(a))),
        st.ip_addresses(v=6).map(lambda a: (socket.AF_INET6, str(a))),
    ),
    port=st.integers(0, 65535),
    ranks=st.integers(0, 4),
)
def test_reads_the_listener_that_a_rank_published(host, ip, port, ranks):
    family, address = ip
    value = _published(host, family, address, port, ranks)
    normal = socket.inet_ntop(family, socket.inet_pton(family, address))
    assert tcp_sockets.published_listener(value) == endpoint((normal, port))


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_passed_over(value):
    found = tcp_sockets.published_listener(value)
    assert found is None or (isinstance(found[0], str) and 0 <= found[1] <= 65535)


@given(st.integers(0, 60))
def test_a_truncated_value_never_raises(length):
    value = _published(b"host", socket.AF_INET6, "::1", 4711, 2)[:length]
    assert tcp_sockets.published_listener(value) in (None, ("::1", 4711))
