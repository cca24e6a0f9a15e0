"""Contents of the embedded store: keys with leases, and quotas of its clients."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator

from crux_torch.store import KEY_BYTES, MAX_STORE_BYTES, MAX_STORE_KEYS, encoded_size
from crux_torch.store.frames import (
    PAGE_BYTES,
    Answer,
    Changes,
    Clock,
    Count,
    Delete,
    Done,
    Origin,
    Put,
    Read,
    Refused,
    Request,
    Swap,
    Writer,
    change_size,
    request_decoder,
)

#: Deleted keys that are remembered; who last looked before the oldest reads everything anew.
MAX_DELETED = 10_000


class Journal:
    """Values by key, in the order of their last change, so that a reader gets what changed.

    Each change has a revision, one above the last. The mirror of an etcd keeps one, too.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._values: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._deleted: OrderedDict[str, int] = OrderedDict()
        #: Up to this revision deletions are forgotten.
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        """Yields the keys, the one that did not change for the longest time first."""
        return iter(self._values)

    def get(self, key: str) -> bytes | None:
        """Returns the value of ``key``; None if there is none."""
        found = self._values.get(key)
        return None if found is None else found[1]

    def set(self, key: str, value: bytes) -> None:
        """Change ``key``."""
        self.revision += 1
        self._values[key] = self.revision, value
        self._values.move_to_end(key)
        self._deleted.pop(key, None)

    def delete(self, key: str) -> None:
        """Remove ``key`` if it is there."""
        if self._values.pop(key, None) is None:
            return
        self.revision += 1
        self._deleted[key] = self.revision
        if len(self._deleted) > MAX_DELETED:
            _, self._forgotten = self._deleted.popitem(last=False)

    def changes(
        self, key: str, prefix: bool, since: int, limit_bytes: int
    ) -> tuple[int, list[tuple[str, bytes | None]], bool, bool]:
        """Returns changes after revision ``since`` of ``key``, or of all keys with it as prefix.

        Returns:
            the fields of :class:`~crux_torch.store.frames.Changes`.
        """
        if since == self.revision:
            return since, [], False, False
        anew = since == 0 or since < self._forgotten or since > self.revision
        if anew:
            since = 0
        if not prefix:
            at, value = self._values.get(key, (0, None))
            at = at or self._deleted.get(key, 0)
            changed = anew or at > since
            return self.revision, [(key, value)] if changed else [], False, anew
        found: list[tuple[int, str, bytes | None]] = []
        for name in reversed(self._values):
            at, value = self._values[name]
            if at <= since:
                break
            if name.startswith(key):
                found.append((at, name, value))
        if not anew:
            for name in reversed(self._deleted):
                at = self._deleted[name]
                if at <= since:
                    break
                if name.startswith(key):
                    found.append((at, name, None))
        found.sort(key=lambda change: change[0])
        page: list[tuple[str, bytes | None]] = []
        size = 0
        for at, name, value in found:
            page.append((name, value))
            size += change_size(name, value)
            if size >= limit_bytes:
                return at, page, at != found[-1][0], anew
        return self.revision, page, False, anew


#: Most that one client may hold. A leader has six keys of at most 1 MiB; a large cluster's planner
#: has entries of all its jobs.
CLIENT_BYTES = 8 << 20
CLIENT_KEYS = 2048
#: Bytes of changes that one client may make in a second on average, and at once. Each change goes
#: to every leader. A renewal is none.
CHANGE_BYTES_PER_S = 512 << 10
CHANGE_BURST_BYTES = 8 << 20
#: Refusals that one client gets in a second on average, and at once. After more, it alone waits for
#: its answers.
REFUSALS_PER_S = 10.0
REFUSALS_BURST = 50.0


class Client:
    """Account of one client: its keys, and its recent changes and refusals.

    ``where`` says who it is, as the server sees it.
    """

    __slots__ = (
        "allowance_bytes",
        "at_s",
        "gone",
        "held_bytes",
        "names",
        "refusals",
        "refused_at_s",
        "where",
    )

    def __init__(self, now_s: float, where: str = "") -> None:
        self.where = where
        self.names: dict[str, None] = {}
        self.held_bytes = 0
        self.allowance_bytes, self.at_s = float(CHANGE_BURST_BYTES), now_s
        self.refusals, self.refused_at_s = REFUSALS_BURST, now_s
        #: Its connection has ended: its keys make room first where the store is full.
        self.gone = False

    def refused(self, now_s: float) -> float:
        """Count a refusal; returns the seconds for which the client has to wait."""
        earned = (now_s - self.refused_at_s) * REFUSALS_PER_S
        self.refusals = min(REFUSALS_BURST, self.refusals + earned) - 1.0
        self.refused_at_s = now_s
        return max(0.0, -self.refusals / REFUSALS_PER_S)

    def spend(self, size: int, now_s: float) -> bool:
        """Count a change of ``size`` bytes; returns False if that is too much now."""
        earned = (now_s - self.at_s) * CHANGE_BYTES_PER_S
        self.allowance_bytes = min(CHANGE_BURST_BYTES, self.allowance_bytes + earned)
        self.at_s = now_s
        if size > self.allowance_bytes:
            return False
        self.allowance_bytes -= size
        return True


