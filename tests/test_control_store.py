"""Both stores against one contract, and what only the embedded one must withstand."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from control_fakes import FakeClock, Hosts, MemoryStore, until
from hypothesis import given
from hypothesis import strategies as st
from loopback import free_port
from torch.distributed import TCPStore

from crux_torch.control.host import StoreHost
from crux_torch.control.records import MAX_RECORD_BYTES
from crux_torch.control.store import MAX_LEASE_S, SharedStore
from crux_torch.control.tcp_store import GARBAGE_LEASES, Header, TcpStore, seal, unseal
from crux_torch.errors import StoreError


@pytest.fixture(scope="module")
def server() -> Iterator[StoreHost]:
    host = StoreHost(f"tcp://127.0.0.1:{free_port()}")
    host.start()
    until(lambda: host.state == "hosting", what="hosting")
    yield host
    host.stop()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "tcp"])
def store(
    request: pytest.FixtureRequest, server: StoreHost, clock: FakeClock
) -> Iterator[SharedStore]:
    made: SharedStore
    if request.param == "memory":
        made = MemoryStore(clock)
    else:
        made = TcpStore(server.host, server.port, timeout_s=10.0, clock=clock)
        for key in made.list(""):
            made.delete(key)
    yield made
    made.close()


def test_values_are_bytes_and_come_back_whole(store: SharedStore) -> None:
    value = bytes(range(256)) + b"\n\x00"
    assert store.get("a") is None
    store.put("a", value)
    assert store.get("a") == value
    store.put("a", b"")
    assert store.get("a") == b""
    store.delete("a")
    store.delete("a")
    assert store.get("a") is None


def test_list_has_the_live_keys_of_a_prefix(store: SharedStore) -> None:
    store.put("x/1", b"1")
    store.put("x/2", b"2")
    store.put("y/1", b"3")
    assert store.list("x/") == {"x/1": b"1", "x/2": b"2"}


def test_compare_and_swap(store: SharedStore) -> None:
    assert not store.compare_and_swap("k", b"old", b"new")
    assert store.get("k") is None
    assert store.compare_and_swap("k", None, b"1")
    assert not store.compare_and_swap("k", None, b"2")
    assert not store.compare_and_swap("k", b"x", b"2")
    assert store.compare_and_swap("k", b"1", b"\xff\x00")
    assert store.get("k") == b"\xff\x00"
    store.put("p", b"put")
    assert store.compare_and_swap("p", b"put", b"swapped")


def test_a_lease_ends_unless_it_is_renewed(store: SharedStore, clock: FakeClock) -> None:
    store.put("k", b"v", lease_s=6.0)
    assert store.get("k") == b"v"
    clock.advance(5.0)
    store.put("k", b"v", lease_s=6.0)
    assert store.get("k") == b"v"
    clock.advance(5.9)
    assert store.list("k") == {"k": b"v"}
    clock.advance(0.2)
    assert store.get("k") is None
    assert store.list("k") == {}
    assert store.compare_and_swap("k", None, b"next", lease_s=1.0)
    clock.advance(1.1 if isinstance(store, MemoryStore) else 0.0)
    if isinstance(store, TcpStore):
        assert store.get("k") == b"next"  # seen now for the first time
        clock.advance(1.1)
    assert store.get("k") is None


def test_what_no_reader_would_accept_is_refused(store: SharedStore) -> None:
    with pytest.raises(StoreError, match="over the limit"):
        store.put("k", b"x" * (MAX_RECORD_BYTES + 1))
    with pytest.raises(StoreError, match="lease"):
        store.compare_and_swap("k", None, b"x", lease_s=0.0)
    store.put("k", b"x" * MAX_RECORD_BYTES)
    assert len(store.get("k") or b"") == MAX_RECORD_BYTES


def test_one_of_many_racing_swaps_wins(store: SharedStore) -> None:
    wins: list[int] = []
    for attempt in range(5):
        start = threading.Barrier(6)

        def race(n: int, attempt: int = attempt, start: threading.Barrier = start) -> None:
            start.wait()
            if store.compare_and_swap(f"race{attempt}", None, b"%d" % n):
                wins.append(n)

        threads = [threading.Thread(target=race, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(wins) == attempt + 1
        assert store.get(f"race{attempt}") == b"%d" % wins[-1]


def test_readers_judge_a_lease_by_their_own_clocks(server: StoreHost) -> None:
    fast, slow = FakeClock(5.0), FakeClock(1e9)
    with_fast = TcpStore(server.host, server.port, timeout_s=10.0, clock=fast)
    with_slow = TcpStore(server.host, server.port, timeout_s=10.0, clock=slow)
    with_fast.put("own/clock", b"v", lease_s=2.0)
    assert with_fast.get("own/clock") == with_slow.get("own/clock") == b"v"
    fast.advance(2.0)
    assert with_fast.get("own/clock") is None
    assert with_slow.get("own/clock") == b"v"
    with_fast.close()
    with_slow.close()


def test_garbage_of_the_gone_is_removed_but_never_a_swapped_key(server: StoreHost) -> None:
    clock = FakeClock()
    store = TcpStore(server.host, server.port, timeout_s=10.0, clock=clock)
    raw = TCPStore(server.host, server.port, None, False, wait_for_workers=False)
    store.put("g/left", b"v", lease_s=1.0)
    store.compare_and_swap("g/slot", None, b"v", lease_s=1.0)
    assert len(store.list("g/")) == 2
    clock.advance(GARBAGE_LEASES - 0.1)
    assert store.list("g/") == {}
    assert raw.check(["g/left"])
    clock.advance(0.2)
    assert store.list("g/") == {}
    assert not raw.check(["g/left"])
    assert raw.check(["g/slot"])
    store.close()


@pytest.mark.parametrize(
    "hostile",
    [
        b"x",
        b"\n",
        b"\xff\xfe\n1",
        b"{}\nvalue",
        b'{"v":2,"w":"a","n":1}\nvalue',
        b'{"v":1,"w":"a","n":-1}\nvalue',
        b'{"v":1,"w":"a","n":1,"lease_s":0}\nvalue',
        b'{"v":1,"w":"a","n":1,"lease_s":86400}\nvalue',
        b'{"v":1,"w":"a","n":1}\nvalue',
        b"[" * 200 + b"\n",
        b'{"v":1,"w":"a","n":1,"lease_s":1}\n' + b"x" * (MAX_RECORD_BYTES + 1),
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_foreign_bytes_count_as_absent_and_can_be_replaced(
    server: StoreHost, hostile: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = TcpStore(server.host, server.port, timeout_s=10.0)
    raw = TCPStore(server.host, server.port, None, False, wait_for_workers=False)
    raw.set("hostile", hostile)
    assert raw.get("hostile") == hostile, "a set is not acknowledged, a get is"
    assert store.get("hostile") is None
    assert store.list("hostile") == {}
    assert caplog.text.count("ignoring 'hostile'") == 1
    assert store.compare_and_swap("hostile", None, b"mine")
    assert store.get("hostile") == b"mine"
    store.close()


@given(st.binary(max_size=400))
def test_unseal_refuses_or_returns_and_nothing_else(raw: bytes) -> None:
    try:
        header, value = unseal(raw)
    except (ValueError, msgspec.MsgspecError):
        return
    assert isinstance(header, Header)
    assert raw.endswith(value)


@given(
    st.binary(max_size=300),
    st.integers(0, 1 << 60),
    st.floats(0.001, MAX_LEASE_S),
    st.booleans(),
)
def test_seal_and_unseal_are_inverse(value: bytes, n: int, lease_s: float, swapped: bool) -> None:
    header = Header(w="0123456789abcdef", n=n, lease_s=lease_s, swapped=swapped)
    assert unseal(seal(header, value)) == (header, value)


def test_a_dead_endpoint_fails_quietly_and_at_once_while_backing_off(
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock = FakeClock()
    store = TcpStore("127.0.0.1", free_port(), timeout_s=5.0, clock=clock)
    with pytest.raises(StoreError, match="refused"):
        store.get("k")
    with pytest.raises(StoreError, match="next attempt"):
        store.get("k")
    clock.advance(60.0)
    with pytest.raises(StoreError, match=r"refused[^;]*$"):
        store.get("k")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k")
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_calls_end_while_the_server_is_stopped_and_work_when_it_goes_on() -> None:
    with Hosts(1) as hosts:
        hosts.wait_for_roles(1)
        store = TcpStore("127.0.0.1", hosts.port, timeout_s=0.5)
        until(lambda: _works(store), what="first answer")
        os.kill(hosts.hosting(), signal.SIGSTOP)
        # The signal stops a process of several threads a moment after kill() returns.
        until(lambda: not _works(store), what="the server stands still")
        before = threading.active_count()
        for _ in range(20):
            with pytest.raises(StoreError):
                store.get("k")
            time.sleep(0.05)
        assert threading.active_count() <= before + 5
        os.kill(hosts.hosting(), signal.SIGCONT)
        until(lambda: _works(store), what="answer after SIGCONT")
        store.close()


def _works(store: SharedStore) -> bool:
    try:
        store.put("k", b"v")
        return store.get("k") == b"v"
    except StoreError:
        return False
