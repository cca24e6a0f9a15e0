"""A comparison as one self-contained HTML page."""

from __future__ import annotations

from matplotlib.figure import FigureBase

from crux_torch.report.page import report
from crux_torch.report.page.charts import COLOURS, Chart, Lane, Span, panels, timeline
from lab.comparison import CaseTimeline, Comparison, Interval
from lab.tables import sheets, spread_ms


def render(comparison: Comparison) -> str:
    """The page; the same comparison gives the same page."""
    charts = [_utilisation(comparison)]
    if comparison.step_times:
        charts.append(_step_times(comparison))
    charts += [_timeline(comparison, timeline) for timeline in comparison.timelines]
    return report(
        comparison.title,
        sheets(comparison),
        charts,
        setting=comparison.setting,
        notes=comparison.notes,
    )


def _utilisation(comparison: Comparison) -> Chart:
    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for y, case in enumerate(comparison.cases):
            share = 100 * (case.utilisation or 0.0)
            axes.barh(y, share, 0.6, color="0.4")
            axes.text(share + 1, y, f"{share:.1f}%" if case.utilisation else "–", va="center")
        axes.set_yticks(range(len(comparison.cases)), [case.title for case in comparison.cases])
        axes.set(xlim=(0, 100), xlabel="%")
        axes.invert_yaxis()

    caption = (
        "The share of their time in which the cluster's devices computed. A step counts with the "
        "compute time that it takes when its job is alone."
    )
    return Chart("Utilisation", caption, 0.45 * len(comparison.cases) + 0.7, draw)


def _step_times(comparison: Comparison) -> Chart:
    jobs = [job for job in comparison.jobs if any(s.job == job.name for s in comparison.step_times)]

    def draw(figure: FigureBase) -> None:
        for number, (axes, job) in enumerate(zip(panels(figure, len(jobs)), jobs, strict=True)):
            for y, case in enumerate(comparison.cases):
                values = comparison.times(job.name, case.key)
                if not values:
                    continue
                # The golden ratio spreads the dots evenly, the same way each time.
                spread = [y + 0.5 * ((i * 0.618034) % 1.0 - 0.5) for i in range(len(values))]
                colour = COLOURS[number % len(COLOURS)]
                axes.plot([1e3 * v for v in values], spread, ".", alpha=0.4, color=colour)
                low, median, high = spread_ms(values)
                axes.hlines(y, low, high, color="black")
                axes.vlines(median, y - 0.35, y + 0.35, color="black", linewidth=2)
            axes.set_yticks(range(len(comparison.cases)), [c.title for c in comparison.cases])
            axes.set(title=job.title, xlim=(0, None), xlabel="ms")
            axes.invert_yaxis()

    caption = "Each dot is one step, the tick the median, and the line the middle 80%."
    return Chart("Every step", caption, 1.6 * len(jobs) + 0.4, draw)


def _timeline(comparison: Comparison, seen: CaseTimeline) -> Chart:
    titles = {job.name: job.title for job in comparison.jobs}
    rates = [rate for lane in seen.lanes for _, rate in lane.rate_Bps]
    top = max([*rates, comparison.capacity_Bps or 0.0]) or 1.0
    lanes = [
        Lane(
            titles.get(lane.job, lane.job),
            _spans(lane.computing),
            _spans(lane.waiting),
            [(at_s, rate / top) for at_s, rate in lane.rate_Bps],
        )
        for lane in seen.lanes
    ]
    title = f"Timeline: {comparison.case_title(seen.case)}"
    about = "what its connections sent, on the same scale for all jobs"
    return timeline(title, lanes, (0, seen.length_s), about)


def _spans(intervals: tuple[Interval, ...]) -> list[Span]:
    return [(i.start, i.end) for i in intervals]
