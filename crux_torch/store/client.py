"""A client of a store that speaks our frames: over TCP, or over a socket to a store process.

It keeps what it has read, so that another look costs a few bytes where nothing has changed.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, TypeVar

import msgspec

from crux_torch.errors import Cause, StoreError, StoreForbidden
from crux_torch.store.causes import cause_of, cause_of_refusal
from crux_torch.store.frame_socket import FrameSocket
from crux_torch.store.frames import (
    MAX_ANSWER_BYTES,
    MAX_GREETING_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Challenge,
    Changes,
    Clock,
    Count,
    Delete,
    Done,
    Handshake,
    Hello,
    Proof,
    Put,
    Read,
    Refused,
    Request,
    Sealer,
    Swap,
    Welcome,
    answer_decoder,
    pack,
    unpack,
)
from crux_torch.store.shared_store import MAX_LEASE_S, check_write

M = TypeVar("M")

#: How the reason begins with which an etcd refuses what a role does not allow.
FORBIDDEN = "permission_denied"

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
#: Looks that are remembered: each prefix or key that was read is one.
MAX_LOOKS = 64
#: Bytes of keys and values that one look holds at most. No honest cluster has more.
MAX_LOOK_BYTES = 256 << 20
#: Exchanges that one look may take as long as until it has read all pages.
MAX_LOOK_CALLS = 10

_challenge = msgspec.msgpack.Decoder(Challenge)
_welcome = msgspec.msgpack.Decoder(Welcome)


class Connector(Protocol):
    """Makes connections to one store, one at a time."""

    #: The store's name in messages.
    where: str

    def connect(self, timeout_s: float) -> socket.socket:
        """A new connection; raises OSError or StoreError."""

    def close(self) -> None:
        """Release what :meth:`connect` made, the socket aside."""


class TcpConnector:
    """To the server at ``host:port``.

    A name is looked up in a thread, because nothing bounds the time that it takes.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self.where = f"store tcp://{host}:{port}"
        self._looked_up: Future[list[tuple[Any, ...]]] | None = None

    def connect(self, timeout_s: float) -> socket.socket:
        """A new connection; raises OSError, also while the name is looked up."""
        until_s = time.monotonic() + timeout_s
        if self._looked_up is None:
            self._looked_up = Future()
            args = self._address, self._looked_up
            threading.Thread(target=_look_up, args=args, name="crux-names", daemon=True).start()
        pending = self._looked_up
        try:
            found = pending.result(timeout_s)
        except FutureTimeoutError:
            raise StoreError(f"{self._address[0]!r} is still looked up", Cause.NAME) from None
        finally:
            if pending.done():
                # Each attempt to connect looks anew: another host may have the name by then.
                self._looked_up = None
        failure: OSError | None = None
        for family, kind, protocol, _, address in found:
            connected = socket.socket(family, kind, protocol)
            try:
                connected.settimeout(max(0.001, until_s - time.monotonic()))
                connected.connect(address)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                failure = error
                connected.close()
            else:
                return connected
        raise failure or StoreError(f"{self._address[0]!r} has no address", Cause.NAME)

    def close(self) -> None:
        """Nothing is left over."""


