"""The embedded store: leases and compare-and-swap over torch's TCPStore.

A TCPStore has no leases. So each value lies in an envelope that changes with every put. A reader
takes a key as expired when its envelope has not changed for its lease *by the reader's own clock*:
no two clocks are ever compared.

A TCPStore has no authorization either: use it on trusted networks only. Readers validate values.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from torch._C._distributed_c10d import TCPStore

from crux_torch.c10d.tcp_client import TcpClient
from crux_torch.control.records import MAX_RECORD_BYTES
from crux_torch.control.store import MAX_LEASE_S, check_write
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

ENVELOPE_VERSION = 1
MAX_HEADER_BYTES = 256
#: A key that its owner has left is deleted after this many times its lease.
GARBAGE_LEASES = 5.0
#: Keys that one listing reads at most. No honest cluster has more.
MAX_KEYS = 100_000
#: Never the value of a key: a compare-and-swap that expects it is a read that does not wait.
_NOTHING = b"\x00crux: no such key"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first line of an envelope, as JSON. The value follows it.

    Attributes:
        w: who wrote it: a random name of the client.
        n: number of the writer's write, so that a renewal differs from what it renews.
        lease_s: seconds without change after which the key counts as expired.
        swapped: written by compare-and-swap. Such a key is never deleted as garbage, because the
            deletion could hit a newer value.
    """

    v: int = ENVELOPE_VERSION
    w: Annotated[str, msgspec.Meta(max_length=64)]
    n: Annotated[int, msgspec.Meta(ge=0)]
    lease_s: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_LEASE_S)]
    swapped: bool = False


_header_decoder = msgspec.json.Decoder(Header)


def seal(header: Header, value: bytes) -> bytes:
    """The envelope of ``value``."""
    return msgspec.json.encode(header) + b"\n" + value


def unseal(raw: bytes) -> tuple[Header, bytes]:
    """Header and value; raises ValueError for another version, and for what is too large."""
    end = raw.find(b"\n", 0, MAX_HEADER_BYTES)
    if end < 0:
        raise ValueError("no header")
    header = _header_decoder.decode(raw[:end])
    if header.v != ENVELOPE_VERSION:
        raise ValueError(f"envelope version {header.v}, expected {ENVELOPE_VERSION}")
    if len(raw) - end - 1 > MAX_RECORD_BYTES:
        raise ValueError(f"{len(raw) - end - 1} bytes, limit {MAX_RECORD_BYTES}")
    return header, raw[end + 1 :]


class TcpStore:
    """A TCPStore server as :class:`~crux_torch.control.store.SharedStore`, which says what each
    method does.

    ``timeout_s`` bounds one call to the server.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = TcpClient(host, port, timeout_s=timeout_s, clock=clock)
        self._clock = clock
        self._writer = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._writes = 0
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._warn = WarnOnce(_log)

    def get(self, key: str) -> bytes | None:
        return self._live(key, self._client.call(lambda client: _read(client, key)))[0]

    def put(self, key: str, value: bytes, lease_s: float = MAX_LEASE_S) -> None:
        check_write(key, value, lease_s)
        envelope = self._envelope(value, lease_s, swapped=False)
        self._client.call(lambda client: client.set(key, _text(envelope)))

    def delete(self, key: str) -> None:
        self._client.call(lambda client: client.delete_key(key))

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease_s: float = MAX_LEASE_S
    ) -> bool:
        check_write(key, value, lease_s)
        raw = self._client.call(lambda client: _read(client, key))
        if self._live(key, raw)[0] != expected:
            return False
        envelope = self._envelope(value, lease_s, swapped=True)
        # Expecting an empty value creates an absent key: an envelope is never empty. Each envelope
        # is unique, so no other writer's swap can pass for this one.
        before = _text(raw or b"")
        after = self._client.call(lambda client: client.compare_set(key, before, _text(envelope)))
        return bytes(after) == envelope

    def list(self, prefix: str) -> dict[str, bytes]:
        def read_all(client: TCPStore) -> dict[str, bytes | None]:
            keys = [k for k in client.list_keys() if k.startswith(prefix)][:MAX_KEYS]
            return {key: _read(client, key) for key in keys}

        found = self._client.call(read_all)
        with self._lock:
            for key in [k for k in self._seen if k.startswith(prefix) and k not in found]:
                del self._seen[key]
        values: dict[str, bytes] = {}
        for key, raw in found.items():
            value, garbage = self._live(key, raw)
            if value is not None:
                values[key] = value
            elif garbage:
                self.delete(key)
        return values

    def close(self) -> None:
        self._client.close()

    def _envelope(self, value: bytes, lease_s: float, swapped: bool) -> bytes:
        with self._lock:
            self._writes += 1
            n = self._writes
        return seal(Header(w=self._writer, n=n, lease_s=lease_s, swapped=swapped), value)

    def _live(self, key: str, raw: bytes | None) -> tuple[bytes | None, bool]:
        """The value in ``raw`` unless it is absent, expired or not an envelope.

        Also whether it is garbage: its owner has left it for so long that it may be deleted.
        """
        if raw is None:
            with self._lock:
                self._seen.pop(key, None)
            return None, False
        try:
            header, value = unseal(raw)
        except (ValueError, msgspec.MsgspecError) as error:
            self._warn(key, f"ignoring {key!r} in the store: {error}")
            return None, False
        now = self._clock()
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        with self._lock:
            seen = self._seen.get(key)
            if seen is None or seen[0] != digest:
                seen = self._seen[key] = (digest, now)
        unchanged_s = now - seen[1]
        if unchanged_s < header.lease_s:
            return value, False
        return None, not header.swapped and unchanged_s >= GARBAGE_LEASES * header.lease_s


def _read(client: TCPStore, key: str) -> bytes | None:
    # get() waits for an absent key, and the key could vanish between check() and get().
    raw = bytes(client.compare_set(key, _text(_NOTHING), ""))
    return None if raw == _NOTHING else raw


def _text(raw: bytes) -> Any:
    # The binding takes bytes for a std::string, but its stub says str.
    return raw
