"""One job's part in agreeing on a plan (no lock, no elected leader: design by compare-and-swap).

Every leader writes its job's record under a lease and looks at all others. Whoever sees a change
computes the plan from the snapshot, which gives every leader the same, and swaps it in for the plan
that it saw; the first one wins and the rest adopt. A leader that agrees with the stored plan only
renews it.

Epochs. A leader adopts a plan only if its epoch is above every epoch that it adopted before, or if
it is the same plan. When the store was lost, its successor starts empty: whoever still holds a
valid plan that fits the snapshot puts it back under its old epoch; and a plan that began to count
anew is replaced by one with ``max(stored, adopted) + 1``. So an applier never goes back.

Validity. A plan counts until ``valid_s`` after this leader last saw it change (a renewal is a
change) by this leader's own clock.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from crux_torch.control.planner import fingerprint
from crux_torch.control.records import (
    MAX_RECORD_BYTES,
    JobRecord,
    PathCounts,
    Plan,
    PlanEntry,
)
from crux_torch.control.registry import PlanState, Registry, StoredPlan
from crux_torch.control.store import Store, WatchHandle
from crux_torch.control.warn_once import WarnOnce
from crux_torch.errors import StoreError
from crux_torch.profile.job_profile import JobProfile

_log = logging.getLogger(__name__)

#: ``waiting``: no valid plan yet; ``planned``: one is in force; ``offline``: the store can't be
#: reached and no plan is valid; ``superseded``: another incarnation of this job publishes.
LeaderState = Literal["waiting", "planned", "offline", "superseded", "closed"]

#: Entries from live records and the topology's bytes; pure, and equal on all leaders.
ComputeEntries = Callable[[Sequence[JobRecord], "bytes | None"], Sequence[PlanEntry]]

#: A snapshot that never stands still is planned after this many debounce times.
MAX_DEBOUNCES = 8
#: Longest time for which a leader bears with a plan that its own snapshot contradicts.
MAX_PATIENCE_S = 60.0
#: Seconds without the store before it is worth a warning: its next host takes a moment.
PATIENCE_S = 3.0


class Leader:
    """Publishes one job and agrees with the other leaders on the plan.

    Not thread-safe but for :attr:`plan`: one background thread owns it and calls :meth:`tick`. A
    tick makes a handful of store operations, each bounded, and sometimes one ``compute``.

    Args:
        store: shared by the cluster's jobs.
        cluster: its name.
        record: of this job, to begin with.
        compute: the planner.
        policy: name of the planner, for the plan.
        lease_s: seconds of silence after which this job counts as gone.
        plan_valid_s: seconds without renewal after which a plan of this leader is dropped.
        poll_s: seconds between two looks at the store.
        debounce_s: seconds for which the snapshot must stand still before it is planned.
        clock: seconds that never go back.
        rng: of the jitter between leaders.
    """

    def __init__(
        self,
        store: Store,
        cluster: str,
        record: JobRecord,
        compute: ComputeEntries,
        *,
        policy: str = "crux",
        lease_s: float = 6.0,
        plan_valid_s: float = 15.0,
        poll_s: float = 0.25,
        debounce_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._registry = Registry(store, cluster)
        self._record = record
        self._compute = compute
        self._policy = policy
        self._lease_s = lease_s
        self._plan_valid_s = plan_valid_s
        self._poll_s = poll_s
        self._debounce_s = debounce_s
        self._clock = clock
        self._random = rng or random.Random()
        self._warn = WarnOnce(_log)
        self._hint = threading.Event()
        self._watch: WatchHandle | None = None

        self._publish_at_s = float("-inf")
        self._look_at_s = float("-inf")
        self._store_error: str | None = None
        self._away_since_s = float("-inf")
        self._settled_at_s = float("-inf")
        self._closed = False
        self._superseded_by: str | None = None

        self._jobs: tuple[JobRecord, ...] = ()
        self._topology: bytes | None = None
        self._snapshot = ""
        self._snapshot_since_s = float("-inf")
        self._unplanned_since_s: float | None = None
        self._failed_snapshot = ""
        self._computed: tuple[str, tuple[PlanEntry, ...]] = ("", ())

        self._adopted: Plan | None = None
        self._adopted_raw: bytes | None = None
        self._adopted_at_s = float("-inf")
        self._confirmed_at_s = float("-inf")
        self._renew_at_s = float("inf")
        self._disagreed_since_s: float | None = None
        self._patience_s = lease_s

    @property
    def record(self) -> JobRecord:
        """What this leader publishes."""
        return self._record

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None where there is none or it was not renewed in time."""
        plan, confirmed_at_s = self._adopted, self._confirmed_at_s
        if plan is None or self._closed or self._superseded_by is not None:
            return None
        return plan if self._clock() - confirmed_at_s < plan.valid_s else None

    @property
    def plan_fits(self) -> bool:
        """Whether the plan in force was made for this job's profile and all else that is seen."""
        plan, mine = self.plan, self._record
        if plan is None or plan.fingerprint != self._snapshot:
            return False
        return any(r.job == mine.job and r.profile == mine.profile for r in self._jobs)

    @property
    def topology(self) -> bytes | None:
        """The cluster's topology as the store has it, in which plans choose paths."""
        return self._topology

    @property
    def state(self) -> LeaderState:
        """Where this leader stands."""
        if self._closed:
            return "closed"
        if self._superseded_by is not None:
            return "superseded"
        if self.plan is not None:
            return "planned"
        return "offline" if self._store_error is not None else "waiting"

    @property
    def store_state(self) -> str:
        """``ok``, or what is wrong with the store."""
        return self._store_error or "ok"

    def set_profile(self, profile: JobProfile | None) -> None:
        """Publish another profile with the next tick."""
        state: Literal["starting", "running"] = "starting" if profile is None else "running"
        self._replace(msgspec.structs.replace(self._record, profile=profile, state=state))

    def set_hosts(self, hosts: Sequence[str]) -> None:
        """Say in the record where the job's ranks run."""
        self._replace(msgspec.structs.replace(self._record, hosts=tuple(hosts)))

    def set_paths(self, paths: PathCounts | None) -> None:
        """Say in the record how many connections take the planned path."""
        self._replace(msgspec.structs.replace(self._record, paths=paths))

    def set_profiling(self, profiling: bool) -> None:
        """Say in the record whether this job is being measured."""
        settled: Literal["starting", "running"] = (
            "starting" if self._record.profile is None else "running"
        )
        state = "profiling" if profiling else settled
        self._replace(msgspec.structs.replace(self._record, state=state))

    def publish_topology(self, topology: bytes) -> bool:
        """Write the cluster's topology; whether that succeeded."""
        try:
            self._registry.publish_topology(topology)
        except StoreError as error:
            self._warn("topology", f"the topology was not published: {error}")
            return False
        return True

    def tick(self) -> None:
        """Do what is due; raises nothing."""
        if self._closed:
            return
        now = self._clock()
        try:
            if now >= self._publish_at_s:
                self._publish(now)
            if now >= self._look_at_s or self._hint.is_set():
                self._hint.clear()
                self._look_at_s = now + self._poll_s
                self._watch_store()
                state = self._look(now)
                if self._superseded_by is None:
                    self._agree(state, now)
                if self._store_error is not None:
                    self._store_error = None
                    # The others come back as late as their back-off lets them: a snapshot before
                    # that is not the cluster's.
                    self._settled_at_s = now + self._lease_s
                    self._warn.forget("store")
        except StoreError as error:
            if self._store_error is None:
                self._away_since_s = now
            self._store_error = str(error)
            self._settled_at_s = float("inf")
            if now - self._away_since_s >= PATIENCE_S:
                self._warn("store", f"going on without the shared store: {error}")
        except Exception as error:
            self._warn("tick", f"agreeing on a plan failed: {type(error).__name__}: {error}")
            _log.debug("tick failed", exc_info=True)

    def close(self) -> None:
        """Remove this job's record, so that the others re-plan at once. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._watch is not None:
                self._watch.close()
            if self._superseded_by is None:
                self._registry.remove_job(self._record.job)
        except StoreError as error:
            _log.debug("the record of %r ends with its lease: %s", self._record.job, error)

    def status(self) -> dict[str, Any]:
        """What ``crux_torch.status()`` shows of this leader; plain values."""
        plan = self.plan
        now = self._clock()
        return {
            "state": self.state,
            "store": self.store_state,
            "job": self._record.job,
            "incarnation": self._record.incarnation,
            "jobs": [record.job for record in self._jobs],
            "snapshot": self._snapshot,
            "epoch": plan.epoch if plan is not None else None,
            "highest_epoch": self._adopted.epoch if self._adopted is not None else 0,
            "plan_age_s": now - self._confirmed_at_s if plan is not None else None,
            "author": plan.author if plan is not None else None,
            "policy": plan.policy if plan is not None else None,
        }

    def _replace(self, record: JobRecord) -> None:
        if record != self._record:
            self._record = record
            self._publish_at_s = float("-inf")

    def _publish(self, now: float) -> None:
        if self._superseded_by is not None:
            return
        self._registry.publish_job(self._record, self._lease_s)
        self._publish_at_s = now + self._lease_s / 3 * self._random.uniform(0.8, 1.0)

    def _watch_store(self) -> None:
        # A store that polls to watch would only do again what this leader's own looks do.
        if self._watch is None and self._store.pushes_changes:
            self._watch = self._store.watch(self._registry.prefix, self._notice)

    def _notice(self, _key: str, _value: bytes | None) -> None:
        self._hint.set()

    def _look(self, now: float) -> PlanState:
        """Read the snapshot and the stored plan."""
        self._jobs = self._registry.jobs()
        self._topology = self._registry.topology()
        self._find_self(now)
        snapshot = fingerprint(self._jobs, self._topology)
        if snapshot != self._snapshot:
            self._snapshot, self._snapshot_since_s = snapshot, now
            self._patience_s = self._lease_s
            if self._unplanned_since_s is None:
                self._unplanned_since_s = now
        state = self._registry.plan()
        self._adopt(state, now)
        return state

    def _find_self(self, now: float) -> None:
        """Republish a record that was lost; yield to a younger incarnation of this job."""
        mine = next((r for r in self._jobs if r.job == self._record.job), None)
        if mine is None:
            self._superseded_by = None
            self._publish_at_s = float("-inf")
            self._snapshot_since_s = now  # not the cluster's snapshot while this job is missing
            return
        if mine.incarnation == self._record.incarnation:
            self._superseded_by = None
        elif self._superseded_by is None:
            self._superseded_by = mine.incarnation
            self._warn(
                "superseded",
                f"another job publishes as {self._record.job!r}: this one goes on without a plan; "
                "give each its own CRUX_JOB",
            )

    def _adopt(self, state: PlanState, now: float) -> None:
        if state.stored is None or state.raw == self._adopted_raw:
            return
        plan = state.stored.plan
        if self._stale(plan):
            return
        if self._adopted is None or plan.epoch > self._adopted.epoch:
            _log.info("plan %d of %s, %d jobs", plan.epoch, plan.author, len(plan.entries))
        self._confirm(plan, state.raw, now)

    def _confirm(self, plan: Plan, raw: bytes | None, now: float) -> None:
        if self._adopted != plan:
            self._adopted_at_s = now
        self._confirmed_at_s = now
        self._adopted, self._adopted_raw = plan, raw
        self._renew_at_s = now + plan.valid_s / 3 * self._random.uniform(0.8, 1.2)

    def _stale(self, plan: Plan) -> bool:
        """Whether ``plan`` would take an applier back."""
        return (
            self._adopted is not None
            and plan.epoch <= self._adopted.epoch
            and plan != self._adopted
        )

    def _agree(self, state: PlanState, now: float) -> None:
        """Renew, restore or replace the stored plan, or leave it."""
        if all(record.profile is None for record in self._jobs):
            return
        stored = state.stored
        usable = stored is not None and not self._stale(stored.plan)
        if stored is not None and usable and stored.plan.fingerprint == self._snapshot:
            self._disagreed_since_s = None
            self._unplanned_since_s = None
            self._check_policy(stored.plan)
            if now >= self._renew_at_s:
                self._swap(state, stored.plan, stored.renewal + 1, now)
            return
        current = self.plan
        # Where somebody counted anew, the same decision goes on under a higher epoch instead.
        if stored is None and current is not None and current.fingerprint == self._snapshot:
            self._swap(state, current, self._random.getrandbits(32), now)
            return
        if now < self._settled_at_s or not self._stands_still(now):
            return
        if stored is not None and usable and not self._out_of_patience(now):
            return
        entries = self._entries()
        if entries is None:
            return
        highest = max(
            stored.plan.epoch if stored is not None else 0,
            self._adopted.epoch if self._adopted is not None else 0,
        )
        plan = Plan(
            epoch=highest + 1,
            fingerprint=self._snapshot,
            valid_s=self._plan_valid_s,
            author=self._record.job,
            policy=self._policy,
            entries=entries,
        )
        self._swap(state, plan, 0, now)

    def _stands_still(self, now: float) -> bool:
        """Whether the snapshot is worth a plan: at rest, or in motion for too long."""
        if now - self._snapshot_since_s >= self._debounce_s:
            return True
        since_s = self._unplanned_since_s
        return since_s is not None and now - since_s >= MAX_DEBOUNCES * self._debounce_s

    def _out_of_patience(self, now: float) -> bool:
        """Whether the stored plan, which does not fit this leader's snapshot, may be replaced.

        A plan that was there before this leader's snapshot changed is replaced at once. A plan
        that came after it was made by a leader that sees other jobs, usually because a lease ends a
        little earlier there: it is given time, each time twice as long, so that two leaders that
        never see the same can't swap plans for ever.
        """
        if self._disagreed_since_s is None:
            if self._snapshot_since_s >= self._adopted_at_s:
                return True
            self._disagreed_since_s = now
            return False
        if self._snapshot_since_s > self._disagreed_since_s:
            self._disagreed_since_s = None
            return True
        if now - self._disagreed_since_s < self._patience_s:
            return False
        self._disagreed_since_s = None
        self._patience_s = min(MAX_PATIENCE_S, 2 * self._patience_s)
        return True

    def _entries(self) -> tuple[PlanEntry, ...] | None:
        if self._computed[0] == self._snapshot:
            return self._computed[1]
        if self._failed_snapshot == self._snapshot:
            return None
        try:
            entries = tuple(self._compute(self._jobs, self._topology))
        except Exception as error:
            self._failed_snapshot = self._snapshot
            self._warn("compute", f"no plan could be computed: {type(error).__name__}: {error}")
            return None
        self._computed = (self._snapshot, entries)
        return entries

    def _swap(self, before: PlanState, plan: Plan, renewal: int, now: float) -> None:
        after = StoredPlan(renewal=renewal, plan=plan)
        size = len(msgspec.json.encode(after))
        if size > MAX_RECORD_BYTES:
            self._warn("size", f"a plan of {size} bytes is over the limit of {MAX_RECORD_BYTES}")
            return
        raw = self._registry.swap_plan(before, after)
        if raw is not None:
            self._confirm(plan, raw, now)
        self._look_at_s = min(self._look_at_s, now + self._poll_s / 4)

    def _check_policy(self, plan: Plan) -> None:
        if plan.policy != self._policy:
            self._warn(
                "policy",
                f"the plan in force was made by policy {plan.policy!r}, this job asked for "
                f"{self._policy!r}: give all jobs of a cluster the same",
            )
