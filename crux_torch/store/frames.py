"""What a client and a server of the embedded store say to each other.

A frame is four bytes of length (big endian), a seal of 16 bytes where both sides have a secret, and
one message as msgpack. A client greets, and both prove that they know the secret without telling
it. From then on each request gets one answer, in order.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec

from crux_torch.store.shared_store import (
    MAX_KEY_BYTES,
    MAX_LEASE_S,
    MAX_VALUE_BYTES,
    encoded_size,
)

#: Goes up when a message changes its meaning. The two sides must be of the same version.
PROTOCOL_VERSION = 2
LENGTH_BYTES = 4
SEAL_BYTES = 16
NONCE_BYTES = 32
#: Largest message: before the greeting is over, of a client, and of a server. A page of changes
#: ends with the value that takes it to PAGE_BYTES, each change counted with ENTRY_BYTES beside its
#: key and value: msgpack takes 9 at most.
MAX_GREETING_BYTES = 256
MAX_REQUEST_BYTES = 2 * MAX_VALUE_BYTES + 2 * MAX_KEY_BYTES + 256
PAGE_BYTES = MAX_VALUE_BYTES
ENTRY_BYTES = 16
MAX_ANSWER_BYTES = 2 * PAGE_BYTES + 4096

M = TypeVar("M")

#: msgspec counts characters: :func:`unpack_request` and :func:`page_size` count bytes.
Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY_BYTES)]
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Lease = Annotated[float, msgspec.Meta(gt=0.0, le=MAX_LEASE_S)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """What all messages have in common."""


class Hello(Message, frozen=True, tag="hello"):
    """The client's first word."""

    version: int
    nonce: Nonce


class Challenge(Message, frozen=True, tag="challenge"):
    """The server's. ``sealed``: it has a secret, and answers only who knows it, too."""

    version: int
    nonce: Nonce
    sealed: bool


class Proof(Message, frozen=True, tag="proof"):
    """The client knows the secret."""

    digest: Digest


class Welcome(Message, frozen=True, tag="welcome"):
    """The server knows it, too.

    Attributes:
        life: random name of this life of the server's content: revisions of another mean nothing.
    """

    digest: Digest
    life: Annotated[str, msgspec.Meta(max_length=64)]


class Read(Message, frozen=True, tag="read"):
    """What changed after revision ``since`` (0: everything) of ``key``, or of all keys that begin
    with it."""

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
    """How many clients does the server have?"""


class Clock(Message, frozen=True, tag="clock"):
    """What does the server's monotonic clock say, in nanoseconds?"""


class Origin(Message, frozen=True, tag="origin"):
    """Who wrote the value of this key, as the server saw it?"""

    key: Key


class Changes(Message, frozen=True, tag="changes"):
    """The answer to :class:`Read`.

    Attributes:
        revision: up to which these are all changes.
        values: of changed keys; None: it is gone.
        more: there are more; read again from ``revision``.
        anew: forget what was read before.
    """

    revision: int
    values: list[tuple[Key, Value | None]]
    more: bool
    anew: bool


class Done(Message, frozen=True, tag="done"):
    """The answer to a write: whether it did something; and to :class:`Count` and
    :class:`Clock`."""

    count: int


class Told(Message, frozen=True, tag="told"):
    """The answer to :class:`Origin`; empty where there is no such key."""

    text: Annotated[str, msgspec.Meta(max_length=200)]


class Refused(Message, frozen=True, tag="refused"):
    """The request was understood and not carried out."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


Request = Read | Put | Swap | Delete | Count | Clock | Origin
Answer = Changes | Done | Told | Refused
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


class Sealer:
    """Seals the frames of one direction of one connection, each by its place in the sequence.

    So nobody on the way can change, repeat or add one. It does not keep them secret.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def seal(self, body: bytes | memoryview) -> bytes:
        """The seal of the next frame."""
        place = self._count.to_bytes(16, "big")
        self._count += 1
        digest = hashlib.blake2b(place, key=self._key, digest_size=SEAL_BYTES)
        digest.update(body)
        return digest.digest()

    def open(self, frame: bytes) -> bytes:
        """The message in the next frame; raises ValueError where its seal is not right."""
        seal, body = frame[:SEAL_BYTES], frame[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self.seal(body)):
            raise ValueError("a frame with a wrong seal")
        return body


class Handshake:
    """Keys and proofs that both sides derive from the secret and from every field of the greeting.

    So a field of the greeting that somebody changes on the way makes the proofs wrong.

    Args:
        secret: what both must know; empty where none is asked for.
        hello, challenge: as they were sent, or came.
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
        """For the frames that ``who`` sends; None without a secret."""
        return Sealer(self.digest(who + " seals")) if self._secret else None


def pack(message: msgspec.Struct, sealer: Sealer | None = None) -> bytes:
    """The frame of ``message``."""
    body = _encoder.encode(message)
    seal = b"" if sealer is None else sealer.seal(body)
    return (len(seal) + len(body)).to_bytes(LENGTH_BYTES, "big") + seal + body


def unpack_request(
    frame: bytes, decoder: msgspec.msgpack.Decoder[M], sealer: Sealer | None = None
) -> M:
    """The request in ``frame``; raises ValueError for an unfit one, or one with too long a key."""
    request = unpack(frame, decoder, sealer)
    key = getattr(request, "key", "")
    if encoded_size(key) > MAX_KEY_BYTES:
        raise ValueError(f"a key of {encoded_size(key)} bytes, limit {MAX_KEY_BYTES}")
    return request


def change_size(key: str, value: bytes | None) -> int:
    """Bytes that a change counts in a page: at least what it takes in a frame."""
    return ENTRY_BYTES + encoded_size(key) + len(value or b"")


def page_size(values: Iterable[tuple[str, bytes | None]]) -> int:
    """Bytes of a page of these changes; raises ValueError for what no server of ours sends."""
    size = 0
    for key, value in values:
        if size >= PAGE_BYTES:
            raise ValueError(f"a page of more than {PAGE_BYTES} bytes")
        if len(key) > MAX_KEY_BYTES or encoded_size(key) > MAX_KEY_BYTES:
            raise ValueError(f"a key of more than {MAX_KEY_BYTES} bytes")
        size += change_size(key, value)
    return size


def unpack(frame: bytes, decoder: msgspec.msgpack.Decoder[M], sealer: Sealer | None = None) -> M:
    """The message in ``frame``, which comes without its length; raises ValueError for an unfit
    one."""
    body = frame if sealer is None else sealer.open(frame)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a message: {error}") from None
