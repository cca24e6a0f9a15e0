"""Publishes a job's step time in the store, for status commands."""

from __future__ import annotations

import logging

import numpy as np

from crux_torch.control.records import StepTimes
from crux_torch.control.registry import Registry
from crux_torch.control.trials import IterationEnds
from crux_torch.errors import StoreForbidden
from crux_torch.measure.job_profile import JobProfile
from crux_torch.schedule.guard import PAUSE
from crux_torch.store.shared_store import MAX_LEASE_S

_log = logging.getLogger(__name__)

#: Seconds of which the iterations count, and how many do at least, as far as they are known.
WINDOW_S, MIN_ITERATIONS = 30.0, 5
#: What is told is written again after a third of its lease, and so much of a job's.
LEASES = 3.0
#: Seconds for which a job whose role may not tell its steps does not try again.
FORBIDDEN_S = 60.0


class StepClock:
    """Tells the store what the job's steps take. It costs one small write in each lease.

    It lies apart from the job's record. So it is read by nobody who plans, and changes no plan.

    Args:
        job, lease_s: of the job.
        iteration_ends: of the job, on the clock that :meth:`tell` is given.
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
        self._told = False
        self._due_at_s = float("-inf")

    def tell(self, now_s: float, profile: JobProfile | None) -> None:
        """Write what is due.

        Args:
            profile: of the job, as it is published.

        Raises:
            StoreError: the store can't be reached.
        """
        if profile is not self._profile:
            self._profile, self._profiled_at_s, self._fastest_s = profile, now_s, None
        if now_s < self._due_at_s:
            return
        self._due_at_s = now_s + self._lease_s
        steps = self._steps(now_s)
        if steps is None:
            return
        try:
            lease_s = min(LEASES * self._lease_s, MAX_LEASE_S)
            self._registry.publish_steps(self._job, steps, lease_s)
            self._told = True
        except StoreForbidden as error:
            _log.debug("this job's role may not tell what its steps take: %s", error)
            self._due_at_s = now_s + FORBIDDEN_S

    def withdraw(self) -> None:
        """Remove what was told.

        Raises:
            StoreError: the store can't be reached.
        """
        if self._told:
            self._registry.publish_steps(self._job, None, self._lease_s)
            self._told = False

    def _steps(self, now_s: float) -> StepTimes | None:
        """Returns the step times now; None before two iterations have ended."""
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
