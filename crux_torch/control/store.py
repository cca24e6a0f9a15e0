"""What the shared store can do: the part of etcd v3 that agreement needs, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from crux_torch.control.records import MAX_RECORD_BYTES
from crux_torch.errors import StoreError

#: Called with a key and its new value, or None where it was deleted or its lease ended.
OnChange = Callable[[str, "bytes | None"], None]


class WatchHandle(Protocol):
    """A running watch."""

    def close(self) -> None:
        """End the watch; no callback begins after it returns. May be called twice."""


@runtime_checkable
class Store(Protocol):
    """A key-value store that jobs share. Every operation is bounded in time.

    Every operation raises :class:`~crux_torch.errors.StoreError` where the store can't be
    reached, does not answer in time, or refuses; a write that failed so may still have happened.

    Attributes:
        pushes_changes: a watch costs nothing while nothing changes; where it is False a watch
            polls, and who polls anyway needs none.
    """

    pushes_changes: bool

    def get(self, key: str) -> bytes | None:
        """The value of ``key``, None where there is none or its lease ended."""

    def put(self, key: str, value: bytes, lease_s: float | None = None) -> None:
        """Set ``key``; with ``lease_s`` it vanishes unless it is put again within that time.

        A lease is a hint: readers may see its end a little late, each by its own clock.
        """

    def delete(self, key: str) -> None:
        """Remove ``key``; nothing happens where it is absent.

        Not for a key that others write by :meth:`compare_and_swap`: swap in a value that means
        "none" instead, because the value that is deleted may be newer than the one that was read.
        """

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease_s: float | None = None
    ) -> bool:
        """Set ``key`` if it holds ``expected`` (None: it is absent or expired); say if it did."""

    def list(self, prefix: str) -> dict[str, bytes]:
        """All live keys that start with ``prefix``, with their values."""

    def watch(self, prefix: str, on_change: OnChange) -> WatchHandle:
        """Call ``on_change`` from another thread when keys under ``prefix`` change.

        Events may be merged, repeated or lost: take one as a hint to look again, and look from
        time to time without one.
        """

    def close(self) -> None:
        """Let go of connections and threads; operations raise afterwards."""


def check_write(key: str, value: bytes, lease_s: float | None) -> None:
    """Refuse what no reader would accept.

    Raises:
        StoreError: a value over ``MAX_RECORD_BYTES``, or a lease that is not positive.
    """
    if len(value) > MAX_RECORD_BYTES:
        raise StoreError(
            f"{key}: a value of {len(value)} bytes is over the limit of {MAX_RECORD_BYTES}"
        )
    if lease_s is not None and not 0 < lease_s <= 86400:
        raise StoreError(f"{key}: a lease of {lease_s} s; expected more than 0, at most 86400")
