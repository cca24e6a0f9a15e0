"""What one client of the embedded store does never harms another, nor takes more than its share."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeClock, until
from hypothesis import given
from hypothesis import strategies as st
from loopback import free_port
from store_server import ServerThread

from crux_torch.errors import StoreError
from crux_torch.store import (
    MAX_KEY_BYTES,
    MAX_STORE_BYTES,
    MAX_VALUE_BYTES,
    check_write,
    contents,
    server,
)
from crux_torch.store.client import Look, StoreClient
from crux_torch.store.contents import CLIENT_KEYS, MAX_DELETED, Client, Contents, Journal
from crux_torch.store.endpoint import open_store
from crux_torch.store.frames import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    PAGE_BYTES,
    PROTOCOL_VERSION,
    Changes,
    Delete,
    Done,
    Hello,
    Put,
    Read,
    Refused,
    Sealer,
    Swap,
    pack,
    request_decoder,
    unpack_request,
)
from crux_torch.store.host import StoreHost

HELLO = pack(Hello(PROTOCOL_VERSION, b"n" * NONCE_BYTES))


@pytest.fixture
def running() -> Iterator[ServerThread]:
    with ServerThread() as thread:
        yield thread


def greeted(port: int) -> socket.socket:
    """The socket of a client that has greeted."""
    client = open_store(f"tcp://127.0.0.1:{port}", timeout_s=60.0)
    client.clients()
    connection = client._connection
    assert connection is not None
    return connection._frames._socket


def is_closed(peer: socket.socket) -> bool:
    peer.settimeout(0.0)
    try:
        while peer.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize(
    "bytes_",
    [
        b"\xc0\x00\x00\x00" + b"x" * 99,
        b"\x00\x00\x00\x05junk!",
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_REQUEST_BYTES + 1).to_bytes(4, "big"),
        pack(Put("k", b"v", 9.0)),
        b"\x00\x00\x00\x00",
    ],
    ids=["3 GiB", "junk", "HTTP", "too long", "no greeting", "empty"],
)
def test_what_is_no_greeting_ends_the_connection(running: ServerThread, bytes_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as peer:
        peer.sendall(bytes_)
        until(lambda: is_closed(peer), what="the end")
    store = running.client()
    assert store.get("k") is None
    store.close()


@pytest.mark.parametrize(
    "body",
    [
        b"\x93\xa3put\xa2\xff\xfe\xc4\x01v\xc0",  # a key that is not UTF-8
        b"\x91\xa4what",
        b"\x94\xa3put\xa1k\xc4\x01v\xcb" + b"\x7f\xf8" + b"\0" * 6,  # a lease that is no number
        b"\x94\xa3put\xa1k\xc4\x01v\xcb" + struct.pack(">d", 601.0),  # longer than any lease
        b"\x94\xa3put\xa1k\xc4\x01v\xc0",  # no lease
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=["not UTF-8", "unknown", "nan", "too long a lease", "no lease", "an endless list"],
)
def test_what_is_no_request_ends_the_connection_of_its_sender(
    running: ServerThread, body: bytes
) -> None:
    other = running.client()
    other.put("k", b"v")
    with greeted(running.port) as peer:
        peer.sendall(len(body).to_bytes(4, "big") + body)
        until(lambda: is_closed(peer), what="the end")
    assert other.get("k") == b"v"
    assert other.list("") == {"k": b"v"}
    other.close()


@pytest.mark.slow
def test_strangers_and_slow_bytes_are_ended_and_harm_nobody(
    running: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GREETING_S", "REQUEST_S"):
        monkeypatch.setattr(server, name, 1.0)
    store = running.client()
    store.put("k", b"v")
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            for _ in range(server.MAX_STRANGERS + 50)
        ]
        assert store.get("k") == b"v"
        slow = stack.enter_context(greeted(running.port))
        slow.sendall((1 << 20).to_bytes(4, "big") + b"x")
        until(lambda: all(map(is_closed, strangers)), what="the end of the strangers")
        until(lambda: is_closed(slow), what="the end of the slow one")
        assert store.get("k") == b"v"
        assert running.server.clients == 1
    assert running.server.unfinished_bytes == 0
    store.close()


def test_idle_clients_make_room_where_there_are_too_many(
    running: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.server, "_max_sessions", 20)
    store = running.client()
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            store.put("k", b"v")
            stack.enter_context(greeted(running.port))
        assert store.get("k") == b"v"
        assert running.server.clients <= 21
    store.close()


@pytest.mark.slow
def test_clients_that_do_not_take_their_answers_are_ended(
    running: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STUCK_S", 1.0)
    monkeypatch.setattr(server, "MAX_STUCK", 4)
    store = running.client()
    for n in range(4):
        store.put(f"k/{n}", b"x" * MAX_VALUE_BYTES)
    ask = pack(Read("k/", True, 0))
    with contextlib.ExitStack() as stack:
        stuck = [stack.enter_context(greeted(running.port)) for _ in range(8)]
        for peer in stuck:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.sendall(ask * 50)
        until(lambda: len(running.server.stuck) > 0, what="one that is stuck")
        until(lambda: running.server.clients == 1, what="their end")
        assert len(store.list("k/")) == 4
    assert not running.server.stuck
    store.close()


def test_nobody_holds_more_than_a_share(running: ServerThread) -> None:
    greedy, honest = running.client(), running.client()
    for n in range(CLIENT_KEYS):
        greedy.put(f"greedy/{n}", b"v")
    with pytest.raises(StoreError, match=f"holds {CLIENT_KEYS} keys"):
        greedy.put("greedy/more", b"v")
    greedy.put("greedy/0", b"another value")
    greedy.delete("greedy/0")
    greedy.put("greedy/more", b"v")
    honest.put("honest", b"v")
    greedy.close()
    honest.close()


def test_nobody_changes_more_a_second_than_a_share() -> None:
    clock = FakeClock()
    with ServerThread(clock=clock) as running:
        greedy, honest = running.client(), running.client()
        sent = contents.CHANGE_BURST_BYTES // (MAX_VALUE_BYTES + contents.KEY_BYTES + 1)
        for n in range(sent):
            greedy.put("k", bytes([n]) * MAX_VALUE_BYTES)
        with pytest.raises(StoreError, match="too much a second"):
            greedy.put("k", bytes([sent]) * MAX_VALUE_BYTES)
        # A renewal changes nothing.
        for _ in range(20):
            greedy.put("k", bytes([sent - 1]) * MAX_VALUE_BYTES)
        honest.put("honest", b"v")
        clock.advance(10.0)
        greedy.put("k", b"v")
        greedy.close()
        honest.close()


def test_a_full_store_drops_first_what_the_gone_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_STORE_KEYS", 10)
    clock = FakeClock()
    kept = Contents(clock)
    gone, here, late = Client(clock()), Client(clock()), Client(clock())
    for n in range(4):
        assert kept.answer(Put(f"gone/{n}", b"", 60.0), gone) == Done(1)
        assert kept.answer(Put(f"here/{n}", b"", 60.0), here) == Done(1)
    kept.leave(gone)
    for n in range(6):
        assert kept.answer(Put(f"late/{n}", b"", 60.0), late) == Done(1)
    refused = kept.answer(Put("late/6", b"", 60.0), late)
    assert isinstance(refused, Refused)
    assert sorted(kept.journal) == sorted(
        [*(f"here/{n}" for n in range(4)), *(f"late/{n}" for n in range(6))]
    )
    clock.advance(61.0)
    assert kept.answer(Put("late/6", b"", 60.0), late) == Done(1)
    assert (gone.names, gone.held_bytes) == ({}, 0)
    assert kept.held_bytes == here.held_bytes + late.held_bytes


@pytest.mark.parametrize("gone_too", [False, True])
def test_a_refused_put_costs_the_same_however_full_the_store_is(
    monkeypatch: pytest.MonkeyPatch, gone_too: bool
) -> None:
    class Counted(dict[str, Any]):
        looked_at = 0

        def __getitem__(self, key: str) -> Any:
            Counted.looked_at += 1
            return super().__getitem__(key)

        def __iter__(self) -> Iterator[str]:
            Counted.looked_at += len(self)
            return super().__iter__()

    found = []
    for size in (100, 1000):
        monkeypatch.setattr(contents, "MAX_STORE_KEYS", size)
        kept = Contents(FakeClock())
        kept._keys = Counted()
        holder, late = Client(0.0), Client(0.0)
        for n in range(size):
            assert kept.answer(Put(f"k/{n}", b"", 60.0), holder) == Done(1)
        if gone_too:
            # Its keys make room, one for each put, and what is left over is refused.
            kept.leave(holder)
            for n in range(size):
                assert kept.answer(Put(f"late/{n}", b"", 60.0), late) == Done(1)
        Counted.looked_at = 0
        for n in range(50):
            assert isinstance(kept.answer(Put(f"more/{n}", b"", 60.0), Client(0.0)), Refused)
        found.append(Counted.looked_at)
    assert found[0] == found[1]


def test_who_is_refused_too_often_waits_and_nobody_else(
    running: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "REFUSALS_BURST", 5.0)
    monkeypatch.setattr(contents, "REFUSALS_PER_S", 1 / 600)
    running.server.contents._left.clear()  # type: ignore[attr-defined]
    monkeypatch.setattr(contents, "MAX_STORE_KEYS", 1)
    honest, greedy = running.client(), running.client(timeout_s=1.0)
    honest.put("honest", b"v")
    for _ in range(6):
        with pytest.raises(StoreError, match="full"):
            greedy.put("more", b"v")
    with pytest.raises(StoreError, match="no answer"):
        greedy.put("more", b"v")
    honest.put("honest", b"another")
    assert honest.get("honest") == b"another"
    honest.close()
    greedy.close()


_keys_of_any_letters = st.text(
    st.characters(exclude_categories=["Cs"]) | st.just("\U0001f600"), max_size=600
)


@given(_keys_of_any_letters)
def test_a_key_is_bounded_in_encoded_bytes_on_both_sides(key: str) -> None:
    fits = len(key.encode()) <= MAX_KEY_BYTES
    for request in (Put(key, b"", 9.0), Swap(key, None, b"", 9.0), Delete(key), Read(key, True, 0)):
        raw = pack(request)[4:]
        if fits:
            assert unpack_request(raw, request_decoder) == request
        else:
            with pytest.raises(ValueError):
                unpack_request(raw, request_decoder)
    if fits:
        check_write(key, b"", 1.0)
    else:
        with pytest.raises(StoreError):
            check_write(key, b"", 1.0)


#: The largest that a store takes, by the bytes of a letter.
_wide_keys = st.builds(
    lambda letter, n, stem: (stem + letter * (n // len(letter.encode())))[:MAX_KEY_BYTES],
    st.sampled_from(["a", "\xe4", "\u20ac", "\U0001f600"]),
    st.integers(0, MAX_KEY_BYTES - 8),
    st.integers(0, 9999).map(str),
)


@given(st.lists(st.tuples(_wide_keys, st.sampled_from([0, 1, 100, 70_000, MAX_VALUE_BYTES]))))
def test_a_page_of_any_keys_and_values_fits_in_a_frame(values: list[tuple[str, int]]) -> None:
    journal = Journal()
    for key, size in values:
        journal.set(key, bytes(size))
    look, sealer, rounds = Look(MAX_STORE_BYTES), Sealer(b"k" * 32), 0
    while True:
        about = Read("", True, look.revision)
        changes = Changes(*journal.changes("", True, look.revision, PAGE_BYTES))
        assert len(pack(changes, sealer)) <= MAX_ANSWER_BYTES + 4
        look.take(changes, about)
        rounds += 1
        if not changes.more:
            break
    assert look.values == {key: bytes(size) for key, size in dict(values).items()}
    assert rounds <= 1 + sum(size + MAX_KEY_BYTES + 16 for _, size in values) // PAGE_BYTES


@given(_keys_of_any_letters, st.binary(max_size=64))
def test_what_fits_the_limits_fits_in_a_request(key: str, tail: bytes) -> None:
    key = key.encode()[:MAX_KEY_BYTES].decode(errors="ignore")
    value = bytes(MAX_VALUE_BYTES - len(tail)) + tail
    for request in (Put(key, value, 9.0), Swap(key, value, value, 9.0)):
        assert len(pack(request, Sealer(b"k" * 32))) <= MAX_REQUEST_BYTES + 4


def test_keys_of_wide_letters_leave_the_store_readable(running: ServerThread) -> None:
    attacker, reader = running.client(), running.client()
    key = "jobs/{:04}" + "\U0001f600" * (MAX_KEY_BYTES // 4 - 3)
    for n in range(CLIENT_KEYS):
        attacker.put(key.format(n), b"")
    with pytest.raises(StoreError, match="limit 512"):
        attacker.put("\U0001f600" * MAX_KEY_BYTES, b"")
    assert len(reader.list("jobs/")) == CLIENT_KEYS
    reader.close()
    with greeted(running.port) as peer:
        # One that does not check what it sends.
        peer.sendall(pack(Put("\U0001f600" * MAX_KEY_BYTES, b"", 9.0)))
        until(lambda: is_closed(peer), what="the end")
    attacker.close()


_names = st.sampled_from(["a", "a/1", "a/2", "b"])
_values = st.sampled_from([b"", b"1", b"22"])
_leases = st.sampled_from([1.0, 5.0])
_steps = st.one_of(
    st.builds(Put, _names, _values, _leases),
    st.builds(Swap, _names, _values | st.none(), _values, _leases),
    st.builds(Delete, _names),
    st.floats(0.0, 3.0),
)


@given(st.lists(_steps, max_size=60), st.lists(st.booleans(), min_size=60, max_size=60))
def test_a_reader_of_changes_has_what_a_plain_dict_has(steps: list[Any], looks: list[bool]) -> None:
    clock = FakeClock()
    kept, client = Contents(clock), Client(clock())
    model: dict[str, tuple[bytes, float]] = {}
    seen: dict[str, bytes] = {}
    revision = 0
    for step, look in zip(steps, looks, strict=False):
        if isinstance(step, float):
            clock.advance(step)
        model = {k: v for k, v in model.items() if v[1] > clock()}
        if isinstance(step, Delete):
            assert kept.answer(step, client) == Done(int(step.key in model))
            model.pop(step.key, None)
        elif isinstance(step, (Put, Swap)):
            held = model.get(step.key, (None, 0.0))[0]
            sets = isinstance(step, Put) or held == step.expected
            assert kept.answer(step, client) == Done(int(sets))
            if sets:
                model[step.key] = step.value, clock() + step.lease_s
        if look:
            answer = kept.answer(Read("a", True, revision), client)
            assert isinstance(answer, Changes)
            seen = {} if answer.anew else seen
            for key, value in answer.values:
                seen.pop(key, None)
                if value is not None:
                    seen[key] = value
            revision = answer.revision
            assert seen == {k: v for k, (v, _) in model.items() if k.startswith("a")}
    assert client.names.keys() == set(kept.journal)
    assert kept.held_bytes == client.held_bytes


def test_a_reader_who_missed_deletions_reads_anew() -> None:
    journal = Journal()
    journal.set("a", b"")
    for n in range(MAX_DELETED + 2):
        journal.set(f"k{n}", b"")
        journal.delete(f"k{n}")
    revision, values, more, anew = journal.changes("", True, 2, 1 << 20)
    assert (revision, values, more, anew) == (journal.revision, [("a", b"")], False, True)
    assert journal.changes("", True, revision, 1 << 20) == (revision, [], False, False)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.data())
def test_a_sealed_frame_fits_its_place_only(bodies: list[bytes], data: st.DataObject) -> None:
    sender = Sealer(b"k" * 32)
    frames = [sender.seal(body) + body for body in bodies]
    reader = Sealer(b"k" * 32)
    assert [reader.open(frame) for frame in frames] == bodies
    n = data.draw(st.integers(0, len(frames) - 1))
    bit = data.draw(st.integers(0, 8 * len(frames[n]) - 1))
    forged = bytearray(frames[n])
    forged[bit // 8] ^= 1 << bit % 8
    reader = Sealer(b"k" * 32)
    for frame in frames[:n]:
        reader.open(frame)
    with pytest.raises(ValueError, match="seal"):
        reader.open(bytes(forged))
    reader = Sealer(b"k" * 32)
    for frame in frames[: n + 1]:
        reader.open(frame)
    with pytest.raises(ValueError, match="seal"):
        reader.open(frames[n])


@given(st.binary(max_size=200))
def test_bytes_from_a_client_are_answered_or_end_it(raw: bytes) -> None:
    from crux_torch.store.frames import request_decoder, unpack

    kept = Contents(FakeClock())
    try:
        request = unpack(raw, request_decoder)
    except ValueError:
        return
    kept.answer(request, Client(0.0))


@pytest.mark.slow
def test_thousands_of_connections_and_floods_leave_the_launcher_and_the_store_at_work() -> None:
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    host = StoreHost(endpoint, poll_s=0.1, linger_s=0.5)
    host.start()
    until(lambda: host.state == "hosting", what="hosting")
    store = open_store(endpoint, timeout_s=60.0)
    store.put("k", b"v")
    pid = host.pid
    assert pid is not None
    before_s = _call_s(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3000 if hard == resource.RLIM_INFINITY else min(hard, 3000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    own = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(wanted - own - 100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            assert store.get("k") == b"v"
            # Each half of a request that fits: memory must stay bounded all the same.
            for _ in range(60):
                peer = stack.enter_context(greeted(port))
                peer.setblocking(False)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    peer.send((MAX_REQUEST_BYTES - 9).to_bytes(4, "big") + b"x" * (2 << 20))
            assert store.get("k") == b"v"
            assert _resident_bytes(pid) < 300 << 20
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert host.pid == pid, "the server lives"
    until(lambda: _call_s(store) < 20 * before_s + 0.05, what="calls as quick as before")
    store.close()
    host.stop()


def _call_s(store: StoreClient) -> float:
    began_s = time.monotonic()
    for _ in range(20):
        store.get("k")
    return (time.monotonic() - began_s) / 20


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_the_server_tells_its_clock(running: ServerThread) -> None:
    client = running.client()
    before_ns = time.monotonic_ns()
    told = [client.clock_ns() for _ in range(3)]
    assert before_ns <= told[0] <= told[1] <= told[2] <= time.monotonic_ns()
    client.close()
