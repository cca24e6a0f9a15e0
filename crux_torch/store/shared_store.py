"""What the shared store can do: the part of etcd v3 that agreement needs, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable
from urllib.parse import quote

from crux_torch.errors import StoreError

MAX_VALUE_BYTES = 1 << 20
#: Of a key in UTF-8. Keys and values are bounded in encoded bytes everywhere.
MAX_KEY_BYTES = 512
#: What an embedded store holds at most, and so what a client reads at most: keys, and bytes. A key
#: counts with ``KEY_BYTES`` beside its own bytes and its value's: Python takes about as much.
MAX_STORE_KEYS = 100_000
MAX_STORE_BYTES = 256 << 20
KEY_BYTES = 512
#: Nothing in the store outlives its writers by more than this.
MAX_LEASE_S = 600.0
#: What an etcd keeps without a lease: the end of the key of a cluster's operator settings, and the
#: beginning of the keys of the audit logs. Roles say who may write them (docs/cluster.md).
OPERATOR = "operator/settings"
AUDIT = "crux-audit/"
#: The beginning of the keys that many write and few read: a look at a cluster leaves them out.
APART = "crux-plan/"

#: Below :func:`cluster_prefix`: the head of the plan in force.
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
        """The value of ``key``; None if there is none or its lease has ended."""

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
        """Set ``key`` if it holds ``expected`` (None: absent or expired); return whether it did."""

    def list(self, prefix: str) -> Mapping[str, bytes]:
        """All live keys that start with ``prefix``, with their values. It does not change later."""

    def origin(self, key: str) -> str:
        """Who wrote the value of ``key``, as the store saw it; empty if there is no such key.

        A store that does not know refuses.
        """

    def clock_ns(self) -> int:
        """What the clock of the store's process says, in nanoseconds; it never goes back.

        A store that has no clock refuses.
        """

    def close(self) -> None:
        """Release connections and threads. Later operations raise."""


def is_kept(key: str) -> bool:
    """Whether a store that lasts holds ``key`` for good, whatever its writer's lease."""
    return key.startswith(AUDIT) or key.endswith("/" + OPERATOR)


def encoded_size(key: str) -> int:
    """Bytes of ``key`` in UTF-8; a UnicodeEncodeError if it has none."""
    return len(key) if key.isascii() else len(key.encode())


def check_key(key: str) -> None:
    """Raise a StoreError for a key that no store takes: too long, or without a form in UTF-8."""
    try:
        size = encoded_size(key)
    except UnicodeEncodeError:
        raise StoreError(f"key {key[:80]!r} can't be written in UTF-8") from None
    if size > MAX_KEY_BYTES:
        raise StoreError(f"key {key[:80]!r}: {size} bytes, limit {MAX_KEY_BYTES}")


def check_write(key: str, value: bytes, lease_s: float) -> None:
    """Raise a StoreError for a write that the store would refuse: too large, or no fit lease."""
    check_key(key)
    if len(value) > MAX_VALUE_BYTES:
        raise StoreError(
            f"{key}: a value of {len(value)} bytes is over the limit of {MAX_VALUE_BYTES}"
        )
    if not 0 < lease_s <= MAX_LEASE_S:
        raise StoreError(
            f"{key}: a lease of {lease_s} s; expected more than 0, at most {MAX_LEASE_S:g}"
        )
