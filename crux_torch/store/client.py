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

from crux_torch.errors import Cause, StoreError, StoreForbidden, StoreTooLarge
from crux_torch.store.causes import cause_of, cause_of_refusal
from crux_torch.store.frame_socket import FrameSocket, FrameTooLong
from crux_torch.store.frames import (
    MAX_ANSWER_BYTES,
    MAX_GREETING_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    SEAL_BYTES,
    Answer,
    Challenge,
    Changes,
    Clock,
    Count,
    Delete,
    Done,
    Handshake,
    Hello,
    Origin,
    Proof,
    Put,
    Read,
    Refused,
    Request,
    Sealer,
    Swap,
    Told,
    Welcome,
    answer_decoder,
    pack,
    unpack,
)
from crux_torch.store.look import Look
from crux_torch.store.shared_store import MAX_LEASE_S, MAX_STORE_BYTES, check_key, check_write

M = TypeVar("M")

#: How the reason begins with which an etcd refuses what a role does not allow.
FORBIDDEN = "permission_denied"

#: Bytes of an answer beside its keys and values, where they are few.
MAX_AROUND_BYTES = 4096

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
#: Looks that are remembered: each prefix or key that was read is one.
MAX_LOOKS = 64
#: Exchanges that one look may take as long as until it has read all pages.
MAX_LOOK_CALLS = 10
#: Bytes of pages that one call reads at most: what a store holds, and as much again of changes.
MAX_LOOK_PAGES_BYTES = 2 * MAX_STORE_BYTES
#: Pauses after answers that no server of ours gives; each is twice as long as the one before, until
#: there was none for a while.
FIRST_OFFENCE_PAUSE_S = 1.0
MAX_OFFENCE_PAUSE_S = 60.0
FORGIVEN_AFTER_S = 600.0

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


class Offence(ValueError):
    """An answer that no server of ours gives."""


