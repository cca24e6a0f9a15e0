"""The plan that one leader has adopted."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from crux_torch.control.records import MAX_EPOCH, Plan, PlanHead
from crux_torch.control.registry import PlanState

_log = logging.getLogger(__name__)

#: Epochs this far apart were not counted one by one: somebody made one of them up.
FAR = 1 << 32


class AdoptedPlan:
    """Follows the epochs upwards, and refuses plans that would take it back.

    A plan counts until ``valid_s`` after this leader last saw it change, by this leader's own
    clock. A renewal is a change.

    Attributes:
        confirmed_at_s: when it was last seen to change.
        renew_at_s: when this leader renews it, unless another leader did meanwhile.
        whole: whether all its entries are known, and are what this leader would have written.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random, valid_s: float) -> None:
        self._clock, self._random = clock, rng
        self._valid_s = valid_s
        self._plan: Plan | None = None
        self._head: PlanHead | None = None
        self._raw: bytes | None = None
        self.confirmed_at_s = float("-inf")
        self.renew_at_s = float("inf")
        self.whole = False

    @property
    def epoch(self) -> int:
        """The epoch that was adopted last; 0 before the first."""
        return 0 if self._plan is None else self._plan.epoch

    @property
    def valid(self) -> Plan | None:
        """The plan; None if there is none or it was not renewed in time."""
        return self._plan if self._clock() - self.confirmed_at_s < self._valid_s else None

    def is_this(self, head: PlanHead) -> bool:
        """Whether the plan of ``head`` was adopted last."""
        return head == self._head

    @property
    def last(self) -> Plan | None:
        """The plan that was adopted last, whether it is still valid or not."""
        return self._plan

    def refuses(self, head: PlanHead) -> bool:
        """Whether the epoch of ``head`` is an old one, or leaps.

        One far below is of another count of the epochs: after a leap that this leader followed
        because it knew no better. It is not refused.
        """
        if self._head is None or head == self._head:
            return False
        ahead = head.epoch - self._head.epoch
        return -FAR < ahead <= 0 or ahead >= FAR

    def epoch_after(self, stored: PlanHead | None) -> int:
        """The epoch of a plan in place of ``stored``."""
        known = self.epoch
        if stored is not None and not self.refuses(stored):
            known = max(known, stored.epoch)
        return known + 1 if known < MAX_EPOCH else 1

    def knows(self, state: PlanState) -> bool:
        """Whether the store has what it had when the plan was confirmed last."""
        return state.raw is not None and state.raw == self._raw

    def confirm(self, plan: Plan, raw: bytes | None, *, whole: bool) -> None:
        """Adopt ``plan``, which lies in the store as ``raw`` since just now."""
        now = self._clock()
        if self._head != plan.head:
            _log.info("plan %d of %r, %d jobs", plan.epoch, plan.author, len(plan.entries))
        self.confirmed_at_s = now
        self._plan, self._head, self._raw, self.whole = plan, plan.head, raw, whole
        self.renew_at_s = now + self._valid_s / 3 * self._random.uniform(0.8, 1.2)
