"""A plan in parts: each job's entry under a key of its own, for leaders that do not compute it."""

from __future__ import annotations

import msgspec

from crux_torch.control.records import Plan
from crux_torch.control.registry import Registry, StoredEntry
from crux_torch.store.shared_store import MAX_LEASE_S

#: Entries that a planner writes in one tick.
PARTS_A_TICK = 64


class PlanParts:
    """Keeps the entries of the plan in force in the store.

    An entry is named by the digest of its group. So a plan that changes one entry writes the
    entries of one group again.

    Args:
        look_s: seconds between two looks at what lies there: others may overwrite or lose it.
    """

    def __init__(self, registry: Registry, look_s: float) -> None:
        self._registry = registry
        self._look_s = look_s
        self._of = ""
        #: What is still to be written, by job.
        self._due: dict[str, bytes] = {}
        self._look_at_s = self._renew_at_s = float("-inf")

    def keep(self, plan: Plan, now_s: float) -> bool:
        """Write what is missing of ``plan``, which lies in the store: a number in each call.

        Returns:
            whether more is missing.

        Raises:
            StoreError: if the store can't be reached.
        """
        if not plan.parts:
            return False
        if plan.parts != self._of or now_s >= self._look_at_s:
            self._of, self._look_at_s = plan.parts, now_s + self._look_s
            wanted = {
                entry.job: msgspec.json.encode(
                    StoredEntry(digest=plan.digest_for(entry.job), entry=entry)
                )
                for entry in plan.entries
            }
            found = self._registry.parts()
            renews = now_s >= self._renew_at_s
            if renews:
                self._renew_at_s = now_s + MAX_LEASE_S / 3
            self._due = {
                job: raw
                for job, raw in wanted.items()
                if renews or job in self._due or found.get(job) != raw
            }
        for job in list(self._due)[:PARTS_A_TICK]:
            self._registry.put_part(job, self._due[job])
            del self._due[job]
        return bool(self._due)
