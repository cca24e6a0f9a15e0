"""The recorder's records, as numpy sees the bytes that C++ wrote, and a window of the newest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: One collective: ``csrc/process_group/record.h`` is the same struct, 64 bytes, little endian.
#: Times are nanoseconds of CLOCK_MONOTONIC (``time.monotonic_ns()``), -1 where unknown.
RECORD = np.dtype(
    [
        ("sequence", "<u8"),  # of its process group, counted by the recorder from 0
        ("issue_ns", "<i8"),  # the call entered the backend
        ("start_ns", "<i8"),  # nothing on this rank held it back: issued, or reached by its stream
        ("end_ns", "<i8"),  # it was complete on this rank
        ("device_ns", "<i8"),  # duration by the device's own clock; it began so long before its end
        ("bytes", "<i8"),  # payload: see ``docs/understand/measuring.md`` for what each op counts
        ("group", "<u4"),  # index into the recorder's table of process groups
        ("world_size", "<u4"),  # ranks of that group
        ("peer", "<i4"),  # group rank of the root or of the other end, -1 where there is none
        ("op", "u1"),  # index into ``OPS``
        ("device", "u1"),  # 0: CPU, 1: accelerator
        ("status", "u1"),  # index into ``STATUSES``
        ("flags", "u1"),  # bits of ``Flag``
    ]
)

#: Operation names by their number in a record.
OPS = (
    "unknown",
    "allreduce",
    "allreduce_coalesced",
    "allreduce_sparse",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_single",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_coalesced",
    "alltoall",
    "alltoall_single",
    "send",
    "recv",
    "barrier",
    "coalesced",
)
OP_NUMBER = {name: number for number, name in enumerate(OPS)}

STATUSES = ("ok", "failed", "incomplete")


class Flag:
    """Bits of a record's ``flags``."""

    END_AT_WAIT = 1  # the end is when the caller's wait() returned, an upper bound
    COALESCED = 2  # part of a coalesced group: only the group's times are known
    DEVICE_CLOCK = 4  # start_ns is when the device's stream came to it, by the device's clock
    SYNCHRONOUS = 8  # the caller, or the stream that it issues on, waits for its end at once
    UNTIMED = 16  # issued while the recorder did not time: nothing else is known of it


Records = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One process group of this rank; a record's ``group`` is its index in the recorder's table.

    Attributes:
        name: the group's name in c10d, the same on all its ranks.
        ranks: global ranks in the order of their group ranks.
        my_rank: this process's rank within the group.
    """

    name: str
    ranks: tuple[int, ...]
    my_rank: int


def from_bytes(raw: bytes | memoryview) -> Records:
    """The records in ``raw``, without copying; raises ValueError if the last one is not whole."""
    return np.frombuffer(raw, dtype=RECORD)


class RecordWindow:
    """A sliding window over the record stream.

    The buffer is twice the capacity and is compacted when it is full. Not thread-safe: one thread
    drains the recorder.

    Args:
        capacity: records kept at most, 1 or more.
        max_age_s: a record whose issue is older than this, counted from the newest, is dropped.
    """

    def __init__(self, capacity: int = 16384, max_age_s: float = 120.0) -> None:
        self._capacity = capacity
        self._max_age_ns = round(max_age_s * 1e9)
        self._buffer = np.zeros(2 * capacity, dtype=RECORD)
        self._begin = 0
        self._end = 0
        #: Records that left the window because it was full, not because of their age.
        self.dropped = 0

    def __len__(self) -> int:
        return self._end - self._begin

    def append(self, records: Records) -> None:
        """Take in ``records``, in the order in which the recorder delivered them."""
        surplus = len(records) - self._capacity
        if surplus > 0:
            self.dropped += surplus
            records = records[surplus:]
        if self._end + len(records) > len(self._buffer):
            kept = self._buffer[self._begin : self._end].copy()
            self._buffer[: len(kept)] = kept
            self._begin, self._end = 0, len(kept)
        self._buffer[self._end : self._end + len(records)] = records
        self._end += len(records)
        excess = max(0, len(self) - self._capacity)
        self.dropped += excess
        self._begin += excess
        if self._begin < self._end:
            issued = self._buffer["issue_ns"][self._begin : self._end]
            young = issued >= int(issued.max()) - self._max_age_ns
            # Delivered by completion, hence only nearly in the order of issue: cut the old head.
            self._begin += int(np.argmax(young))

    def forget_before(self, time_ns: int) -> None:
        """Drop the records issued before ``time_ns``: what came before a measurement began."""
        issued = self._buffer["issue_ns"][self._begin : self._end]
        keep = np.flatnonzero(issued >= time_ns)
        self._begin += int(keep[0]) if len(keep) else len(issued)

    def records(self) -> Records:
        """A copy of the window in the order of issue."""
        window = self._buffer[self._begin : self._end]
        return window[np.argsort(window["issue_ns"], kind="stable")]