def _look_up(address: tuple[str, int], found: Future[list[tuple[Any, ...]]]) -> None:
    try:
        found.set_result(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
    except Exception as error:
        found.set_exception(error)


class _Look:
    """What is known of one key or prefix, up to ``revision``."""

    def __init__(self) -> None:
        self.revision = 0
        self.values: dict[str, bytes] = {}
        self.size = 0

    def take(self, changes: Changes, about: Read) -> None:
        # Whoever looked before has the values that he was given.
        if changes.anew:
            self.values, self.size = {}, 0
        elif changes.values:
            self.values = dict(self.values)
        for key, value in changes.values:
            fits = key.startswith(about.key) if about.prefix else key == about.key
            if not fits:
                raise ValueError(f"an answer about {key[:80]!r}, not {about.key!r}")
            self.size -= len(key) + len(self.values.pop(key, b""))
            if value is not None:
                self.values[key] = value
                self.size += len(key) + len(value)
        if self.size > MAX_LOOK_BYTES:
            raise ValueError(f"more than {MAX_LOOK_BYTES >> 20} MiB under {about.key!r}")
        self.revision = changes.revision


class Connection:
    """A connection that has greeted.

    Raises:
        OSError, EOFError, ValueError: it failed, or the other side is no server of ours.
        StoreError: the other side is of another release, or asks for another secret.
    """

    def __init__(self, connected: socket.socket, secret: bytes, deadline_s: float) -> None:
        self._frames = FrameSocket(connected)
        self._opener: Sealer | None = None
        self._sealer: Sealer | None = None
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._frames.send(pack(Hello(PROTOCOL_VERSION, nonce)), deadline_s)
        challenge = unpack(self._frames.receive(MAX_GREETING_BYTES, deadline_s), _challenge)
        if challenge.version != PROTOCOL_VERSION:
            raise StoreError(
                f"it speaks version {challenge.version} of the protocol, this job "
                f"{PROTOCOL_VERSION}",
                Cause.VERSION,
            )
        if challenge.sealed != bool(secret):
            if challenge.sealed:
                raise StoreError("it asks for a secret", Cause.NEEDS_SECRET)
            raise StoreError("it asks for no secret, this job has one", Cause.HAS_NO_SECRET)
        handshake = Handshake(secret, nonce, challenge.nonce)
        self._frames.send(pack(Proof(handshake.digest("client"))), deadline_s)
        try:
            welcome = unpack(self._frames.receive(MAX_GREETING_BYTES, deadline_s), _welcome)
        except EOFError:
            raise StoreError(
                "it refused this job: CRUX_STORE_SECRET is not its secret", Cause.WRONG_SECRET
            ) from None
        if not handshake.proves("server", welcome.digest):
            raise StoreError("it does not know the secret", Cause.UNPROVEN)
        self.life = welcome.life
        self._opener, self._sealer = handshake.sealer("server"), handshake.sealer("client")

    def ask(
        self, request: msgspec.Struct, deadline_s: float, decoder: msgspec.msgpack.Decoder[M]
    ) -> M:
        """The answer to ``request``; raises OSError, EOFError or ValueError."""
        self._frames.send(pack(request, self._sealer), deadline_s)
        frame = self._frames.receive(MAX_ANSWER_BYTES, deadline_s)
        return unpack(frame, decoder, self._opener)

    def has_ended(self) -> bool:
        """Whether the other side is known to be gone."""
        return self._frames.has_ended()

    def close(self) -> None:
        """Close it."""
        self._frames.close()


class StoreClient:
    """A :class:`~crux_torch.store.shared_store.SharedStore`, which says what each method does.

    Safe to use from several threads, which take turns. No call holds the GIL while it waits.

    Args:
        connector: makes the connections.
        secret: of the store; empty if it has none.
        timeout_s: seconds that one exchange with the server may take, connecting included.
        clock: paces the attempts to connect again.
    """

    def __init__(
        self,
        connector: Connector,
        secret: bytes = b"",
        *,
        timeout_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connector = connector
        self._secret = secret
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._random = random.Random()
        self._connection: Connection | None = None
        self._life = ""
        self._looks: dict[tuple[str, bool], _Look] = {}
        self._failures = 0
        self._retry_at_s = float("-inf")
        self._reason, self._cause = "", Cause.OTHER
        self._closed = False

    def get(self, key: str) -> bytes | None:
        with self._turn():
            return self._look(key, prefix=False).get(key)

    def put(self, key: str, value: bytes, lease_s: float = MAX_LEASE_S) -> None:
        check_write(key, value, lease_s)
        with self._turn():
            self._write(Put(key, value, lease_s))

    def delete(self, key: str) -> None:
        with self._turn():
            self._write(Delete(key))

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease_s: float = MAX_LEASE_S
    ) -> bool:
        check_write(key, value, lease_s)
        with self._turn():
            return self._write(Swap(key, expected, value, lease_s)) > 0

    def list(self, prefix: str) -> Mapping[str, bytes]:
        with self._turn():
            return self._look(prefix, prefix=True)

    def clients(self) -> int:
        """How many clients the server has; StoreError where it does not tell."""
        with self._turn():
            return self._write(Count())

    def clock_ns(self) -> int:
        with self._turn():
            return self._write(Clock())

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._drop()
            self._connector.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=2 * self._timeout_s):
            about = f"{self._connector.where}: another thread's call still waits"
            raise StoreError(about, Cause.BUSY)
        try:
            if self._closed:
                raise StoreError(f"{self._connector.where}: closed", Cause.BUSY)
            yield
        finally:
            self._lock.release()

    def _look(self, key: str, *, prefix: bool) -> dict[str, bytes]:
        until_s = time.monotonic() + MAX_LOOK_CALLS * self._timeout_s
        while True:
            connection = self._connected()
            look = self._looks.pop((key, prefix), None) or _Look()
            while len(self._looks) >= MAX_LOOKS:
                del self._looks[next(iter(self._looks))]  # the one that was not used for longest
            self._looks[key, prefix] = look
            about = Read(key, prefix, look.revision)
            answer = self._ask(connection, about)
            try:
                if not isinstance(answer, Changes):
                    raise ValueError("an answer to another question")
                look.take(answer, about)
            except ValueError as error:
                del self._looks[key, prefix]
                raise self._fail(str(error), Cause.STRANGER) from None
            if not answer.more:
                return look.values
            if time.monotonic() > until_s:
                # What was read is kept, so another look gets further.
                told = f"{self._connector.where}: too much to read at once"
                raise StoreError(told, Cause.BUSY)

    def _write(self, request: Request) -> int:
        answer = self._ask(self._connected(), request)
        if not isinstance(answer, Done):
            raise self._fail("an answer to another question", Cause.STRANGER)
        return answer.count

    def _ask(self, connection: Connection, request: Request) -> Answer:
        try:
            answer = connection.ask(request, time.monotonic() + self._timeout_s, answer_decoder)
        except (OSError, EOFError, ValueError) as error:
            raise self._fail(self._told(error), cause_of(error, greeted=True)) from None
        self._failures = 0
        if isinstance(answer, Refused):
            about = f"{self._connector.where}: {answer.reason}"
            if answer.reason.startswith(FORBIDDEN):
                raise StoreForbidden(about, Cause.ROLE)
            raise StoreError(about, cause_of_refusal(answer.reason))
        return answer

    def _connected(self) -> Connection:
        if self._connection is not None and self._connection.has_ended():
            self._drop()
        if self._connection is not None:
            return self._connection
        now = self._clock()
        if now < self._retry_at_s:
            about = f"{self._reason}; next attempt in {self._retry_at_s - now:.2f} s"
            raise StoreError(f"{self._connector.where}: {about}", self._cause)
        deadline_s = time.monotonic() + self._timeout_s
        connected = None
        try:
            connected = self._connector.connect(self._timeout_s)
            connection = Connection(connected, self._secret, deadline_s)
        except (OSError, EOFError, ValueError) as error:
            cause = cause_of(error, greeted=False, connected=connected is not None)
            if connected is not None:
                connected.close()
            raise self._fail(self._told(error), cause) from None
        if connection.life != self._life:
            self._looks.clear()
            self._life = connection.life
        self._connection = connection
        return connection

    def _told(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout_s} s"
        return str(error).partition("\n")[0][:200] or type(error).__name__

    def _fail(self, reason: str, cause: Cause) -> StoreError:
        self._drop()
        pause_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._retry_at_s = self._clock() + pause_s * self._random.uniform(0.5, 1.0)
        self._reason, self._cause = reason, cause
        return StoreError(f"{self._connector.where}: {reason}", cause)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
