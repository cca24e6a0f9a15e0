"""The leading rank turns a plan's shift and grid into the pace of its job (CASSINI §4, §5.7)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from crux_torch.control.records import Grid, Moved, PlanEntry
from crux_torch.control.shared_clock import SharedClock
from crux_torch.errors import StoreError
from crux_torch.runtime.order import Pace
from crux_torch.runtime.pace_keeper import PaceKeeper
from crux_torch.schedule.pace import behind
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

#: Shares of the grid by which the offset of the clocks may be uncertain, and by which the pace may
#: be off before the ranks get another one.
MAX_ERROR = 0.02
MAX_OFF = 0.01
#: More corrections in a minute: the job does not fit its grid.
MAX_CORRECTIONS = 12
#: Seconds from the decision that grids move until they do: all leaders have heard of it by then.
NOTICE_S = 1.0
#: Seconds that an order takes to the ranks, rather more than less.
ORDER_S = 0.5
#: Seconds until it is tried again; the pause doubles up to the second.
PAUSE_S = 60.0
MAX_PAUSE_S = 3600.0


class PaceSetter:
    """Says where the grid of a plan lies on the ranks' own clocks.

    Args:
        clock: the one that the grids of all jobs are told on.
        keeper: of the leading rank.
        now_s: this process's clock.
    """

    def __init__(
        self,
        clock: SharedClock,
        keeper: PaceKeeper,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._keeper = clock, keeper
        self._now_s = now_s
        self._pause_s, self._not_before_s = PAUSE_S, float("-inf")
        self._warn = WarnOnce(_log)
        self._of: Grid | None = None
        self._pace: Pace | None = None
        self._origin_ns = 0
        self._moved: Moved | None = None
        self._gave_up = False
        self._why_not = "the plan has no grid for this job"

    @property
    def gave_up(self) -> bool:
        """Whether the job was found not to fit the grid that the plan has for it."""
        return self._gave_up

    @property
    def moved(self) -> Moved | None:
        """What the others have to hear: by how much this job has to have its grid moved."""
        return self._moved

    def wanted(self, entry: PlanEntry | None, others: Iterable[Moved] = ()) -> Pace | None:
        """The pace that ``entry`` gives the job now; the same again while it fits the grid.

        Args:
            entry: of the plan in force.
            others: what the jobs say that are shifted with this one. The grids of all of them move
                by the most that any says, so they keep their places to each other.
        """
        grid = entry.grid or None if entry is not None else None
        if grid != self._of:
            self._of, self._pace, self._gave_up, self._moved = grid, None, False, None
        if grid is None:
            self._why_not = "the plan has no grid for this job"
            return None
        corrections = self._keeper.corrections_per_minute if self._pace is not None else 0
        if corrections > MAX_CORRECTIONS:
            self._gave_up, self._pace = True, None
            self._not_before_s = self._now_s() + self._pause_s
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
            self._why_not = f"over {MAX_CORRECTIONS} iterations in a minute missed the grid"
        if self._gave_up or self._now_s() < self._not_before_s:
            return None
        try:
            self._clock.look()
        except StoreError as error:
            self._warn("clock", f"iterations can't be shifted in time: {error}")
        moved_s = self._moved_s(grid, others)
        error_s, end = self._clock.error_s, self._keeper.last_end
        if error_s > MAX_ERROR * grid.period_s:
            self._why_not = f"the store's clock is known to {error_s * 1e3:.3g} ms only"
        elif end is None:
            self._why_not = "the leading rank sees no end of an iteration"
        elif self._pace is None or self._off_s(grid, moved_s) > MAX_OFF * grid.period_s:
            number, ended_ns = end
            lead_s = (grid.shift_s + moved_s - self._shared_s(ended_ns)) % grid.period_s
            self._pace = Pace(number, lead_s, grid.period_s, moved_s)
            self._origin_ns = ended_ns + round(lead_s * 1e9)
        return self._pace

    def status(self) -> dict[str, Any]:
        """Plain values for :func:`crux_torch.status`."""
        error_s = self._clock.error_s
        return {
            "grid_s": self._of.period_s if self._of else None,
            "shift_s": self._of.shift_s if self._of else None,
            "moved_s": self._moved.by_s if self._moved else 0.0,
            "clock_error_ms": None if error_s == float("inf") else error_s * 1e3,
            "why_not": None if self._pace is not None else self._why_not,
        }

    def _shared_s(self, own_ns: int) -> float:
        return (own_ns + self._clock.offset_ns) / 1e9

    def _moved_s(self, grid: Grid, others: Iterable[Moved]) -> float:
        """By how much the grids are moved now; says so if this job needs more."""
        now_s = self._shared_s(self._keeper.now_ns())
        told = [*others, *([self._moved] if self._moved is not None else [])]
        moved_s = max((m.by_s for m in told if m.from_s <= now_s), default=0.0)
        # One that begins later than anyone may say is from before the store began anew.
        soon = [m for m in told if now_s < m.from_s <= now_s + 2 * NOTICE_S]
        if self._pace is None or any(m.by_s > moved_s for m in soon):
            return moved_s
        if self._off_s(grid, moved_s) > MAX_OFF * grid.period_s:
            return moved_s  # what it was late by was for another place of the grid
        period_ns, late_ns = round(grid.period_s * 1e9), self._keeper.late_ns(self._pace)
        by_ns = behind(late_ns, period_ns, (NOTICE_S + ORDER_S) / grid.period_s)
        if by_ns:
            self._moved = Moved(grid, moved_s + by_ns / 1e9, now_s + NOTICE_S)
            self._keeper.moved()
        return moved_s

    def _off_s(self, grid: Grid, moved_s: float) -> float:
        """By how much the present pace misses ``grid``, which has moved."""
        off_s = (self._shared_s(self._origin_ns) - grid.shift_s - moved_s) % grid.period_s
        return min(off_s, grid.period_s - off_s)
