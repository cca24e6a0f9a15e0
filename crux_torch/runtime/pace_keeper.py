"""One rank keeps to the pace of its job's order: it holds iterations back until their slot."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from crux_torch.measure.iterations import IterationMarks
from crux_torch.runtime.order import Pace
from crux_torch.schedule.pace import following_point, start_point

#: Iterations whose ends are remembered: an order may name one of some seconds ago.
REMEMBERED = 4096
#: Iterations that tell how long one takes.
TIMED = 20
MINUTE_NS = 60 * 10**9


class PaceKeeper:
    """Holds the training thread at an iteration's end, before the next one communicates.

    The end is the optimizer's step; a rank that sees none holds nothing. A hold is no longer than
    the grid's period. As all ranks hold until the same point, they hold for the same time; a rank
    that heard of the pace an iteration later does no harm: the others wait at most until then.

    The training thread calls it at every mark; one background thread calls the rest.

    Args:
        marks: tells the ends of iterations.
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
        # The rest is the training thread's; others read it.
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
        """Hear of marks from now on; twice is once."""
        if self._unlisten is None:
            self._unlisten = self._marks.add_listener(self._on_mark)

    def remove(self) -> None:
        """Hold nothing any more."""
        self.follow(None)
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None

    def follow(self, pace: Pace | None) -> None:
        """Keep to ``pace`` from the next mark on; None: iterations begin when they are ready."""
        if pace != self._pace:
            self._pace = pace

    @property
    def last_end(self) -> tuple[int, int] | None:
        """Number and time of the last iteration's end, nanoseconds; None before the first."""
        ends = list(self._ends)
        return ends[-1] if ends else None

    def now_ns(self) -> int:
        """The clock of the marks."""
        return self._clock_ns()

    @property
    def keeps(self) -> bool:
        """Whether iterations are held back to a grid now."""
        return self._pace is not None and self._kept == self._pace

    @property
    def corrections_per_minute(self) -> int:
        """How often in the last minute the job had fallen behind its grid: a point was left out,
        or :meth:`moved` was called."""
        since_ns = self._clock_ns() - MINUTE_NS
        return sum(at_ns >= since_ns for at_ns in list(self._corrected_ns))

    def late_ns(self, pace: Pace) -> list[int]:
        """By how much the last iterations under ``pace`` began late; none before it is kept to."""
        return list(self._late_ns) if self._kept == pace else []

    def moved(self) -> None:
        """Count that the grid has to be moved, as this job does not catch up with it."""
        self._corrected_ns.append(self._clock_ns())

    @property
    def iteration_s(self) -> float | None:
        """Median of this pace's last iterations, without holds; None before there are enough."""
        own_ns = list(self._own_ns)
        return statistics.median(own_ns) / 1e9 if len(own_ns) == TIMED else None

    def status(self) -> dict[str, Any]:
        """Plain values for :func:`crux_torch.status`."""
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
        if not self._begin(pace):
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
            self._sleep(wait_ns / 1e9)

    def _point_of(self, mark_ns: int, grid_ns: int) -> int:
        """The point of the grid that the iteration after this mark belongs to."""
        if self._point_ns is None:
            return start_point(mark_ns, self._origin_ns, grid_ns)
        point_ns = following_point(mark_ns, self._point_ns, self._behind_ns, grid_ns)
        if point_ns - self._point_ns > grid_ns:
            self._corrected_ns.append(mark_ns)
        return point_ns

    def _begin(self, pace: Pace | None) -> bool:
        """Whether there is a pace whose origin this rank knows."""
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
