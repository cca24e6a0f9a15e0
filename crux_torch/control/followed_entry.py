"""What a job follows of the plan, in the store."""

from __future__ import annotations

import logging

from crux_torch.control.records import Plan
from crux_torch.control.registry import Registry, StoredEntry
from crux_torch.errors import StoreForbidden
from crux_torch.store.shared_store import MAX_LEASE_S

_log = logging.getLogger(__name__)

#: Seconds for which a job whose role may not write its entry does not try again.
FORBIDDEN_S = 60.0


class FollowedEntry:
    """Tells the store which entry this job follows, for whoever looks.

    Args:
        job: whose entry it is.
    """

    def __init__(self, registry: Registry, job: str) -> None:
        self._registry = registry
        self._job = job
        #: What was told last, and until when that holds.
        self._told: StoredEntry | None = None
        self._until_s = float("-inf")

    def tell(self, plan: Plan | None, now_s: float) -> None:
        """Write what is due: this job's entry in ``plan``.

        Raises:
            StoreError: if the store can't be reached.
        """
        try:
            self._tell(plan, now_s)
        except StoreForbidden as error:
            _log.debug("this job's role may not say what it follows: %s", error)
            self._until_s = now_s + FORBIDDEN_S

    def tell_again(self) -> None:
        """The store may have lost what was told."""
        self._until_s = float("-inf")

    def withdraw(self) -> None:
        """Remove what was told.

        Raises:
            StoreError: if the store can't be reached.
        """
        if self._told is not None:
            self._registry.tell_follows(self._job, None)
            self._told = None

    def _tell(self, plan: Plan | None, now_s: float) -> None:
        entry = plan.entry(self._job) if plan is not None else None
        if plan is None or entry is None:
            self.withdraw()
            return
        told = StoredEntry(digest=plan.digest_for(self._job), entry=entry)
        if told != self._told or now_s >= self._until_s:
            self._told, self._until_s = told, now_s + MAX_LEASE_S / 3
            self._registry.tell_follows(self._job, told)
