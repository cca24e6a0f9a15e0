"""The newest records of this rank, bounded in number and in age."""

from __future__ import annotations

import numpy as np

from crux_torch.measure.record import RECORD, Records


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
