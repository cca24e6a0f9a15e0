"""A store inside one process, with a clock that tests can move."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from crux_torch.control.store import OnChange, check_write
from crux_torch.errors import StoreError


@dataclass(frozen=True, slots=True)
class _Entry:
    value: bytes
    ends_s: float


class _Watch:
    def __init__(self, watches: list[_Watch], prefix: str, on_change: OnChange) -> None:
        self._watches = watches
        self.prefix = prefix
        self.on_change = on_change

    def close(self) -> None:
        if self in self._watches:
            self._watches.remove(self)


class MemoryStore:
    """The store for a single process; callbacks run on the thread that makes the change.

    The end of a lease is noticed, and told to watches, by the next operation.

    Args:
        clock: seconds that never go back.
    """

    pushes_changes = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._watches: list[_Watch] = []
        self._lock = threading.Lock()
        self._closed = False

    def get(self, key: str) -> bytes | None:
        """See :meth:`Store.get`."""
        self._expire()
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else entry.value

    def put(self, key: str, value: bytes, lease_s: float | None = None) -> None:
        """See :meth:`Store.put`."""
        check_write(key, value, lease_s)
        self._expire()
        with self._lock:
            self._entries[key] = self._entry(value, lease_s)
        self._tell({key: value})

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._expire()
        with self._lock:
            gone = self._entries.pop(key, None)
        if gone is not None:
            self._tell({key: None})

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease_s: float | None = None
    ) -> bool:
        """See :meth:`Store.compare_and_swap`."""
        check_write(key, value, lease_s)
        self._expire()
        with self._lock:
            entry = self._entries.get(key)
            if (None if entry is None else entry.value) != expected:
                return False
            self._entries[key] = self._entry(value, lease_s)
        self._tell({key: value})
        return True

    def list(self, prefix: str) -> dict[str, bytes]:
        """See :meth:`Store.list`."""
        self._expire()
        with self._lock:
            return {k: e.value for k, e in self._entries.items() if k.startswith(prefix)}

    def watch(self, prefix: str, on_change: OnChange) -> _Watch:
        """See :meth:`Store.watch`."""
        watch = _Watch(self._watches, prefix, on_change)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """See :meth:`Store.close`."""
        self._closed = True
        self._watches.clear()

    def _entry(self, value: bytes, lease_s: float | None) -> _Entry:
        return _Entry(bytes(value), float("inf") if lease_s is None else self._clock() + lease_s)

    def _expire(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")
        now = self._clock()
        with self._lock:
            ended = [key for key, entry in self._entries.items() if entry.ends_s <= now]
            for key in ended:
                del self._entries[key]
        self._tell(dict.fromkeys(ended))

    def _tell(self, changes: dict[str, bytes | None]) -> None:
        for key, value in changes.items():
            for watch in tuple(self._watches):
                if key.startswith(watch.prefix):
                    watch.on_change(key, value)
