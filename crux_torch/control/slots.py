"""The profiling slot: one job at a time holds the top class (docs/agreement.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Annotated
from urllib.parse import quote

import msgspec

from crux_torch.control.records import RecordError
from crux_torch.control.registry import decode
from crux_torch.errors import StoreError
from crux_torch.measure.job_profile import Name
from crux_torch.store.shared_store import SharedStore
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

#: The slot's value while it is free. It is not deleted: that could hit its next holder.
FREE = b"{}"
#: Seconds of silence after which a waiting job loses its place.
WAIT_LEASE_S = 6.0


#: Nobody's ticket is higher, so nobody can make the others' tickets invalid. No honest line gets
#: there; if one does, names decide between equal tickets.
MAX_TICKET = 1 << 32


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the slot, or waits for it. A smaller ticket goes first."""

    job: Name
    incarnation: Name
    ticket: Annotated[int, msgspec.Meta(ge=0, le=MAX_TICKET)]


class ProfilingSlot:
    """One leader's part in taking turns. Its thread drives it; only store operations block.

    The lease is never renewed. A holder counts its time from *before* it wrote, and everyone else
    from after, each by its own clock. So two jobs never both take themselves for the holder, if
    clocks run at one pace.

    Args:
        store, cluster: where the cluster's jobs meet, and its name there.
        job, incarnation: who this is.
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
        prefix = f"crux/{quote(cluster, safe='')}/"
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
        #: Whether the store did not let this job try the last time.
        self.refused = False

    @property
    def held(self) -> bool:
        """Whether this job holds the slot now."""
        return self._held is not None and self._clock() < self._until_s

    def acquire_step(self) -> bool:
        """Take a place in the line, or the slot if it is free and this job's turn.

        Returns:
            whether the slot is held; False also if the store can't be reached.
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
        wanted = msgspec.json.encode(me)
        now = self._clock()
        if now >= self._waits_until_s - WAIT_LEASE_S * 2 / 3:
            self._store.put(self._wait_key, wanted, WAIT_LEASE_S)
            self._waits_until_s = now + WAIT_LEASE_S
        ahead = min(((h.ticket, h.job) for h in line if h.job != self._job), default=None)
        if self._attempt is not None and before == self._attempt[0]:
            return self._take(*self._attempt)  # the swap that seemed to fail did happen
        if holder is not None or (ahead is not None and ahead < (me.ticket, me.job)):
            return False
        began_s = self._clock()
        self._attempt = (wanted, began_s)
        if not self._store.compare_and_swap(self._key, before, wanted, self._lease_s):
            return False
        return self._take(wanted, began_s)

    def _take(self, wanted: bytes, began_s: float) -> bool:
        self._attempt = None
        self._held, self._until_s = wanted, began_s + self._lease_s
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
