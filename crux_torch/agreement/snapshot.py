"""One leader's view of the cluster, and the plan that it follows."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import msgspec

from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import MAX_EPOCH, JobRecord, Plan, PlanHead
from crux_torch.agreement.registry import PlanState

_log = logging.getLogger(__name__)

#: A snapshot that never stands still is planned after this many debounce times.
MAX_DEBOUNCES = 8
#: Snapshots that are kept, and for how long after they changed. While jobs come and go, the newest
#: plan is of one that has just changed.
MAX_RECENT = 8
MAX_RECENT_S = 5.0
#: Epochs this far apart were not counted one by one: somebody made one of them up.
FAR = 1 << 32
#: Everything in a profile that a plan follows from.
_READ = attrgetter("period_s", "compute_s", "flops", "flows", "inside", "bursts", "t_s", "t_source")


def canonical(record: JobRecord) -> bytes:
    """Return the bytes of one record that :func:`fingerprint` hashes; empty without a profile."""
    if record.profile is None:
        return b""
    r = record
    fields = [r.job, r.incarnation, r.hosts, r.gpus, r.peak_flops, _READ(record.profile)]
    # One is an object, the other an array: neither can be taken for the other.
    fields += [optional for optional in (r.marks, r.seen) if optional]
    return msgspec.json.encode(fields, order="deterministic")


def fingerprint(
    records: Sequence[JobRecord],
    topology: bytes | None,
    operator: bytes = b"",
    canonical: Callable[[JobRecord], bytes] = canonical,
) -> str:
    """Hash everything that a plan follows from and that is the same for all leaders.

    That is :func:`canonical` of each profiled job, the topology's bytes,
    ``OperatorSettings.effect``, and the plans that judges admit. A field that only a newer release
    knows is not part of it, nor are a leader's own settings (policy; docs/understand/agreement.md).
    """
    ordered = sorted(records, key=attrgetter("job", "incarnation"))
    digest = hashlib.sha256(b"[" + b",".join(filter(None, map(canonical, ordered))) + b"]")
    digest.update(b"-" if topology is None else b"+" + topology)
    digest.update(operator and b"#" + operator)
    admitted = sorted(admitted_trials(records))
    digest.update(b"!" + msgspec.json.encode(admitted) if admitted else b"")
    return digest.hexdigest()


def admitted_trials(records: Sequence[JobRecord]) -> Iterator[tuple[str, str]]:
    """Yield each plan that is on trial or kept, with the job that judges it."""
    for record in records:
        for tried in record.trials:
            if record.profile is not None and tried.state != "worse":
                yield tried.name, record.job


def size_of(jobs: Sequence[JobRecord]) -> int:
    """Return the cost of computing a plan for ``jobs``, in jobs and flows."""
    return sum(1 + len(r.profile.flows) + len(r.profile.inside) for r in jobs if r.profile)


class Snapshot:
    """The job records, the topology's bytes and the operator's settings at a leader's last look.

    ``fingerprint`` is of all three, and ``since_s`` tells when they last changed.
    """

    def __init__(self) -> None:
        #: Records by fingerprint, and when they were read last.
        self._recent: dict[str, tuple[tuple[JobRecord, ...], float]] = {}
        #: :func:`canonical` of each job's record: few change at once.
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
        """Take in what was read at ``now``; return True if anything has changed."""
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
        """Take in a follower's look, which sees a part of the cluster and has no fingerprint."""
        self.jobs, self.topology, self.operator = jobs, topology, operator
        self.fingerprint = ""
        self._recent.clear()
        self._canonical.clear()
        self._unplanned_since_s = float("inf")

    def jobs_of(self, fingerprint: str) -> tuple[JobRecord, ...] | None:
        """Return the records that had this fingerprint a moment ago; None if none were seen."""
        found = self._recent.get(fingerprint)
        return None if found is None else found[0]

    def was_planned(self) -> None:
        """Note that a plan for this snapshot is in force."""
        self._unplanned_since_s = float("inf")

    def stands_still(self, now: float, debounce_s: float) -> bool:
        """Return True once nothing changed for ``debounce_s``, or changes went on for too long."""
        in_motion_s = now - self._unplanned_since_s
        return now - self.since_s >= debounce_s or in_motion_s >= MAX_DEBOUNCES * debounce_s


class AdoptedPlan:
    """The plan that a leader follows: epochs go upwards only.

    A plan counts until ``valid_s`` after this leader last saw it change, by this leader's own
    clock. A renewal is a change.

    Attributes:
        last: the plan that was adopted last, valid or not.
        confirmed_at_s: when it was last seen to change.
        renew_at_s: when this leader renews it, unless another leader did meanwhile.
        whole: all its entries are known, and are what this leader would have written.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random, valid_s: float) -> None:
        self._clock, self._random = clock, rng
        self._valid_s = valid_s
        self.last: Plan | None = None
        self._head: PlanHead | None = None
        self._raw: bytes | None = None
        self.confirmed_at_s = float("-inf")
        self.renew_at_s = float("inf")
        self.whole = False

    @property
    def epoch(self) -> int:
        """The epoch that was adopted last; 0 before the first."""
        return 0 if self.last is None else self.last.epoch

    @property
    def valid(self) -> Plan | None:
        """The plan; None if there is none or it was not renewed in time."""
        return self.last if self._clock() - self.confirmed_at_s < self._valid_s else None

    def is_this(self, head: PlanHead) -> bool:
        """Return True if the plan of ``head`` was adopted last."""
        return head == self._head

    def refuses(self, head: PlanHead) -> bool:
        """Return True if the epoch of ``head`` is an old one, or leaps.

        One far below is of another count of the epochs: after a leap that this leader followed
        because it knew no better. It is not refused.
        """
        if self._head is None or head == self._head:
            return False
        ahead = head.epoch - self._head.epoch
        return -FAR < ahead <= 0 or ahead >= FAR

    def epoch_after(self, stored: PlanHead | None) -> int:
        """Return the epoch of a plan in place of ``stored``."""
        known = self.epoch
        if stored is not None and not self.refuses(stored):
            known = max(known, stored.epoch)
        return known + 1 if known < MAX_EPOCH else 1

    def knows(self, state: PlanState) -> bool:
        """Return True if the store has what it had when the plan was confirmed last."""
        return state.raw is not None and state.raw == self._raw

    def confirm(self, plan: Plan, raw: bytes | None, *, whole: bool) -> None:
        """Adopt ``plan``, which lies in the store as ``raw`` since just now."""
        now = self._clock()
        if self._head != plan.head:
            _log.info("plan %d of %r, %d jobs", plan.epoch, plan.author, len(plan.entries))
        self.confirmed_at_s = now
        self.last, self._head, self._raw, self.whole = plan, plan.head, raw, whole
        self.renew_at_s = now + self._valid_s / 3 * self._random.uniform(0.8, 1.2)
