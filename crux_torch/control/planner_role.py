"""Which leaders of a large cluster read everything and plan: a hint that saves work, not a lock."""

from __future__ import annotations

import logging
import random
from typing import Literal

import msgspec

from crux_torch.control.registry import Registry
from crux_torch.errors import StoreForbidden

_log = logging.getLogger(__name__)

#: The planner, and those that stand by.
SEATS = 3
#: The value of a seat that its holder left. It is not deleted: that could hit its next holder.
FREE = b"{}"
#: Seconds for which a leader whose role may not take a seat does not try again.
FORBIDDEN_S = 60.0

#: ``everyone``: the cluster is small enough for every leader to plan; ``planner``: holds the first
#: seat, or has waited for it in vain; ``standby``: holds another; ``follower``: holds none.
Role = Literal["everyone", "planner", "standby", "follower"]


class PlannerRole:
    """One leader's part: it tries for a free seat, keeps it, and moves up.

    A seat is a key under a lease. Nothing that a plan says follows from who holds one: two planners
    at once are two leaders that agree as in a small cluster, and if nobody plans, followers notice
    that the plan is not renewed, and plan themselves for a while.

    Args:
        job, incarnation: who this is.
        lease_s: of a seat.
        plan_valid_s: after which a plan ends that nobody renews.
    """

    def __init__(
        self,
        registry: Registry,
        job: str,
        incarnation: str,
        lease_s: float,
        plan_valid_s: float,
        rng: random.Random,
    ) -> None:
        self._registry = registry
        self._mine = msgspec.json.encode({"job": job, "incarnation": incarnation})
        self._lease_s = lease_s
        self._plan_valid_s = plan_valid_s
        self._random = rng
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
        """What this leader is now."""
        if not self._large:
            return "everyone"
        if self._seat == 0 or self._now_s < self._planning_until_s:
            return "planner"
        return "follower" if self._seat is None else "standby"

    @property
    def plans(self) -> bool:
        """Whether it computes plans, and writes them."""
        return self.name != "follower"

    @property
    def reads_all(self) -> bool:
        """Whether it reads all records. A follower does while the plan has no parts."""
        return self.plans or not self._in_parts

    @property
    def waits_s(self) -> float:
        """For how much longer than a planner it waits before it writes a plan."""
        return self._lease_s if self.name == "standby" else 0.0

    def cluster_is(self, *, large: bool) -> None:
        """What the records say, as this leader has read them."""
        self._large = large

    def step(self, now_s: float, *, may_plan: bool = True) -> None:
        """Take, keep or leave a seat.

        Raises:
            StoreError: if the store can't be reached.
        """
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
        """Give up the seat.

        Raises:
            StoreError: if the store can't be reached.
        """
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
