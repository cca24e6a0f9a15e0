"""The plan that one leader has adopted."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from crux_torch.control.records import Plan
from crux_torch.control.registry import PlanState

_log = logging.getLogger(__name__)


class AdoptedPlan:
    """Never goes back: its epoch is above that of every plan adopted before.

    It counts until ``valid_s`` after this leader last saw it change, by this leader's own clock. A
    renewal is a change.

    Attributes:
        since_s: when it was adopted.
        confirmed_at_s: when it was last seen to change.
        renew_at_s: when this leader renews it, unless another leader did meanwhile.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock, self._random = clock, rng
        self._plan: Plan | None = None
        self._raw: bytes | None = None
        self.since_s = self.confirmed_at_s = float("-inf")
        self.renew_at_s = float("inf")

    @property
    def epoch(self) -> int:
        """The highest epoch that was adopted; 0 before the first."""
        return 0 if self._plan is None else self._plan.epoch

    @property
    def valid(self) -> Plan | None:
        """The plan; None if there is none or it was not renewed in time."""
        plan = self._plan
        if plan is None or self._clock() - self.confirmed_at_s >= plan.valid_s:
            return None
        return plan

    def is_behind(self, plan: Plan) -> bool:
        """Whether ``plan`` would take an applier back."""
        return self._plan is not None and plan.epoch <= self._plan.epoch and plan != self._plan

    def look_at(self, state: PlanState) -> None:
        """Adopt what the store has, if it changed and is not behind."""
        if state.stored is None or state.raw == self._raw or self.is_behind(state.stored.plan):
            return
        plan = state.stored.plan
        if plan.epoch > self.epoch:
            _log.info("plan %d of %s, %d jobs", plan.epoch, plan.author, len(plan.entries))
        self.confirm(plan, state.raw)

    def confirm(self, plan: Plan, raw: bytes | None) -> None:
        """Adopt ``plan``, which lies in the store as ``raw`` since just now."""
        now = self._clock()
        if self._plan != plan:
            self.since_s = now
        self.confirmed_at_s = now
        self._plan, self._raw = plan, raw
        self.renew_at_s = now + plan.valid_s / 3 * self._random.uniform(0.8, 1.2)
