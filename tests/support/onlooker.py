"""Who looks on at what jobs agree on."""

from __future__ import annotations

import contextlib

from crux_torch.agreement.records import Plan, plan_of
from crux_torch.agreement.registry import Registry
from crux_torch.errors import StoreError
from crux_torch.store.endpoint import open_store


class Cluster:
    """The plan and the jobs as an onlooker reads them from the shared store."""

    def __init__(self, endpoint: str) -> None:
        self._store = open_store(endpoint)
        self._registry = Registry(self._store, "default")

    def jobs(self) -> set[str]:
        with contextlib.suppress(StoreError):
            return {record.job for record in self._registry.look().jobs}
        return set()

    def plan(self) -> Plan | None:
        with contextlib.suppress(StoreError):
            view = self._registry.look()
            if view.plan.stored is not None:
                follows = self._registry.follows(view.plan.stored.plan)
                entries = (follows[job.job] for job in view.jobs if job.job in follows)
                return plan_of(view.plan.stored.plan, tuple(entries))
        return None

    def close(self) -> None:
        self._store.close()
