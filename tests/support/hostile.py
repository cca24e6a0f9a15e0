"""Programs that share a host with a job and mean it no good: servers and clients of a store.

    python tests/support/hostile.py NAME PORT

A squatter takes the store's port before anyone else, and prints ``ready``; a client attacks the
store that answers there. Both go on until they are ended. ``SQUATTERS`` and ``CLIENTS`` name them.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from places import ROOT

sys.path.insert(0, str(ROOT))

from crux_torch.errors import StoreError
from crux_torch.store import MAX_KEY_BYTES, MAX_VALUE_BYTES
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import TcpConnector
from crux_torch.store.frames import (
    MAX_GREETING_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Clock,
    Done,
    FrameSocket,
    Handshake,
    Hello,
    Put,
    Read,
    Welcome,
    pack,
    request_decoder,
    unpack,
)

CLUSTER = "crux/default/"
FOREVER = 1e9


class Page(msgspec.Struct, frozen=True, array_like=True, tag="changes"):
    """A page without the bounds that ours have."""

    revision: int
    values: list[tuple[str, bytes | None]]
    more: bool
    anew: bool


_numbers = itertools.count(1)
_pages: dict[str, list[bytes]] = {}


def _flood(request: Read) -> bytes:
    key = request.key
    values = [(f"{key}{next(_numbers):x}", b"") for _ in range(70_000)]
    return pack(Page(next(_numbers), values, True, False))  # type: ignore[arg-type]


def _ahead(request: Read) -> bytes:
    key = request.key
    if key not in _pages:
        _pages[key] = [
            pack(Page(n + 1, [(f"{key}{n:x}/{i:x}", b"") for i in range(70_000)], True, False))
            for n in range(40)
        ]
    return _pages[key][next(_numbers) % 40]


def _absent(request: Read) -> bytes:
    values = [(f"{request.key}{n:x}", None) for n in range(70_000)]
    return pack(Page(next(_numbers), values, True, False))  # type: ignore[arg-type]


def _junk(request: Read) -> bytes:
    values = [(f"{request.key}jobs/{n}", b"%d" % next(_numbers)) for n in range(20_000)]
    return pack(Page(next(_numbers), values, False, False))  # type: ignore[arg-type]


def _big(request: Read) -> bytes:
    values = [(f"{request.key}jobs/{next(_numbers)}", bytes(MAX_VALUE_BYTES))]
    return pack(Page(next(_numbers), values, True, False))  # type: ignore[arg-type]


def _small_junk(request: Read) -> bytes:
    """As much as a rank reads itself, and new each time."""
    values = [(f"{request.key}jobs/{n}", b"[%d]" % next(_numbers)) for n in range(1500)]
    return pack(Page(next(_numbers), values, False, False))  # type: ignore[arg-type]


def _slow(request: Read) -> bytes:
    time.sleep(0.45)
    return pack(Page(next(_numbers), [], False, False))


#: What each answers a read of a prefix with.
_ANSWERS: dict[str, Callable[[Read], bytes]] = {
    "squatter: endless pages": _flood,
    "squatter: pages made ahead": _ahead,
    "squatter: absent keys": _absent,
    "squatter: junk records": _junk,
    "squatter: small junk records": _small_junk,
    "squatter: values of 1 MiB": _big,
    "squatter: slow answers": _slow,
}


def _greet(frames: FrameSocket) -> None:
    hello = unpack(frames.receive(MAX_GREETING_BYTES, FOREVER), msgspec.msgpack.Decoder(Hello))
    challenge = Challenge(PROTOCOL_VERSION, os.urandom(32), False)
    frames.send(pack(challenge), FOREVER)
    frames.receive(MAX_GREETING_BYTES, FOREVER)
    proof = Handshake(b"", hello, challenge).digest("server", "squat")
    frames.send(pack(Welcome(proof, "squat")), FOREVER)


def _serve(answer: Callable[[Read], bytes], connected: socket.socket) -> None:
    frames = FrameSocket(connected)
    _greet(frames)
    while True:
        request = unpack(frames.receive(MAX_REQUEST_BYTES, FOREVER), request_decoder)
        if isinstance(request, Read) and request.prefix:
            frames.send(answer(request), FOREVER)
        elif isinstance(request, Read):
            frames.send(pack(Page(next(_numbers), [(request.key, None)], False, False)), FOREVER)
        else:
            told = time.monotonic_ns() if isinstance(request, Clock) else 1
            frames.send(pack(Done(told)), FOREVER)


def _drip(connected: socket.socket) -> None:
    frames = FrameSocket(connected)
    _greet(frames)
    connected.sendall((60_000).to_bytes(4, "big"))
    while True:
        connected.sendall(b"x")
        time.sleep(0.1)


def _garbage(connected: socket.socket) -> None:
    while True:
        connected.sendall(os.urandom(1 << 16))


def _reset(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()


def _silent(connected: socket.socket) -> None:
    time.sleep(FOREVER)


def _hangs_up(connected: socket.socket) -> None:
    _greet(FrameSocket(connected))
    connected.close()


def _old(connected: socket.socket) -> None:
    frames = FrameSocket(connected)
    frames.receive(MAX_GREETING_BYTES, FOREVER)
    frames.send(pack(Challenge(PROTOCOL_VERSION - 1, bytes(32), False)), FOREVER)
    time.sleep(FOREVER)


_CONNECTED: dict[str, Callable[[socket.socket], None]] = {
    "squatter: single bytes": _drip,
    "squatter: garbage": _garbage,
    "squatter: resets": _reset,
    "squatter: silence": _silent,
    "squatter: hangs up": _hangs_up,
    "squatter: another release": _old,
}


def squat(name: str, port: int) -> None:
    """Answer on ``port`` as ``name`` says."""
    if name == "squatter: refuses":
        held = socket.socket()
        held.bind(("127.0.0.1", port))
        print("ready", flush=True)
        time.sleep(FOREVER)
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    print("ready", flush=True)

    def serve(connected: socket.socket) -> None:
        try:
            if name in _ANSWERS:
                _serve(_ANSWERS[name], connected)
            else:
                _CONNECTED[name](connected)
        except (OSError, EOFError, ValueError):
            connected.close()

    while True:
        connected, _ = listener.accept()
        threading.Thread(target=serve, args=(connected,), daemon=True).start()


SQUATTERS = (*_ANSWERS, *_CONNECTED, "squatter: refuses")


def _wide_keys(client: StoreClient) -> None:
    for n in range(2000):
        stem = f"{CLUSTER}jobs/{n:04}"
        client.put(stem + "\U0001f600" * ((MAX_KEY_BYTES - len(stem)) // 4), b"")


def _too_wide_keys(client: StoreClient) -> None:
    """Without the check that our clients make."""
    stem = f"{CLUSTER}jobs/{next(_numbers):04}"
    client._write(Put(stem + "\U0001f600" * (MAX_KEY_BYTES - len(stem)), b"", 600.0))


def _fill(client: StoreClient) -> None:
    """Nobody gives the others room: each of these keeps its connection."""
    port = client._connector._address[1]  # type: ignore[attr-defined]
    others = [StoreClient(TcpConnector("127.0.0.1", port), timeout_s=5.0) for _ in range(60)]
    while True:
        for other in others:
            try:
                for _ in range(200):
                    other.put(f"other/{next(_numbers)}", b"")
            except StoreError:
                pass


def _topologies(client: StoreClient) -> None:
    for n in itertools.count():
        tors = "".join(f"  tor{i}-{n}: tor\n" for i in range(20_000))
        client.put(CLUSTER + "topology", f"version: 1\nhosts: {{}}\nswitches:\n{tors}".encode())
        time.sleep(1.8)


def _built_topologies(client: StoreClient) -> None:
    for n in itertools.count():
        text = f"version: 1\nbuilder: fat_tree\nparameters: {{k: {24 + 2 * (n % 12)}}}\n"
        client.put(CLUSTER + "topology", text.encode())
        time.sleep(1.8)


def _records(make: Callable[[int, int], bytes], count: int, pause_s: float) -> Any:
    def attack(client: StoreClient) -> None:
        for turn in itertools.count():
            for n in range(count):
                client.put(f"{CLUSTER}jobs/other{n}", make(turn, n))
            time.sleep(pause_s)

    return attack


def _job(turn: int, n: int) -> bytes:
    """A well-formed record whose profile changes."""
    from control_fakes import profile, record

    job = record(f"other{n}", hosts=(f"h{n % 8}", f"h{n % 8 + 1}"), profile=profile(t_s=0.1 + turn))
    return msgspec.json.encode(job)


def _forged_plans(client: StoreClient) -> None:
    for n in itertools.count(1):
        head = {
            "version": 2, "epoch": (1 << 40) + n, "fingerprint": "f", "valid_s": 15.0,
            "author": "other", "policy": "crux", "digest": "d",
        }  # fmt: skip
        told = msgspec.json.encode({"renewal": 0, "plan": head})
        client.put(CLUSTER + "head", told)
        time.sleep(0.05)


def _deletes(client: StoreClient) -> None:
    while True:
        for key in list(client.list(CLUSTER)):
            client.delete(key)
        time.sleep(0.02)


def _settings(client: StoreClient) -> None:
    for n in itertools.count():
        pins = {f"job{i}": n % 8 for i in range(500)}
        raw = msgspec.json.encode({"disabled": bool(n % 2), "pins": pins})
        client.put(CLUSTER + "operator/settings", raw)
        time.sleep(0.1)


def _connections(client: StoreClient) -> None:
    port = client._connector._address[1]  # type: ignore[attr-defined]
    held: list[socket.socket] = []
    while True:
        try:
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5.0))
        except OSError:
            time.sleep(0.1)
        if len(held) > 800:
            for one in held[:400]:
                one.close()
            del held[:400]


def _reads(client: StoreClient) -> None:
    """Everything again and again, from the beginning."""
    client.list(CLUSTER)
    client._looks.clear()


_ATTACKS: dict[str, Callable[[StoreClient], None]] = {
    "client: wide keys": _wide_keys,
    "client: keys over the limit": _too_wide_keys,
    "client: fills the store": _fill,
    "client: topology of 20,000 switches every 1.8 s": _topologies,
    "client: fat trees every 1.8 s": _built_topologies,
    "client: records of 1 MiB": _records(
        lambda t, n: b"%09d" % t + bytes(MAX_VALUE_BYTES - 9), 7, 1.0
    ),
    "client: deep JSON": _records(lambda t, n: b"[" * 60_000 + b"%d" % t, 20, 0.5),
    "client: 60 jobs that change": _records(_job, 60, 0.5),
    "client: forged plans": _forged_plans,
    "client: deletes everything": _deletes,
    "client: operator's settings": _settings,
    "client: connections": _connections,
    "client: reads without an end": _reads,
}
CLIENTS = tuple(_ATTACKS)


def attack(name: str, port: int) -> None:
    """Attack the store on ``port``, from the time when it answers."""
    while True:
        client = StoreClient(TcpConnector("127.0.0.1", port), timeout_s=5.0)
        try:
            client.clients()
            while True:
                _ATTACKS[name](client)
        except StoreError:
            time.sleep(0.05)
        finally:
            client.close()


def names() -> Iterator[str]:
    """All of them."""
    yield from (*SQUATTERS, *CLIENTS)


if __name__ == "__main__":
    given, at = sys.argv[1], int(sys.argv[2])
    (squat if given in SQUATTERS else attack)(given, at)
