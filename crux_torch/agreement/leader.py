"""One job's part in agreeing on a plan, without a lock and without an elected leader.

A tick goes one way: record → store → view → snapshot → plan in the store → plan in force.
docs/understand/agreement.md explains the protocol.
"""

from __future__ import annotations

import logging
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, Literal

import msgspec

from crux_torch.agreement.bounds import claims_in_words
from crux_torch.agreement.inputs import Agree, TopologyReader, every_level
from crux_torch.agreement.operator import ComputeEntries
from crux_torch.agreement.outcome import Outcome, Outcomes
from crux_torch.agreement.plan_author import PlanAuthor
from crux_torch.agreement.planner import PlanComputer
from crux_torch.agreement.planner_role import MAX_READERS, MAX_VERIFIED, PlannerRole
from crux_torch.agreement.publish import (
    FollowedEntry,
    KeptFragment,
    KeptSettings,
    KeptTopology,
    StepClock,
)
from crux_torch.agreement.records import (
    NO_ENTRIES,
    JobRecord,
    Plan,
    PlanEntry,
    PlanHead,
    digest_of,
    parts_of,
    plan_of,
)
from crux_torch.agreement.registry import PlanState, Registry, View
from crux_torch.agreement.seen_network import SeenNetwork, is_seen
from crux_torch.agreement.snapshot import AdoptedPlan, Snapshot
from crux_torch.agreement.trials import IterationEnds, Trials
from crux_torch.errors import StoreError, StoreTooLarge
from crux_torch.logs import WarnOnce
from crux_torch.network.topology import Topology
from crux_torch.store import SharedStore

_log = logging.getLogger(__name__)

#: ``waiting``: no valid plan yet; ``planned``: one is in force; ``offline``: the store can't be
#: reached and no plan is valid; ``superseded``: another incarnation of this job publishes.
LeaderState = Literal["waiting", "planned", "offline", "superseded", "closed"]

#: Seconds without the store before a warning: its next host takes a moment.
PATIENCE_S = 3.0
#: Seconds between two looks of a follower at what is not the plan.
FOLLOWER_LOOK_S = 1.0


