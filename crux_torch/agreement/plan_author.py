"""A leader as the author of plans: it renews, restores or replaces the plan in the store."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import msgspec

from crux_torch.agreement.audit import Basis, of_plan
from crux_torch.agreement.planner import PlanComputer
from crux_torch.agreement.planner_role import PlannerRole, PlanParts
from crux_torch.agreement.records import Plan, PlanEntry, PlanHead, digest_of, parts_of
from crux_torch.agreement.registry import FORBIDDEN_S, PlanState, Registry, StoredPlan
from crux_torch.agreement.snapshot import AdoptedPlan, Snapshot
from crux_torch.errors import StoreError, StoreForbidden
from crux_torch.logs import WarnOnce
from crux_torch.network.topology import Topology
from crux_torch.schedule.schedulers import FIRST_NAME

_log = logging.getLogger(__name__)

#: Plans in a minute in the long run, and at once: one job that flaps must not make all flap.
PLANS_PER_MINUTE = 12
PLANS_AT_ONCE = 6
#: Longest time for which an author bears with a plan that its own snapshot contradicts.
MAX_PATIENCE_S = 60.0
#: Seconds for which a plan that is safe at once waits for a better one that is being computed.
BETTER_S = 0.5


class PlanAllowance:
    """Plans that may still be written: a few at once, then so many a minute.

    Every leader counts each plan that it sees, whoever wrote it.
    """

    def __init__(self, now_s: float) -> None:
        self._left, self._at_s = float(PLANS_AT_ONCE), now_s

    def count(self, now_s: float) -> None:
        """Count a plan that was written."""
        self._left, self._at_s = max(0.0, self._earned(now_s) - 1), now_s

    def allows(self, now_s: float) -> bool:
        """Return True if a plan may be written now."""
        return self._earned(now_s) >= 1

    def _earned(self, now_s: float) -> float:
        return min(PLANS_AT_ONCE, self._left + (now_s - self._at_s) * PLANS_PER_MINUTE / 60)


class PlanAuthor:
    """Writes plans of the leader's snapshot. The leader's thread owns it.

    Every method that uses the store raises StoreError if it can't be reached.

    Args:
        computer: of the entries.
        snapshot, adopted, role: what the leader has seen, what it follows, and its part. Only
            ``adopted`` is changed here: with a plan that was written.
        policy: that plans are made by.
        lease_s: of the job; the first patience with a plan that does not fit.
        plan_valid_s: validity of the plans.
        debounce_s: seconds for which the snapshot must stand still before it is planned.
    """

    def __init__(
        self,
        registry: Registry,
        job: str,
        computer: PlanComputer,
        snapshot: Snapshot,
        adopted: AdoptedPlan,
        role: PlannerRole,
        *,
        policy: str,
        lease_s: float,
        plan_valid_s: float,
        debounce_s: float,
        clock: Callable[[], float],
        rng: random.Random,
        warn: WarnOnce,
    ) -> None:
        self._registry = registry
        self._job = job
        self._computer = computer
        self._snapshot, self._adopted, self._role = snapshot, adopted, role
        self._policy = policy
        self._lease_s = lease_s
        self._plan_valid_s = plan_valid_s
        self._debounce_s = debounce_s
        self._random = rng
        self._warn = warn
        self._parts = PlanParts(registry, lease_s)
        self._allowance = PlanAllowance(clock())
        #: What the plan that this leader followed last follows from.
        self._basis: Basis | None = None
        self._topology: Topology | None = None
        self._forbidden_until_s = float("-inf")
        #: The snapshot whose first plan was ready last, and since when.
        self._first_ready = "", float("-inf")
        #: The plan that lies in the store, and since when.
        self._stored: tuple[int, str, str] | None = None
        self._stored_since_s = float("-inf")
        self._disagreed_since_s: float | None = None
        self._patience_s = lease_s
        self._look_soon = False

    def may_write(self, now: float) -> bool:
        """Return False for a while after the store has refused a plan."""
        return now >= self._forbidden_until_s

    def saw_snapshot(self) -> None:
        """Note that the snapshot has changed."""
        self._patience_s = self._lease_s

    def saw_plan(self, head: PlanHead, now: float) -> None:
        """Remember since when the plan of ``head`` lies in the store."""
        stored = head.epoch, head.fingerprint, head.author
        if stored != self._stored:
            same = self._stored is not None and self._stored[1] == head.fingerprint
            self._stored, self._stored_since_s = stored, now
            if not same:
                self._allowance.count(now)

    def step(
        self, state: PlanState, topology: Topology | None, now: float, *, settled: bool
    ) -> bool:
        """Do what is due about the plan in the store.

        Args:
            state: as it was just read.
            topology: of the snapshot, for the audit log.
            settled: the snapshot is the cluster's: the store was not away a moment ago.

        Returns:
            True if the next look should be soon.
        """
        self._topology, self._look_soon = topology, False
        try:
            self._agree(state, now, settled)
        except StoreForbidden as error:
            _log.info("this job follows plans that others write: %s", error)
            self._forbidden_until_s = now + FORBIDDEN_S
        self._keep_parts(state, now)
        return self._look_soon

    def _agree(self, state: PlanState, now: float, settled: bool) -> None:
        """Renew, restore or replace the stored plan, or leave it."""
        snapshot, adopted = self._snapshot, self._adopted
        if all(record.profile is None for record in snapshot.jobs):
            return
        stored = state.stored.plan if state.stored is not None else None
        fits = stored is not None and stored.fingerprint == snapshot.fingerprint
        if stored is not None and fits and adopted.is_this(stored) and adopted.whole:
            self._keep_up(state, stored, now)
            return
        in_force = adopted.valid
        restores = in_force is not None and in_force.fingerprint == snapshot.fingerprint
        # Only into an empty place: a plan that began to count anew is replaced by a higher epoch.
        if stored is None and in_force is not None and restores and adopted.whole:
            self._swap(state, in_force, self._random.getrandbits(32), now)
            return
        if not settled or not snapshot.stands_still(now, self._debounce_s + self._role.waits_s):
            return
        if in_force is not None and not self._allowance.allows(now):
            return
        # Soon enough that the plan in force does not end if the stored one is made up.
        patience_s = self._plan_valid_s / 3 if fits else self._patience_s
        usable = stored is not None and not adopted.refuses(stored)
        if usable and not self._out_of_patience(now, patience_s):
            return
        policy, entries = self._first_or_better(now)
        if entries is not None:
            self._replace(state, policy, entries, now)

    def _keep_up(self, state: PlanState, stored: PlanHead, now: float) -> None:
        """Renew the stored plan, which is in force and fits; or replace a first plan."""
        self._disagreed_since_s = None
        self._snapshot.was_planned()
        self._basis = self._current_basis()
        if stored.policy == FIRST_NAME.get(self._policy):
            _, better = self._computer.entries(self._snapshot, stored.fingerprint, self._policy)
            if better is not None:
                self._replace(state, self._policy, better, now)
                return
        elif stored.policy != self._policy:
            self._warn(
                "policy",
                f"the plan in force was made by policy {stored.policy!r}, this job asked "
                f"for {self._policy!r}: give all jobs of a cluster the same",
            )
        if now >= self._adopted.renew_at_s:
            assert self._adopted.last is not None
            self._wrote(self._adopted.last, self._registry.renew_plan(state), now)

    def _first_or_better(self, now: float) -> tuple[str, tuple[PlanEntry, ...] | None]:
        """Return the policy and the entries of the plan to write; None if there are none yet.

        Where the policy takes longer than ``BETTER_S``, its first plan is written. If a plan is in
        force, delay replacing it: the first plan would reset every job's level.
        """
        snapshot, fingerprint = self._snapshot, self._snapshot.fingerprint
        first = FIRST_NAME.get(self._policy)
        if first is None or not self._computer.is_pending(fingerprint, self._policy):
            return self._policy, self._computer.entries(snapshot, fingerprint, self._policy)[1]
        done, entries = self._computer.entries(snapshot, fingerprint, first)
        if not done:
            return first, None
        self._computer.entries(snapshot, fingerprint, self._policy)
        if self._first_ready[0] != fingerprint:
            self._first_ready = fingerprint, now
        patience_s = BETTER_S if self._adopted.valid is None else self._plan_valid_s / 3
        return first, entries if now - self._first_ready[1] >= patience_s else None

    def _replace(
        self, state: PlanState, policy: str, entries: tuple[PlanEntry, ...], now: float
    ) -> None:
        stored = state.stored.plan if state.stored is not None else None
        large = self._role.is_large(self._snapshot.jobs)
        plan = Plan(
            epoch=self._adopted.epoch_after(stored),
            fingerprint=self._snapshot.fingerprint,
            valid_s=self._plan_valid_s,
            author=self._job,
            policy=policy,
            digest=digest_of(entries),
            parts=parts_of(entries) if large else msgspec.UNSET,
            entries=entries,
        )
        before = self._adopted.last
        if not self._swap(state, plan, 0, now):
            return
        try:
            origin = self._registry.operator_origin() if self._snapshot.operator.effect else ""
            replaced = stored.epoch if stored is not None else 0
            audited = of_plan(replaced, before, plan, self._basis, self._current_basis(), origin)
            self._registry.append_audit(audited)
        except StoreError as error:
            _log.debug("plan %d is not in the audit log: %s", plan.epoch, error)

    def _current_basis(self) -> Basis:
        seen = self._snapshot
        return Basis(seen.jobs, seen.topology, seen.operator, self._topology)

    def _out_of_patience(self, now: float, patience_s: float) -> bool:
        """Return True if the stored plan, which does not fit the snapshot, may be replaced.

        A plan that was there before this leader's snapshot changed is replaced at once. One that
        came later, from a leader that sees other jobs, is given time, twice as long each time.
        """
        since_s = self._snapshot.since_s
        if self._disagreed_since_s is None:
            if since_s >= self._stored_since_s:
                return True
            self._disagreed_since_s = now
            return False
        if since_s > self._disagreed_since_s:
            self._disagreed_since_s = None
            return True
        if now - self._disagreed_since_s < patience_s:
            return False
        self._disagreed_since_s = None
        self._patience_s = min(MAX_PATIENCE_S, 2 * self._patience_s)
        return True

    def _swap(self, before: PlanState, plan: Plan, renewal: int, now: float) -> bool:
        raw = self._registry.swap_plan(before, StoredPlan(renewal=renewal, plan=plan.head))
        self._wrote(plan, raw, now)
        return raw is not None

    def _wrote(self, plan: Plan, raw: bytes | None, now: float) -> None:
        """Adopt ``plan``, which lies in the store as ``raw``; None: another leader was first."""
        if raw is not None:
            self.saw_plan(plan, now)
            self._adopted.confirm(plan, raw, whole=True)
        self._look_soon = True

    def _keep_parts(self, state: PlanState, now: float) -> None:
        """Write the entries of the plan in the store, as far as they are this leader's to write."""
        plan, head = self._adopted.last, state.stored.plan if state.stored is not None else None
        if plan is None or head is None or not self._adopted.whole or head != plan.head:
            return
        if self._role.name == "planner" or plan.author == self._job:
            self._look_soon |= self._parts.keep(plan, now)
