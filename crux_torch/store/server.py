"""The embedded store's server: one process on one host, which any ``cruxrun`` there starts.

    python -m crux_torch.store.server --fd N [--secret FILE]

It listens on a socket that it inherits, and ends by itself when it has had no client for a while.
Whatever a client does or leaves undone costs a bounded share of memory, descriptors and time.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from crux_torch.own_folders import peer, peer_is_trusted
from crux_torch.store.contents import Client, Contents
from crux_torch.store.frames import (
    LENGTH_BYTES,
    MAX_GREETING_BYTES,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Clock,
    Count,
    Done,
    Handshake,
    Refused,
    Sealer,
    Welcome,
    hello_decoder,
    pack,
    proof_decoder,
    read_secret,
    unpack,
    unpack_request,
)
from crux_torch.store.unix_place import while_named

#: Seconds without a client after which the server ends.
LINGER_S = 10.0
BACKLOG = 1024
MAX_CLIENTS = 16_384
#: Descriptors beside the clients'.
SPARE_DESCRIPTORS = 64
#: Connections that have not greeted yet: beyond it the oldest goes.
MAX_STRANGERS = 512
GREETING_S = 5.0
#: A leader looks several times a second.
IDLE_S = 60.0
#: Longest time from the first to the last byte of a request, and bytes of unfinished ones.
REQUEST_S = 10.0
MAX_UNFINISHED_BYTES = 64 << 20
#: Clients that do not take their answers: seconds until they go, and how many there may be before
#: others' requests have to wait, for that long at most.
STUCK_S = 10.0
MAX_STUCK = 64
STUCK_IN_A_CROWD_S = 1.0
#: Seconds from which on a client that has to wait is not read.
READ_PAUSE_S = 0.1
#: Requests of one client that are answered before others have their turn.
TURN = 16
#: Seconds between two looks at the leases, and at all sessions.
SWEEP_S = 0.1
SESSIONS_S = 1.0
#: The most by which one sweep may move the clock of the leases.
MAX_STEP_S = 0.5


class Service(Protocol):
    """Contents of a server: the store's, or other ones that speak its frames."""

    #: For requests, with ``Count`` and ``Clock`` among them, which the session answers.
    decoder: msgspec.msgpack.Decoder[Any]

    def answer(self, request: Any, client: Client) -> msgspec.Struct:
        """Carry out ``request`` for ``client``."""

    def leave(self, client: Client) -> None:
        """The connection of ``client`` has ended."""

    def expire(self) -> None:
        """Drop the entries that nobody renewed in time."""


