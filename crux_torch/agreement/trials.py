"""One job's part in trying out a plan: it measures its iterations, and may judge its component's.

    safe plan, measured -> on trial -> kept, or taken back for a while

The jobs of a component that has something to try publish what their iterations take, apart from
their records, so that nobody else reads it. The first job of the component is the judge. It says in
its record what it lets its component try: that is part of what a plan follows from, so all leaders
give the component the plan on trial, or the safe one, in the same plan.
docs/understand/agreement.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from crux_torch.agreement.audit import about_trial
from crux_torch.agreement.bounds import claimed_devices
from crux_torch.agreement.records import (
    MAX_TRIED,
    JobRecord,
    Measured,
    OnTrial,
    Plan,
    PlanEntry,
    TriedPlan,
)
from crux_torch.agreement.registry import Registry
from crux_torch.errors import StoreForbidden
from crux_torch.schedule.default.guard import WAITING_S, Judgement, Member, Tally, enough, judge
from crux_torch.store import MAX_LEASE_S

_log = logging.getLogger(__name__)

#: Seconds between two looks at the measurements, and between two publications.
LOOK_S = 2.0
#: Seconds that do not count after another plan came, and after a job of the component was measured
#: or made other connections.
SETTLE_S = 5.0
#: Seconds after which the plan before need not be known better for a trial.
BEFORE_S = 600.0
#: Seconds after which a trial ends as soon as something is known of each job.
TRIAL_S = 1800.0
#: Seconds for which a plan that did worse is not tried again; each time twice as long.
TAKEN_BACK_S = 3600.0
#: Doublings at most.
MAX_DOUBLINGS = 8
#: Larger shares stand for infinity, which JSON has not.
BOUNDLESS = 1e9

#: Ends of the job's iterations since a time, in ns of the monotonic clock.
IterationEnds = Callable[[int], Iterable[int]]


class Trials:
    """Measures one job while its component has a plan to try, and judges if it is its turn.

    Every method that uses the store raises StoreError if it can't be reached.

    Args:
        max_slowdown: see :func:`crux_torch.schedule.default.guard.judge`.
        iteration_ends: of the job, on the clock that :meth:`step` is given.
    """

    def __init__(
        self, registry: Registry, job: str, max_slowdown: float, iteration_ends: IterationEnds
    ) -> None:
        self._registry = registry
        self._job = job
        self._max_slowdown = max_slowdown
        self._ends = iteration_ends
        self._name = ""
        #: Of what is measured: the trial's name, whether the plan is on, and the job's own entry.
        self._counted: object = None
        self._before = self._after = Tally(0.0)
        self._counts_from_s = float("inf")
        self._last_end_ns: int | None = None
        self._published: Measured | None = None
        self._publish_until_s = float("-inf")
        self._on_paths: int | None = None
        self._look_at_s = float("-inf")
        #: As judge: what it judged last, since when the jobs are measured before, since when the
        #: plan is on trial, and when and how often plans were taken back.
        self._judged = ""
        self._before_since_s = self._on_since_s = float("-inf")
        self._taken_back: dict[str, tuple[float, int]] = {}
        self._mine: tuple[TriedPlan, ...] = ()
        self._company = frozenset[str]()
        self._verdict: TriedPlan | None = None

    def step(
        self, now_s: float, plan: Plan | None, records: Sequence[JobRecord]
    ) -> tuple[TriedPlan, ...]:
        """Count what has ended, publish it, and judge.

        Args:
            plan: in force.
            records: of the last look.

        Returns:
            the judge's part of this job's record.
        """
        entry = plan.entry(self._job) if plan is not None else None
        trial = entry.trial if entry is not None else msgspec.UNSET
        if plan is None or entry is None or trial is msgspec.UNSET:
            self._company = frozenset()
            self._pause(now_s)
            return self._mine
        if trial.judge != self._job:
            self._company = frozenset({trial.judge})
        by_name = {record.job: record for record in records}
        own, judge_record = by_name.get(self._job), by_name.get(trial.judge)
        if own is None or own.profile is None or judge_record is None:
            self._pause(now_s)
            return self._mine
        judges = trial.judge == self._job
        trials = self._mine if judges else judge_record.trials
        verdict = next((t for t in trials if t.name == trial.name), None)
        self._verdict = verdict
        if verdict is not None and verdict.state != "trying":
            self._end()
            if judges and verdict.state == "worse":
                self._forgive(now_s, trial.name)
            return self._mine
        jobs = _jobs_of(plan, trial)
        self._count(now_s, entry, own, trial, [by_name[job] for job in jobs if job in by_name])
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            try:
                self._publish(now_s, trial)
            except StoreForbidden as error:
                _log.debug("this job's role may not publish its iterations: %s", error)
            if judges:
                self._judge(now_s, trial, jobs, by_name)
        return self._mine

    @property
    def company(self) -> frozenset[str]:
        """Jobs whose records :meth:`step` needs: the judge, and those that it judges."""
        return self._company

    def withdraw(self) -> None:
        """Remove the measurements, as this job ends."""
        if self._published is not None:
            self._registry.publish_measured(self._job, None)
            self._published = None

    def status(self) -> Mapping[str, object]:
        """Return plain values for status commands."""
        return {
            "of": self._name or None,
            "before": self._before.sample._asdict(),
            "after": self._after.sample._asdict(),
            "verdict": about_trial(self._verdict) if self._verdict is not None else "",
        }

    def _pause(self, now_s: float) -> None:
        """Count nothing until a while from now."""
        self._last_end_ns = None
        self._counts_from_s = now_s + SETTLE_S
        self._before.skip()
        self._after.skip()

    def _end(self) -> None:
        self._name, self._counted = "", None
        self.withdraw()

    def _count(
        self,
        now_s: float,
        entry: PlanEntry,
        own: JobRecord,
        trial: OnTrial,
        members: Sequence[JobRecord],
    ) -> None:
        """Take in the iterations that have ended."""
        assert own.profile is not None
        if trial.name != self._name:
            self._name = trial.name
            self._before = Tally(own.profile.period_s)
        seen = trial.name, trial.on, entry.level, entry.paths
        if seen != self._counted:
            self._counted = seen
            self._after = Tally(own.profile.period_s)
            if not trial.on:
                self._before = Tally(own.profile.period_s)
            self._pause(now_s)
        on_paths = own.paths.as_planned if own.paths is not None else None
        if on_paths != self._on_paths or any(m.state == "profiling" for m in members):
            self._on_paths = on_paths
            self._pause(now_s)
        if now_s < self._counts_from_s:
            return
        tally = self._after if trial.on else self._before
        if self._last_end_ns is None:
            self._last_end_ns = -1
        since_ns = max(round(self._counts_from_s * 1e9), self._last_end_ns + 1)
        for end_ns in self._ends(since_ns):
            if self._last_end_ns > 0:
                tally.add((int(end_ns) - self._last_end_ns) / 1e9)
            self._last_end_ns = int(end_ns)

    def _waiting_s(self, now_s: float) -> float:
        if self._last_end_ns is None:
            return 0.0
        waiting_s = now_s - max(self._counts_from_s, self._last_end_ns / 1e9)
        return round(waiting_s, 1) if waiting_s >= WAITING_S else 0.0

    def _publish(self, now_s: float, trial: OnTrial) -> None:
        measured = Measured(
            name=trial.name,
            before=self._before.sample,
            after=self._after.sample,
            waiting_s=self._waiting_s(now_s) if trial.on else 0.0,
        )
        if measured != self._published or now_s >= self._publish_until_s:
            self._registry.publish_measured(self._job, measured)
            self._published, self._publish_until_s = measured, now_s + MAX_LEASE_S / 3

    def _judge(
        self, now_s: float, trial: OnTrial, jobs: Sequence[str], records: Mapping[str, JobRecord]
    ) -> None:
        measured = self._registry.measured(jobs if len(jobs) == trial.jobs else None)
        self._company = frozenset(
            job for job, sample in measured.items() if sample.name == trial.name
        )
        members = {}
        for job, sample in measured.items():
            record = records.get(job)
            if sample.name == trial.name and record is not None and record.profile is not None:
                members[job] = Member(
                    gpus=claimed_devices(record),
                    compute_s=record.profile.compute_s,
                    alone_s=record.profile.period_s,
                    before=sample.before,
                    after=sample.after,
                    waiting_s=sample.waiting_s,
                )
        if len(members) != trial.jobs:
            return  # somebody has not published yet
        if not trial.on:
            if trial.name != self._judged:
                self._judged, self._before_since_s = trial.name, now_s
            patient = now_s - self._before_since_s < BEFORE_S
            if all(enough(member.before, patient) for member in members.values()):
                self._say(TriedPlan(name=trial.name, jobs=tuple(sorted(members)), state="trying"))
                self._on_since_s = now_s
            return
        found = judge(members, self._max_slowdown, now_s - self._on_since_s >= TRIAL_S)
        if found.verdict == "open":
            return
        self._say(_tried(trial.name, members, found, found.verdict))
        if found.verdict == "worse":
            times = self._taken_back.get(trial.name, (0.0, 0))[1] + 1
            self._taken_back[trial.name] = now_s, times

    def _say(self, tried: TriedPlan) -> None:
        """Put the state of this trial into the job's record, and drop the oldest one."""
        others = tuple(t for t in self._mine if t.name != tried.name)
        self._mine = (*others, tried)[-MAX_TRIED:]
        names = {t.name for t in self._mine}
        self._taken_back = {n: v for n, v in self._taken_back.items() if n in names}

    def _forgive(self, now_s: float, name: str) -> None:
        """Let a plan that was taken back be tried again after a while."""
        at_s, times = self._taken_back.get(name, (now_s, 1))
        if now_s - at_s >= TAKEN_BACK_S * 2 ** min(times - 1, MAX_DOUBLINGS):
            self._mine = tuple(t for t in self._mine if t.name != name)
            self._judged = ""


def _jobs_of(plan: Plan, trial: OnTrial) -> list[str]:
    """Return the jobs of the component, as far as the plan is known here."""
    entries = (e for e in plan.entries if e.trial is not msgspec.UNSET)
    return [e.job for e in entries if e.trial and e.trial.name == trial.name]


def _tried(
    name: str, members: Mapping[str, Member], found: Judgement, state: Literal["kept", "worse"]
) -> TriedPlan:
    numbers = (max(-BOUNDLESS, min(BOUNDLESS, x)) for x in (found.change, found.low, found.high))
    change, low, high = numbers
    return TriedPlan(
        name=name,
        jobs=tuple(sorted(members)),
        state=state,
        change=change,
        low=low,
        high=high,
        iterations=min(member.after.iterations for member in members.values()),
        slowed=found.slowed,
    )
