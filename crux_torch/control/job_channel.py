"""Leader and ranks of one job talk through the job's own c10d store.

Nothing waits: a key is checked before it is read, each operation is bounded, and a store that can't
be reached gives nothing instead of an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import Store as C10dStore

from crux_torch.c10d.tcp_client import TcpClient
from crux_torch.control.records import MAX_RECORD_BYTES
from crux_torch.errors import StoreError
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

MAX_SAMPLE_BYTES = MAX_RECORD_BYTES
MAX_PATHS_BYTES = 1 << 10
MAX_HOST_BYTES = 1 << 14
PREFIX = "crux/"
#: Seconds of failure before a warning: a job's store ends a little before its ranks.
PATIENCE_S = 5.0

T = TypeVar("T")


class JobChannel:
    """One rank's end of the channel.

    Construct it on the thread that owns ``store``. Everything after belongs to one background
    thread. On a TCPStore the channel makes a connection of its own, because a client that waits
    for the training thread's ``get`` can't serve anyone else.

    No method raises because of the store; :attr:`error` says what went wrong last.

    Args:
        store: the job's store as its process group has it, prefixes included.
        rank, world_size: of this process in the job.
        timeout_s: seconds that one operation may take.
    """

    def __init__(
        self,
        store: C10dStore,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from crux_torch import _C

        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: expected 0 to {world_size - 1}")
        self._rank, self._world_size = rank, world_size
        self._warn = WarnOnce(_log)
        self._clock = clock
        #: What went wrong in the last operation; None if nothing did.
        self.error: str | None = None
        self._failing_since_s: float | None = None
        self._last_put: bytes | None = None
        base = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        self._client: TcpClient | None = None
        self._shared: C10dStore | None = None
        self._prefix = PREFIX
        if isinstance(base, TCPStore):
            self._client = TcpClient(base.host, base.port, timeout_s=timeout_s, clock=clock)
            self._prefix = _C.store_prefix(store) + PREFIX
        else:
            self._shared = store

    def put_sample(self, sample: bytes) -> bool:
        """Replace this rank's sample; return whether that succeeded.

        Raises:
            ValueError: over ``MAX_SAMPLE_BYTES``.
        """
        return self._put(f"sample/{self._rank}", sample, MAX_SAMPLE_BYTES)

    def collect(self) -> dict[int, bytes]:
        """The latest sample of each rank that has put one; for the leader."""
        return self._of_ranks("sample", MAX_SAMPLE_BYTES)

    def put_paths(self, seen: bytes) -> bool:
        """Replace what this rank sees of its paths; return whether that succeeded."""
        return self._put(f"paths/{self._rank}", seen, MAX_PATHS_BYTES)

    def paths(self) -> list[bytes]:
        """What the ranks see of their paths; for the leader."""
        return list(self._of_ranks("paths", MAX_PATHS_BYTES).values())

    def put_host(self, about: bytes) -> bool:
        """Say where this rank runs; return whether that succeeded.

        Raises:
            ValueError: over ``MAX_HOST_BYTES``.
        """
        return self._put(f"host/{self._rank}", about, MAX_HOST_BYTES)

    def hosts(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Where each of ``ranks`` runs that has said so; for the leader."""
        return self._of_ranks("host", MAX_HOST_BYTES, ranks)

    def publish(self, order: bytes) -> bool:
        """Replace the job's order, unless it is there already, and return whether it is there.

        Raises:
            ValueError: over ``MAX_RECORD_BYTES``.
        """
        if order == self._last_put:
            return True
        done = self._put("order", order, MAX_RECORD_BYTES)
        if done:
            self._last_put = order
        return done

    def order(self) -> bytes | None:
        """What the leader published last; None if there is nothing."""
        raw = self._get("order")
        if raw is not None and len(raw) > MAX_RECORD_BYTES:
            self._warn("order", f"ignoring an order of {len(raw)} bytes; limit {MAX_RECORD_BYTES}")
            return None
        return raw

    def close(self) -> None:
        """End the channel's own connection."""
        if self._client is not None:
            self._client.close()
        self._shared = None

    def _of_ranks(
        self, kind: str, limit_bytes: int, ranks: Iterable[int] | None = None
    ) -> dict[int, bytes]:
        """What each rank has put under ``kind``; the ranks up to the first failure."""
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
        self._do(lambda store: store.set(self._prefix + key, value))
        return self.error is None

    def _get(self, key: str) -> bytes | None:
        """The value of ``key``; None if there is none, or after a failure."""

        def read(store: Any) -> bytes | None:
            # get() would wait for an absent key.
            name = self._prefix + key
            return bytes(store.get(name)) if store.check([name]) else None

        return self._do(read)

    def _do(self, operation: Callable[[Any], T]) -> T | None:
        """The operation's result; None, and :attr:`error`, if it failed."""
        try:
            if self._client is not None:
                result = self._client.call(operation)
            elif self._shared is not None:
                result = operation(self._shared)
            else:
                raise StoreError("the channel is closed")
        except Exception as error:
            self.error = str(error).partition("\n")[0][:200] or type(error).__name__
            now = self._clock()
            if self._failing_since_s is None:
                self._failing_since_s = now
            if now - self._failing_since_s >= PATIENCE_S:
                about = f"rank {self._rank} can't reach its job's leader: {self.error}"
                self._warn("channel", about)
            return None
        self.error = self._failing_since_s = None
        self._warn.forget("channel")
        return result
