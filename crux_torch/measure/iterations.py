"""Where one iteration ends and the next begins: seen from the optimizer, without the user."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

#: Steps of other optimizers without one of the elected: it is out of use, elect another.
SILENT_STEPS = 64

MarkListener = Callable[[int], None]


class IterationMarks:
    """Marks the end of every optimizer step, by the hooks that torch keeps for all optimizers.

    One optimizer is elected, the first seen, and only its steps are marks (docs/recorder.md). An
    optimizer that steps within another's step (ZeroRedundancyOptimizer's inner one) is not elected,
    since the outer pre-hook runs first. The elected one is replaced when it is collected, or when
    others have stepped ``SILENT_STEPS`` times without it.

    Args:
        capacity: marks kept, the newest.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._marks: deque[int] = deque(maxlen=capacity)
        #: Marks that were ever made; all ranks of a job count alike.
        self.total = 0
        self._elected: weakref.ref[Any] | None = None
        self._others = 0
        self._armed = False
        self._listeners: list[MarkListener] = []
        self._handles: list[Any] = []
        self._lock = threading.Lock()
        self._warned = False

    def install(self) -> None:
        """Register the hooks; twice is once."""
        from torch.optim import optimizer

        with self._lock:
            if not self._handles:
                self._handles = [
                    optimizer.register_optimizer_step_pre_hook(self._pre_hook),
                    optimizer.register_optimizer_step_post_hook(self._post_hook),
                ]

    def remove(self) -> None:
        """Take the hooks away; marks already made stay."""
        with self._lock:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def add_listener(self, listener: MarkListener) -> Callable[[], None]:
        """Call ``listener(mark_ns)`` in the training thread at every mark; return its remover."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    @property
    def count(self) -> int:
        """Marks kept."""
        return len(self._marks)

    def marks_ns(self, since_ns: int = 0) -> NDArray[np.int64]:
        """The marks since ``since_ns`` on CLOCK_MONOTONIC, ascending."""
        # list() of a deque is atomic under the GIL; the free-threaded build locks the deque.
        marks = np.array(list(self._marks), dtype=np.int64)
        return marks[marks >= since_ns]

    def _pre_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _compiling():
            return
        try:
            elected = self._elected() if self._elected is not None else None
            if elected is not optimizer:
                self._others += 1
                if elected is not None and self._others <= SILENT_STEPS:
                    return
                self._elected = weakref.ref(optimizer)
                self._marks.clear()
            self._others = 0
            self._armed = True
        except Exception:
            self._warn()

    def _post_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _compiling():
            return
        try:
            # A subclass's step calls its parent's, and both run the hooks: the inner one marks.
            if not self._armed or self._elected is None or self._elected() is not optimizer:
                return
            self._armed = False
            now_ns = time.monotonic_ns()
            self._marks.append(now_ns)
            self.total += 1
            for listener in tuple(self._listeners):
                listener(now_ns)
        except Exception:
            self._warn()

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("iteration marks failed; training goes on without them", exc_info=True)


def _compiling() -> bool:
    import torch

    # Dynamo folds this to True and drops the rest of the hook from its graph.
    return torch.compiler.is_compiling()