class Leader:
    """Publishes one job, checks and follows the plan in the store, and may write plans.

    Thread safety: one background thread owns it and calls :meth:`tick`; other threads may read
    :attr:`plan`. A tick makes a handful of store operations, each bounded, and sometimes one
    ``compute``.

    Args:
        record: of this job, to begin with.
        compute, policy: the planner, and the policy that it is asked for.
        topologies: parses the stored topology.
        published: the topology that this job knows, for the store.
        agree: the levels that a plan of some records may assign.
        lease_s: seconds of silence after which this job counts as gone.
        plan_valid_s: seconds without renewal after which a plan of this leader is dropped.
        poll_s: seconds between two looks at the store.
        debounce_s: seconds for which the snapshot must stand still before it is planned.
        max_slowdown, iteration_ends: for :class:`~crux_torch.agreement.trials.Trials`. Without the
            latter no plan of this job's component is tried, and no step times are published.
        in_thread: True: threads of their own compute plans, so that no tick takes long.
        check: raises StoreTooLarge for a view that is not to be parsed and planned here: see
            :attr:`too_large`.
        max_verified, max_readers: see :class:`~crux_torch.agreement.planner_role.PlannerRole`.
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
        self._registry = registry = Registry(store, cluster)
        #: The job's record as it is published; :meth:`update` changes it.
        self.record = record
        #: Part of the store that is too large for this leader, in words; empty while none is. Then
        #: another one has to take over.
        self.too_large = ""
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._clock = clock
        self._random = rng = rng or random.Random()
        self._check = check
        self._warn = warn = WarnOnce(_log)

        self._kept_topology = KeptTopology(registry, published, warn)
        self._kept_fragment = KeptFragment(registry, record.job, warn)
        self._kept_settings = KeptSettings(registry, lease_s)
        self._followed_entry = FollowedEntry(registry, record.job)
        self._trials, self._step_clock = None, None
        if iteration_ends is not None:
            self._step_clock = StepClock(registry, record.job, lease_s, iteration_ends)
            self._trials = Trials(registry, record.job, max_slowdown, iteration_ends)

        self._seen_network = SeenNetwork(record.job)
        self._snapshot = Snapshot()
        #: The cluster's topology as it was parsed last; None without one. It is that of the store,
        #: or what jobs saw, if ``topology_is_known``: False while that is being parsed.
        self.topology: Topology | None = None
        self.topology_is_known = True
        self._topology_raw: bytes | None = None
        self._claims_are_checked = True
        self._role = PlannerRole(
            registry, record.job, record.incarnation, lease_s, plan_valid_s, rng,
            max_verified=max_verified, max_readers=max_readers,
        )  # fmt: skip
        self._computer = PlanComputer(
            compute, agree, topologies or TopologyReader(), warn, in_thread=in_thread, clock=clock
        )
        self._adopted = AdoptedPlan(clock, rng, plan_valid_s)
        self._author = PlanAuthor(
            registry, record.job, self._computer, self._snapshot, self._adopted, self._role,
            policy=policy, lease_s=lease_s, plan_valid_s=plan_valid_s, debounce_s=debounce_s,
            clock=clock, rng=rng, warn=warn,
        )  # fmt: skip
        self._outcomes = Outcomes(books=policy == "mlcc")

        self._publish_at_s = self._look_at_s = self._look_around_at_s = float("-inf")
        self._store_error: str | None = None
        self._away_since_s = float("-inf")
        self._settled_at_s = float("-inf")
        self._closed = False
        self._superseded = False
        #: The plan's bytes that this leader has refused.
        self._refused: bytes | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None if there is none or it was not renewed in time."""
        return None if self._closed or self._superseded else self._adopted.valid

    @property
    def outcome(self) -> Outcome:
        """The plan's outcome for this job now."""
        seen = self._snapshot
        outcome = self._outcomes.of(
            self.plan, self.record, seen.jobs, seen.operator, self.topology, self.is_alone
        )
        network = outcome.network._replace(seen=is_seen(self._topology_raw))
        routed = outcome.routed if self.topology_is_known else None
        lost = self._seen_network.lost
        return msgspec.structs.replace(outcome, network=network, routed=routed, lost=lost)

    @property
    def is_alone(self) -> bool:
        """True if this leader reads all records and the store knows no other job."""
        known = {record.job for record in self._snapshot.jobs}
        return self._role.reads_all and self.store_state == "ok" and known <= {self.record.job}

    @property
    def state(self) -> LeaderState:
        """This leader's state."""
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

    def tell_network(self, fragment: bytes | None) -> None:
        """Publish what this job saw of the network with the next tick; None: nothing more."""
        self._kept_fragment.change(fragment)

    def tick(self) -> None:
        """Do what is due; raises nothing."""
        if self._closed:
            return
        now = self._clock()
        try:
            if now >= self._publish_at_s and not self._superseded:
                self._registry.publish_job(self.record, self._lease_s)
                self._publish_at_s = now + self._lease_s / 3 * self._random.uniform(0.8, 1.0)
                self._kept_fragment.keep(now)
            self._kept_topology.keep(now)
            if now >= self._look_at_s:
                self._look_at_s = now + self._poll_s
                self._go_round(now)
        except StoreTooLarge as error:
            self.too_large = str(error)
        except StoreError as error:
            if self._store_error is None:
                self._away_since_s = now
            self._store_error = str(error)
            self._kept_topology.publish_again()
            self._kept_fragment.publish_again()
            self._followed_entry.publish_again()
            self._settled_at_s = float("inf")
            if now - self._away_since_s >= PATIENCE_S:
                self._warn("store", f"going on without the shared store: {error.with_remedy}")
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
                self._kept_fragment.withdraw()
                self._followed_entry.withdraw()
                self._role.leave()
                if self._trials is not None:
                    self._trials.withdraw()
                if self._step_clock is not None:
                    self._step_clock.withdraw()
        except StoreError as error:
            _log.debug("the record of %r ends with its lease: %s", self.record.job, error)

    def status(self) -> dict[str, Any]:
        """Plain values for ``crux_torch.status()``."""
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

    def _go_round(self, now: float) -> None:
        """Look at the store, adopt its plan or write one, and publish what follows from it."""
        self._role.step(now, may_plan=self._may_plan(now))
        state = self._look(now)
        self._adopt(state, now)
        if self._role.plans and self._may_plan(now):
            settled = now >= self._settled_at_s
            if self._author.step(state, self.topology, now, settled=settled):
                self._look_at_s = min(self._look_at_s, now + self._poll_s / 4)
        self._followed_entry.publish(self.plan, now)
        if self._store_error is not None:
            self._store_error = None
            # The others' back-off lets them return later: until then the snapshot is not the
            # cluster's.
            self._settled_at_s = now + self._lease_s
            self._warn.forget("store")
        if self._step_clock is not None and not self._superseded:
            self._step_clock.publish(now, self.record.profile)
        # In a dry run no plan is in force, so that none can be tried.
        observes = self._snapshot.operator.observe or self.record.dry_run
        if self._trials is not None and not observes:
            tried = self._trials.step(now, self.plan, self._snapshot.jobs)
            self.update(tried=tried or msgspec.UNSET)

    def _may_plan(self, now: float) -> bool:
        return not self._superseded and self._author.may_write(now)

    def _look(self, now: float) -> PlanState:
        """Read the store, all of it or a follower's part, and take that in."""
        whole = self._role.reads_all
        around = whole or now >= self._look_around_at_s
        if whole:
            self._look_around_at_s = float("-inf")
            view = self._registry.look()
        else:
            company = self._trials.company if self._trials is not None else frozenset[str]()
            view = self._registry.glance(company | {self.record.job} if around else None)
            if around:
                self._look_around_at_s = now + FOLLOWER_LOOK_S
        if self._check is not None:
            self._check(view)
        self._kept_settings.keep(view, now)
        topology = view.topology
        if topology is None:
            topology = self._seen_network.bytes_of(view.fragments, view.jobs)
            self._warn_if_left_out(self._seen_network.left_out)
        if not whole:
            self._snapshot.narrow(view.jobs, topology, view.operator)
        elif self._snapshot.update(view.jobs, topology, view.operator, now):
            self._author.saw_snapshot()
            self._role.cluster_is(view.jobs)
            self._claims_are_checked = False
        self._load_topology(topology)
        if not self._claims_are_checked and self.topology_is_known:
            self._claims_are_checked = True
            self._warn_of_claims()
        if around:
            self._find_self(now)
        return view.plan

    def _load_topology(self, raw: bytes | None) -> None:
        """Have the topology parsed, once."""
        if raw != self._topology_raw:
            self._topology_raw, self.topology_is_known = raw, False
        if not self.topology_is_known:
            self.topology_is_known, topology = self._computer.topology(raw)
            if self.topology_is_known:
                self.topology = topology
                self._warn_if_left_out(topology.left_out if topology is not None else ())

    def _warn_if_left_out(self, jobs: Collection[str]) -> None:
        if self.record.job in jobs:
            self._warn("seen", "jobs saw more of the network than fits: this job has no paths")

    def _warn_of_claims(self) -> None:
        """Log claims that count for less, with a warning if they are this job's."""
        jobs, own = self._snapshot.jobs, frozenset(self.record.hosts)
        if not _log.isEnabledFor(logging.INFO):
            # Those that share a host with it, few in a large cluster, are enough for a warning.
            jobs = tuple(record for record in jobs if not own.isdisjoint(record.hosts))
        for word, concerned, sentence in claims_in_words(jobs, self.topology):
            if self.record.job in concerned:
                self._warn(word, sentence)
            else:
                _log.info("%s", sentence)

    def _find_self(self, now: float) -> None:
        """Publish a record that was lost again; yield to a younger incarnation of this job."""
        jobs = self._snapshot.jobs
        at = bisect_left(jobs, self.record.job, key=attrgetter("job"))
        mine = jobs[at] if at < len(jobs) and jobs[at].job == self.record.job else None
        if mine is None:
            self._publish_at_s = float("-inf")
            self._followed_entry.publish_again()
            self._snapshot.since_s = now  # without this job it is not the cluster's
        superseded = mine is not None and mine.incarnation != self.record.incarnation
        if superseded and not self._superseded:
            self._warn(
                "superseded",
                f"another job publishes as {self.record.job!r}: this one goes on without a plan; "
                "give each its own CRUX_JOB",
            )
        self._superseded = superseded

    def _adopt(self, state: PlanState, now: float) -> None:
        """Follow the plan in the store, or see that it was renewed."""
        adopted, plan, in_parts = self._adopted, None, False
        if state.stored is not None:
            head = state.stored.plan
            in_parts = bool(head.parts)
            self._author.saw_plan(head, now)
            known = adopted.knows(state)
            if not known or (self._role.plans and not adopted.whole):
                plan = self._checked(state, head)
            if plan is not None and not (known and plan is adopted.last):
                whole = adopted.whole if plan is adopted.last else self._role.plans
                adopted.confirm(plan, state.raw, whole=whole)
        waits = self.record.profile is not None and not adopted.knows(state)
        self._role.saw(state.raw, in_parts=in_parts, useless=waits)

    def _checked(self, state: PlanState, head: PlanHead) -> Plan | None:
        """Return the stored plan if this leader may adopt it.

        A follower takes its own entry as the plan's author wrote it, if that has a level that a
        plan may assign. All others take what they would have written themselves.
        """
        if self._superseded or state.raw == self._refused or self._adopted.refuses(head):
            return None
        last = self._adopted.last if self._adopted.is_this(head) else None
        if last is not None and (self._adopted.whole or not self._role.plans):
            return last
        if not self._role.plans:
            found = self._own_part(head)
            if found is None:
                return None  # not written yet
            levels = self._own_levels()
            may_have = self._snapshot.operator.may_have
            if all(may_have(entry.job, entry.level, levels) for entry in found):
                return plan_of(head, found)
        else:
            jobs = self._snapshot.jobs_of(head.fingerprint)
            if jobs is None:
                return last  # of a snapshot that this leader has not seen, or not yet
            done, computed = self._computer.entries(self._snapshot, head.fingerprint, head.policy)
            if not done:
                return last
            same = computed is not None and digest_of(computed) == head.digest
            if computed is not None and same and self._role.is_large(jobs):
                same = head.parts == parts_of(computed)
            if computed is not None and same:
                return plan_of(head, computed)
        self._refused = state.raw
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
        """Return this job's entry as the author of ``head`` wrote it; None if it is not there."""
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
