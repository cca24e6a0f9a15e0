"""The leaders of a large cluster that read everything and plan, and their entries for others.

Every method that uses the store raises StoreError if it can't be reached.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from crux_torch.agreement.records import JobRecord, Plan
from crux_torch.agreement.registry import FORBIDDEN_S, Registry, StoredEntry
from crux_torch.agreement.snapshot import size_of
from crux_torch.errors import StoreForbidden
from crux_torch.store import MAX_LEASE_S

_log = logging.getLogger(__name__)

#: The planner, and those that stand by.
SEATS = 3
#: The value of a seat that its holder left. It is not deleted: that could hit its next holder.
FREE = b"{}"
#: Entries that a planner writes in one tick.
PARTS_A_TICK = 64
#: Jobs and flows up to which each leader computes the plan that it adopts.
MAX_VERIFIED = 1 << 11
#: Jobs up to which each leader reads all records: a change is read by as many leaders.
MAX_READERS = 1 << 8

#: ``everyone``: the cluster is small enough for every leader to plan; ``planner``: holds the first
#: seat, or has waited for it in vain; ``standby``: holds another; ``follower``: holds none.
Role = Literal["everyone", "planner", "standby", "follower"]


class PlannerRole:
    """One leader's part: it tries for a free seat, keeps it, and moves up.

    A seat is a key under a lease, and a hint that saves work, not a lock: two planners at once are
    two leaders that agree as in a small cluster. If nobody plans, followers notice that the plan is
    not renewed, and plan themselves for a while.

    Args:
        lease_s: of a seat.
        plan_valid_s: after which a plan ends that nobody renews.
        max_verified, max_readers: jobs and flows, and jobs, above which a cluster is large.
    """

    def __init__(
        self,
        registry: Registry,
        job: str,
        incarnation: str,
        lease_s: float,
        plan_valid_s: float,
        rng: random.Random,
        *,
        max_verified: int = MAX_VERIFIED,
        max_readers: int = MAX_READERS,
    ) -> None:
        self._registry = registry
        self._mine = msgspec.json.encode({"job": job, "incarnation": incarnation})
        self._lease_s = lease_s
        self._plan_valid_s = plan_valid_s
        self._random = rng
        self._max_verified, self._max_readers = max_verified, max_readers
        #: Jobs, and the cost of computing a plan for them.
        self._sized: tuple[Sequence[JobRecord], int] = (), 0
        self._large = False
        self._seat: int | None = None
        self._look_at_s = self._renew_at_s = float("-inf")
        #: When this leader tries for a free seat: not all at once.
        self._apply_at_s: float | None = None
        #: The plan's key as it was seen last; since when; since when it has been of no use here;
        #: how long either may last; and until when this leader plans because of that.
        self._seen: bytes | None = None
        self._seen_since_s: float | None = None
        self._useless_since_s: float | None = None
        self._patience_s = self._patience()
        self._planning_until_s = float("-inf")
        self._in_parts = False
        self._now_s = float("-inf")

    @property
    def name(self) -> Role:
        """This leader's part now."""
        if not self._large:
            return "everyone"
        if self._seat == 0 or self._now_s < self._planning_until_s:
            return "planner"
        return "follower" if self._seat is None else "standby"

    @property
    def plans(self) -> bool:
        """True if it computes plans, and writes them."""
        return self.name != "follower"

    @property
    def reads_all(self) -> bool:
        """True if it reads all records. A follower does while the plan has no parts."""
        return self.plans or not self._in_parts

    @property
    def waits_s(self) -> float:
        """Seconds that this leader waits longer than a planner before it writes a plan."""
        return self._lease_s if self.name == "standby" else 0.0

    def is_large(self, jobs: Sequence[JobRecord]) -> bool:
        """Return True if a plan for ``jobs`` is too much work for every leader."""
        if jobs is not self._sized[0]:
            self._sized = jobs, size_of(jobs)
        return self._sized[1] > self._max_verified or len(jobs) > self._max_readers

    def cluster_is(self, jobs: Sequence[JobRecord]) -> None:
        """Note whether ``jobs``, all records of the cluster, make it a large one."""
        self._large = self.is_large(jobs)

    def step(self, now_s: float, *, may_plan: bool = True) -> None:
        """Take, keep or leave a seat."""
        self._now_s = now_s
        if now_s < self._look_at_s or not (self._large or self._seat is not None):
            return
        self._look_at_s = now_s + self._lease_s / 6
        try:
            self._take_turn(now_s, self._large and may_plan)
        except StoreForbidden as error:
            _log.debug("this job's role may not take a planner's seat: %s", error)
            self._seat, self._look_at_s = None, now_s + FORBIDDEN_S

    def saw(self, head: bytes | None, *, in_parts: bool, useless: bool) -> None:
        """The plan's key, as it was just read.

        Args:
            in_parts: whether followers find their entries.
            useless: whether it has no entry for this job, which waits for one.
        """
        now_s = self._now_s
        if head is not None:
            self._in_parts = in_parts
        if head != self._seen or self._seen_since_s is None:
            self._seen, self._seen_since_s = head, now_s
        if not useless:
            self._useless_since_s = None
        elif self._useless_since_s is None:
            self._useless_since_s = now_s
        quiet_s = now_s - self._seen_since_s
        useless_s = now_s - (self._useless_since_s or now_s)
        # The plan must not end meanwhile. What it has for this job may take longer to be written.
        if self.name == "follower" and (
            quiet_s > self._patience_s or useless_s > 2 * self._patience_s
        ):
            _log.info("the plan is not kept up: this job reads all records and plans for a while")
            self._planning_until_s = now_s + self._plan_valid_s
            self._seen_since_s = self._useless_since_s = None
            self._patience_s = self._patience()

    def leave(self) -> None:
        """Give up the seat."""
        seat, self._seat = self._seat, None
        if seat is not None:
            self._registry.swap_seat(str(seat), self._mine, FREE, self._lease_s)

    def _take_turn(self, now_s: float, wants: bool) -> None:
        seats = self._registry.seats()
        held = [n for n in range(SEATS) if seats.get(str(n)) == self._mine]
        free = [n for n in range(SEATS) if seats.get(str(n)) in (None, FREE)]
        held = held[:wants]  # one that is not wanted, or a second one, ends with its lease
        if held and now_s >= self._renew_at_s and not self._swap(held[0], self._mine, self._mine):
            held = []
        self._seat = held[0] if held else None
        better = [n for n in free if self._seat is None or n < self._seat]
        if not wants or not better:
            self._apply_at_s = None
            return
        if self._seat is None:
            if self._apply_at_s is None:
                self._apply_at_s = now_s + self._random.uniform(0, self._lease_s / 4)
            if now_s < self._apply_at_s:
                return
        if self._swap(better[0], seats.get(str(better[0])), self._mine):
            left, self._seat = self._seat, better[0]
            if left is not None:
                self._swap(left, self._mine, FREE)

    def _swap(self, seat: int, before: bytes | None, after: bytes) -> bool:
        done = self._registry.swap_seat(str(seat), before, after, self._lease_s)
        if done and after == self._mine:
            self._renew_at_s = self._now_s + self._lease_s / 3
        return done

    def _patience(self) -> float:
        return self._plan_valid_s * self._random.uniform(0.65, 0.85)


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
        self._kept_parts = ""
        #: What is still to be written, by job.
        self._due: dict[str, bytes] = {}
        self._look_at_s = self._renew_at_s = float("-inf")

    def keep(self, plan: Plan, now_s: float) -> bool:
        """Write what is missing of ``plan``, which lies in the store: a number in each call.

        Returns:
            whether more is missing.
        """
        if not plan.parts:
            return False
        if plan.parts != self._kept_parts or now_s >= self._look_at_s:
            self._kept_parts, self._look_at_s = plan.parts, now_s + self._look_s
            encoded = {
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
                for job, raw in encoded.items()
                if renews or job in self._due or found.get(job) != raw
            }
        for job in list(self._due)[:PARTS_A_TICK]:
            self._registry.put_part(job, self._due[job])
            del self._due[job]
        return bool(self._due)