class RunningClock:
    """Seconds for which this process ran: no lease ends while it is stopped."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._now_s = 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        self._now_s += min(now - self._last_s, MAX_STEP_S)
        self._last_s = now
        return self._now_s


class Session(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = bytearray()
        self._transport: asyncio.Transport
        self._handshake: Handshake | None = None
        self._client: Client | None = None
        self._opener: Sealer | None = None
        self._sealer: Sealer | None = None
        self._waits = False
        #: Times of its last byte, of the start of an unfinished request, and since which it takes
        #: no answers; infinite if there is none.
        self.heard_s = self.began_s = time.monotonic()
        self.unfinished_s = self.stuck_s = float("inf")

    @property
    def greeted(self) -> bool:
        return self._client is not None

    @property
    def unfinished_bytes(self) -> int:
        return len(self._buffer)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._server.admits(transport.get_extra_info("socket")):
            transport.abort()
            return
        transport.set_write_buffer_limits(high=64 << 10)
        self._server.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.dismiss(self)
        self._buffer.clear()
        if self._client is not None:
            self._server.contents.leave(self._client)

    def data_received(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        self._buffer += data
        self._server.unfinished_bytes += len(data)
        self._process()

    def pause_writing(self) -> None:
        self.stuck_s = time.monotonic()
        self._server.stuck.add(self)
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.stuck_s = float("inf")
        self._server.stuck.discard(self)
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._process()

    def abort(self) -> None:
        """End the connection without another word."""
        self._transport.abort()

    def _later(self, delay_s: float) -> None:
        if not self._waits:
            self._waits = True
            if delay_s >= READ_PAUSE_S and not self._transport.is_closing():
                # What it sends meanwhile stays with it.
                self._transport.pause_reading()
            asyncio.get_running_loop().call_later(delay_s, self._go_on)

    def _go_on(self) -> None:
        self._waits = False
        if not self._transport.is_closing() and self.stuck_s == float("inf"):
            self._transport.resume_reading()
        self._process()

    def _process(self) -> None:
        """Answer the complete requests, some at a time, so that every client has a turn."""
        if self._waits:
            return
        for _ in range(TURN):
            if self._transport.is_closing() or self.stuck_s != float("inf"):
                return
            if len(self._server.stuck) >= MAX_STUCK:
                self._later(0.02)
                return
            try:
                frame = self._frame()
                if frame is None:
                    return
                self._obey(frame)
                if self._waits:
                    return
            except ValueError:
                self.abort()
                return
        self._later(0.0)

    def _frame(self) -> bytes | None:
        buffer = self._buffer
        size = int.from_bytes(buffer[:LENGTH_BYTES], "big")
        if len(buffer) >= LENGTH_BYTES:
            limit = MAX_REQUEST_BYTES if self.greeted else MAX_GREETING_BYTES
            if size > limit:
                raise ValueError(f"a frame of {size} bytes, limit {limit}")
        end = LENGTH_BYTES + size
        if len(buffer) < max(end, LENGTH_BYTES):
            if not buffer:
                self.unfinished_s = float("inf")
            elif self.unfinished_s == float("inf"):
                self.unfinished_s = self.heard_s
            self._server.check_unfinished()
            return None
        frame = bytes(memoryview(buffer)[LENGTH_BYTES:end])
        del buffer[:end]
        self._server.unfinished_bytes -= end
        self.unfinished_s = float("inf")
        return frame

    def _obey(self, frame: bytes) -> None:
        if self._client is not None:
            request = unpack_request(frame, self._server.contents.decoder, self._opener)
            if isinstance(request, Count):
                answer: msgspec.Struct = Done(self._server.clients)
            elif isinstance(request, Clock):
                answer = Done(time.monotonic_ns())
            else:
                answer = self._server.contents.answer(request, self._client)
            self._transport.write(pack(answer, self._sealer))
            if isinstance(answer, Refused):
                pause_s = self._client.refused(self._server.clock())
                if pause_s > 0:
                    self._later(pause_s)
        elif self._handshake is None:
            hello = unpack(frame, hello_decoder)
            secret, nonce = self._server.secret, secrets.token_bytes(NONCE_BYTES)
            challenge = Challenge(PROTOCOL_VERSION, nonce, bool(secret))
            self._handshake = Handshake(secret, hello, challenge)
            self._transport.write(pack(challenge))
            if hello.version != PROTOCOL_VERSION:
                raise ValueError("another version")
        else:
            handshake = self._handshake
            if not handshake.proves("client", unpack(frame, proof_decoder).digest):
                raise ValueError("a wrong proof")
            self._opener, self._sealer = handshake.sealer("client"), handshake.sealer("server")
            where = peer_of(self._transport.get_extra_info("socket"))
            self._client = self._server.greet(self, where)
            life = self._server.life
            welcome = Welcome(handshake.digest("server", life), life)
            self._transport.write(pack(welcome))


class Server:
    """The connections and the contents.

    Args:
        secret: secret that clients must know; empty for none.
        linger_s: time without a client after which :meth:`run` returns.
        clock: seconds, for leases and the time without a client.
        contents: makes the contents, which judge leases by the clock.
        admits: returns True if the other end of a connection may be a client.
    """

    def __init__(
        self,
        secret: bytes,
        linger_s: float = LINGER_S,
        clock: Callable[[], float] | None = None,
        contents: Callable[[Callable[[], float]], Service] = Contents,
        admits: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self.secret = secret
        self.admits = admits
        self.life = secrets.token_hex(8)
        self.clock = clock or RunningClock()
        self.contents = contents(self.clock)
        self.unfinished_bytes = 0
        self.stuck: set[Session] = set()
        self._linger_s = linger_s
        self._strangers: deque[Session] = deque()
        self._sessions: dict[Session, None] = {}
        self.clients = 0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = MAX_CLIENTS + SPARE_DESCRIPTORS
        if 0 <= soft < limit:  # RLIM_INFINITY is negative
            limit = min(hard, limit) if hard >= 0 else limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        self._max_sessions = max(1, limit - SPARE_DESCRIPTORS)

    def admit(self, session: Session) -> None:
        """Add a new connection."""
        self._sessions[session] = None
        self._strangers.append(session)
        if len(self._strangers) > MAX_STRANGERS:
            self._strangers.popleft().abort()
        if len(self._sessions) > self._max_sessions:
            known = (each for each in self._sessions if each.greeted)
            min(known, key=lambda each: each.heard_s, default=session).abort()

    def greet(self, session: Session, where: str) -> Client:
        """Returns the account of a session that knows the secret."""
        self._strangers.remove(session)
        self.clients += 1
        return Client(self.clock(), where)

    def dismiss(self, session: Session) -> None:
        """Remove a connection that has ended."""
        if self._sessions.pop(session, 0) is None:
            self.unfinished_bytes -= session.unfinished_bytes
            self.stuck.discard(session)
            if session.greeted:
                self.clients -= 1
            elif session in self._strangers:
                self._strangers.remove(session)

    def check_unfinished(self) -> None:
        """End the oldest unfinished request's connection, if they take too much memory."""
        if self.unfinished_bytes > MAX_UNFINISHED_BYTES:
            min(self._sessions, key=lambda each: each.unfinished_s).abort()

    async def run(self, listener: socket.socket) -> None:
        """Serve until there was no client for a while."""
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: Session(self), sock=listener, backlog=BACKLOG)
        used_s = sessions_at_s = self.clock()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.contents.expire()
            now = self.clock()
            self._end_stuck(time.monotonic())
            if now - sessions_at_s >= SESSIONS_S:
                sessions_at_s = now
                self._end_idle(time.monotonic())
            if self.clients:
                used_s = now
            elif now - used_s >= self._linger_s:
                return

    def _end_stuck(self, now: float) -> None:
        crowded = len(self.stuck) >= MAX_STUCK
        patience_s = STUCK_IN_A_CROWD_S if crowded else STUCK_S
        for each in list(self.stuck):
            if now - each.stuck_s > patience_s:
                each.abort()

    def _end_idle(self, now: float) -> None:
        while self._strangers and now - self._strangers[0].began_s > GREETING_S:
            self._strangers.popleft().abort()
        for each in list(self._sessions):
            if now - each.heard_s > IDLE_S or now - each.unfinished_s > REQUEST_S:
                each.abort()


