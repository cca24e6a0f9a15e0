"""Shifts a job's iterations in time (CASSINI §4, §5.7): the leader sets a pace, ranks keep it."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from crux_torch.agent.orders import Pace
from crux_torch.agreement.records import Grid, Moved, PlanEntry
from crux_torch.errors import StoreError
from crux_torch.logs import WarnOnce
from crux_torch.measure.iterations import IterationMarks
from crux_torch.schedule.papers.cassini_grid import behind, following_point, start_point

if TYPE_CHECKING:
    from crux_torch.agreement.claims import SharedClock

_log = logging.getLogger(__name__)

#: Iterations whose ends are remembered: an order may name one of some seconds ago.
REMEMBERED = 4096
#: Iterations that tell how long one takes.
TIMED = 20
MINUTE_NS = 60 * 10**9
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
#: Seconds until a grid that did not fit is tried again; the pause doubles up to the second.
PAUSE_S = 60.0
MAX_PAUSE_S = 3600.0


class PaceKeeper:
    """Holds the training thread at an iteration's end, before the next one communicates.

    The end is the optimizer's step; a rank that sees none holds nothing. A hold is no longer than
    the grid's period. As all ranks hold until the same point, they hold for the same time; a rank
    that heard of the pace an iteration later does no harm: the others wait at most until then.

    Thread safety: the training thread calls ``_on_mark`` at every mark and alone changes what
    iterations have shown; one background thread calls the rest, and reads copies of it.

    Args:
        sleep, clock_ns: how the training thread waits, and the clock of the marks.
    """

    def __init__(
        self,
        marks: IterationMarks,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._marks = marks
        self._sleep, self._clock_ns = sleep, clock_ns
        self._unlisten: Callable[[], None] | None = None
        self._pace: Pace | None = None
        # The training thread owns the fields below; other threads read them.
        self._ends: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)
        self._kept: Pace | None = None
        self._origin_ns = 0
        self._point_ns: int | None = None
        self._released_ns: int | None = None
        self._behind_ns = 0
        self._late_ns: deque[int] = deque(maxlen=2)
        self._own_ns: deque[int] = deque(maxlen=TIMED)
        self._corrected_ns: deque[int] = deque(maxlen=REMEMBERED)
        self._held = 0
        self._held_ns = 0

    def install(self) -> None:
        """Begins to hear of marks; calling it again changes nothing."""
        if self._unlisten is None:
            self._unlisten = self._marks.add_listener(self._on_mark)

    def remove(self) -> None:
        """Stops holding iterations."""
        self.follow(None)
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None

    def follow(self, pace: Pace | None) -> None:
        """Sets the pace from the next mark on; None: iterations begin when they are ready."""
        self._pace = pace

    @property
    def last_end(self) -> tuple[int, int] | None:
        """Number and time of the last iteration's end, nanoseconds; None before the first."""
        ends = list(self._ends)
        return ends[-1] if ends else None

    def now_ns(self) -> int:
        """Returns the time by the clock of the marks."""
        return self._clock_ns()

    @property
    def keeps(self) -> bool:
        """True while iterations are held back to a grid."""
        return self._pace is not None and self._kept == self._pace

    @property
    def corrections_per_minute(self) -> int:
        """Times in the last minute that the job had fallen behind its grid.

        A point was left out, or :meth:`moved` was called.
        """
        since_ns = self._clock_ns() - MINUTE_NS
        return sum(at_ns >= since_ns for at_ns in list(self._corrected_ns))

    def late_ns(self, pace: Pace) -> list[int]:
        """Returns how late the last iterations under ``pace`` began; empty if that is over."""
        return list(self._late_ns) if self._kept == pace else []

    def moved(self) -> None:
        """Counts one move of the grid, which this job could not catch up with."""
        self._corrected_ns.append(self._clock_ns())

    @property
    def iteration_s(self) -> float | None:
        """Median of this pace's last iterations, without holds; None before there are enough."""
        own_ns = list(self._own_ns)
        return statistics.median(own_ns) / 1e9 if len(own_ns) == TIMED else None

    def status(self) -> dict[str, Any]:
        """Returns plain values for :func:`crux_torch.status`."""
        pace = self._pace
        return {
            "grid_s": None if pace is None else pace.grid_s,
            "keeps": self.keeps,
            "held": self._held,
            "held_s": self._held_ns / 1e9,
            "corrections_per_minute": self.corrections_per_minute,
        }

    def _on_mark(self, mark_ns: int) -> None:
        self._ends.append((self._marks.total, mark_ns))
        pace = self._pace
        if not self._take_up(pace):
            self._released_ns = None
            return
        assert pace is not None
        grid_ns = round(pace.grid_s * 1e9)
        if self._released_ns is not None:
            self._own_ns.append(mark_ns - self._released_ns)
        point_ns = self._point_of(mark_ns, grid_ns)
        self._point_ns = point_ns
        self._behind_ns = max(0, mark_ns - point_ns)
        self._late_ns.append(self._behind_ns)
        self._released_ns = max(mark_ns, point_ns)
        wait_ns = point_ns - self._clock_ns()
        if 0 < wait_ns <= grid_ns:
            self._held += 1
            self._held_ns += wait_ns
            with torch.profiler.record_function("crux: wait for the grid"):
                self._sleep(wait_ns / 1e9)

    def _point_of(self, mark_ns: int, grid_ns: int) -> int:
        """Returns the point of the grid that the iteration after this mark belongs to."""
        if self._point_ns is None:
            return start_point(mark_ns, self._origin_ns, grid_ns)
        point_ns = following_point(mark_ns, self._point_ns, self._behind_ns, grid_ns)
        if point_ns - self._point_ns > grid_ns:
            self._corrected_ns.append(mark_ns)
        return point_ns

    def _take_up(self, pace: Pace | None) -> bool:
        """Take up a new pace; returns True if there is one whose origin this rank knows."""
        if pace == self._kept:
            return pace is not None
        known, self._kept = self._kept, None
        if pace is None:
            self._point_ns = None
            return False
        ended_ns = next((ns for number, ns in self._ends if number == pace.mark), None)
        if ended_ns is None:
            return False
        if known is None or pace.grid_s != known.grid_s:
            self._point_ns = None
            self._own_ns.clear()
        self._kept, self._origin_ns = pace, ended_ns + round(pace.lead_s * 1e9)
        if known is not None and self._point_ns is not None:
            # The last iteration's point moves with the grid.
            grid_ns = round(pace.grid_s * 1e9)
            moved_ns = round((pace.moved_s - known.moved_s) * 1e9)
            point_ns = self._point_ns + moved_ns
            off_ns = (self._origin_ns - point_ns + grid_ns // 2) % grid_ns - grid_ns // 2
            self._point_ns = point_ns + off_ns
            self._behind_ns = max(0, self._behind_ns - moved_ns - off_ns)
        self._late_ns.clear()
        return True


class PaceSetter:
    """Puts the grid of a plan onto the clocks of the ranks.

    Thread safety: none; the leading rank's background thread owns it.

    Args:
        clock: of the store; the grids of all jobs lie on it.
        keeper: of the leading rank.
        now_s: this process's clock.
    """

    def __init__(
        self, clock: SharedClock, keeper: PaceKeeper, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._keeper = clock, keeper
        self._now_s = now_s
        self._pause_s, self._not_before_s = PAUSE_S, float("-inf")
        self._warn = WarnOnce(_log)
        self._grid: Grid | None = None
        self._pace: Pace | None = None
        self._origin_ns = 0
        self._moved: Moved | None = None
        self._gave_up = False
        self._why_not = "the plan has no grid for this job"

    @property
    def gave_up(self) -> bool:
        """True if the job was found not to fit the grid that the plan has for it."""
        return self._gave_up

    @property
    def moved(self) -> Moved | None:
        """Grid offset to publish to the other jobs; None if this job needs none."""
        return self._moved

    def pace(self, entry: PlanEntry | None, others: Iterable[Moved] = ()) -> Pace | None:
        """Returns the job's pace under the plan now; the same again while it fits the grid.

        Args:
            entry: of the plan in force.
            others: grid offsets that the jobs shifted with this one publish. The grids of all of
                them move by the largest, so they keep their places to each other.
        """
        grid = entry.grid or None if entry is not None else None
        if grid != self._grid:
            self._grid, self._pace, self._gave_up, self._moved = grid, None, False, None
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
        """Returns plain values for :func:`crux_torch.status`."""
        error_s = self._clock.error_s
        return {
            "grid_s": self._grid.period_s if self._grid else None,
            "shift_s": self._grid.shift_s if self._grid else None,
            "moved_s": self._moved.by_s if self._moved else 0.0,
            "clock_error_ms": None if error_s == float("inf") else error_s * 1e3,
            "why_not": None if self._pace is not None else self._why_not,
        }

    def _shared_s(self, own_ns: int) -> float:
        return (own_ns + self._clock.offset_ns) / 1e9

    def _moved_s(self, grid: Grid, others: Iterable[Moved]) -> float:
        """Returns the grids' offset now; publishes a larger one if this job needs it."""
        now_s = self._shared_s(self._keeper.now_ns())
        offsets = [*others, *([self._moved] if self._moved is not None else [])]
        moved_s = max((m.by_s for m in offsets if m.from_s <= now_s), default=0.0)
        # An offset that begins later than that was written before the store's clock began anew.
        soon = [m for m in offsets if now_s < m.from_s <= now_s + 2 * NOTICE_S]
        if self._pace is None or any(m.by_s > moved_s for m in soon):
            return moved_s
        if self._off_s(grid, moved_s) > MAX_OFF * grid.period_s:
            return moved_s  # the ranks were late for another place of the grid
        period_ns, late_ns = round(grid.period_s * 1e9), self._keeper.late_ns(self._pace)
        by_ns = behind(late_ns, period_ns, (NOTICE_S + ORDER_S) / grid.period_s)
        if by_ns:
            self._moved = Moved(grid, moved_s + by_ns / 1e9, now_s + NOTICE_S)
            self._keeper.moved()
        return moved_s

    def _off_s(self, grid: Grid, moved_s: float) -> float:
        """Returns by how much the present pace misses ``grid``, which has moved."""
        off_s = (self._shared_s(self._origin_ns) - grid.shift_s - moved_s) % grid.period_s
        return min(off_s, grid.period_s - off_s)
