"""One job's part in agreeing on a plan, without a lock and without an elected leader.

docs/agreement.md explains the protocol.
"""

from __future__ import annotations

import logging
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec

from crux_torch.control.adopted_plan import AdoptedPlan
from crux_torch.control.agreed_marks import Agree, every_level
from crux_torch.control.audit import Basis, of_plan
from crux_torch.control.beside import Beside
from crux_torch.control.contested_hosts import holdings
from crux_torch.control.followed_entry import FollowedEntry
from crux_torch.control.inputs import overclaims
from crux_torch.control.kept_in_store import KeptSettings, KeptTopology
from crux_torch.control.operator import ComputeEntries, OperatorSettings, operated
from crux_torch.control.outcome import Outcome, Outcomes
from crux_torch.control.plan_allowance import PlanAllowance
from crux_torch.control.plan_parts import PlanParts
from crux_torch.control.planner import within
from crux_torch.control.planner_role import PlannerRole
from crux_torch.control.records import (
    MAX_RECORD_BYTES,
    NO_ENTRIES,
    JobRecord,
    Plan,
    PlanEntry,
    PlanHead,
    digest_of,
    parts_of,
    plan_of,
)
from crux_torch.control.registry import PlanState, Registry, StoredPlan, View
from crux_torch.control.snapshot import Snapshot
from crux_torch.control.step_clock import StepClock
from crux_torch.control.topology_reader import TopologyReader
from crux_torch.control.trials import IterationEnds, Trials
from crux_torch.errors import StoreError, StoreForbidden, StoreTooLarge
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.scheduler import FIRST_NAME
from crux_torch.store.shared_store import SharedStore
from crux_torch.warn_once import WarnOnce, one_line

_log = logging.getLogger(__name__)

#: ``waiting``: no valid plan yet; ``planned``: one is in force; ``offline``: the store can't be
#: reached and no plan is valid; ``superseded``: another incarnation of this job publishes.
LeaderState = Literal["waiting", "planned", "offline", "superseded", "closed"]


#: Longest time for which a leader bears with a plan that its own snapshot contradicts.
MAX_PATIENCE_S = 60.0
#: Seconds without the store before a warning: its next host takes a moment.
PATIENCE_S = 3.0
#: Seconds for which a leader whose role may not write plans leaves them to the others.
FORBIDDEN_S = 60.0
#: Seconds for which a plan that is safe at once waits for a better one that is being computed.
BETTER_S = 0.5
#: Bytes of a stored entry beside the entry.
MAX_AROUND_BYTES = 4096
#: Letters of one message about what others have written.
MAX_SAID = 1000
#: Jobs and flows up to which each leader computes what it adopts.
MAX_VERIFIED = 1 << 11
#: Jobs up to which each leader reads all records: a change is read by as many leaders.
MAX_READERS = 1 << 8
#: Seconds between two looks of a follower at what is not the plan.
FOLLOWER_LOOK_S = 1.0


