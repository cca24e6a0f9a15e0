"""Calls that may hang: made in daemon threads, so that the caller waits for a bounded time.

An executor of ``concurrent.futures`` would wait for such a call when Python ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Starts ``call`` in a daemon thread.

    ``result(timeout)`` of the future waits for its end. A call that takes longer is left to itself.

    Args:
        call: its result or its exception becomes that of the future.
        name: of the thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
