"""Charts of a comparison as inline SVG: step times, utilisation, timelines.

Colours come from the page's CSS classes, so that the charts follow its light and dark scheme.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape

from crux_torch.report.comparison import Comparison, Lane, Point, Timeline

WIDTH = 920
_LABEL_WIDTH = 190
_RIGHT = 16


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, linearly interpolated."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def ticks(end: float, about: int = 6) -> list[float]:
    """Round numbers from 0 to ``end``, about ``about`` of them."""
    if end <= 0:
        return [0.0]
    raw = end / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= raw * 0.999)
    return [step * i for i in range(int(end / step * 1.000001) + 1)]


def step_time_chart(comparison: Comparison, job: str, title: str, colour: int) -> str:
    """Every step of one job as a dot, a row for each case, with the median and the middle 80%."""
    cases = [c for c in comparison.cases if comparison.times(job, c.key)]
    end_s = 1.08 * max(quantile(comparison.times(job, c.key), 0.98) for c in cases)
    row = 46
    height = row * len(cases) + 34
    x = _scale(0.0, end_s, _LABEL_WIDTH, WIDTH - _RIGHT)
    parts = [_time_axis(end_s, x, 6, height - 28, unit_ms=True)]
    described = []
    for index, case in enumerate(cases):
        values = comparison.times(job, case.key)
        middle = 6 + row * index + row / 2
        median, low, high = statistics.median(values), quantile(values, 0.1), quantile(values, 0.9)
        parts.append(_text(_LABEL_WIDTH - 12, middle + 4, case.title, "end"))
        dots = "".join(
            f'<circle cx="{x(v):.1f}" cy="{middle + _jitter(i) * 22:.1f}" r="2.4"/>'
            for i, v in enumerate(values)
            if v <= end_s
        )
        parts.append(f'<g class="dots job{colour}">{dots}</g>')
        parts.append(
            f'<line class="range job{colour}" x1="{x(low):.1f}" x2="{x(high):.1f}" '
            f'y1="{middle:.1f}" y2="{middle:.1f}"/>'
            f'<line class="median job{colour}" x1="{x(median):.1f}" x2="{x(median):.1f}" '
            f'y1="{middle - 15:.1f}" y2="{middle + 15:.1f}"/>'
        )
        described.append(f"{case.title}: median {1e3 * median:.0f} ms")
        beyond = sum(v > end_s for v in values)
        if beyond:
            parts.append(_text(WIDTH - _RIGHT, middle - 12, f"{beyond} beyond", "end", "faint"))
    return _svg(height, f"Step times of {title}", "; ".join(described), parts)


def utilisation_chart(comparison: Comparison) -> str:
    """A bar for the utilisation of each case."""
    cases = [(c.title, c.utilisation) for c in comparison.cases if c.utilisation is not None]
    row = 34
    height = row * len(cases) + 30
    x = _scale(0.0, 1.0, _LABEL_WIDTH, WIDTH - _RIGHT - 50)
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_grid_line(x(tick), 4, height - 26))
        parts.append(_text(x(tick), height - 8, f"{100 * tick:.0f}%", "middle", "faint"))
    for index, (title, value) in enumerate(cases):
        top = 4 + row * index + 7
        parts.append(_text(_LABEL_WIDTH - 12, top + 14, title, "end"))
        parts.append(
            f'<rect class="bar" x="{x(0):.1f}" y="{top}" width="{x(value) - x(0):.1f}" '
            f'height="{row - 14}" rx="2"/>'
        )
        parts.append(_text(x(value) + 8, top + 14, f"{100 * value:.1f}%", "start", "strong"))
    described = "; ".join(f"{title}: {100 * value:.1f}%" for title, value in cases)
    return _svg(height, "Utilisation of the devices", described, parts)


def timeline_chart(comparison: Comparison, timeline: Timeline) -> str:
    """Each job's computing and waiting, above what its connections sent."""
    lane_height = 92
    height = lane_height * len(timeline.lanes) + 30
    x = _scale(0.0, timeline.length_s, _LABEL_WIDTH, WIDTH - _RIGHT)
    highest = max((rate for lane in timeline.lanes for _, rate in lane.rate_Bps), default=0.0)
    ceiling = max(highest, comparison.capacity_Bps or 0.0) or 1.0
    parts = [_time_axis(timeline.length_s, x, 4, height - 26, unit_ms=False)]
    order = {job.name: (i, job.title) for i, job in enumerate(comparison.jobs)}
    for index, lane in enumerate(timeline.lanes):
        colour, title = order.get(lane.job, (index, lane.job))
        parts += _lane(lane, title, colour, 6 + lane_height * index, lane_height, ceiling, x)
    title = f"Timeline: {comparison.case_title(timeline.case)}"
    described = f"{timeline.length_s:.1f} seconds; for each job when it computes, when it waits "
    return _svg(height, title, described + "for communication, and the rate it sends at", parts)


def _lane(
    lane: Lane, title: str, colour: int, top: float, height: float, ceiling: float, x: _Scale
) -> list[str]:
    base = top + height - 12
    area_top = top + 26
    parts = [
        _text(_LABEL_WIDTH - 12, top + 14, title, "end"),
        _text(_LABEL_WIDTH - 12, base - 12, "sending", "end", "faint"),
    ]
    for kind, intervals in (("computing", lane.computing), ("waiting", lane.waiting)):
        parts += [
            f'<rect class="{kind} job{colour}" x="{x(i.start):.1f}" y="{top + 3}" '
            f'width="{max(0.5, x(i.end) - x(i.start)):.1f}" height="15"/>'
            for i in intervals
        ]
    if lane.rate_Bps:
        parts.append(_area(lane.rate_Bps, colour, base, base - area_top, ceiling, x))
    parts.append(f'<line class="grid" x1="{x.low}" x2="{x.high}" y1="{base}" y2="{base}"/>')
    return parts


def _area(
    rate: Sequence[Point], colour: int, base: float, height: float, ceiling: float, x: _Scale
) -> str:
    points = [f"{x(rate[0][0]):.1f},{base:.1f}"]
    points += [f"{x(at):.1f},{base - height * value / ceiling:.1f}" for at, value in rate]
    points.append(f"{x(rate[-1][0]):.1f},{base:.1f}")
    return f'<polygon class="area job{colour}" points="{" ".join(points)}"/>'


class _Scale:
    """A linear map from values to horizontal positions."""

    def __init__(self, start: float, end: float, low: float, high: float) -> None:
        self.low, self.high = low, high
        self._start = start
        self._factor = (high - low) / (end - start) if end > start else 0.0

    def __call__(self, value: float) -> float:
        return self.low + (value - self._start) * self._factor


_scale = _Scale


def _time_axis(end_s: float, x: _Scale, top: float, bottom: float, unit_ms: bool) -> str:
    parts = []
    for tick in ticks(end_s, 8):
        label = f"{1e3 * tick:g} ms" if unit_ms else f"{tick:g} s"
        parts.append(_grid_line(x(tick), top, bottom))
        parts.append(_text(x(tick), bottom + 18, label, "middle", "faint"))
    return "".join(parts)


def _grid_line(at: float, top: float, bottom: float) -> str:
    return f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _jitter(index: int) -> float:
    # The golden ratio spreads any number of dots evenly, the same way each time.
    return (index * 0.618033988749895) % 1.0 - 0.5


def _svg(height: float, title: str, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )
