"""One rank's use of the network during a measurement, where NCCL's profiler plugin counts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from crux_torch.apply.nccl_profiler import NcclProfiler, NcclProfilerError, NetworkUse
from crux_torch.profile.network import NetworkRow


def network_use() -> NetworkUse | None:
    """What this process has moved so far; None where no plugin counts it."""
    try:
        profiler = NcclProfiler.loaded()
    except NcclProfilerError:
        return None
    return None if profiler is None else profiler.totals()


@dataclass(frozen=True, slots=True)
class Measured:
    """What a process moved in ``elapsed_s`` seconds."""

    use: NetworkUse
    elapsed_s: float

    def per_iteration(self, period_s: float) -> NetworkRow:
        """What an iteration of ``period_s`` seconds moves.

        The counters know of no iterations: what was moved is divided by the time that it took. A
        part of an iteration at either end makes an error of at most one iteration's share.
        """
        iterations = self.elapsed_s / period_s
        return NetworkRow(
            sent_bytes=self.use.sent_bytes / iterations,
            sending_s=self.use.sending_s / iterations,
            untracked=self.use.untracked,
        )


class NetworkMeter:
    """The counters at both ends of a measurement.

    Args:
        read: gives them.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        read: Callable[[], NetworkUse | None] = network_use,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._before: NetworkUse | None = None
        self._begin_s = 0.0

    def begin(self) -> None:
        """Start; a measurement that was under way is dropped."""
        self._before, self._begin_s = self._read(), self._clock()

    def end(self) -> Measured | None:
        """End the measurement; None where nothing counts, or began to while this measured."""
        before, now, elapsed_s = self._before, self._read(), self._clock() - self._begin_s
        self._before = None
        if before is None or now is None or elapsed_s <= 0:
            return None
        return Measured(now.since(before), elapsed_s)
