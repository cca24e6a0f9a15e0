"""What a client of the store bears of a server that is none of ours, and what a greeting proves."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from control_fakes import FakeClock
from hostile import Page
from hypothesis import given
from hypothesis import strategies as st
from store_server import ServerThread

from crux_torch.errors import StoreError, StoreTooLarge
from crux_torch.store import KEY_BYTES, MAX_STORE_BYTES, MAX_STORE_KEYS
from crux_torch.store import client as client_module
from crux_torch.store.client import MAX_OFFENCE_PAUSE_S, Connection, Look, StoreClient
from crux_torch.store.endpoint import TcpConnector
from crux_torch.store.frames import (
    MAX_GREETING_BYTES,
    MAX_REQUEST_BYTES,
    PAGE_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Changes,
    FrameSocket,
    Handshake,
    Hello,
    Proof,
    Read,
    Welcome,
    pack,
    request_decoder,
    unpack,
)

SECRET = b"0123456789abcdef"
FAR_S = 1e9
NONCE = bytes(32)


class Squatter:
    """A process in the store's place that greets, and then answers as it likes."""

    def __init__(self, answer: Callable[[Any], msgspec.Struct]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Squatter:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def client(self, **options: Any) -> StoreClient:
        connector = TcpConnector("127.0.0.1", self.port)
        return StoreClient(connector, **{"timeout_s": 30.0, **options})

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        frames = FrameSocket(connected)
        try:
            greet(frames, b"")
            while True:
                frame = frames.receive(MAX_REQUEST_BYTES, FAR_S)
                frames.send(pack(self._answer(unpack(frame, request_decoder))), FAR_S)
        except (OSError, EOFError, ValueError):
            connected.close()


def greet(
    frames: FrameSocket, secret: bytes, change: Callable[[Any], Any] = lambda message: message
) -> None:
    """The server's part of a greeting, with its messages changed on the way."""
    raw = frames.receive(MAX_GREETING_BYTES, FAR_S)
    hello = change(unpack(raw, msgspec.msgpack.Decoder(Hello)))
    challenge = Challenge(PROTOCOL_VERSION, NONCE, bool(secret))
    frames.send(pack(change(challenge)), FAR_S)
    handshake = Handshake(secret, hello, challenge)
    proof = change(
        unpack(frames.receive(MAX_GREETING_BYTES, FAR_S), msgspec.msgpack.Decoder(Proof))
    )
    if not handshake.proves("client", proof.digest):
        raise EOFError
    frames.send(pack(change(Welcome(handshake.digest("server", "life"), "life"))), FAR_S)


def _flipped(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return bytes([value[0] ^ 1]) + value[1:]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (kind, name)
        for kind in (Hello, Challenge, Proof, Welcome)
        for name in kind.__struct_fields__
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_no_field_of_a_greeting_can_be_changed_on_the_way(kind: type, field: str) -> None:
    def change(message: Any) -> Any:
        if type(message) is not kind:
            return message
        return msgspec.structs.replace(message, **{field: _flipped(getattr(message, field))})

    for changes, works in ((lambda message: message, True), (change, False)):
        ours, its = socket.socketpair()
        with ours, its:

            def serve(its: socket.socket = its, changes: Any = changes) -> None:
                try:
                    greet(FrameSocket(its), SECRET, changes)
                except (OSError, EOFError, ValueError):
                    its.shutdown(socket.SHUT_RDWR)

            server = threading.Thread(target=serve)
            server.start()
            if works:
                assert Connection(ours, SECRET, FAR_S).life == "life"
            else:
                with pytest.raises((StoreError, OSError, EOFError, ValueError)):
                    Connection(ours, SECRET, FAR_S)
            ours.shutdown(socket.SHUT_RDWR)
            server.join(60)


def _fill(count: int, size: int = 0, start: int = 0) -> list[tuple[str, bytes | None]]:
    return [(f"j/{n:09}", bytes(size)) for n in range(start, start + count)]


#: Each answers a read with what no server of ours sends.
UNFIT: dict[str, Callable[[Read], Page]] = {
    "more without a page": lambda q: Page(q.since + 1, [], True, False),
    "more of the same revision": lambda q: Page(q.since, _fill(1, PAGE_BYTES), True, False),
    "a page of empty values": lambda q: Page(q.since + 1, _fill(70_000), True, False),
    "a page of absent keys": lambda q: Page(
        q.since + 1, [(key, None) for key, _ in _fill(70_000)], True, False
    ),
    "another prefix": lambda q: Page(q.since + 1, [("other", b"")], False, False),
    "a wide key": lambda q: Page(q.since + 1, [("j/" + "\U0001f600" * 200, b"")], False, False),
    "too long": lambda q: Page(q.since + 1, _fill(3, PAGE_BYTES), False, False),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_server_beyond_the_stores_limits_is_left_alone_for_longer_each_time(what: str) -> None:
    clock = FakeClock()
    with Squatter(UNFIT[what]) as squatter:
        client = squatter.client(clock=clock)
        pauses: list[float] = []
        for turn in range(9):
            with pytest.raises(StoreError):
                client.list("j/")
            assert squatter.connections == turn + 1
            # Until its pause is over, nobody asks.
            began, step = clock(), 0.05
            while squatter.connections == turn + 1:
                clock.advance(step)
                try:
                    client.get("j/own")
                except StoreError:
                    continue
                raise AssertionError("the squatter answers nothing that a client takes")
            pauses.append(clock() - began)
        client.close()
    assert pauses[2] > 1.5 * pauses[0]
    assert max(pauses) <= 2 * MAX_OFFENCE_PAUSE_S


def test_what_a_squatter_sends_without_an_end_is_bounded() -> None:
    kept, held, ended = Look(MAX_STORE_BYTES), 0, ""
    while not ended and held <= 2 * MAX_STORE_KEYS:
        page, turn = _fill(1900, 500, held), kept.revision
        try:
            kept.take(Changes(turn + 1, page, False, False), Read("j/", True, turn))
            held += len(page)
        except ValueError as error:
            ended = str(error)
    assert "more than a store holds" in ended
    assert held <= MAX_STORE_KEYS


def test_large_contents_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    def counted(frame: bytes, *about: Any) -> Any:
        parsed.append(len(frame))
        return unpack(frame, *about)

    monkeypatch.setattr(client_module, "unpack", counted)
    with ServerThread() as running:
        writer, small = running.client(), running.client(limit_bytes=1000)
        writer.put("a", bytes(400))
        writer.put("b", bytes(400))
        assert len(small.list("")) == 2
        writer.put("c", bytes(400))
        with pytest.raises(StoreTooLarge):
            small.list("")
        writer.put("c", bytes(100_000))
        parsed.clear()
        with pytest.raises(StoreTooLarge):
            small.list("")
        assert not parsed
        # What is small is read on, at once.
        assert small.get("a") == bytes(400)
        writer.delete("c")
        assert len(small.list("")) == 2
        writer.close()
        small.close()


_changes = st.lists(
    st.tuples(st.sampled_from(["j/a", "j/b", "j/\U0001f600"]), st.none() | st.binary(max_size=9)),
    max_size=8,
)


@given(st.lists(st.tuples(_changes, st.booleans()), max_size=12))
def test_a_look_counts_what_it_holds(pages: list[tuple[list[Any], bool]]) -> None:
    look = Look(MAX_STORE_BYTES)
    model: dict[str, bytes] = {}
    for number, (values, anew) in enumerate(pages):
        before, seen = dict(look.values), look.values
        look.take(Changes(number + 1, values, False, anew), Read("j/", True, number))
        model = {} if anew else model
        for key, value in values:
            model.pop(key, None)
            if value is not None:
                model[key] = value
        assert look.values == model
        assert seen == before  # what was given out stays
        held = sum(len(key.encode()) + len(value) for key, value in model.items())
        assert look._held_bytes == held
        assert look._counted_bytes == held + KEY_BYTES * len(model)


def test_single_bytes_do_not_keep_a_reader_busy() -> None:
    """A sender of single bytes costs looks by the time that it takes, not by its bytes."""
    ours, its = socket.socketpair()
    body = random.Random(0).randbytes(20_000)
    with ours, its:
        frame = len(body).to_bytes(4, "big") + body

        def drip() -> None:
            for at in range(0, len(frame), 2):
                its.sendall(frame[at : at + 2])

        looks = 0

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(ours, name)

            def recv_into(self, *args: Any) -> int:
                nonlocal looks
                looks += 1
                return ours.recv_into(*args)

        sender = threading.Thread(target=drip)
        sender.start()
        assert FrameSocket(Counting()).receive(1 << 20, FAR_S) == body  # type: ignore[arg-type]
        sender.join()
    assert looks < len(frame) // 8


def test_the_store_tells_who_wrote_a_value() -> None:
    with ServerThread() as running:
        one, other = running.client(), running.client()
        one.put("k", b"v")
        told = one.origin("k")
        other.put("k", b"v")  # a renewal is no change
        assert other.origin("k") == told
        assert told.startswith("127.0.0.1 port ")
        other.put("k", b"w")
        assert one.origin("k") not in ("", told)
        assert one.origin("absent") == ""
        one.close()
        other.close()
