"""The clock that the leaders of a cluster have in common: that of the store's process."""

from __future__ import annotations

import time
from collections.abc import Callable

from crux_torch.store.shared_store import SharedStore

#: Seconds between two looks at the store's clock, and questions of one look.
LOOK_S = 10.0
QUESTIONS = 5
#: By how much two clocks part at most: 100 millionths each.
PARTING = 2e-4


class SharedClock:
    """This process's monotonic clock against the store's, by half of the shortest round trip.

    Args:
        clock_ns: this process's.
    """

    def __init__(self, store: SharedStore, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._store = store
        self._clock_ns = clock_ns
        self._offset_ns = 0
        self._error_ns = float("inf")
        self._asked_at_ns: int | None = None
        self._look_at_ns = clock_ns()

    @property
    def offset_ns(self) -> int:
        """What to add to this process's clock to get the store's."""
        return self._offset_ns

    @property
    def error_s(self) -> float:
        """By how much the offset may be wrong now; infinite before the first answer."""
        if self._asked_at_ns is None:
            return float("inf")
        age_ns = self._clock_ns() - self._asked_at_ns
        return (self._error_ns + PARTING * age_ns) / 1e9

    def look(self) -> None:
        """Ask the store, if that is due.

        Raises:
            StoreError: it can't be reached, or has no clock. The next look tries again.
        """
        now = self._clock_ns()
        if now < self._look_at_ns:
            return
        self._look_at_ns = now + round(LOOK_S * 1e9)
        answers = []
        for _ in range(QUESTIONS):
            asked = self._clock_ns()
            told = self._store.clock_ns()
            answered = self._clock_ns()
            answers.append(((answered - asked) / 2, told - (asked + answered) // 2))
        error_ns, offset_ns = min(answers)
        # An older answer is kept while it is the better one, unless the store has another clock.
        agrees = abs(offset_ns - self._offset_ns) <= error_ns + self.error_s * 1e9
        if not agrees or error_ns <= self.error_s * 1e9:
            self._error_ns, self._offset_ns, self._asked_at_ns = error_ns, offset_ns, now
