"""Client of a store that speaks our frames: over TCP, or over a socket to a store process.

It keeps what it has read, so that reading again costs a few bytes if nothing has changed.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

import msgspec

from crux_torch.errors import Cause, StoreError, StoreForbidden, StoreTooLarge, first_line
from crux_torch.own_folders import FolderError
from crux_torch.store import (
    KEY_BYTES,
    MAX_KEY_BYTES,
    MAX_LEASE_S,
    MAX_STORE_BYTES,
    MAX_STORE_KEYS,
    check_key,
    check_write,
    encoded_size,
)
from crux_torch.store.frames import (
    HTTP,
    MAX_ANSWER_BYTES,
    MAX_GREETING_BYTES,
    NONCE_BYTES,
    PAGE_BYTES,
    PROTOCOL_VERSION,
    SEAL_BYTES,
    Answer,
    Challenge,
    Changes,
    Clock,
    Count,
    Delete,
    Done,
    FrameSocket,
    FrameTooLong,
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
    Welcome,
    Writer,
    answer_decoder,
    change_size,
    pack,
    unpack,
)

M = TypeVar("M")

#: Start of an etcd's reason for refusing what a role does not allow.
FORBIDDEN = "permission_denied"

#: Bytes of a small answer beside its keys and values.
MAX_AROUND_BYTES = 4096

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
#: Keys and prefixes whose values are remembered.
MAX_LOOKS = 64
#: Timeouts that reading all pages of one look may take.
MAX_LOOK_CALLS = 10
#: Bytes of pages that one call reads: what a store holds, and as much again of changes.
MAX_LOOK_PAGES_BYTES = 2 * MAX_STORE_BYTES
#: Pauses after answers that no server of ours gives; each doubles the last, until forgiven.
FIRST_OFFENCE_PAUSE_S = 1.0
MAX_OFFENCE_PAUSE_S = 60.0
FORGIVEN_AFTER_S = 600.0

_challenge = msgspec.msgpack.Decoder(Challenge)
_welcome = msgspec.msgpack.Decoder(Welcome)


#: Start of an etcd's refusal if no member answers.
NO_CONTACT = "no contact"
#: Words of such a refusal if a member answers, and does not take this client.
_LOGIN = ("unauthenticated", "invalid user", "authentication", "certificate", "handshake")


def cause_of(error: Exception, *, greeted: bool, connected: bool = True) -> Cause:
    """Returns why an exchange failed, from the error and how far the connection had come."""
    if isinstance(error, StoreError):
        return error.cause
    if isinstance(error, FolderError):
        return Cause.FOLDER
    if isinstance(error, socket.gaierror):
        return Cause.NAME
    if isinstance(error, TimeoutError):
        return Cause.SILENT if connected else Cause.UNREACHABLE
    if not connected:
        absent = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
        return Cause.ABSENT if absent else Cause.UNREACHABLE
    if isinstance(error, ValueError):
        return Cause.HTTP if str(error) == HTTP else Cause.STRANGER
    return Cause.CUT if greeted else Cause.STRANGER


def cause_of_refusal(reason: str) -> Cause:
    """Returns why a server refused a request."""
    if not reason.startswith(NO_CONTACT):
        return Cause.LIMIT
    login = any(word in reason.lower() for word in _LOGIN)
    return Cause.ETCD_LOGIN if login else Cause.ETCD_AWAY


class Connector(Protocol):
    """Makes connections to one store, one at a time."""

    #: The store's name in messages.
    where: str

    def connect(self, timeout_s: float) -> socket.socket:
        """Returns a new connection; raises OSError or StoreError."""

    def close(self) -> None:
        """Release what :meth:`connect` made, except the socket."""


class Offence(ValueError):
    """An answer that no server of ours gives."""


class Connection:
    """A connection whose two sides have proved that they know the secret.

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
        """Returns the answer to ``request``; raises OSError, EOFError, Offence or StoreTooLarge."""
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
        """Returns True if the other side is known to be gone."""
        return self._frames.has_ended()

    def close(self) -> None:
        self._frames.close()


