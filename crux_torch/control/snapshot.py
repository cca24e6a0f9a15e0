"""What one leader sees of the cluster, and for how long it has stood still."""

from __future__ import annotations

from crux_torch.control.planner import fingerprint
from crux_torch.control.records import JobRecord

#: A snapshot that never stands still is planned after this many debounce times.
MAX_DEBOUNCES = 8


class Snapshot:
    """The live job records and the topology's bytes at one leader's last look.

    ``fingerprint`` is of both, and ``since_s`` tells when they last changed.
    """

    def __init__(self) -> None:
        self.jobs: tuple[JobRecord, ...] = ()
        self.topology: bytes | None = None
        self.fingerprint = ""
        self.since_s = float("-inf")
        self._unplanned_since_s = float("inf")

    def update(self, jobs: tuple[JobRecord, ...], topology: bytes | None, now: float) -> bool:
        """Take in what was read at ``now``; return whether anything has changed."""
        self.jobs, self.topology = jobs, topology
        current = fingerprint(jobs, topology)
        if current == self.fingerprint:
            return False
        self.fingerprint, self.since_s = current, now
        self._unplanned_since_s = min(self._unplanned_since_s, now)
        return True

    def was_planned(self) -> None:
        """A plan for it is in force."""
        self._unplanned_since_s = float("inf")

    def stands_still(self, now: float, debounce_s: float) -> bool:
        """Whether it has come to rest, or has been in motion for too long."""
        in_motion_s = now - self._unplanned_since_s
        return now - self.since_s >= debounce_s or in_motion_s >= MAX_DEBOUNCES * debounce_s
