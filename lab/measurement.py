"""What the demo measured, and the comparison that follows from it: no processes, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lab.comparison import Case, CaseTimeline, Interval, JobRow, Lane, LinkBytes, StepTimes
from lab.job import Step
from lab.phases import Window, compute_seconds, durations, steps_within, utilisation

GPUS_PER_JOB = 2


@dataclass
class Measurement:
    """Everything that was observed of the jobs.

    Attributes:
        stock: for each job its steps under torchrun with the stock backend.
        crux: the same under cruxrun.
        alone: for each job the windows in which it ran alone (stock).
        together: windows in which both ran, stock.
        with_crux: windows in which both ran under Crux.
        sent: for each window, bytes that each job's connections had sent, by time.
        links: bytes by level of the shared link for each case.
        status: the store's last state, as ``crux status --json`` prints it.
        dscp: what each job's connections carried in the end.
    """

    stock: dict[str, list[Step]] = field(default_factory=dict)
    crux: dict[str, list[Step]] = field(default_factory=dict)
    alone: dict[str, list[Window]] = field(default_factory=dict)
    together: list[Window] = field(default_factory=list)
    with_crux: list[Window] = field(default_factory=list)
    sent: dict[str, dict[str, list[tuple[float, int]]]] = field(default_factory=dict)
    links: dict[str, dict[str, dict[int, int]]] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    dscp: dict[str, int] = field(default_factory=dict)

    def compute_s(self) -> dict[str, float]:
        """Seconds that one step of each job computes while the job is alone."""
        return {name: compute_seconds(self.stock[name], w) for name, w in self.alone.items()}

    def cases(self) -> tuple[Case, ...]:
        compute = self.compute_s()
        names = list(self.alone)
        alone = sum(
            self._utilisation({name: self.stock[name]}, windows, compute)
            for name, windows in self.alone.items()
        )
        stock = {name: self.stock[name] for name in names}
        crux = {name: self.crux[name] for name in names}
        return (
            Case(
                key="alone",
                title="Alone",
                utilisation=alone,
                seconds=sum(map(_length, self.alone.values())),
            ),
            Case(
                key="together",
                title="Together",
                utilisation=self._utilisation(stock, self.together, compute),
                seconds=_length(self.together),
            ),
            Case(
                key="with_crux",
                title="Together, Crux",
                utilisation=self._utilisation(crux, self.with_crux, compute),
                seconds=_length(self.with_crux),
            ),
        )

    def step_times(self) -> tuple[StepTimes, ...]:
        found = []
        for name, windows in self.alone.items():
            for case, steps, where in (
                ("alone", self.stock[name], windows),
                ("together", self.stock[name], self.together),
                ("with_crux", self.crux[name], self.with_crux),
            ):
                found.append(StepTimes(job=name, case=case, seconds=tuple(durations(steps, where))))
        return tuple(found)

    def job_rows(self, titles: Mapping[str, str]) -> tuple[JobRow, ...]:
        profiles = {job["job"]: job["profile"] or {} for job in self.status.get("jobs", ())}
        plan = self.status.get("plan") or {}
        entries = {entry["job"]: entry for entry in plan.get("entries", ())}
        rows = []
        for name, title in titles.items():
            profile, entry = profiles.get(name, {}), entries.get(name, {})
            equal, compared = losses_equal(self.stock[name], self.crux[name])
            rows.append(
                JobRow(
                    name=name,
                    title=title,
                    flops=profile.get("flops"),
                    t_s=profile.get("t_s"),
                    period_s=profile.get("period_s"),
                    overlap=profile.get("overlap"),
                    intensity=entry.get("intensity"),
                    correction=entry.get("correction"),
                    priority=entry.get("priority"),
                    level=entry.get("level"),
                    dscp=self.dscp.get(name),
                    losses_equal=equal,
                    steps_compared=compared,
                )
            )
        return tuple(rows)

    def timelines(self, length_s: float = 3.0) -> tuple[CaseTimeline, ...]:
        """The end of the last window of each case in which both jobs ran."""
        found = []
        for case, steps, windows in (
            ("together", self.stock, self.together),
            ("with_crux", self.crux, self.with_crux),
        ):
            if windows:
                end = windows[-1].end
                start = max(windows[-1].start, end - length_s)
                lanes = tuple(
                    _lane(name, steps[name], self.sent.get(case, {}).get(name, ()), start, end)
                    for name in self.alone
                )
                found.append(CaseTimeline(case=case, length_s=end - start, lanes=lanes))
        return tuple(found)

    def link_rows(self) -> tuple[LinkBytes, ...]:
        return tuple(
            LinkBytes(case=case, link=link, by_level=by_level)
            for case, links in self.links.items()
            for link, by_level in links.items()
        )

    def slowdown(self, name: str, case: str) -> float:
        """Median step of a job in a case over its median alone."""
        times = {(s.job, s.case): statistics.median(s.seconds) for s in self.step_times()}
        return times[name, case] / times[name, "alone"]

    def _utilisation(
        self,
        steps: Mapping[str, Sequence[Step]],
        windows: Sequence[Window],
        compute: Mapping[str, float],
    ) -> float:
        return utilisation(
            {name: steps_within(done, windows) for name, done in steps.items()},
            compute,
            dict.fromkeys(steps, GPUS_PER_JOB),
            _length(windows),
            GPUS_PER_JOB * len(self.alone),
        )


def losses_equal(a: Sequence[Step], b: Sequence[Step]) -> tuple[bool | None, int]:
    """Whether the losses of the steps that both runs did are the same bits; how many there are."""
    both = min(len(a), len(b))
    if not both:
        return None, 0
    return [s.loss for s in a[:both]] == [s.loss for s in b[:both]], both


def _length(windows: Iterable[Window]) -> float:
    return sum(w.length_s for w in windows)


def _lane(
    name: str, steps: Iterable[Step], sent: Sequence[tuple[float, int]], start: float, end: float
) -> Lane:
    inside = [s for s in steps if s.end > start and s.start < end]
    return Lane(
        job=name,
        computing=_clip(((s.start, s.computed) for s in inside), start, end),
        waiting=_clip(((s.computed, s.end) for s in inside), start, end),
        rate_Bps=tuple(
            ((t0 + t1) / 2 - start, (b1 - b0) / (t1 - t0))
            for (t0, b0), (t1, b1) in pairwise(sent)
            if t0 >= start and t1 <= end and t1 > t0
        ),
    )


def _clip(
    intervals: Iterable[tuple[float, float]], start: float, end: float
) -> tuple[Interval, ...]:
    clipped = ((max(a, start) - start, min(b, end) - start) for a, b in intervals)
    return tuple(Interval(a, b) for a, b in clipped if b > a)
