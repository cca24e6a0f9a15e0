"""Values that a leader keeps in the store beside its job's record and the plan.

Every method that writes raises StoreError if the store can't be reached.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import Plan, StepTimes
from crux_torch.agreement.registry import FORBIDDEN_S, Registry, StoredEntry, View
from crux_torch.agreement.trials import IterationEnds
from crux_torch.errors import StoreError, StoreForbidden
from crux_torch.logs import WarnOnce
from crux_torch.measure.profile import JobProfile
from crux_torch.schedule.default.guard import PAUSE
from crux_torch.store import MAX_LEASE_S

_log = logging.getLogger(__name__)

#: Seconds of which the iterations count, and how many do at least, as far as they are known.
WINDOW_S, MIN_ITERATIONS = 30.0, 5
#: Step times are written again after a third of their lease, which is so many of a job's.
LEASES = 3.0


class KeptTopology:
    """Publishes the topology that this job knows, and renews it.

    Args:
        published: the topology; None: this job knows none.
    """

    def __init__(self, registry: Registry, published: bytes | None, warn: WarnOnce) -> None:
        self._registry = registry
        self._published = published
        self._warn = warn
        self._is_there = False
        self._renew_at_s = float("-inf")

    def keep(self, now_s: float) -> None:
        """Write what is due. One that the store refuses must not keep the job from the plan."""
        if self._published is None:
            return
        if not self._is_there:
            try:
                self._registry.publish_topology(self._published)
            except StoreError as error:
                self._warn("topology", f"the topology was not published: {error}")
            else:
                self._is_there = True
        elif now_s >= self._renew_at_s:
            self._registry.renew_topology(self._published)
        else:
            return
        self._renew_at_s = now_s + MAX_LEASE_S / 3

    def publish_again(self) -> None:
        """Note that the store may have lost it."""
        self._is_there = False


class KeptFragment:
    """Publishes what this job saw of the network, and renews it. The job's record gives it weight.

    A store that refuses it must not keep the job from the plan.
    """

    def __init__(self, registry: Registry, job: str, warn: WarnOnce) -> None:
        self._registry = registry
        self._job = job
        self._warn = warn
        self._fragment: bytes | None = None
        self._is_there = False
        self._due_at_s = float("inf")

    def change(self, fragment: bytes | None) -> None:
        """Have another fragment written; None: the one in the store ends with its lease."""
        if fragment != self._fragment:
            self._fragment = fragment
            self.publish_again()

    def keep(self, now_s: float) -> None:
        """Write what is due."""
        if self._fragment is None or now_s < self._due_at_s:
            return
        self._due_at_s = now_s + MAX_LEASE_S / 3
        try:
            self._registry.publish_fragment(self._job, self._fragment)
            self._is_there = True
        except StoreForbidden as error:
            self._warn("fragment", f"what this job saw of the network was not published: {error}")

    def publish_again(self) -> None:
        """Note that the store may have lost it."""
        self._due_at_s = float("-inf")

    def withdraw(self) -> None:
        """Remove what was published."""
        if self._is_there:
            self._registry.publish_fragment(self._job, None)


class KeptSettings:
    """Writes the operator's settings again before their lease ends, and where the store lost them.

    Those that tell no end and are not to stay end with their writer's lease. A tenant's role may
    not write any.

    Args:
        retry_s: seconds between two attempts while they are lost.
    """

    def __init__(self, registry: Registry, retry_s: float) -> None:
        self._registry = registry
        self._retry_s = retry_s
        #: As they were seen last, and when they are due to be written.
        self._seen: bytes | None = None
        self._settings = OperatorSettings()
        self._lost = False
        self._keep_at_s = float("inf")

    def keep(self, view: View, now_s: float) -> None:
        """Write what is due after ``view`` of the store."""
        if view.operator.revision and view.operator_raw != self._seen:
            self._seen, self._settings = view.operator_raw, view.operator
            self._keep_at_s = now_s + MAX_LEASE_S / 3
        lease_s = self._settings.lease_s(time.time())
        if self._seen is None or not lease_s:
            return
        lost, before = view.operator_raw is None, self._lost
        self._lost = lost
        if now_s < self._keep_at_s and (before or not lost):
            return
        self._keep_at_s = now_s + (self._retry_s if lost else MAX_LEASE_S / 3)
        try:
            self._registry.keep_operator(self._seen, lease_s)
        except StoreError as error:
            _log.debug("the operator's settings were not written again: %s", error)


class FollowedEntry:
    """Publishes the entry that this job follows, for status commands."""

    def __init__(self, registry: Registry, job: str) -> None:
        self._registry = registry
        self._job = job
        #: What was published last, and until when that holds.
        self._published: StoredEntry | None = None
        self._until_s = float("-inf")

    def publish(self, plan: Plan | None, now_s: float) -> None:
        """Write what is due: this job's entry in ``plan``."""
        entry = plan.entry(self._job) if plan is not None else None
        if plan is None or entry is None:
            self.withdraw()
            return
        stored = StoredEntry(digest=plan.digest_for(self._job), entry=entry)
        if stored == self._published and now_s < self._until_s:
            return
        self._published, self._until_s = stored, now_s + MAX_LEASE_S / 3
        if not self._put(stored):
            self._until_s = now_s + FORBIDDEN_S

    def publish_again(self) -> None:
        """Note that the store may have lost it."""
        self._until_s = float("-inf")

    def withdraw(self) -> None:
        """Remove what was published."""
        if self._published is not None:
            self._put(None)
            self._published = None

    def _put(self, stored: StoredEntry | None) -> bool:
        try:
            self._registry.publish_follows(self._job, stored)
        except StoreForbidden as error:
            _log.debug("this job's role may not say what it follows: %s", error)
            return False
        return True


