"""Things that jobs share through the store: devices, the measuring slot, and a clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec

from crux_torch.agreement.records import RecordError
from crux_torch.agreement.registry import decode
from crux_torch.errors import StoreError
from crux_torch.logs import WarnOnce
from crux_torch.measure.profile import Name
from crux_torch.store import SharedStore, cluster_prefix

_log = logging.getLogger(__name__)

#: The slot's value while it is free. It is not deleted: that could hit its next holder.
FREE = b"{}"
#: Seconds of silence after which a waiting job loses its place.
WAIT_LEASE_S = 6.0
#: Nobody's ticket is higher, so nobody can make the others' tickets invalid. No honest line gets
#: there; if one does, names decide between equal tickets.
MAX_TICKET = 1 << 32
#: Seconds between two looks at the store's clock, and questions of one look.
LOOK_S = 10.0
QUESTIONS = 5
#: Two clocks part at most by this: 100 millionths each.
PARTING = 2e-4


class DeviceClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a device.

    Attributes:
        job, incarnation: the job, and the launcher that took the device for it.
        index: number of the device on its host, in the order of PCI addresses.
    """

    job: Name
    incarnation: Name
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class DeviceClaims:
    """The devices of one cluster that launchers have taken: one leased record each.

    Every method raises :class:`~crux_torch.errors.StoreError` if the store does.
    """

    def __init__(self, store: SharedStore, cluster: str) -> None:
        self._store = store
        self._prefix = cluster_prefix(cluster) + "devices/"
        self._warn = WarnOnce(_log)

    def taken(self) -> dict[str, dict[str, DeviceClaim]]:
        """Return claims by host and device UUID. Those that can't be read are left out."""
        found: dict[str, dict[str, DeviceClaim]] = {}
        for key, raw in self._store.list(self._prefix).items():
            host, _, device = key.removeprefix(self._prefix).partition("/")
            try:
                claim = decode(DeviceClaim, raw, key)
            except RecordError as error:
                self._warn(key, f"ignoring a claim on a device: {error}")
                continue
            found.setdefault(unquote(host), {})[unquote(device)] = claim
        return found

    def take(self, host: str, claims: Mapping[str, DeviceClaim], lease_s: float) -> bool:
        """Claim devices, by UUID, all or none; False if another launcher was first with one."""
        mine: dict[str, DeviceClaim] = {}
        for device, claim in claims.items():
            raw = msgspec.json.encode(claim)
            if not self._store.compare_and_swap(self._key(host, device), None, raw, lease_s):
                self.release(host, mine)
                return False
            mine[device] = claim
        return True

    def renew(self, host: str, claims: Mapping[str, DeviceClaim], lease_s: float) -> None:
        """Keep claims for another ``lease_s``, but for those that somebody else has by now."""
        for device, claim in claims.items():
            raw, key = msgspec.json.encode(claim), self._key(host, device)
            for before in (raw, None):
                if self._store.compare_and_swap(key, before, raw, lease_s):
                    break

    def release(self, host: str, claims: Mapping[str, DeviceClaim]) -> None:
        """Give up claims, but for those that somebody else has by now."""
        for device, claim in claims.items():
            key = self._key(host, device)
            if self._store.get(key) == msgspec.json.encode(claim):
                self._store.delete(key)

    def _key(self, host: str, device: str) -> str:
        return f"{self._prefix}{quote(host, safe='')}/{quote(device, safe='')}"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The job that holds the slot, or one that waits for it. A smaller ticket goes first."""

    job: Name
    incarnation: Name
    ticket: Annotated[int, msgspec.Meta(ge=0, le=MAX_TICKET)]


class ProfilingSlot:
    """One leader's part in taking turns with the profiling slot (docs/understand/agreement.md).

    The leader's thread drives it; only store operations block.

    The lease is never renewed. A holder counts its time from *before* it wrote, and everyone else
    from after, each by its own clock. So two jobs never both take themselves for the holder, if
    clocks run at one pace.

    Args:
        lease_s: seconds for which the slot is held at most.
    """

    def __init__(
        self,
        store: SharedStore,
        cluster: str,
        job: str,
        incarnation: str,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        prefix = cluster_prefix(cluster)
        self._store = store
        self._key = prefix + "slot"
        self._wait_prefix = prefix + "waiting/"
        self._wait_key = self._wait_prefix + quote(job, safe="")
        self._job, self._incarnation = job, incarnation
        self._lease_s = lease_s
        self._clock = clock
        self._ticket: int | None = None
        self._waits_until_s = float("-inf")
        self._attempt: tuple[bytes, float] | None = None
        self._held: bytes | None = None
        self._until_s = float("-inf")
        self._warn = WarnOnce(_log)
        #: True if the store did not let this job try the last time.
        self.refused = False

    @property
    def held(self) -> bool:
        """True if this job holds the slot now."""
        return self._held is not None and self._clock() < self._until_s

    def acquire_step(self) -> bool:
        """Take a place in the line, or the slot if it is free and this job's turn.

        Returns:
            True if the slot is held; False also if the store can't be reached.
        """
        if self.held:
            return True
        self._held = None
        try:
            taken = self._try()
        except StoreError:
            self.refused = True
            return self.held
        self.refused = False
        return taken

    def release(self) -> None:
        """Free the slot, or leave the line. If the store is away, the leases end both later."""
        held, self._held = self._held, None
        waiting, self._ticket = self._ticket, None
        self._waits_until_s = float("-inf")
        try:
            if held is not None:
                self._store.compare_and_swap(self._key, held, FREE, self._lease_s)
            if waiting is not None:
                self._store.delete(self._wait_key)
        except StoreError:
            return

    def _try(self) -> bool:
        waiting = self._store.list(self._wait_prefix).items()
        places = (self._read(key, raw, "a place in the line for profiling") for key, raw in waiting)
        line = [place for place in places if place is not None]
        before = self._store.get(self._key)
        holder = None
        if before is not None and before != FREE:
            holder = self._read(self._key, before, "the holder of the profiling slot")
        if self._ticket is None:
            known = line if holder is None else [*line, holder]
            self._ticket = min(max((h.ticket for h in known), default=0) + 1, MAX_TICKET)
        me = Holder(job=self._job, incarnation=self._incarnation, ticket=self._ticket)
        ticket_raw = msgspec.json.encode(me)
        now = self._clock()
        if now >= self._waits_until_s - WAIT_LEASE_S * 2 / 3:
            self._store.put(self._wait_key, ticket_raw, WAIT_LEASE_S)
            self._waits_until_s = now + WAIT_LEASE_S
        ahead = min(((h.ticket, h.job) for h in line if h.job != self._job), default=None)
        if self._attempt is not None and before == self._attempt[0]:
            return self._take(*self._attempt)  # the swap that seemed to fail did happen
        if holder is not None or (ahead is not None and ahead < (me.ticket, me.job)):
            return False
        began_s = self._clock()
        self._attempt = (ticket_raw, began_s)
        if not self._store.compare_and_swap(self._key, before, ticket_raw, self._lease_s):
            return False
        return self._take(ticket_raw, began_s)

    def _take(self, ticket_raw: bytes, began_s: float) -> bool:
        self._attempt = None
        self._held, self._until_s = ticket_raw, began_s + self._lease_s
        self._ticket = None
        self._waits_until_s = float("-inf")
        self._store.delete(self._wait_key)
        return self.held

    def _read(self, key: str, raw: bytes, what: str) -> Holder | None:
        try:
            return decode(Holder, raw, key)
        except RecordError as error:
            self._warn(key, f"ignoring {what}: {error}")
            return None


class SharedClock:
    """Offset of this process's monotonic clock to the store's, by the shortest round trip."""

    def __init__(self, store: SharedStore, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._store = store
        self._clock_ns = clock_ns
        self._offset_ns = 0
        self._error_ns = float("inf")
        self._asked_at_ns: int | None = None
        self._look_at_ns = clock_ns()

    @property
    def offset_ns(self) -> int:
        """The store's clock minus this process's."""
        return self._offset_ns

    @property
    def error_s(self) -> float:
        """Bound of the offset's error now; infinite before the first answer."""
        if self._asked_at_ns is None:
            return float("inf")
        age_ns = self._clock_ns() - self._asked_at_ns
        return (self._error_ns + PARTING * age_ns) / 1e9

    def look(self) -> None:
        """Ask the store, if that is due.

        Raises:
            StoreError: it can't be reached, or has no clock. The next look tries again.
        """
        now = self._clock_ns()
        if now < self._look_at_ns:
            return
        self._look_at_ns = now + round(LOOK_S * 1e9)
        answers = []
        for _ in range(QUESTIONS):
            asked = self._clock_ns()
            store_ns = self._store.clock_ns()
            answered = self._clock_ns()
            answers.append(((answered - asked) / 2, store_ns - (asked + answered) // 2))
        error_ns, offset_ns = min(answers)
        # An older answer is kept while it is the better one, unless the store has another clock.
        agrees = abs(offset_ns - self._offset_ns) <= error_ns + self.error_s * 1e9
        if not agrees or error_ns <= self.error_s * 1e9:
            self._error_ns, self._offset_ns, self._asked_at_ns = error_ns, offset_ns, now
