"""How often a plan may replace another one."""

from __future__ import annotations

#: Plans in a minute in the long run, and at once: one job that flaps must not make all flap.
PLANS_PER_MINUTE = 12
PLANS_AT_ONCE = 6


class PlanAllowance:
    """Plans that may still be written: a few at once, then so many a minute.

    Every leader counts each plan that it sees, whoever wrote it.
    """

    def __init__(self, now_s: float) -> None:
        self._left, self._at_s = float(PLANS_AT_ONCE), now_s

    def count(self, now_s: float) -> None:
        """A plan was written."""
        self._left, self._at_s = max(0.0, self._earned(now_s) - 1), now_s

    def allows(self, now_s: float) -> bool:
        """Whether one may be written now."""
        return self._earned(now_s) >= 1

    def _earned(self, now_s: float) -> float:
        return min(PLANS_AT_ONCE, self._left + (now_s - self._at_s) * PLANS_PER_MINUTE / 60)