class StepClock:
    """Publishes a job's step time for status commands: one small write in each lease, or profile.

    It lies apart from the job's record. So it is read by nobody who plans, and changes no plan.

    Args:
        lease_s: of the job.
        iteration_ends: of the job, on the clock that :meth:`publish` is given.
    """

    def __init__(
        self, registry: Registry, job: str, lease_s: float, iteration_ends: IterationEnds
    ) -> None:
        self._registry = registry
        self._job = job
        self._lease_s = lease_s
        self._ends = iteration_ends
        self._profile: JobProfile | None = None
        self._profiled_at_s = 0.0
        self._fastest_s: float | None = None
        self._is_there = False
        self._due_at_s = float("-inf")

    def publish(self, now_s: float, profile: JobProfile | None) -> None:
        """Write what is due.

        Args:
            profile: of the job, as it is published.
        """
        if profile is not self._profile:
            self._profile, self._profiled_at_s, self._fastest_s = profile, now_s, None
            self._due_at_s = now_s
        if now_s < self._due_at_s:
            return
        steps = self._steps(now_s)
        if steps is None:
            return
        self._due_at_s = now_s + self._lease_s
        try:
            lease_s = min(LEASES * self._lease_s, MAX_LEASE_S)
            self._registry.publish_steps(self._job, steps, lease_s)
            self._is_there = True
        except StoreForbidden as error:
            _log.debug("this job's role may not tell what its steps take: %s", error)
            self._due_at_s = now_s + FORBIDDEN_S

    def withdraw(self) -> None:
        """Remove what was published."""
        if self._is_there:
            self._registry.publish_steps(self._job, None)
            self._is_there = False

    def _steps(self, now_s: float) -> StepTimes | None:
        """Return the step times now; None before two iterations have ended."""
        ends_s = np.array(list(self._ends(0)), np.float64) / 1e9
        if len(ends_s) < 2:
            return None
        begin = int(np.searchsorted(ends_s, now_s - WINDOW_S))
        ends_s = ends_s[min(begin, max(0, len(ends_s) - MIN_ITERATIONS - 1)) :]
        steps_s = np.diff(ends_s)
        # A pause, like that of a checkpoint, is no step.
        steps_s = steps_s[steps_s <= PAUSE * np.median(steps_s)]
        step_s = float(steps_s.mean())
        profile_age_s = None
        if self._profile is not None:
            profile_age_s = now_s - self._profiled_at_s
            # Only steps of the work that was measured.
            if ends_s[0] >= self._profiled_at_s and len(steps_s) >= MIN_ITERATIONS:
                self._fastest_s = min(step_s, self._fastest_s or step_s)
        return StepTimes(
            step_s=step_s,
            iterations=len(steps_s),
            age_s=max(0.0, now_s - float(ends_s[-1])),
            fastest_s=self._fastest_s,
            profile_age_s=profile_age_s,
        )
