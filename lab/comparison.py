"""What the demo found, as plain values that turn into JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec

Point = tuple[float, float]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One condition under which the jobs were measured.

    Attributes:
        key: short name that the other records refer to.
        title: what a reader calls it.
        utilisation: of the cluster, 0 to 1; None where it was not measured.
        seconds: for how long it was measured.
    """

    key: str
    title: str
    utilisation: float | None = None
    seconds: float = 0.0


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one job's steps in one case, seconds."""

    job: str
    case: str
    seconds: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """What Crux measured of one job and decided about it. None: Crux said nothing about it.

    Attributes:
        flops: W, FLOPs of one iteration over all devices.
        t_s: seconds that one iteration's traffic needs on its slowest link.
        period_s: seconds from one iteration to the next.
        overlap: share of the communication that computation hides.
        intensity: I = W / t, FLOP/s.
        correction: k.
        priority: P = k I.
        level: its priority level; a higher one goes first.
        dscp: DSCP value found on its connections.
        losses_equal: whether its losses equal those of the stock run, bit for bit.
        steps_compared: how many losses were compared.
    """

    name: str
    title: str
    flops: float | None = None
    t_s: float | None = None
    period_s: float | None = None
    overlap: float | None = None
    intensity: float | None = None
    correction: float | None = None
    priority: float | None = None
    level: int | None = None
    dscp: int | None = None
    losses_equal: bool | None = None
    steps_compared: int = 0


class Interval(msgspec.Struct, frozen=True):
    """Seconds from the beginning of a timeline."""

    start: float
    end: float


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One job on a timeline.

    Attributes:
        computing: when it computed.
        waiting: when it waited for its communication.
        rate_Bps: what its connections sent, as (seconds, bytes per second).
    """

    job: str
    computing: tuple[Interval, ...] = ()
    waiting: tuple[Interval, ...] = ()
    rate_Bps: tuple[Point, ...] = ()


class CaseTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A few seconds of one case, with a lane for each job."""

    case: str
    length_s: float
    lanes: tuple[Lane, ...]


class LinkBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a link sent in one case, by level."""

    case: str
    link: str
    by_level: dict[int, int]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that share a network, measured alone, together, and together with Crux.

    Attributes:
        title: of the report.
        setting: sentences that say where and how it was measured.
        notes: sentences that a reader needs to judge the numbers.
        capacity_Bps: of the shared link; None where there is none.
        baseline: key of the case that step times are compared with.
    """

    title: str
    setting: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    capacity_Bps: float | None = None
    baseline: str
    cases: tuple[Case, ...]
    jobs: tuple[JobRow, ...]
    step_times: tuple[StepTimes, ...]
    timelines: tuple[CaseTimeline, ...] = ()
    links: tuple[LinkBytes, ...] = ()

    def times(self, job: str, case: str) -> tuple[float, ...]:
        """Step times of ``job`` in ``case``; empty where it did not run."""
        return next((s.seconds for s in self.step_times if (s.job, s.case) == (job, case)), ())

    def case_title(self, key: str) -> str:
        """What a reader calls the case."""
        return next((case.title for case in self.cases if case.key == key), key)
