"""Protocol between the client and the server of a store: messages, frames, and the secret.

A frame is four bytes of length (big endian), a seal of 16 bytes if both sides have a secret, and
one message as msgpack. A client greets, and both prove that they know the secret without telling
it. From then on each request gets one answer, in order.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import time
from typing import Annotated, TypeVar

import msgspec

from crux_torch.errors import SettingsError
from crux_torch.files import open_regular
from crux_torch.store import MAX_KEY_BYTES, MAX_LEASE_S, MAX_VALUE_BYTES, encoded_size

#: Goes up when a message changes its meaning. The two sides must be of the same version.
PROTOCOL_VERSION = 2
LENGTH_BYTES = 4
SEAL_BYTES = 16
NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
#: Largest messages: of the greeting, of a client, and of a server. A page of changes ends with the
#: value that takes it to PAGE_BYTES. Each change counts ENTRY_BYTES beside its key and value:
#: msgpack takes 9 at most.
MAX_GREETING_BYTES = 256
MAX_REQUEST_BYTES = 2 * MAX_VALUE_BYTES + 2 * MAX_KEY_BYTES + 256
PAGE_BYTES = MAX_VALUE_BYTES
ENTRY_BYTES = 16
MAX_ANSWER_BYTES = 2 * PAGE_BYTES + 4096

#: First byte that a store process sends: all is loaded; or it failed, and the reason follows.
READY, FAILED = b"\x01", b"\x00"

M = TypeVar("M")

#: msgspec counts characters: :func:`unpack_request` and a client's ``Look`` count bytes.
Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY_BYTES)]
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Lease = Annotated[float, msgspec.Meta(gt=0.0, le=MAX_LEASE_S)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages."""


class Hello(Message, frozen=True, tag="hello"):
    """First message of a client."""

    version: int
    nonce: Nonce


class Challenge(Message, frozen=True, tag="challenge"):
    """First message of a server. ``sealed``: clients must know its secret."""

    version: int
    nonce: Nonce
    sealed: bool


class Proof(Message, frozen=True, tag="proof"):
    """Proof that the client knows the secret."""

    digest: Digest


class Welcome(Message, frozen=True, tag="welcome"):
    """Proof that the server knows the secret.

    Attributes:
        life: random name of the server's content: revisions of another one mean nothing.
    """

    digest: Digest
    life: Annotated[str, msgspec.Meta(max_length=64)]


class Read(Message, frozen=True, tag="read"):
    """Ask for changes after revision ``since`` (0: all) of ``key``, or of all keys with it as
    prefix."""

    key: Key
    prefix: bool
    since: Annotated[int, msgspec.Meta(ge=0)]


class Put(Message, frozen=True, tag="put"):
    """Set a key. The same value again only renews the lease, and is no change."""

    key: Key
    value: Value
    lease_s: Lease


class Swap(Message, frozen=True, tag="swap"):
    """Set a key if it holds ``expected``; None: if it is absent."""

    key: Key
    expected: Value | None
    value: Value
    lease_s: Lease


class Delete(Message, frozen=True, tag="delete"):
    """Remove a key."""

    key: Key


class Count(Message, frozen=True, tag="count"):
    """Ask for the number of the server's clients."""


class Clock(Message, frozen=True, tag="clock"):
    """Ask for the server's monotonic clock, in nanoseconds."""


class Origin(Message, frozen=True, tag="origin"):
    """Ask who wrote the value of this key, as the server saw it."""

    key: Key


class Changes(Message, frozen=True, tag="changes"):
    """Answer to :class:`Read`.

    Attributes:
        revision: revision up to which these are all changes.
        values: changed keys with their values; None if a key is gone.
        more: True if there are more; read again from ``revision``.
        anew: True if what was read before no longer counts.
    """

    revision: int
    values: list[tuple[Key, Value | None]]
    more: bool
    anew: bool


class Done(Message, frozen=True, tag="done"):
    """Answer to a write: 1 if it changed something, else 0; and to :class:`Count` and
    :class:`Clock`."""

    count: int


class Writer(Message, frozen=True, tag="told"):
    """Answer to :class:`Origin`; empty if there is no such key."""

    text: Annotated[str, msgspec.Meta(max_length=200)]


class Refused(Message, frozen=True, tag="refused"):
    """Answer to a request that was not carried out."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


Request = Read | Put | Swap | Delete | Count | Clock | Origin
Answer = Changes | Done | Writer | Refused
hello_decoder = msgspec.msgpack.Decoder(Hello)
proof_decoder = msgspec.msgpack.Decoder(Proof)
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


def read_secret(path: str) -> bytes:
    """Returns the secret in the file at ``path``, stripped; empty for an empty path.

    Raises:
        SettingsError: the file can't be read, others may read it, or it is too short or too long.
    """
    if not path:
        return b""
    how = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise SettingsError(f"CRUX_STORE_SECRET={path!r}: {error.strerror}; {how}") from None
    if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
        raise SettingsError(
            f"CRUX_STORE_SECRET={path!r} must be its user's alone: chown and chmod 600 it"
        )
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise SettingsError(
            f"CRUX_STORE_SECRET={path!r} has {len(secret)} bytes, expected {MIN_SECRET_BYTES} to "
            f"{MAX_SECRET_BYTES}; {how}"
        )
    return secret


class Sealer:
    """Seals the frames of one direction of one connection, each by its place in the sequence.

    So nobody on the way can change, repeat or add one. It does not keep them secret.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def seal(self, body: bytes | memoryview) -> bytes:
        """Returns the seal of the next frame."""
        place = self._count.to_bytes(16, "big")
        self._count += 1
        digest = hashlib.blake2b(place, key=self._key, digest_size=SEAL_BYTES)
        digest.update(body)
        return digest.digest()

    def open(self, frame: bytes) -> bytes:
        """Returns the message in the next frame; raises ValueError if its seal is wrong."""
        seal, body = frame[:SEAL_BYTES], frame[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self.seal(body)):
            raise ValueError("a frame with a wrong seal")
        return body


