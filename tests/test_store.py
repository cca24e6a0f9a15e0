"""Every store against one contract, and what clients of the embedded one must withstand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_fakes import FakeClock, Hosts, MemoryStore, until
from etcd_server import Etcd, needs_etcd, wait_ready
from loopback import free_port
from store_server import ServerThread, secret_file

from crux_torch.errors import SettingsError, StoreError
from crux_torch.store.client import MAX_LOOKS
from crux_torch.store.endpoint import open_store
from crux_torch.store.secret import read_secret
from crux_torch.store.shared_store import MAX_KEY_BYTES, MAX_VALUE_BYTES, SharedStore


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        wait_ready(etcd)
        yield etcd


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
        until(lambda: _works(over_etcd), what="an answer")
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
        pytest.skip("no test moves an etcd's clock: see test_store_etcd.py")
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


def test_without_the_secret_nobody_gets_an_answer() -> None:
    with ServerThread(b"the right secret") as sealed, ServerThread() as open_:
        good = sealed.client()
        good.put("k", b"v")
        for secret, says in (
            (b"", "asks for a secret"),
            (b"the wrong secret", "is not its secret"),
        ):
            bad = sealed.client(secret)
            with pytest.raises(StoreError, match=says):
                bad.get("k")
            bad.close()
        # A server that has no secret, such as one that took the port, gets nothing either.
        lured = open_.client(b"the right secret")
        with pytest.raises(StoreError, match="asks for no secret"):
            lured.put("k", b"v")
        assert good.get("k") == b"v"
        assert open_.server.clients == 0
        for client in (good, lured):
            client.close()


def test_a_secret_is_its_users_alone(tmp_path: Path) -> None:
    path = Path(secret_file(tmp_path))
    assert read_secret(str(path)) == b"0123456789abcdef"
    assert read_secret("") == b""
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="its user's alone"):
        read_secret(str(path))
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(SettingsError, match="5 bytes"):
        read_secret(str(path))
    with pytest.raises(SettingsError, match="No such file"):
        read_secret(str(path) + "x")
    with pytest.raises(SettingsError, match="not a folder"):
        read_secret(str(tmp_path))


SQUATTERS: dict[str, Callable[[socket.socket], object]] = {
    "a length of 3 GiB": lambda peer: peer.sendall(b"\xc0\0\0\0" + b"x" * 99),
    "junk": lambda peer: peer.sendall(b"\0\0\0\x05junk!"),
    "another protocol": lambda peer: peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n"),
    "the end": lambda peer: peer.close(),
    "nothing": lambda peer: None,
}


@pytest.mark.parametrize("what", SQUATTERS)
def test_whoever_took_the_port_costs_a_bounded_time(what: str) -> None:
    peers = []
    with socket.create_server(("127.0.0.1", 0)) as squatter:

        def serve() -> None:
            peers.append(squatter.accept()[0])
            SQUATTERS[what](peers[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        endpoint = f"tcp://127.0.0.1:{squatter.getsockname()[1]}"
        store = open_store(endpoint, timeout_s=0.3)
        with pytest.raises(StoreError):
            store.get("k")
        store.close()
        thread.join(10)


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
        thread.join(10)
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
            return _works(store)

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
            thread.join(20)
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


@pytest.mark.slow
def test_calls_end_while_the_server_is_stopped_and_work_when_it_goes_on() -> None:
    with Hosts(1) as hosts:
        hosts.wait_for_roles(1)
        store = open_store(f"tcp://127.0.0.1:{hosts.port}", timeout_s=0.5)
        until(lambda: _works(store), what="first answer")
        os.kill(hosts.server(), signal.SIGSTOP)
        until(lambda: not _works(store), what="the server stands still")
        for _ in range(20):
            with pytest.raises(StoreError):
                store.get("k")
            time.sleep(0.05)
        os.kill(hosts.server(), signal.SIGCONT)
        until(lambda: _works(store), what="answer after SIGCONT")
        store.close()


def _works(store: SharedStore) -> bool:
    try:
        store.put("k", b"v")
        return store.get("k") == b"v"
    except StoreError:
        return False
