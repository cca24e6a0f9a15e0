"""A job's word about itself: a line about each plan, and a summary when it ends.

The leading rank keeps the summary in a file for the ``cruxrun`` of its host, which prints it. So
there is one, too, if the ranks are killed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from crux_torch.agent.orders import Order
from crux_torch.agreement.records import PathCounts, PlanEntry
from crux_torch.files import read_file, write_file
from crux_torch.logs import news, one_line
from crux_torch.measure.iterations import IterationMarks
from crux_torch.measure.profile import JobProfile, in_words
from crux_torch.settings import JOB_OF_VARIABLE, SUMMARY_VARIABLE
from crux_torch.words import age, seconds

if TYPE_CHECKING:
    from crux_torch.agreement.outcome import Outcome

_log = logging.getLogger(__name__)
_news = news(logging.getLogger("crux_torch"))

#: Seconds between two lines about plans that everyone should see; the others are of level INFO.
NEWS_PAUSE_S = 30.0
#: Seconds between two writes of the summary, and the age from which the reader is told of it.
WRITE_S = 5.0
OLD_S = 2 * WRITE_S
MAX_BYTES = 1 << 20
#: Reasons that are shown at most.
MAX_REASONS = 4

_Count = Annotated[int, msgspec.Meta(ge=0)]


class PlanNews:
    """Logs a line about the first plan that a job follows, and about each that is another one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: tuple[int, object, object] | None = None
        self._told_at_s = float("-inf")

    def tell(self, outcome: Outcome, entry: PlanEntry, dscp: int | None) -> None:
        """Log what is new.

        Args:
            outcome, entry: of the plan in force.
            dscp: value that the level stands for; None: the job marks nothing.
        """
        before, now_s = self._told, self._clock()
        self._told = entry.level, entry.paths, entry.grid
        if self._told == before:
            return
        which, level, paths = "first plan, number", f"{entry.level}", f"{len(entry.paths)}"
        if before is not None:
            which = "plan"
            level = f"{before[0]} -> {level}" if before[0] != entry.level else level
            paths += " (others than before)" if before[1] != entry.paths else ""
        mark = "no mark" if dscp is None else f"DSCP {dscp}"
        text = one_line(
            f"{which} {outcome.epoch} by {outcome.author!r}: level {level} ({mark}), "
            f"paths: {paths}, jobs: {outcome.jobs}"
        )
        if now_s - self._told_at_s >= NEWS_PAUSE_S:
            self._told_at_s = now_s
            _news.info("%s", text)
        else:
            _log.info("%s", text)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One job, from its first iterations to the time of writing.

    Attributes:
        at_s: seconds since 1970 at which it was written.
        ended: True if the job ended by itself.
        steps, lasted_s: iterations, and seconds from the first of them to the last.
        step_s: median of the last iterations.
        profile: as measured last; None: never.
        held_s: seconds at each level, by its number; ``none``: no level.
        plans: plans that gave the job another level, other paths or another grid.
        paths: connections on planned paths, as seen last; None without planned paths.
        connections: times that the job was given new connections.
        safe_s, planned_s: mean iteration under the safe plan and under the one on trial; 0: not
            measured.
        verdict: of the last trial; empty without one.
        left_out: reasons for what Crux did not do for the job.
    """

    at_s: float
    ended: bool = False
    steps: _Count = 0
    lasted_s: float = 0.0
    step_s: float | None = None
    profile: JobProfile | None = None
    held_s: dict[str, float] = {}
    plans: _Count = 0
    paths: PathCounts | None = None
    connections: _Count = 0
    safe_s: float = 0.0
    planned_s: float = 0.0
    verdict: str = ""
    left_out: tuple[str, ...] = ()


class SummaryKeeper:
    """Keeps the summary of a job in a file.

    Thread safety: one background thread owns it.

    Args:
        file: that is written.
        marks: of the leading rank.
    """

    def __init__(
        self, file: str, marks: IterationMarks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = Path(file)
        self._marks = marks
        self._clock = clock
        self._begin_ns = 0
        self._held_s: dict[str, float] = {}
        self._last: tuple[str, object] | None = None
        self._looked_at_s = self._write_at_s = clock()
        self._plans = 0

    def look(self, order: Order | None) -> bool:
        """Count the time at the level of ``order``; return True if it is time to write."""
        now_s = self._clock()
        level = "none" if order is None or order.level is None else f"{order.level}"
        if order is not None and not order.marks:
            level = "none"
        self._held_s[level] = self._held_s.get(level, 0.0) + now_s - self._looked_at_s
        self._looked_at_s = now_s
        entry = order.entry if order is not None else None
        if entry is not None:
            seen = f"{entry.level}", (entry.paths, entry.grid)
            self._plans += seen != self._last
            self._last = seen
        if not self._begin_ns and len(marks_ns := self._marks.marks_ns()):
            self._begin_ns = int(marks_ns[0])
        return now_s >= self._write_at_s

    def write(
        self,
        status: Mapping[str, Any],
        profile: JobProfile | None,
        paths: PathCounts | None,
        connections: int,
        *,
        ended: bool = False,
    ) -> None:
        """Write the file.

        Args:
            status: of the leader, for :func:`crux_torch.status`.
            profile, paths: of the job.
            connections: see :class:`Summary`.

        Raises:
            OSError: it can't be written.
        """
        self._write_at_s = self._clock() + WRITE_S
        marks_ns = self._marks.marks_ns()
        # Flows may be thousands, and nobody reads them here.
        bare = (
            msgspec.structs.replace(profile, flows=(), inside=()) if profile is not None else None
        )
        trial = status.get("trial") or {}
        before, after = trial.get("before") or {}, trial.get("after") or {}
        summary = Summary(
            at_s=time.time(),
            ended=ended,
            steps=self._marks.total,
            lasted_s=(int(marks_ns[-1]) - self._begin_ns) / 1e9 if len(marks_ns) else 0.0,
            step_s=float(np.median(np.diff(marks_ns))) / 1e9 if len(marks_ns) > 1 else None,
            profile=bare,
            held_s=self._held_s,
            plans=self._plans,
            paths=paths,
            connections=connections,
            safe_s=before.get("mean_s", 0.0),
            planned_s=after.get("mean_s", 0.0),
            verdict=trial.get("verdict", ""),
            left_out=tuple(status.get("left_out", ()))[:MAX_REASONS],
        )
        write_file(self._file, msgspec.json.encode(summary))


def summary_file() -> str:
    """Returns the file that this process's ``cruxrun`` reads; empty if it leads no job of that."""
    own = os.environ.get(JOB_OF_VARIABLE) == f"{os.getpid()}"
    return os.environ.get(SUMMARY_VARIABLE, "") if own else ""