class Look:
    """Values of one key or prefix, up to ``revision``; ``limit_bytes`` bounds keys and values."""

    def __init__(self, limit_bytes: int) -> None:
        self.revision = 0
        #: Replaced, not changed, when the last page has come: callers keep what they were given.
        self.values: dict[str, bytes] = {}
        #: With the pages that have come so far; None if there are none.
        self._coming: dict[str, bytes] | None = None
        self._limit_bytes = limit_bytes
        self._held_bytes = self._counted_bytes = 0

    def take(self, changes: Changes, request: Read) -> int:
        """Take in one page; return its bytes.

        Raises:
            ValueError: no server of ours sends it.
            StoreTooLarge: it is more than the limit.
        """
        size = 0
        for key, value in changes.values:
            if size >= PAGE_BYTES:
                raise ValueError(f"a page of more than {PAGE_BYTES} bytes")
            if len(key) > MAX_KEY_BYTES or encoded_size(key) > MAX_KEY_BYTES:
                raise ValueError(f"a key of more than {MAX_KEY_BYTES} bytes")
            size += change_size(key, value)
        if changes.more and (size < PAGE_BYTES or changes.revision <= request.since):
            raise ValueError("a page that says that there is more without a reason")
        if changes.anew:
            self._coming, self._held_bytes, self._counted_bytes = {}, 0, 0
        elif self._coming is None and changes.values:
            self._coming = dict(self.values)
        values = self._coming
        for key, value in changes.values:
            fits = key.startswith(request.key) if request.prefix else key == request.key
            if not fits:
                raise ValueError(f"an answer about {key[:80]!r}, not {request.key!r}")
            assert values is not None
            before = values.pop(key, None)
            if before is not None:
                self._count(key, before, -1)
            if value is not None:
                values[key] = value
                self._count(key, value, 1)
        if values is not None:
            if len(values) > MAX_STORE_KEYS or self._counted_bytes > MAX_STORE_BYTES:
                raise ValueError(
                    f"{len(values)} keys and {self._counted_bytes >> 20} MiB under "
                    f"{request.key!r}, more than a store holds"
                )
            if self._held_bytes > self._limit_bytes:
                raise StoreTooLarge(f"{self._held_bytes} bytes under {request.key!r}")
        self.revision = changes.revision
        if not changes.more and values is not None:
            self.values, self._coming = values, None
        return size

    def _count(self, key: str, value: bytes, sign: int) -> None:
        size = encoded_size(key) + len(value)
        self._held_bytes += sign * size
        self._counted_bytes += sign * (KEY_BYTES + size)


class StoreClient:
    """A :class:`~crux_torch.store.SharedStore`, which says what each method does.

    Thread safety: any thread may call any method; calls take turns under one lock. No call holds
    the GIL while it waits.

    Args:
        connector: makes the connections.
        secret: secret of the store; empty if it has none.
        timeout_s: longest time of one exchange with the server, connecting included.
        limit_bytes: most bytes that one look may show; a call raises StoreTooLarge for more.
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
            if not isinstance(answer, Writer):
                raise self._offended("an answer to another question")
            return answer.text

    def clients(self) -> int:
        """Returns the number of the server's clients; raises StoreError if it does not tell."""
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
            reason = "another thread's call still waits"
            raise StoreError(f"{self._connector.where}: {reason}", Cause.BUSY)
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
            request = Read(key, prefix, look.revision)
            answer = self._ask(connection, request)
            try:
                if not isinstance(answer, Changes):
                    raise ValueError("an answer to another question")
                read_bytes += look.take(answer, request)
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
                raise StoreError(f"{self._connector.where}: too much to read at once", Cause.BUSY)

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
            raise self._fail(self._reason_of(error), cause_of(error, greeted=True)) from None
        self._failures = 0
        if isinstance(answer, Refused):
            reason = f"{self._connector.where}: {answer.reason}"
            if answer.reason.startswith(FORBIDDEN):
                raise StoreForbidden(reason, Cause.ROLE)
            raise StoreError(reason, cause_of_refusal(answer.reason))
        return answer

    def _connected(self) -> Connection:
        if self._connection is not None and self._connection.has_ended():
            self._drop()
        if self._connection is not None:
            return self._connection
        now = self._clock()
        if now < self._retry_at_s:
            reason = f"{self._reason}; next attempt in {self._retry_at_s - now:.2f} s"
            raise StoreError(f"{self._connector.where}: {reason}", self._cause)
        deadline_s = time.monotonic() + self._timeout_s
        connected = None
        try:
            connected = self._connector.connect(self._timeout_s)
            connection = Connection(connected, self._secret, deadline_s, self._answer_bytes)
        except (OSError, EOFError, ValueError) as error:
            cause = cause_of(error, greeted=False, connected=connected is not None)
            if connected is not None:
                connected.close()
            raise self._fail(self._reason_of(error), cause) from None
        if connection.life != self._life:
            self._looks.clear()
            self._life = connection.life
        self._connection = connection
        return connection

    def _reason_of(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout_s} s"
        return first_line(error)

    def _offended(self, reason: str) -> StoreError:
        """Leave the other side alone for a while: it is no server of ours, or broken."""
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