class Leader:
    """Publishes one job and agrees with the other leaders on the plan.

    One background thread owns it and calls :meth:`tick`; other threads may read :attr:`plan`. A
    tick makes a handful of store operations, each bounded, and sometimes one ``compute``.

    Args:
        store, cluster: where the cluster's jobs meet, and its name there.
        record: of this job, to begin with.
        compute, policy: the planner, and the policy that it is asked for.
        agree: the levels that a plan of some records may assign.
        topologies: parses the stored topology.
        published: the topology that this job knows, for the store.
        lease_s: seconds of silence after which this job counts as gone.
        plan_valid_s: seconds without renewal after which a plan of this leader is dropped.
        poll_s: seconds between two looks at the store.
        debounce_s: seconds for which the snapshot must stand still before it is planned.
        max_slowdown, iteration_ends: for :class:`~crux_torch.control.trials.Trials`. Without the
            latter no plan of this job's component is tried, and nothing told of its steps.
        in_thread: whether a thread of its own computes plans, so that no tick takes long.
        check: raises StoreTooLarge for a view that is not to be parsed and planned here: see
            :attr:`too_large`.
        max_verified, max_readers: jobs and flows of the cluster, and jobs, above which only a
            planner and its stand-bys read all records and plan.
    """

    def __init__(
        self,
        store: SharedStore,
        cluster: str,
        record: JobRecord,
        compute: ComputeEntries,
        topologies: TopologyReader | None = None,
        published: bytes | None = None,
        *,
        policy: str = "crux",
        agree: Agree = every_level,
        lease_s: float = 6.0,
        plan_valid_s: float = 15.0,
        poll_s: float = 0.25,
        debounce_s: float = 0.5,
        max_slowdown: float = math.inf,
        iteration_ends: IterationEnds | None = None,
        in_thread: bool = False,
        check: Callable[[View], None] | None = None,
        max_verified: int = MAX_VERIFIED,
        max_readers: int = MAX_READERS,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._registry = Registry(store, cluster)
        #: What this leader publishes; :meth:`update` changes it.
        self.record = record
        self._compute = compute
        self._topologies = topologies or TopologyReader()
        #: What the plan that this leader followed last follows from.
        self._basis: Basis | None = None
        self._policy = policy
        self._agree_on = agree
        self._lease_s = lease_s
        self._plan_valid_s = plan_valid_s
        self._poll_s = poll_s
        self._debounce_s = debounce_s
        self._clock = clock
        self._random = rng or random.Random()
        self._warn = WarnOnce(_log)
        self._kept_topology = KeptTopology(self._registry, published, self._warn)
        self._kept_settings = KeptSettings(self._registry, lease_s)
        self._followed_entry = FollowedEntry(self._registry, record.job)
        self._allowance = PlanAllowance(clock())
        self._max_verified, self._max_readers = max_verified, max_readers
        #: Jobs, and what computing a plan for them costs.
        self._sized: tuple[Sequence[JobRecord], int] = (), 0
        self._check = check
        #: What of the store's contents is too large for this leader; empty while nothing is. Then
        #: another one has to take over.
        self.too_large = ""
        self._outcomes = Outcomes(books=policy == "mlcc")
        self._role = PlannerRole(
            self._registry, record.job, record.incarnation, lease_s, plan_valid_s, self._random
        )
        self._parts = PlanParts(self._registry, lease_s)
        self._trials, self._step_clock = None, None
        if iteration_ends is not None:
            self._step_clock = StepClock(self._registry, record.job, lease_s, iteration_ends)
            self._trials = Trials(self._registry, record.job, max_slowdown, iteration_ends)

        self._publish_at_s = float("-inf")
        self._look_at_s = self._look_around_at_s = float("-inf")
        self._store_error: str | None = None
        self._away_since_s = float("-inf")
        self._settled_at_s = float("-inf")
        self._forbidden_until_s = float("-inf")
        self._closed = False
        self._superseded = False

        self._snapshot = Snapshot()
        self._adopted = AdoptedPlan(clock, self._random, plan_valid_s)
        self._beside = Beside(in_thread=in_thread, clock=clock)
        #: First plans: they must not wait for a better one of a snapshot that is gone already.
        self._beside_first = Beside(in_thread=in_thread, clock=clock)
        #: The snapshot whose first plan was ready last, and since when.
        self._first_of = "", float("-inf")
        #: The plan that lies in the store, and since when.
        self._stored: tuple[int, str, str] | None = None
        self._stored_since_s = float("-inf")
        self._unfollowed: bytes | None = None
        self._disagreed_since_s: float | None = None
        self._patience_s = lease_s

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None if there is none or it was not renewed in time."""
        return None if self._closed or self._superseded else self._adopted.valid

    @property
    def topology(self) -> Topology | None:
        """The cluster's topology as the store has it, in which plans choose paths.

        None if there is none, and until it was read.
        """
        raw = self._snapshot.topology
        if raw is None:
            return None
        found: tuple[bool, Topology | None] = self._beside.ask(
            ("topology", raw), lambda: self._topologies.read(raw)
        )
        return found[1]

    @property
    def outcome(self) -> Outcome:
        """The plan's outcome for this job now."""
        seen = self._snapshot
        return self._outcomes.of(
            self.plan, self.record, seen.jobs, seen.operator, self.topology, self.is_alone
        )

    @property
    def jobs(self) -> tuple[JobRecord, ...]:
        """The jobs' records as they were read last: all, or those that a follower reads."""
        return self._snapshot.jobs

    @property
    def is_alone(self) -> bool:
        """True if this leader reads all records and the store knows no other job."""
        known = {record.job for record in self._snapshot.jobs}
        return self._role.reads_all and self.store_state == "ok" and known <= {self.record.job}

    @property
    def operator(self) -> OperatorSettings:
        """The operator's settings as they were read last."""
        return self._snapshot.operator

    @property
    def state(self) -> LeaderState:
        """Where this leader stands."""
        if self._closed:
            return "closed"
        if self._superseded:
            return "superseded"
        if self.plan is not None:
            return "planned"
        return "offline" if self._store_error is not None else "waiting"

    @property
    def store_state(self) -> str:
        """``ok``, or what is wrong with the store."""
        return self._store_error or "ok"

    def update(self, **changes: Any) -> None:
        """Publish other values of these fields of the record with the next tick."""
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._publish_at_s = float("-inf")

    def tick(self) -> None:
        """Do what is due; raises nothing."""
        if self._closed:
            return
        now = self._clock()
        try:
            if now >= self._publish_at_s and not self._superseded:
                self._registry.publish_job(self.record, self._lease_s)
                self._publish_at_s = now + self._lease_s / 3 * self._random.uniform(0.8, 1.0)
            self._kept_topology.keep(now)
            if now >= self._look_at_s:
                self._look_at_s = now + self._poll_s
                self._role.step(now, may_plan=self._may_plan(now))
                state = self._look(now)
                if self._role.plans and self._may_plan(now):
                    self._agree_as_allowed(state, now)
                    self._keep_parts(state, now)
                self._followed_entry.tell(self.plan, now)
                if self._store_error is not None:
                    self._store_error = None
                    # The others' back-off lets them return later: until then the snapshot is not
                    # the cluster's.
                    self._settled_at_s = now + self._lease_s
                    self._warn.forget("store")
                if self._step_clock is not None and not self._superseded:
                    self._step_clock.tell(now, self.record.profile)
                # In a dry run no plan is in force, so that none can be tried.
                if self._trials is not None and not (self.operator.observe or self.record.dry_run):
                    tried = self._trials.step(now, self.plan, self._snapshot.jobs)
                    self.update(tried=tried or msgspec.UNSET)
        except StoreTooLarge as error:
            self.too_large = str(error)
        except StoreError as error:
            if self._store_error is None:
                self._away_since_s = now
            self._store_error = str(error)
            self._kept_topology.publish_again()
            self._followed_entry.tell_again()
            self._settled_at_s = float("inf")
            if now - self._away_since_s >= PATIENCE_S:
                self._warn("store", f"going on without the shared store: {error.told}")
        except Exception as error:
            self._warn("tick", f"agreeing on a plan failed: {type(error).__name__}: {error}")
            _log.debug("tick failed", exc_info=True)

    def close(self) -> None:
        """Remove this job's record, so that the others plan anew at once. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._superseded:
                self._registry.remove_job(self.record.job)
                self._followed_entry.withdraw()
                self._role.leave()
                if self._trials is not None:
                    self._trials.withdraw()
                if self._step_clock is not None:
                    self._step_clock.withdraw()
        except StoreError as error:
            _log.debug("the record of %r ends with its lease: %s", self.record.job, error)

    def status(self) -> dict[str, Any]:
        """What ``crux_torch.status()`` shows of this leader; plain values."""
        plan = self.plan
        now = self._clock()
        return {
            "state": self.state,
            "role": self._role.name,
            "store": self.store_state,
            "job": self.record.job,
            "incarnation": self.record.incarnation,
            "jobs": [record.job for record in self._snapshot.jobs],
            "snapshot": self._snapshot.fingerprint,
            "epoch": plan.epoch if plan is not None else None,
            "highest_epoch": self._adopted.epoch,
            "plan_age_s": now - self._adopted.confirmed_at_s if plan is not None else None,
            "author": plan.author if plan is not None else None,
            "policy": plan.policy if plan is not None else None,
            "trial": self._trials.status() if self._trials is not None else None,
        }

    def _may_plan(self, now: float) -> bool:
        return not self._superseded and now >= self._forbidden_until_s

    def _look(self, now: float) -> PlanState:
        whole = self._role.reads_all
        around = whole or now >= self._look_around_at_s
        if whole:
            self._look_around_at_s = float("-inf")
            view = self._registry.look()
        else:
            view = self._registry.glance(self._company() if around else None)
            if around:
                self._look_around_at_s = now + FOLLOWER_LOOK_S
        if self._check is not None:
            self._check(view)
        self._kept_settings.keep(view, now)
        if not whole:
            self._snapshot.narrow(view.jobs, view.topology, view.operator)
        elif self._snapshot.update(view.jobs, view.topology, view.operator, now):
            self._patience_s = self._lease_s
            self._role.cluster_is(large=self._is_large(view.jobs))
            self._say_overclaims()
        if around:
            self._find_self(now)
        self._adopt(view.plan, now)
        return view.plan

    def _company(self) -> frozenset[str]:
        """Whose records a follower reads."""
        company = self._trials.company if self._trials is not None else frozenset[str]()
        return company | {self.record.job}

    def _is_large(self, jobs: Sequence[JobRecord]) -> bool:
        if jobs is not self._sized[0]:
            self._sized = jobs, size_of(jobs)
        return self._sized[1] > self._max_verified or len(jobs) > self._max_readers

    def _adopt(self, state: PlanState, now: float) -> None:
        """Follow the plan in the store, or see that it was renewed."""
        adopted, plan, in_parts = self._adopted, None, False
        if state.stored is not None:
            head = state.stored.plan
            in_parts = bool(head.parts)
            self._note(head, now)
            known = adopted.knows(state)
            if not known or (self._role.plans and not adopted.whole):
                plan = self._followed(state)
            if plan is not None and not (known and plan is adopted.last):
                whole = adopted.whole if plan is adopted.last else self._role.plans
                adopted.confirm(plan, state.raw, whole=whole)
        waits = self.record.profile is not None and not adopted.knows(state)
        self._role.saw(state.raw, in_parts=in_parts, useless=waits)

    def _say_overclaims(self) -> None:
        """Say which claims count for less: a warning where this job's do, else for the log."""
        jobs, topology, own = self._snapshot.jobs, self.topology, frozenset(self.record.hosts)
        told = _log.isEnabledFor(logging.INFO)
        if not told:
            # Those that share a host with it, few in a large cluster, tell enough for a warning.
            jobs = tuple(record for record in jobs if not own.isdisjoint(record.hosts))
        contested, held = holdings(jobs, topology)
        for host in contested:
            said = one_line(str(host))[:MAX_SAID]
            if self.record.job in host.claimed:
                self._warn("contested", said)
            else:
                _log.info("%s", said)
        for record in jobs:
            mine = record.job == self.record.job
            if (told or mine) and (less := overclaims(record, topology, held.get(record.job))):
                said = f"the plan counts, of what job {record.job!r} claims, {less}"
                if mine:
                    self._warn("claims", f"{said}: more than its hosts can do")
                else:
                    _log.info("%s", one_line(said))

    def _note(self, head: PlanHead, now: float) -> None:
        """Remember since when the plan of ``head`` lies in the store."""
        stored = head.epoch, head.fingerprint, head.author
        if stored != self._stored:
            same = self._stored is not None and self._stored[1] == head.fingerprint
            self._stored, self._stored_since_s = stored, now
            if not same:
                self._allowance.count(now)

    def _followed(self, state: PlanState) -> Plan | None:
        """The stored plan if this leader would have written the same, so that it may adopt it.

        A follower takes its own entry as the plan's author wrote it, if that has a level that a
        plan may assign.
        """
        assert state.stored is not None
        head = state.stored.plan
        if self._superseded or state.raw == self._unfollowed or self._adopted.refuses(head):
            return None
        last = self._adopted.last if self._adopted.is_this(head) else None
        if last is not None and (self._adopted.whole or not self._role.plans):
            return last
        if not self._role.plans:
            found = self._own_part(head)
            if found is None:
                return None  # not written yet
            settings = self._snapshot.operator
            levels = self._own_levels()
            if all(settings.may_have(entry.job, entry.level, levels) for entry in found):
                return plan_of(head, found)
        else:
            jobs = self._snapshot.jobs_of(head.fingerprint)
            if jobs is None:
                return last  # of a snapshot that this leader has not seen, or not yet
            done, computed = self._entries(head.fingerprint, head.policy)
            if not done:
                return last
            same = computed is not None and digest_of(computed) == head.digest
            if computed is not None and same and self._is_large(jobs):
                same = head.parts == parts_of(computed)
            if computed is not None and same:
                return plan_of(head, computed)
        self._unfollowed = state.raw
        self._warn(
            "unfollowed",
            f"ignoring plan {head.epoch} of {head.author}: it does not follow from the jobs' "
            "records. Give all jobs of a cluster the same settings and release of Crux; if "
            "they have them, somebody else writes to the store",
        )
        return None

    def _own_levels(self) -> Collection[int]:
        """The levels that a plan may give this job, whatever the others' DSCP maps are."""
        if not self.record.marks:
            return range(64)  # none has an effect
        return {0, *self.record.marks.plan_levels}

    def _own_part(self, head: PlanHead) -> tuple[PlanEntry, ...] | None:
        """This job's entry as the author of ``head`` wrote it; None if it is not there."""
        self._warn(
            "unverified",
            "the cluster has too many jobs to compute every plan here: of plans of others, this "
            "job's level is checked only",
        )
        digest, last = head.digest_for(self.record.job), self._adopted.last
        if not head.parts:
            return None
        if digest == NO_ENTRIES:
            return ()
        if last is not None and last.parts and last.digest_for(self.record.job) == digest:
            entry = last.entry(self.record.job)
        else:
            entry = self._registry.part(self.record.job, digest)
        return None if entry is None else (entry,)

    def _find_self(self, now: float) -> None:
        """Publish a record that was lost again; yield to a younger incarnation of this job."""
        jobs = self._snapshot.jobs
        at = bisect_left(jobs, self.record.job, key=attrgetter("job"))
        mine = jobs[at] if at < len(jobs) and jobs[at].job == self.record.job else None
        if mine is None:
            self._publish_at_s = float("-inf")
            self._followed_entry.tell_again()
            self._snapshot.since_s = now  # without this job it is not the cluster's
        superseded = mine is not None and mine.incarnation != self.record.incarnation
        if superseded and not self._superseded:
            self._warn(
                "superseded",
                f"another job publishes as {self.record.job!r}: this one goes on without a plan; "
                "give each its own CRUX_JOB",
            )
        self._superseded = superseded

    def _agree_as_allowed(self, state: PlanState, now: float) -> None:
        try:
            self._agree(state, now)
        except StoreForbidden as error:
            _log.info("this job follows plans that others write: %s", error)
            self._forbidden_until_s = now + FORBIDDEN_S

    def _keep_parts(self, state: PlanState, now: float) -> None:
        """Write the entries of the plan in the store, as far as they are this leader's to write."""
        plan, head = self._adopted.last, state.stored.plan if state.stored is not None else None
        if plan is None or head is None or not self._adopted.whole or head != plan.head:
            return
        if self._role.name == "planner" or plan.author == self.record.job:
            more = self._parts.keep(plan, now)
            if more:
                self._look_soon(now)

    def _agree(self, state: PlanState, now: float) -> None:
        """Renew, restore or replace the stored plan, or leave it."""
        snapshot, adopted = self._snapshot, self._adopted
        if all(record.profile is None for record in snapshot.jobs):
            return
        stored = state.stored
        usable = stored is not None and not adopted.refuses(stored.plan)
        fits = stored is not None and stored.plan.fingerprint == snapshot.fingerprint
        if stored is not None and fits and adopted.is_this(stored.plan) and adopted.whole:
            self._disagreed_since_s = None
            snapshot.was_planned()
            self._basis = self._current_basis()
            if stored.plan.policy == FIRST_NAME.get(self._policy):
                _, better = self._entries(snapshot.fingerprint, self._policy)
                if better is not None:
                    self._replace(state, self._policy, better, now)
                    return
            elif stored.plan.policy != self._policy:
                self._warn(
                    "policy",
                    f"the plan in force was made by policy {stored.plan.policy!r}, this job asked "
                    f"for {self._policy!r}: give all jobs of a cluster the same",
                )
            if now >= adopted.renew_at_s:
                assert adopted.last is not None
                self._wrote(adopted.last, self._registry.renew_plan(state), now)
            return
        current = self.plan
        # Only into an empty place: a plan that began to count anew is replaced by a higher epoch.
        in_place = current is not None and current.fingerprint == snapshot.fingerprint
        if stored is None and current is not None and in_place and adopted.whole:
            self._swap(state, current, self._random.getrandbits(32), now)
            return
        debounce_s = self._debounce_s + self._role.waits_s
        if now < self._settled_at_s or not snapshot.stands_still(now, debounce_s):
            return
        # Soon enough that the plan in force does not end if the stored one is made up.
        patience_s = self._plan_valid_s / 3 if fits else self._patience_s
        if current is not None and not self._allowance.allows(now):
            return
        if usable and not self._out_of_patience(now, patience_s):
            return
        policy, entries = self._first_or_better(snapshot.fingerprint, now)
        if entries is not None:
            self._replace(state, policy, entries, now)

    def _first_or_better(
        self, fingerprint: str, now: float
    ) -> tuple[str, tuple[PlanEntry, ...] | None]:
        """What to write for a snapshot without a plan: by which policy, and the entries if any.

        Where the policy takes longer than ``BETTER_S``, that is what it begins with. A plan in
        force is left for that later: those that changed may be few, and all would lose their
        levels.
        """
        first = FIRST_NAME.get(self._policy)
        if first is None or not self._beside.waits_for((fingerprint, self._policy)):
            return self._policy, self._entries(fingerprint, self._policy)[1]
        done, entries = self._entries(fingerprint, first)
        if not done:
            return first, None
        self._entries(fingerprint, self._policy)
        if self._first_of[0] != fingerprint:
            self._first_of = fingerprint, now
        patience_s = BETTER_S if self.plan is None else self._plan_valid_s / 3
        return first, entries if now - self._first_of[1] >= patience_s else None

    def _replace(
        self, state: PlanState, policy: str, entries: tuple[PlanEntry, ...], now: float
    ) -> None:
        stored = state.stored.plan if state.stored is not None else None
        plan = Plan(
            epoch=self._adopted.epoch_after(stored),
            fingerprint=self._snapshot.fingerprint,
            valid_s=self._plan_valid_s,
            author=self.record.job,
            policy=policy,
            digest=digest_of(entries),
            parts=parts_of(entries) if self._is_large(self._snapshot.jobs) else msgspec.UNSET,
            entries=entries,
        )
        before = self._adopted.last
        if self._swap(state, plan, 0, now):
            self._append_audit(stored.epoch if stored is not None else 0, before, plan)

    def _append_audit(self, epoch: int, before: Plan | None, plan: Plan) -> None:
        try:
            origin = self._registry.operator_origin() if self._snapshot.operator.effect else ""
            audited = of_plan(epoch, before, plan, self._basis, self._current_basis(), origin)
            self._registry.append_audit(audited)
        except StoreError as error:
            _log.debug("plan %d is not in the audit log: %s", plan.epoch, error)

    def _current_basis(self) -> Basis:
        seen = self._snapshot
        return Basis(seen.jobs, seen.topology, seen.operator, self.topology)

    def _out_of_patience(self, now: float, patience_s: float) -> bool:
        """Whether the stored plan, which does not fit this leader's snapshot, may be replaced.

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

    def _entries(self, fingerprint: str, policy: str) -> tuple[bool, tuple[PlanEntry, ...] | None]:
        """Whether the entries for a snapshot that was seen are there, and the entries.

        They are None if the planner failed.
        """
        snapshot = self._snapshot
        jobs, raw = snapshot.jobs_of(fingerprint) or (), snapshot.topology
        operator = snapshot.operator
        beside = self._beside_first if policy in FIRST_NAME.values() else self._beside
        found: tuple[bool, tuple[PlanEntry, ...] | None] = beside.ask(
            (fingerprint, policy), lambda: self._plan_of(jobs, raw, operator, policy)
        )
        return found

    def _plan_of(
        self, jobs: Sequence[JobRecord], raw: bytes | None, operator: OperatorSettings, policy: str
    ) -> tuple[PlanEntry, ...] | None:
        try:
            topology = self._topologies.read(raw)
            computed = operated(
                self._compute,
                jobs,
                topology,
                policy=policy,
                agreed=self._agree_on(jobs, topology),
                settings=operator,
            )
            entries, without = within(computed, MAX_RECORD_BYTES - MAX_AROUND_BYTES)
        except Exception as error:
            self._warn("compute", f"no plan could be computed: {type(error).__name__}: {error}")
            return None
        if without:
            self._warn(
                "size",
                f"entries of the plan are over {MAX_RECORD_BYTES} bytes: the network chooses the "
                f"paths of these {without} jobs",
            )
        return entries

    def _swap(self, before: PlanState, plan: Plan, renewal: int, now: float) -> bool:
        raw = self._registry.swap_plan(before, StoredPlan(renewal=renewal, plan=plan.head))
        self._wrote(plan, raw, now)
        return raw is not None

    def _wrote(self, plan: Plan, raw: bytes | None, now: float) -> None:
        """``plan`` lies in the store as ``raw``; None: another leader was first."""
        if raw is not None:
            self._note(plan, now)
            self._adopted.confirm(plan, raw, whole=True)
        self._look_soon(now)

    def _look_soon(self, now: float) -> None:
        self._look_at_s = min(self._look_at_s, now + self._poll_s / 4)


def size_of(jobs: Sequence[JobRecord]) -> int:
    """What computing a plan for ``jobs`` costs, in jobs and flows."""
    return sum(1 + len(r.profile.flows) + len(r.profile.inside) for r in jobs if r.profile)