def read_summary(file: str) -> Summary | None:
    """Returns the summary in ``file``; None if no job has written one that can be read."""
    try:
        return msgspec.json.decode(read_file(file, MAX_BYTES), type=Summary)
    except (OSError, msgspec.MsgspecError):
        return None


def summary_lines(summary: Summary, job: str, now_s: float) -> Iterator[str]:
    """Yields the lines of the block that ``cruxrun`` prints."""
    old_s = now_s - summary.at_s
    known = ""
    if not summary.ended and old_s >= OLD_S:
        known = f", as known {age(old_s)} before the end"
    elif not summary.ended:
        known = ", as known when its ranks were ended"
    yield f"summary of {job}: {summary.steps} steps in {seconds(summary.lasted_s)}{known}"
    profile = summary.profile
    if profile is None:
        yield "not measured: it ended before, or no rank saw whole iterations"
    else:
        yield f"measured: {in_words(profile)}"
    if summary.step_s is not None:
        text = f"steps of late: {seconds(summary.step_s)} (median)"
        if profile is not None and profile.measured_alone and profile.period_s > 0:
            ratio = summary.step_s / profile.period_s
            longer = f"{ratio:.2f} times as long as" if ratio > 1 else "no longer than"
            text += f", {longer} measured alone"
        if profile is not None and summary.step_s > profile.compute_s:
            waits = 1.0 - profile.compute_s / summary.step_s
            text += f"; {waits:.0%} of a step waits, by the compute time that was measured"
        yield text
    yield _plan_line(summary)
    if summary.safe_s > 0 and summary.planned_s > 0:
        change = summary.planned_s / summary.safe_s - 1.0
        yield (
            f"against the safe plan: a step took {seconds(summary.planned_s)} instead of "
            f"{seconds(summary.safe_s)} ({change:+.1%})"
        )
    if summary.verdict:
        yield summary.verdict
    yield from summary.left_out
    yield "more: crux explain while a job runs, crux cluster audit (docs/operate/explain.md)"


def _plan_line(summary: Summary) -> str:
    held_s = {level: held for level, held in summary.held_s.items() if held >= 1}
    order = sorted(held_s, key=lambda level: -held_s[level])
    levels = ", ".join(
        f"{'no level' if level == 'none' else f'level {level}'} for {age(held_s[level])}"
        for level in order
    )
    text = "1 plan" if summary.plans == 1 else f"{summary.plans or 'no'} plans"
    text += f"; {levels}" if levels else ""
    if summary.connections:
        times = "once" if summary.connections == 1 else f"{summary.connections} times"
        text += f"; new connections {times}"
    if summary.paths is not None:
        seen = summary.paths
        total = seen.as_planned + seen.elsewhere + seen.unknown
        text += f"; {seen.as_planned} of {total} connections on their planned path"
    return text
