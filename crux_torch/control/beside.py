"""Work that may take seconds, beside a thread that must not: one piece at a time, and not often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

#: Results that are kept.
MAX_RESULTS = 8
#: Seconds of work in a row, and the share of the time that work takes in the long run. Python runs
#: one thread at a time, so training gets slower meanwhile.
BURST_S = 10.0
SHARE = 0.1


class Beside:
    """Gives the results of work that is named by a key; each is done once.

    One thread asks. Work must not raise.

    Args:
        in_thread: whether a thread of its own works; otherwise the one that asks.
    """

    def __init__(self, *, in_thread: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_thread = in_thread
        self._clock = clock
        self._lock = threading.Lock()
        self._results: dict[Hashable, Any] = {}
        self._thread: threading.Thread | None = None
        self._left_s, self._counted_s = BURST_S, clock()

    def ask(self, key: Hashable, work: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether ``work`` is done, and its result. If not, it begins when its turn comes."""
        with self._lock:
            if key in self._results:
                self._results[key] = self._results.pop(key)  # the last to be dropped
                return True, self._results[key]
        if not self._in_thread:
            self._run(key, work)
            return True, self._results[key]
        if self._thread is None or not self._thread.is_alive():
            now = self._clock()
            self._left_s = min(BURST_S, self._left_s + SHARE * (now - self._counted_s))
            self._counted_s = now
            if self._left_s > 0:
                self._thread = threading.Thread(
                    target=self._run, args=(key, work), name="crux-plan", daemon=True
                )
                self._thread.start()
        return False, None

    def waits_for(self, key: Hashable) -> bool:
        """Whether whoever asks for ``key`` now has to come back for the result."""
        with self._lock:
            return self._in_thread and key not in self._results

    def _run(self, key: Hashable, work: Callable[[], Any]) -> None:
        began_s = self._clock()
        result = work()
        with self._lock:
            self._left_s -= self._clock() - began_s
            self._results[key] = result
            if len(self._results) > MAX_RESULTS:
                del self._results[next(iter(self._results))]
