"""The embedded store: leases, watches and compare-and-swap over torch's TCPStore.

A TCPStore has no lease and no watch. A value is kept in an envelope that its writer changes with
every put, and a reader takes a key as expired when its envelope has not changed for its lease *by
the reader's own clock*: no two clocks are ever compared.

It has no authorization either: whoever reaches the port may write, so it belongs on trusted
networks, and every value is taken as foreign.
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

from crux_torch.control.polling_watch import PollingWatch
from crux_torch.control.records import MAX_RECORD_BYTES
from crux_torch.control.store import OnChange, check_write
from crux_torch.control.tcp_client import TcpClient
from crux_torch.control.warn_once import WarnOnce

_log = logging.getLogger(__name__)

ENVELOPE_VERSION = 1
MAX_HEADER_BYTES = 256
#: A key that its owner left is deleted after this many times its lease.
GARBAGE_LEASES = 5.0
#: Keys looked at in one listing; a store with more is being abused.
MAX_KEYS = 100_000
#: Never the value of a key: a compare-and-swap that expects it reads without waiting for the key.
_NOTHING = b"\x00crux: no such key"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first line of an envelope, JSON; the value follows it.

    Attributes:
        v: version of the envelope.
        w: who wrote it, random for each client.
        n: counts the writer's writes: a renewal differs from what it renews.
        lease_s: seconds without change after which the key counts as expired; absent: never.
        swapped: written by compare-and-swap, so never deleted as garbage (the deletion could hit
            a newer value).
    """

    v: int = ENVELOPE_VERSION
    w: Annotated[str, msgspec.Meta(max_length=64)]
    n: Annotated[int, msgspec.Meta(ge=0)]
    lease_s: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)] | None = None
    swapped: bool = False


_header_decoder = msgspec.json.Decoder(Header)


def seal(header: Header, value: bytes) -> bytes:
    """The envelope of ``value``."""
    return msgspec.json.encode(header) + b"\n" + value


def unseal(raw: bytes) -> tuple[Header, bytes]:
    """The header and the value of an envelope.

    Raises:
        ValueError: not an envelope of this version, or too large.
    """
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
    """A :class:`~crux_torch.control.store.Store` on a TCPStore server.

    Args:
        host: of the server.
        port: of the server.
        timeout_s: seconds that one call to the server may take.
        watch_interval_s: seconds between two looks of a watch.
        clock: seconds that never go back.
    """

    pushes_changes = False

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 0.5,
        watch_interval_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = TcpClient(host, port, timeout_s=timeout_s, clock=clock)
        self._clock = clock
        self._watch_interval_s = watch_interval_s
        self._writer = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._writes = 0
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._watches: list[PollingWatch] = []
        self._warn = WarnOnce(_log)

    def get(self, key: str) -> bytes | None:
        """See :meth:`Store.get`."""
        raw = self._client.call(lambda client: _read(client, key))
        return self._live(key, raw)

    def put(self, key: str, value: bytes, lease_s: float | None = None) -> None:
        """See :meth:`Store.put`."""
        check_write(key, value, lease_s)
        envelope = self._envelope(value, lease_s, swapped=False)
        self._client.call(lambda client: client.set(key, _text(envelope)))

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._client.call(lambda client: client.delete_key(key))

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease_s: float | None = None
    ) -> bool:
        """See :meth:`Store.compare_and_swap`."""
        check_write(key, value, lease_s)
        raw = self._client.call(lambda client: _read(client, key))
        if self._live(key, raw) != expected:
            return False
        envelope = self._envelope(value, lease_s, swapped=True)
        # An absent key is created by expecting nothing; an envelope is never empty. Every envelope
        # is unique, so no other writer's swap can be taken for this one.
        before = _text(raw or b"")
        after = self._client.call(lambda client: client.compare_set(key, before, _text(envelope)))
        return bytes(after) == envelope

    def list(self, prefix: str) -> dict[str, bytes]:
        """See :meth:`Store.list`."""

        def read_all(client: TCPStore) -> dict[str, bytes | None]:
            keys = [k for k in client.list_keys() if k.startswith(prefix)][:MAX_KEYS]
            return {key: _read(client, key) for key in keys}

        found = self._client.call(read_all)
        with self._lock:
            for key in [k for k in self._seen if k.startswith(prefix) and k not in found]:
                del self._seen[key]
        values: dict[str, bytes] = {}
        for key, raw in found.items():
            value = self._live(key, raw)
            if value is not None:
                values[key] = value
            elif self._garbage(key, raw):
                self.delete(key)
        return values

    def watch(self, prefix: str, on_change: OnChange) -> PollingWatch:
        """See :meth:`Store.watch`; a thread lists the prefix from time to time."""
        watch = PollingWatch(self.list, prefix, on_change, self._watch_interval_s)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """See :meth:`Store.close`."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        self._client.close()

    def _envelope(self, value: bytes, lease_s: float | None, swapped: bool) -> bytes:
        with self._lock:
            self._writes += 1
            n = self._writes
        return seal(Header(w=self._writer, n=n, lease_s=lease_s, swapped=swapped), value)

    def _live(self, key: str, raw: bytes | None) -> bytes | None:
        """The value in ``raw`` unless it is absent, expired or no envelope."""
        now = self._clock()
        if raw is None:
            with self._lock:
                self._seen.pop(key, None)
            return None
        try:
            header, value = unseal(raw)
        except (ValueError, msgspec.MsgspecError) as error:
            self._warn(key, f"ignoring {key!r} in the store: {error}")
            return None
        unchanged_s = now - self._since(key, raw, now)
        if header.lease_s is not None and unchanged_s >= header.lease_s:
            return None
        return value

    def _since(self, key: str, raw: bytes, now: float) -> float:
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        with self._lock:
            seen = self._seen.get(key)
            if seen is None or seen[0] != digest:
                seen = (digest, now)
                self._seen[key] = seen
            return seen[1]

    def _garbage(self, key: str, raw: bytes | None) -> bool:
        if raw is None:
            return False
        try:
            header, _ = unseal(raw)
        except (ValueError, msgspec.MsgspecError):
            return False
        if header.lease_s is None or header.swapped:
            return False
        now = self._clock()
        return now - self._since(key, raw, now) >= GARBAGE_LEASES * header.lease_s


def _read(client: TCPStore, key: str) -> bytes | None:
    # get() waits for an absent key, and check() before it leaves a moment in which it may vanish.
    raw = bytes(client.compare_set(key, _text(_NOTHING), ""))
    return None if raw == _NOTHING else raw


def _text(raw: bytes) -> Any:
    # The binding takes bytes for std::string; the stub only knows str.
    return raw