def peer_of(connected: socket.socket) -> str:
    """Returns user and process at the other end of a Unix socket, or the address of a TCP one's."""
    try:
        if connected.family == socket.AF_UNIX:
            pid, uid, _ = peer(connected)
            return f"uid {uid}, process {pid}"
        host, port = connected.getpeername()[:2]
    except OSError:
        return ""
    return f"{host} port {port}"


def arguments(name: str) -> argparse.ArgumentParser:
    """Returns the command line of a process that serves."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--secret", default="")
    parser.add_argument("--linger-s", type=float, default=LINGER_S)
    # For a Unix socket.
    parser.add_argument("--path", type=Path)
    parser.add_argument("--group", type=int)
    return parser


def serve(
    args: argparse.Namespace, contents: Callable[[Callable[[], float]], Service] = Contents
) -> None:
    """Serve as the command line says, until there was no client for a while."""
    listener = socket.socket(fileno=args.fd)
    on_host = listener.family == socket.AF_UNIX
    admits = partial(peer_is_trusted, group=args.group) if on_host else lambda _: True
    server = Server(read_secret(args.secret), args.linger_s, contents=contents, admits=admits)
    asyncio.run(while_named(server.run(listener), args.path))


if __name__ == "__main__":
    serve(arguments("crux-store").parse_args())
