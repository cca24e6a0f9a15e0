"""What the embedded store holds: keys with leases and quotas, and answers to requests on them."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

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
    Told,
    request_decoder,
)
from crux_torch.store.journal import Journal
from crux_torch.store.shared_store import (
    KEY_BYTES,
    MAX_STORE_BYTES,
    MAX_STORE_KEYS,
    encoded_size,
)

#: What one client may hold. A leader has six keys, of 1 MiB at most each; a large cluster's planner
#: has entries of all its jobs.
CLIENT_BYTES = 8 << 20
CLIENT_KEYS = 2048
#: Bytes of changes that one client may make in a second on average, and at once. Each change goes
#: to every leader. A renewal is none.
CHANGE_BYTES_PER_S = 512 << 10
CHANGE_BURST_BYTES = 8 << 20
#: Refusals that one client gets in a second on average, and at once. Who causes more waits for its
#: answers, and nobody else does.
REFUSALS_PER_S = 10.0
REFUSALS_BURST = 50.0


class Client:
    """The account of one client: what it holds, and what it has changed and was refused lately.

    Args:
        where: who it is, as the server sees it.
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
        """Seconds for which it has to wait after another refusal."""
        earned = (now_s - self.refused_at_s) * REFUSALS_PER_S
        self.refusals = min(REFUSALS_BURST, self.refusals + earned) - 1.0
        self.refused_at_s = now_s
        return max(0.0, -self.refusals / REFUSALS_PER_S)

    def spend(self, size: int, now_s: float) -> bool:
        """Whether it may change ``size`` bytes now."""
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
            return Told(key.origin if key is not None else "")
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
        """The connection of ``client`` has ended: its keys stay as long as there is room."""
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
        """Why ``client`` may not put a key of that size in place of ``before``, or None."""
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
