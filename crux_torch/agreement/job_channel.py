"""Leader and ranks of one job talk through the job's own c10d store.

Nothing waits, and a store that can't be reached gives nothing instead of an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch._C._distributed_c10d import Store

from crux_torch.agreement.records import MAX_RECORD_BYTES
from crux_torch.backend.job_store import JobStore
from crux_torch.errors import first_line
from crux_torch.logs import WarnOnce

_log = logging.getLogger(__name__)

MAX_SAMPLE_BYTES = MAX_RECORD_BYTES
MAX_PATHS_BYTES = 1 << 14
MAX_HOST_BYTES = 1 << 14
MAX_FOUND_BYTES = 1 << 20
PREFIX = "crux/"
#: Seconds of failure before a warning: a job's store ends a little before its ranks.
PATIENCE_S = 5.0

T = TypeVar("T")


class JobChannel:
    """One rank's end of the channel.

    No method raises because of the store; :attr:`error` says what went wrong last.

    Thread safety: construct it on the thread that owns ``store``. Everything after belongs to one
    background thread.

    Args:
        store: the job's store as its process group has it, prefixes included.
        rank, world_size: of this process in the job.
        timeout_s: of one operation.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: expected 0 to {world_size - 1}")
        self._rank, self._world_size = rank, world_size
        self._warn = WarnOnce(_log)
        self._clock = clock
        #: What went wrong in the last operation; None if nothing did.
        self.error: str | None = None
        self._failing_since_s: float | None = None
        self._published: bytes | None = None
        self._store = JobStore(store, timeout_s=timeout_s, clock=clock)

    def put_sample(self, sample: bytes) -> bool:
        """Replaces this rank's sample; returns True if that succeeded.

        Raises:
            ValueError: over ``MAX_SAMPLE_BYTES``.
        """
        return self._put(f"sample/{self._rank}", sample, MAX_SAMPLE_BYTES)

    def collect(self) -> dict[int, bytes]:
        """Returns the latest sample of each rank that has put one; for the leader."""
        return self._of_ranks("sample", MAX_SAMPLE_BYTES)

    def put_paths(self, seen: bytes) -> bool:
        """Replaces what this rank sees of its paths; returns True if that succeeded."""
        return self._put(f"paths/{self._rank}", seen, MAX_PATHS_BYTES)

    def paths(self) -> dict[int, bytes]:
        """Returns what the ranks see of their paths; for the leader."""
        return self._of_ranks("paths", MAX_PATHS_BYTES)

    def put_searches(self, rank: int, searches: bytes) -> bool:
        """Replaces what ``rank`` is to search; returns True if that succeeded. For the leader."""
        return self._put(f"searches/{rank}", searches, MAX_FOUND_BYTES)

    def searches(self) -> bytes | None:
        """Returns what this rank is to search; None if it is nothing."""
        raw = self._get(f"searches/{self._rank}")
        return None if raw is None or len(raw) > MAX_FOUND_BYTES else raw

    def put_found(self, found: bytes) -> bool:
        """Replaces what this rank has found; returns True if that succeeded."""
        return self._put(f"found/{self._rank}", found, MAX_FOUND_BYTES)

    def found(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Returns what each of ``ranks`` has found that has put anything; for the leader."""
        return self._of_ranks("found", MAX_FOUND_BYTES, ranks)

    def put_host(self, place: bytes) -> bool:
        """Puts where this rank runs; returns True if that succeeded.

        Raises:
            ValueError: over ``MAX_HOST_BYTES``.
        """
        return self._put(f"host/{self._rank}", place, MAX_HOST_BYTES)

    def hosts(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Returns where each of ``ranks`` runs that has put it; for the leader."""
        return self._of_ranks("host", MAX_HOST_BYTES, ranks)

    def publish(self, order: bytes) -> bool:
        """Replaces the job's order unless it is there already; returns True if it is there.

        Raises:
            ValueError: over ``MAX_RECORD_BYTES``.
        """
        if order == self._published:
            return True
        done = self._put("order", order, MAX_RECORD_BYTES)
        if done:
            self._published = order
        return done

    def order(self) -> bytes | None:
        """Returns what the leader published last; None if there is nothing."""
        raw = self._get("order")
        if raw is not None and len(raw) > MAX_RECORD_BYTES:
            self._warn("order", f"ignoring an order of {len(raw)} bytes; limit {MAX_RECORD_BYTES}")
            return None
        return raw

    def close(self) -> None:
        """Ends the channel's own connection."""
        self._store.close()

    def _of_ranks(
        self, kind: str, limit_bytes: int, ranks: Iterable[int] | None = None
    ) -> dict[int, bytes]:
        """Returns what ranks have put under ``kind``; those up to the first failure."""
        found = {}
        for rank in range(self._world_size) if ranks is None else ranks:
            value = self._get(f"{kind}/{rank}")
            if self.error is not None:
                break
            if value is not None and len(value) <= limit_bytes:
                found[rank] = value
            elif value is not None:
                self._warn(f"{kind} {rank}", f"ignoring an oversize {kind} of rank {rank}")
        return found

    def _put(self, key: str, value: bytes, limit_bytes: int) -> bool:
        if len(value) > limit_bytes:
            raise ValueError(f"{key}: {len(value)} bytes; limit {limit_bytes}")
        self._do(lambda: self._store.set(PREFIX + key, value))
        return self.error is None

    def _get(self, key: str) -> bytes | None:
        """Returns the value of a key; None if there is none, or after a failure."""
        return self._do(lambda: self._store.find(PREFIX + key))

    def _do(self, operation: Callable[[], T]) -> T | None:
        """Returns the operation's result; None, and sets :attr:`error`, if it failed."""
        try:
            result = operation()
        except Exception as error:
            self.error = first_line(error)
            now = self._clock()
            if self._failing_since_s is None:
                self._failing_since_s = now
            if now - self._failing_since_s >= PATIENCE_S:
                message = f"rank {self._rank} can't reach its job's leader: {self.error}"
                self._warn("channel", message)
            return None
        self.error = self._failing_since_s = None
        self._warn.forget("channel")
        return result