class Handshake:
    """Keys and proofs that both sides derive from the secret and from every field of the greeting.

    So a field of the greeting that somebody changes on the way makes the proofs wrong.
    """

    def __init__(self, secret: bytes, hello: Hello, challenge: Challenge) -> None:
        self._secret = secret
        self._greeting = _encoder.encode((hello, challenge))

    def digest(self, who: str, life: str = "") -> bytes:
        """Returns the proof of ``who``; ``life``: the server's, in its own proof."""
        return hmac.digest(self._secret, _encoder.encode((who, life)) + self._greeting, "sha256")

    def proves(self, who: str, digest: bytes, life: str = "") -> bool:
        """True if ``who`` knows the secret, and both sides saw the same greeting."""
        return hmac.compare_digest(digest, self.digest(who, life))

    def sealer(self, who: str) -> Sealer | None:
        """Returns the sealer of the frames that ``who`` sends; None without a secret."""
        return Sealer(self.digest(who + " seals")) if self._secret else None


def pack(message: msgspec.Struct, sealer: Sealer | None = None) -> bytes:
    """Returns the frame of ``message``."""
    body = _encoder.encode(message)
    seal = b"" if sealer is None else sealer.seal(body)
    return (len(seal) + len(body)).to_bytes(LENGTH_BYTES, "big") + seal + body


def unpack_request(
    frame: bytes, decoder: msgspec.msgpack.Decoder[M], sealer: Sealer | None = None
) -> M:
    """Returns the request in ``frame``; raises ValueError for an unfit one."""
    request = unpack(frame, decoder, sealer)
    key = getattr(request, "key", "")
    if encoded_size(key) > MAX_KEY_BYTES:
        raise ValueError(f"a key of {encoded_size(key)} bytes, limit {MAX_KEY_BYTES}")
    return request


def change_size(key: str, value: bytes | None) -> int:
    """Returns the bytes that a change counts in a page: at least what it takes in a frame."""
    return ENTRY_BYTES + encoded_size(key) + len(value or b"")


def unpack(frame: bytes, decoder: msgspec.msgpack.Decoder[M], sealer: Sealer | None = None) -> M:
    """Returns the message in ``frame``, which has no length; raises ValueError for an unfit one."""
    body = frame if sealer is None else sealer.open(frame)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a message: {error}") from None


#: DSCP is the upper six bits of the traffic class; ECN has the lower two.
_ECN_BITS = 2


def mark(connection: socket.socket, dscp: int) -> None:
    """Send with this DSCP value, 0 to 63; what a listener accepts does, too. Raises OSError."""
    if connection.family == socket.AF_UNIX:
        return  # it sends nothing
    # A socket of IPv6 may speak IPv4, too.
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << _ECN_BITS)
    if connection.family == socket.AF_INET6:
        connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << _ECN_BITS)


#: Start of an HTTP server's answer: as the length of a frame it would be a gigabyte.
_HTTP_BEGIN = b"HTTP"
HTTP = "an HTTP server answers"
#: Seconds between two looks of a child process for its parent.
PARENT_POLL_S = 1.0
#: Pause after a part of a frame: its sender may send single bytes, and each receive takes the GIL.
PART_S = 0.001


class FrameTooLong(ValueError):
    """A frame of ``size`` bytes, which is over a limit."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size} bytes, limit {limit}")
        self.size = size


class FrameSocket:
    """Sends and receives frames over ``connected``. Deadlines are by ``time.monotonic``."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, data: bytes, deadline_s: float) -> None:
        """Send ``data``; raises OSError, which a TimeoutError is."""
        self._socket.settimeout(_left(deadline_s))
        self._socket.sendall(data)

    def receive(self, limit: int, deadline_s: float) -> bytes:
        """Returns the next frame without its length.

        Raises:
            OSError: the connection failed, or the deadline has passed.
            EOFError: the other side closed it.
            FrameTooLong: the frame is longer than ``limit``.
        """
        head = self._bytes(LENGTH_BYTES, deadline_s)
        size = int.from_bytes(head, "big")
        if head == _HTTP_BEGIN:
            raise ValueError(HTTP)
        if size > limit:
            raise FrameTooLong(size, limit)
        return self._bytes(size, deadline_s)

    def has_ended(self) -> bool:
        """Returns True if the other side is known to be gone."""
        self._socket.setblocking(False)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()

    def _bytes(self, size: int, deadline_s: float) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            self._socket.settimeout(_left(deadline_s))
            count = self._socket.recv_into(view[got:])
            if not count:
                raise EOFError("it closed the connection")
            got += count
            if got < size:
                time.sleep(PART_S)
        return bytes(data)


class ChildSocket(FrameSocket):
    """A child process's connection to its parent; tells it at once that all is loaded.

    Args:
        parent: process ID.
        frame_s: seconds that one frame may take.
    """

    def __init__(self, connected: socket.socket, parent: int, frame_s: float) -> None:
        super().__init__(connected)
        self._parent, self._frame_s = parent, frame_s
        self.answer(READY)

    def answer(self, data: bytes) -> None:
        """Send ``data``; raises OSError."""
        self.send(data, time.monotonic() + self._frame_s)

    def next_frame(self, limit: int) -> bytes:
        """Returns the parent's next frame; raises EOFError once the parent is gone, or OSError."""
        while not select.select([self._socket], [], [], PARENT_POLL_S)[0]:
            if os.getppid() != self._parent:
                raise EOFError("the parent is gone")
        return self.receive(limit, time.monotonic() + self._frame_s)


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
