"""Shows how far a discovery is: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from crux_torch.network.discover.plan import Plan

#: Seconds between two lines where there is no terminal.
PERIOD_S = 5.0


class Progress:
    """Says how far a discovery is.

    Args:
        say: called with each line that is due.
        period_s: least time between two lines.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._period_s, self._clock = say, period_s, clock
        self._next_s = 0.0
        self._began: tuple[float, int] | None = None

    def meeting(self, came: int, size: int) -> None:
        """Take note of the processes that have come."""
        self._tell(f"hosts: {came} of {size} are there", due=came == size)

    def watch(self, plan: Plan) -> None:
        """Take note of a step of ``plan``."""
        self._tell(self.line(plan))

    def line(self, plan: Plan) -> str:
        """Returns how far ``plan`` is, and the time left once there is a measure for it."""
        if plan.phase == "leaves":
            placed, ends = plan.placed
            return f"leaves: {plan.leaves}, hosts placed: {placed} of {ends}, probes: {plan.sent}"
        done, count = plan.searches
        now = self._clock()
        if self._began is None:
            self._began = now, done
        since, before = self._began
        left = ""
        if done > before:
            left = f", {(now - since) / (done - before) * (count - done):.0f} s left"
        return f"leaves: {plan.leaves}, paths: {done} of {count} pairs, probes: {plan.sent}{left}"

    def _tell(self, line: str, *, due: bool = False) -> None:
        if due or self._clock() >= self._next_s:
            self._next_s = self._clock() + self._period_s
            self._say(line)


@contextmanager
def progress() -> Iterator[Progress]:
    """Shows progress on standard error."""
    console = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty():
        yield Progress(lambda line: console.print(line, soft_wrap=True), PERIOD_S)
        return
    with console.status("starting") as status:
        yield Progress(status.update, 0.1)
