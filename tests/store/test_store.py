"""Every store against one contract, and what clients of the embedded one must withstand."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from control_fakes import FakeClock, MemoryStore, until
from etcd_server import needs_etcd
from loopback import free_port
from store_server import ServerThread, works

from crux_torch.errors import StoreError
from crux_torch.store import MAX_KEY_BYTES, MAX_VALUE_BYTES, SharedStore
from crux_torch.store.client import MAX_LOOKS
from crux_torch.store.endpoint import open_store


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(
    params=[
        "memory",
        "embedded",
        "sealed",
        pytest.param("etcd", marks=[needs_etcd, pytest.mark.slow]),
    ]
)
def store(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[SharedStore]:
    if request.param == "memory":
        yield MemoryStore(clock)
        return
    if request.param == "etcd":
        endpoints = request.getfixturevalue("etcd").endpoints
        over_etcd = open_store(f"etcd://{endpoints}/{time.monotonic_ns()}", timeout_s=60.0)
        until(lambda: works(over_etcd), what="an answer")
        over_etcd.delete("k")
        yield over_etcd
        over_etcd.close()
        return
    secret = b"" if request.param == "embedded" else b"a secret of the test"
    with ServerThread(secret, clock) as server:
        client = server.client()
        yield client
        client.close()


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
    found = store.list("x/")
    assert found == {"x/1": b"1", "x/2": b"2"}
    store.put("x/3", b"3")
    assert store.list("x/") == {**found, "x/3": b"3"}
    assert len(found) == 2  # what was read stays as it was


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
    if "etcd" in getattr(getattr(store, "_connector", None), "where", ""):
        pytest.skip("no test moves an etcd's clock: see test_etcd.py")
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
    assert store.get("k") == b"next"
    clock.advance(1.1)
    assert store.get("k") is None


def test_what_no_reader_would_accept_is_refused(store: SharedStore) -> None:
    with pytest.raises(StoreError, match="over the limit"):
        store.put("k", b"x" * (MAX_VALUE_BYTES + 1))
    with pytest.raises(StoreError, match="lease"):
        store.compare_and_swap("k", None, b"x", lease_s=0.0)
    store.put("k", b"x" * MAX_VALUE_BYTES)
    assert len(store.get("k") or b"") == MAX_VALUE_BYTES


def test_each_of_two_clients_sees_what_the_other_does(clock: FakeClock) -> None:
    with ServerThread(clock=clock) as server:
        one, other = server.client(), server.client()
        for n in range(200):
            one.put(f"k/{n % 7}", b"%d" % n)
            assert other.list("k/") == one.list("k/")
            assert other.get(f"k/{n % 7}") == b"%d" % n
            if n % 5 == 0:
                other.delete(f"k/{n % 3}")
                assert f"k/{n % 3}" not in one.list("k/")
                assert one.get(f"k/{n % 3}") is None
        one.put("k/leased", b"", lease_s=1.0)
        assert "k/leased" in other.list("k/")
        clock.advance(2.0)
        assert "k/leased" not in other.list("k/")
        for n in range(2 * MAX_LOOKS):
            assert one.get(f"absent/{n}") is None
        one.close()
        other.close()


def test_many_values_come_in_pages() -> None:
    with ServerThread() as server:
        writers = [server.client() for _ in range(4)]
        values = {f"k/{n}": bytes([n]) * (600 << 10) for n in range(40)}
        for n, (key, value) in enumerate(values.items()):
            writers[n % 4].put(key, value)
        reader = server.client()
        assert reader.list("k/") == values
        writers[0].delete("k/3")
        del values["k/3"]
        assert reader.list("k/") == values
        for client in (reader, *writers):
            client.close()


def test_a_look_where_nothing_changed_moves_a_few_bytes() -> None:
    with ServerThread() as server:
        store = server.client()
        store.put("k", b"x" * MAX_VALUE_BYTES, lease_s=60.0)
        assert len(store.get("k") or b"") == MAX_VALUE_BYTES
        received: list[int] = []

        class Counting(socket.socket):
            def recv_into(self, *args: object) -> int:  # type: ignore[override]
                received.append(super().recv_into(*args))  # type: ignore[arg-type]
                return received[-1]

        inner = store._connection._frames._socket  # type: ignore[union-attr]
        counting = Counting(fileno=inner.detach())
        store._connection._frames._socket = counting  # type: ignore[union-attr]
        store.put("k", b"x" * MAX_VALUE_BYTES, lease_s=60.0)
        received.clear()
        assert len(store.get("k") or b"") == MAX_VALUE_BYTES
        assert sum(received) < 100
        store.close()


def test_an_empty_successor_makes_clients_forget() -> None:
    with ServerThread() as first:
        port = first.port
        store = first.client()
        for n in range(10):
            store.put(f"k/{n}", b"old")
        assert len(store.list("k/")) == 10
        store._drop()
        store._connector._address = ("127.0.0.1", free_port())  # type: ignore[attr-defined]
    with ServerThread() as second:
        store._connector._address = ("127.0.0.1", second.port)  # type: ignore[attr-defined]
        assert second.port != port
        assert store.list("k/") == {}
        store.put("k/1", b"new")
        assert store.list("k/") == {"k/1": b"new"}
        store.close()


def test_slow_bytes_do_not_stretch_a_call() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as squatter:

        def serve() -> None:
            peer, _ = squatter.accept()
            with peer:
                while not stop.wait(0.05):
                    peer.sendall(b"\0")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = open_store(f"tcp://127.0.0.1:{squatter.getsockname()[1]}", timeout_s=0.12)
        with pytest.raises(StoreError):
            store.get("k")
        stop.set()
        thread.join(60)
        store.close()


def test_a_name_that_takes_long_to_look_up_does_not_stretch_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    with ServerThread() as server:

        def slow(*args: object, **options: object) -> object:
            release.wait(60)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.port))]

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        clock = FakeClock()
        store = open_store("tcp://a.name.invalid:1", timeout_s=0.2, clock=clock)
        for _ in range(2):
            with pytest.raises(StoreError, match="still looked up"):
                store.get("k")
            assert sum(t.name == "crux-names" for t in threading.enumerate()) == 1
            clock.advance(10.0)
        release.set()

        def answered() -> bool:
            clock.advance(10.0)
            return works(store)

        until(answered, what="an answer")
        store.close()


def test_neither_server_nor_client_import_torch() -> None:
    code = (
        "import sys, crux_torch.store.server, crux_torch.store.host; "
        "print(sorted({'torch', 'numpy', 'grpc', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_keys_that_no_store_would_take(store: SharedStore) -> None:
    with pytest.raises(StoreError, match="key"):
        store.put("x" * (MAX_KEY_BYTES + 1), b"")
    with pytest.raises(StoreError, match="key"):
        store.put("ü" * (MAX_KEY_BYTES // 2 + 1), b"")


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
            thread.join(60)
        assert len(wins) == attempt + 1
        assert store.get(f"race{attempt}") == b"%d" % wins[-1]


def test_a_dead_endpoint_fails_quietly_and_at_once_while_backing_off(
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock = FakeClock()
    store = open_store(f"tcp://127.0.0.1:{free_port()}", timeout_s=5.0, clock=clock)
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