class Connection:
    """A connection that has greeted.

    Args:
        limit_bytes: of an answer.

    Raises:
        OSError, EOFError, ValueError: it failed, or the other side is no server of ours.
        StoreError: the other side is of another release, or asks for another secret.
    """

    def __init__(
        self,
        connected: socket.socket,
        secret: bytes,
        deadline_s: float,
        limit_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._frames = FrameSocket(connected)
        self._opener: Sealer | None = None
        self._sealer: Sealer | None = None
        self._limit = limit_bytes
        hello = Hello(PROTOCOL_VERSION, secrets.token_bytes(NONCE_BYTES))
        self._frames.send(pack(hello), deadline_s)
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
        handshake = Handshake(secret, hello, challenge)
        self._frames.send(pack(Proof(handshake.digest("client"))), deadline_s)
        try:
            welcome = unpack(self._frames.receive(MAX_GREETING_BYTES, deadline_s), _welcome)
        except EOFError:
            raise StoreError(
                "it refused this job: CRUX_STORE_SECRET is not its secret", Cause.WRONG_SECRET
            ) from None
        if not handshake.proves("server", welcome.digest, welcome.life):
            raise StoreError("it does not know the secret", Cause.UNPROVEN)
        self.life = welcome.life
        self._opener, self._sealer = handshake.sealer("server"), handshake.sealer("client")

    def ask(
        self, request: msgspec.Struct, deadline_s: float, decoder: msgspec.msgpack.Decoder[M]
    ) -> M:
        """The answer to ``request``; raises OSError, EOFError, Offence or StoreTooLarge."""
        self._frames.send(pack(request, self._sealer), deadline_s)
        try:
            frame = self._frames.receive(min(self._limit, MAX_ANSWER_BYTES), deadline_s)
            return unpack(frame, decoder, self._opener)
        except FrameTooLong as error:
            if self._limit < error.size <= MAX_ANSWER_BYTES:
                raise StoreTooLarge(f"an answer of {error.size} bytes") from None
            raise Offence(str(error)) from None
        except ValueError as error:
            raise Offence(str(error)) from None

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
        limit_bytes: of what one look shows. Where there is more, a call raises StoreTooLarge, and
            nothing of it was parsed.
        clock: paces the attempts to connect again.
    """

    def __init__(
        self,
        connector: Connector,
        secret: bytes = b"",
        *,
        timeout_s: float = 0.5,
        limit_bytes: int = MAX_STORE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_bytes = limit_bytes
        #: An answer holds that much at most, and what is around it.
        self._answer_bytes = limit_bytes + SEAL_BYTES + MAX_AROUND_BYTES
        self._offences = 0
        self._offended_at_s = float("-inf")
        self._connector = connector
        self._secret = secret
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._random = random.Random()
        self._connection: Connection | None = None
        self._life = ""
        self._looks: dict[tuple[str, bool], Look] = {}
        self._failures = 0
        self._retry_at_s = float("-inf")
        self._reason, self._cause = "", Cause.OTHER
        self._closed = False

    def get(self, key: str) -> bytes | None:
        check_key(key)
        with self._turn():
            return self._look(key, prefix=False).get(key)

    def put(self, key: str, value: bytes, lease_s: float = MAX_LEASE_S) -> None:
        check_write(key, value, lease_s)
        with self._turn():
            self._write(Put(key, value, lease_s))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._turn():
            self._write(Delete(key))

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease_s: float = MAX_LEASE_S
    ) -> bool:
        check_write(key, value, lease_s)
        with self._turn():
            return self._write(Swap(key, expected, value, lease_s)) > 0

    def list(self, prefix: str) -> Mapping[str, bytes]:
        check_key(prefix)
        with self._turn():
            return self._look(prefix, prefix=True)

    def origin(self, key: str) -> str:
        check_key(key)
        with self._turn():
            answer = self._ask(self._connected(), Origin(key))
            if not isinstance(answer, Told):
                raise self._offended("an answer to another question")
            return answer.text

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
        read_bytes = 0
        while True:
            connection = self._connected()
            look = self._looks.pop((key, prefix), None) or Look(self._limit_bytes)
            while len(self._looks) >= MAX_LOOKS:
                del self._looks[next(iter(self._looks))]  # the one that was not used for longest
            self._looks[key, prefix] = look
            about = Read(key, prefix, look.revision)
            answer = self._ask(connection, about)
            try:
                if not isinstance(answer, Changes):
                    raise ValueError("an answer to another question")
                read_bytes += look.take(answer, about)
            except StoreTooLarge as error:
                del self._looks[key, prefix]
                raise StoreTooLarge(f"{self._connector.where}: {error}") from None
            except ValueError as error:
                del self._looks[key, prefix]
                raise self._offended(str(error)) from None
            if not answer.more:
                return look.values
            if time.monotonic() > until_s or read_bytes > MAX_LOOK_PAGES_BYTES:
                # What was read is kept, so another look gets further.
                told = f"{self._connector.where}: too much to read at once"
                raise StoreError(told, Cause.BUSY)

    def _write(self, request: Request) -> int:
        answer = self._ask(self._connected(), request)
        if not isinstance(answer, Done):
            raise self._offended("an answer to another question")
        return answer.count

    def _ask(self, connection: Connection, request: Request) -> Answer:
        try:
            answer = connection.ask(request, time.monotonic() + self._timeout_s, answer_decoder)
        except StoreTooLarge as error:
            self._drop()  # its answer is still to come
            raise StoreTooLarge(f"{self._connector.where}: {error}") from None
        except Offence as error:
            raise self._offended(str(error)) from None
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
            connection = Connection(connected, self._secret, deadline_s, self._answer_bytes)
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

    def _offended(self, reason: str) -> StoreError:
        """The other side is no server of ours, or broken: it is left alone for a while."""
        now = self._clock()
        if now - self._offended_at_s > FORGIVEN_AFTER_S:
            self._offences = 0
        self._offended_at_s = now
        pause_s = min(MAX_OFFENCE_PAUSE_S, FIRST_OFFENCE_PAUSE_S * 2.0 ** min(self._offences, 30))
        self._offences += 1
        return self._fail(reason, Cause.STRANGER, pause_s)

    def _fail(self, reason: str, cause: Cause, least_pause_s: float = 0.0) -> StoreError:
        self._drop()
        pause_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._failures, 30))
        pause_s = max(pause_s, least_pause_s)
        self._failures += 1
        self._retry_at_s = self._clock() + pause_s * self._random.uniform(0.5, 1.0)
        self._reason, self._cause = reason, cause
        return StoreError(f"{self._connector.where}: {reason}", cause)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
