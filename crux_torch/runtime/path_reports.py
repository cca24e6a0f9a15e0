"""How many connections take the planned path: from every rank to its leader."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from crux_torch.control.job_channel import JobChannel
from crux_torch.control.records import PathCounts

#: Seconds between two rounds of the leader over its ranks.
GATHER_S = 5.0


class PathReports:
    """One rank's end; owned by its background thread.

    Args:
        channel: to the job's store.
        clock: seconds that never go back.
    """

    def __init__(self, channel: JobChannel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._sent: bytes | None = None
        self._gather_at_s = float("-inf")
        self._gathered: PathCounts | None = None

    def send(self, counts: PathCounts | None) -> None:
        """Tell the leader what this rank sees; None where no path is planned for it."""
        raw = msgspec.json.encode(counts)
        if raw == self._sent or (self._sent is None and counts is None):
            return
        if self._channel.put_paths(raw):
            self._sent = raw

    def gather(self, planned: bool) -> PathCounts | None:
        """The sum over all ranks that reported; None where no path is ``planned``.

        A report that can't be read counts for nothing.
        """
        if not planned:
            return None
        now = self._clock()
        if now >= self._gather_at_s:
            self._gather_at_s = now + GATHER_S
            self._gathered = _total(self._channel.paths())
        return self._gathered


def _total(reports: list[bytes]) -> PathCounts:
    as_planned = elsewhere = unknown = missed = 0
    for raw in reports:
        try:
            counts = msgspec.json.decode(raw, type=PathCounts | None)
        except (msgspec.MsgspecError, ValueError):
            continue
        if counts is not None:
            as_planned += counts.as_planned
            elsewhere += counts.elsewhere
            unknown += counts.unknown
            missed += counts.missed
    return PathCounts(as_planned, elsewhere, unknown, missed)
