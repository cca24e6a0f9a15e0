"""Leader and ranks of one job talk through the job's own c10d store.

A rank puts its latest sample under its rank; the leader collects what there is. The leader puts the
job's part of the plan; ranks look for it. Nothing waits: a key is checked before it is read, each
operation is bounded, and a store that can't be reached gives nothing instead of an error.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import Store as C10dStore

from crux_torch.control.records import MAX_RECORD_BYTES
from crux_torch.control.tcp_client import TcpClient
from crux_torch.control.warn_once import WarnOnce
from crux_torch.errors import StoreError

_log = logging.getLogger(__name__)

MAX_SAMPLE_BYTES = MAX_RECORD_BYTES
MAX_HEADER_BYTES = 64
MAX_PATHS_BYTES = 1 << 10
PREFIX = "crux"
#: Seconds of failure before it is worth a warning: a job's store ends a little before its ranks.
PATIENCE_S = 5.0

T = TypeVar("T")


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of what the leader publishes; the decision's bytes follow it."""

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True, slots=True)
class Samples:
    """What the leader collected.

    Attributes:
        by_rank: the latest sample of each rank that put one.
        missing: the ranks that did not.
    """

    by_rank: Mapping[int, bytes]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobDecision:
    """What the leader published: the plan's epoch and the job's part of it."""

    epoch: int
    payload: bytes


