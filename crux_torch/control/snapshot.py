"""What one leader sees of the cluster, and for how long it has stood still."""

from __future__ import annotations

from crux_torch.control.operator import OperatorSettings
from crux_torch.control.planner import canonical, fingerprint
from crux_torch.control.records import JobRecord

#: A snapshot that never stands still is planned after this many debounce times.
MAX_DEBOUNCES = 8


#: Snapshots that are kept, and for how long after they changed. While jobs come and go, the newest
#: plan is of one that has just changed.
MAX_RECENT = 8
MAX_RECENT_S = 5.0


class Snapshot:
    """The job records, the topology's bytes and the operator's settings at one leader's last look.

    ``fingerprint`` is of all three, and ``since_s`` tells when they last changed.
    """

    def __init__(self) -> None:
        #: Records by fingerprint, and when they were read last.
        self._recent: dict[str, tuple[tuple[JobRecord, ...], float]] = {}
        #: What the fingerprint takes of each job's record: few change at once.
        self._canonical: dict[str, tuple[JobRecord, bytes]] = {}
        self.jobs: tuple[JobRecord, ...] = ()
        self.topology: bytes | None = None
        self.operator = OperatorSettings()
        self.fingerprint = ""
        self.since_s = float("-inf")
        self._unplanned_since_s = float("inf")

    def update(
        self,
        jobs: tuple[JobRecord, ...],
        topology: bytes | None,
        operator: OperatorSettings,
        now: float,
    ) -> bool:
        """Take in what was read at ``now``; return whether anything has changed."""
        current = self.fingerprint
        same = topology == self.topology and operator == self.operator
        if jobs is not self.jobs or not same or not current:
            if not same:
                self._recent.clear()
            self.jobs, self.topology, self.operator = jobs, topology, operator
            before, self._canonical = self._canonical, {}

            def known(record: JobRecord) -> bytes:
                found = before.get(record.job)
                if found is None or found[0] is not record:
                    found = record, canonical(record)
                self._canonical[record.job] = found
                return found[1]

            current = fingerprint(jobs, topology, operator.effect, known)
        self._recent.pop(current, None)
        recent = [(key, seen) for key, seen in self._recent.items() if now - seen[1] < MAX_RECENT_S]
        self._recent = {**dict(recent[1 - MAX_RECENT :]), current: (jobs, now)}
        if current == self.fingerprint:
            return False
        self.fingerprint, self.since_s = current, now
        self._unplanned_since_s = min(self._unplanned_since_s, now)
        return True

    def narrow(
        self, jobs: tuple[JobRecord, ...], topology: bytes | None, operator: OperatorSettings
    ) -> None:
        """Take in what a leader read that does not read everything: it is no snapshot."""
        self.jobs, self.topology, self.operator = jobs, topology, operator
        self.fingerprint = ""
        self._recent.clear()
        self._canonical.clear()
        self._unplanned_since_s = float("inf")

    def jobs_of(self, fingerprint: str) -> tuple[JobRecord, ...] | None:
        """The records that had this fingerprint a moment ago; None if this leader saw none."""
        found = self._recent.get(fingerprint)
        return None if found is None else found[0]

    def was_planned(self) -> None:
        """A plan for it is in force."""
        self._unplanned_since_s = float("inf")

    def stands_still(self, now: float, debounce_s: float) -> bool:
        """Whether it has come to rest, or has been in motion for too long."""
        in_motion_s = now - self._unplanned_since_s
        return now - self.since_s >= debounce_s or in_motion_s >= MAX_DEBOUNCES * debounce_s