class _Key:
    __slots__ = ("client", "ends_s", "origin", "size")

    def __init__(self, client: Client, size: int, ends_s: float, origin: str) -> None:
        self.client, self.size, self.ends_s, self.origin = client, size, ends_s, origin


class Contents:
    """The store's keys. ``clock`` judges leases: seconds, never back."""

    decoder = request_decoder

    def __init__(self, clock: Callable[[], float]) -> None:
        self.journal = Journal()
        self.held_bytes = 0
        self._clock = clock
        self._keys: dict[str, _Key] = {}
        self._ends: list[tuple[float, str]] = []
        #: Keys of clients that are gone, the one that was left first at the beginning.
        self._left: OrderedDict[str, None] = OrderedDict()

    def answer(self, request: Request, client: Client) -> Answer:
        """Carry out ``request`` for ``client``."""
        self.expire()
        if isinstance(request, Read):
            since, limit = request.since, PAGE_BYTES
            return Changes(*self.journal.changes(request.key, request.prefix, since, limit))
        if isinstance(request, Origin):
            key = self._keys.get(request.key)
            return Writer(key.origin if key is not None else "")
        if isinstance(request, (Count, Clock)):
            return Refused("not kept here")
        if isinstance(request, Delete):
            there = request.key in self._keys
            self._drop(request.key)
            return Done(int(there))
        if isinstance(request, Swap) and self.journal.get(request.key) != request.expected:
            return Done(0)
        return self._set(request, client)

    def leave(self, client: Client) -> None:
        """Note that a client is gone: its keys stay as long as there is room."""
        client.gone = True
        self._left.update(client.names)

    def expire(self) -> None:
        """Drop the keys whose leases have ended."""
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            _, name = heapq.heappop(self._ends)
            key = self._keys.get(name)
            if key is not None and key.ends_s <= now:
                self._drop(name)

    def _set(self, request: Put | Swap, client: Client) -> Answer:
        name, value, lease_s, now = request.key, request.value, request.lease_s, self._clock()
        size = KEY_BYTES + encoded_size(name) + len(value)
        before = self._keys.get(name)
        reason = self._refusal(client, before, size)
        changed = self.journal.get(name) != value
        if reason is None and changed and not client.spend(size, now):
            reason = "this client changes too much a second"
        if reason is not None:
            return Refused(reason)
        if before is not None:
            self._discharge(name, before)
        ends_s = now + lease_s
        origin = client.where if changed or before is None else before.origin
        self._keys[name] = _Key(client, size, ends_s, origin)
        client.names[name] = None
        client.held_bytes += size
        self.held_bytes += size
        heapq.heappush(self._ends, (ends_s, name))
        if len(self._ends) > 64 + 8 * len(self._keys):
            self._ends = [(key.ends_s, name) for name, key in self._keys.items()]
            heapq.heapify(self._ends)
        if changed:
            self.journal.set(name, value)
        return Done(1)

    def _refusal(self, client: Client, before: _Key | None, size: int) -> str | None:
        """Returns why ``client`` may not put a key of that size in place of ``before``, or None."""
        mine = before if before is not None and before.client is client else None
        if len(client.names) - (mine is not None) >= CLIENT_KEYS:
            return f"this client holds {CLIENT_KEYS} keys: delete some, or let their leases end"
        if client.held_bytes - (mine.size if mine else 0) + size > CLIENT_BYTES:
            return f"this client holds {CLIENT_BYTES >> 20} MiB: delete some"
        kept = before.size if before is not None else 0
        while not self._has_room(before is None, size - kept):
            # Whoever needs such a key and still lives writes it again. What is dropped was put
            # once, so the work is the putter's.
            left = next((name for name in self._left if self._keys[name] is not before), None)
            if left is None:
                return "the store is full"
            self._drop(left)
        return None

    def _has_room(self, another: bool, more_bytes: int) -> bool:
        fits = len(self._keys) + another <= MAX_STORE_KEYS
        return fits and self.held_bytes + more_bytes <= MAX_STORE_BYTES

    def _discharge(self, name: str, key: _Key) -> None:
        key.client.names.pop(name, None)
        self._left.pop(name, None)
        key.client.held_bytes -= key.size
        self.held_bytes -= key.size

    def _drop(self, name: str) -> None:
        key = self._keys.pop(name, None)
        if key is not None:
            self._discharge(name, key)
            self.journal.delete(name)