class JobChannel:
    """One rank's end of the channel.

    Construct it on the thread that owns ``store``, which it uses once; everything after belongs
    to one background thread. On a TCPStore the channel makes a connection of its own, because
    a client that waits for the training thread's ``get`` can't serve anyone else.

    No method raises for the store's sake; :attr:`error` says what went wrong last.

    Args:
        store: the job's store as its process group has it, prefixes included.
        rank: of this process.
        world_size: of the job.
        timeout_s: seconds that one operation may take.
        clock: seconds that never go back.
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
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: expected 0 to {world_size - 1}")
        self._rank, self._world_size = rank, world_size
        self._warn = WarnOnce(_log)
        self._clock = clock
        self._error: str | None = None
        self._failing_since_s: float | None = None
        self._client: TcpClient | None = None
        self._shared: C10dStore | None = None
        self._prefix: str | None = ""
        self._epoch = -1
        self._last_put: bytes | None = None
        base = _base(store)
        if isinstance(base, TCPStore):
            self._client = TcpClient(base.host, base.port, timeout_s=timeout_s, clock=clock)
            # The binding does not tell a PrefixStore's prefix: leave a key and look where it is.
            self._beacon = f"{PREFIX}/beacon/{secrets.token_hex(8)}"
            self._prefix = None
            try:
                store.set(self._beacon, "")
            except Exception as error:
                self._failed(f"the job's store refused a key: {_first_line(error)}")
        else:
            self._shared = store

    @property
    def error(self) -> str | None:
        """What went wrong in the last operation, None where nothing did."""
        return self._error

    def put_sample(self, sample: bytes) -> bool:
        """Put this rank's sample in the place of its last one.

        Returns:
            whether it is there.

        Raises:
            ValueError: over ``MAX_SAMPLE_BYTES``.
        """
        if len(sample) > MAX_SAMPLE_BYTES:
            raise ValueError(f"a sample of {len(sample)} bytes; limit {MAX_SAMPLE_BYTES}")
        return self._do(lambda s, p: _set(s, f"{p}sample/{self._rank}", sample)) is not None

    def collect(self) -> Samples:
        """The samples that are there now; for the leader."""
        found: dict[int, bytes] = {}
        for rank in range(self._world_size):
            sample = self._do(lambda s, p, r=rank: _get(s, f"{p}sample/{r}"))  # type: ignore[misc]
            if sample is None and self._error is not None:
                break
            if sample:
                if len(sample[0]) <= MAX_SAMPLE_BYTES:
                    found[rank] = sample[0]
                else:
                    self._warn(f"sample {rank}", f"ignoring an oversize sample of rank {rank}")
        missing = tuple(r for r in range(self._world_size) if r not in found)
        return Samples(found, missing)

    def put_paths(self, told: bytes) -> bool:
        """Put what this rank sees of its paths in the place of what it put last.

        Returns:
            whether it is there.
        """
        if len(told) > MAX_PATHS_BYTES:
            raise ValueError(f"{len(told)} bytes of paths; limit {MAX_PATHS_BYTES}")
        return self._do(lambda s, p: _set(s, f"{p}paths/{self._rank}", told)) is not None

    def paths(self) -> list[bytes]:
        """What the ranks have put of their paths; for the leader."""
        found = []
        for rank in range(self._world_size):
            told = self._do(lambda s, p, r=rank: _get(s, f"{p}paths/{r}"))  # type: ignore[misc]
            if told is None:
                break
            found += [raw for raw in told if len(raw) <= MAX_PATHS_BYTES]
        return found

    def publish(self, epoch: int, payload: bytes) -> bool:
        """Put the job's decision; for the leader. Writes nothing where it is there already.

        Returns:
            whether it is there.

        Raises:
            ValueError: over ``MAX_RECORD_BYTES``.
        """
        if len(payload) > MAX_RECORD_BYTES:
            raise ValueError(f"a decision of {len(payload)} bytes; limit {MAX_RECORD_BYTES}")
        raw = msgspec.json.encode(_Header(epoch)) + b"\n" + payload
        if raw == self._last_put:
            return True
        done = self._do(lambda s, p: _set(s, f"{p}decision", raw)) is not None
        if done:
            self._last_put = raw
        return done

    def decision(self) -> JobDecision | None:
        """What the leader published last; None where there is nothing, or only an older epoch.

        The same epoch may come again with another payload: the leader says so when a plan ended.
        """
        got = self._do(lambda s, p: _get(s, f"{p}decision"))
        if not got:
            return None
        raw = got[0]
        end = raw.find(b"\n", 0, MAX_HEADER_BYTES)
        try:
            if end < 0 or len(raw) - end - 1 > MAX_RECORD_BYTES:
                raise ValueError("no header, or too large")
            epoch = msgspec.json.decode(raw[:end], type=_Header).epoch
        except (ValueError, msgspec.MsgspecError) as error:
            self._warn("decision", f"ignoring the leader's decision: {error}")
            return None
        if epoch < self._epoch:
            return None
        self._epoch = epoch
        return JobDecision(epoch, raw[end + 1 :])

    def close(self) -> None:
        """End the channel's own connection."""
        if self._client is not None:
            self._client.close()
        self._shared = None

    def _do(self, operation: Callable[[C10dStore, str], T]) -> T | None:
        """The operation's result; None, and :attr:`error`, where it failed."""
        try:
            if self._client is not None:
                if self._prefix is None:
                    self._prefix = self._client.call(self._find_prefix)
                prefix = self._prefix
                result = self._client.call(lambda client: operation(client, prefix))
            elif self._shared is not None:
                result = operation(self._shared, f"{PREFIX}/")
            else:
                raise StoreError("the channel is closed")
        except Exception as error:
            self._failed(_first_line(error))
            return None
        self._error = self._failing_since_s = None
        self._warn.forget("channel")
        return result

    def _find_prefix(self, client: TCPStore) -> str:
        places = [key for key in client.list_keys() if key.endswith(self._beacon)]
        if len(places) != 1:
            raise StoreError("the job's store does not show the channel's key")
        client.delete_key(places[0])
        return places[0].removesuffix(self._beacon) + f"{PREFIX}/"

    def _failed(self, reason: str) -> None:
        self._error = reason
        now = self._clock()
        if self._failing_since_s is None:
            self._failing_since_s = now
        if now - self._failing_since_s < PATIENCE_S:
            return
        self._warn("channel", f"rank {self._rank} can't reach its job's leader: {reason}")


def _base(store: C10dStore) -> C10dStore:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _set(store: C10dStore, key: str, value: bytes) -> bool:
    store.set(key, value)  # type: ignore[arg-type]
    return True


def _get(store: C10dStore, key: str) -> tuple[bytes] | tuple[()]:
    """The value in a tuple, or an empty one: an absent key is no failure, and get() would wait."""
    return (bytes(store.get(key)),) if store.check([key]) else ()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
