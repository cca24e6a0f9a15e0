"""The store that the jobs of a cluster share: its interface and limits, its server, its clients.

The interface is the part of etcd v3 that agreement needs. Nothing here imports torch: the server is
a process of its own, which starts in an instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable
from urllib.parse import quote

from crux_torch.errors import StoreError

MAX_VALUE_BYTES = 1 << 20
#: Bytes of a key in UTF-8.
MAX_KEY_BYTES = 512
#: Most keys and bytes that an embedded store holds and a client reads. A key counts ``KEY_BYTES``
#: beside its own bytes and its value's: Python takes about as much.
MAX_STORE_KEYS = 100_000
MAX_STORE_BYTES = 256 << 20
KEY_BYTES = 512
#: Longest lease.
MAX_LEASE_S = 600.0
#: Keys that an etcd keeps without a lease: the end of the key of a cluster's operator settings, and
#: the start of the keys of the audit logs. Roles say who may write them (docs/operate/cluster.md).
OPERATOR = "operator/settings"
AUDIT = "crux-audit/"
#: Start of the keys that many write and few read: a look at a cluster leaves them out.
APART = "crux-plan/"
#: Key of the head of the plan in force, below :func:`cluster_prefix`.
PLAN = "head"


def cluster_prefix(cluster: str) -> str:
    """Returns what the keys of ``cluster`` begin with."""
    return f"crux/{quote(cluster, safe='')}/"


@runtime_checkable
class SharedStore(Protocol):
    """A key-value store that the cluster's jobs share. Every operation is bounded in time.

    An operation raises :class:`~crux_torch.errors.StoreError` if the store can't be reached, does
    not answer in time, or refuses. A write that failed in this way may still have happened.
    """

    def get(self, key: str) -> bytes | None:
        """Returns the value of ``key``; None if there is none or its lease has ended."""

    def put(self, key: str, value: bytes, lease_s: float = MAX_LEASE_S) -> None:
        """Set ``key``. It vanishes unless it is put again within ``lease_s``.

        The store's clock judges leases, and never ends one early.
        """

    def delete(self, key: str) -> None:
        """Remove ``key`` if it is there.

        Do not delete a key that others write by :meth:`compare_and_swap`: the deleted value may be
        newer than the one you read. Swap in a value that means "none" instead.
        """

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease_s: float = MAX_LEASE_S
    ) -> bool:
        """Set ``key`` if it holds ``expected`` (None: absent or expired); returns True if so."""

    def list(self, prefix: str) -> Mapping[str, bytes]:
        """Returns all live keys that start with ``prefix``, with values; it never changes later."""

    def origin(self, key: str) -> str:
        """Returns who wrote the value of ``key``, as the store saw it; empty if there is no key.

        A store that does not know refuses.
        """

    def clock_ns(self) -> int:
        """Returns the clock of the store's process, in nanoseconds; it never goes back.

        A store that has no clock refuses.
        """

    def close(self) -> None:
        """Release connections and threads. Later operations raise."""


def is_kept(key: str) -> bool:
    """Returns True if an etcd holds ``key`` for good, whatever its writer's lease."""
    return key.startswith(AUDIT) or key.endswith("/" + OPERATOR)


def encoded_size(key: str) -> int:
    """Returns the bytes of ``key`` in UTF-8; raises UnicodeEncodeError if it has no such form."""
    return len(key) if key.isascii() else len(key.encode())


def check_key(key: str) -> None:
    """Raise StoreError for a key that is too long, or has no form in UTF-8."""
    try:
        size = encoded_size(key)
    except UnicodeEncodeError:
        raise StoreError(f"key {key[:80]!r} can't be written in UTF-8") from None
    if size > MAX_KEY_BYTES:
        raise StoreError(f"key {key[:80]!r}: {size} bytes, limit {MAX_KEY_BYTES}")


def check_write(key: str, value: bytes, lease_s: float) -> None:
    """Raise StoreError for a write that the store would refuse: too large, or an unfit lease."""
    check_key(key)
    if len(value) > MAX_VALUE_BYTES:
        raise StoreError(
            f"{key}: a value of {len(value)} bytes is over the limit of {MAX_VALUE_BYTES}"
        )
    if not 0 < lease_s <= MAX_LEASE_S:
        raise StoreError(
            f"{key}: a lease of {lease_s} s; expected more than 0, at most {MAX_LEASE_S:g}"
        )
