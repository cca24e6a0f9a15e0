"""The ranks of a test as threads of its process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LIMIT_S = 300.0


def both(body: Callable[[int], object]) -> None:
    """``body(rank)`` for two ranks at once; raises what either raised."""
    pool = ThreadPoolExecutor(2)
    try:
        for future in [pool.submit(body, rank) for rank in range(2)]:
            future.result(LIMIT_S)
    finally:
        pool.shutdown(wait=False)
