"""The last hour of a cluster, kept in memory by the process that serves its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crux_torch.report.cluster_status import ClusterStatus
from crux_torch.report.live_cluster import LinkLoad

#: Seconds between two samples, and of all of them.
PERIOD_S, HOUR_S = 30.0, 3600.0
#: Jobs in small multiples.
MULTIPLES = 12
#: Width and height of one.
WIDTH, HEIGHT = 160, 40
#: Least top of the scale of slowdowns.
LEAST_TOP = 1.5


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the cluster at one moment.

    Attributes:
        at_s: seconds since 1970.
        slowdown: of the jobs whose step now and alone are known.
        load: planned load of the busiest link over its capacity; None without a topology.
    """

    at_s: float
    slowdown: Mapping[str, float]
    load: float | None


@dataclass(frozen=True, slots=True)
class Multiple:
    """One small drawing.

    Attributes:
        points: of its lines, one for each stretch without a gap, as SVG has them.
        top: what the upper border stands for.
        first, last: values at the ends of what is known.
    """

    title: str
    points: tuple[str, ...]
    top: float
    low: float
    high: float
    last: float


@dataclass
class Hour:
    """Samples of the last hour. One thread adds, any may read."""

    samples: tuple[Sample, ...] = ()

    def add(
        self, status: ClusterStatus, loads: Mapping[str, LinkLoad] | None, now_s: float
    ) -> None:
        """Keeps a sample if the last one is old enough, and drops those older than an hour."""
        if self.samples and now_s - self.samples[-1].at_s < PERIOD_S:
            return
        known = {name: steps.slowdown for name, steps in status.steps.items()}
        ratios = [load.planned_ratio for load in (loads or {}).values()]
        made = Sample(
            now_s,
            {name: value for name, value in known.items() if value is not None},
            max(ratios, default=0.0) if loads is not None else None,
        )
        kept = (sample for sample in self.samples if sample.at_s >= now_s - HOUR_S)
        self.samples = (*kept, made)

    def multiples(self) -> tuple[Multiple, ...]:
        """Returns the drawings of the jobs that were slowed down most in the hour."""
        samples = self.samples
        worst: dict[str, float] = {}
        for sample in samples:
            for name, value in sample.slowdown.items():
                worst[name] = max(value, worst.get(name, 0.0))
        shown = sorted(worst, key=lambda name: (-worst[name], name))[:MULTIPLES]
        top = max([LEAST_TOP, *(worst[name] for name in shown)])
        return tuple(
            _multiple(name, samples, [sample.slowdown.get(name) for sample in samples], top)
            for name in shown
        )

    def busiest_link(self) -> Multiple | None:
        """Returns the drawing of the planned load of the busiest link, if any is known."""
        samples = self.samples
        values = [sample.load for sample in samples]
        known = [value for value in values if value is not None]
        return _multiple("busiest link", samples, values, max([1.0, *known])) if known else None


def _multiple(
    title: str, samples: Sequence[Sample], values: Sequence[float | None], top: float
) -> Multiple:
    end_s = samples[-1].at_s
    lines: list[list[str]] = [[]]
    for sample, value in zip(samples, values, strict=True):
        if value is None:
            lines.append([])
            continue
        x = WIDTH * (1 - (end_s - sample.at_s) / HOUR_S)
        lines[-1].append(f"{x:.1f},{HEIGHT * (1 - value / top):.1f}")
    known = [value for value in values if value is not None]
    points = tuple(_line(line) for line in lines if line)
    return Multiple(title, points, top, min(known), max(known), known[-1])


def _line(points: Sequence[str]) -> str:
    """Returns a line through the points; one through a single point is a dash."""
    if len(points) > 1:
        return " ".join(points)
    x, y = points[0].split(",")
    return f"{float(x) - 2:.1f},{y} {points[0]}"
