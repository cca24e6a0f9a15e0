"""A comparison as one self-contained HTML page: it loads no script, font or image."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import jinja2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.comparison import CaseTimeline, Comparison, Interval
from lab.tables import sheets, spread_ms

TEMPLATE = Path(__file__).with_name("page.html.jinja")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")


@dataclass(frozen=True)
class Chart:
    """A drawing, and the sentence that says how to read it."""

    title: str
    caption: str
    svg: str


def render(comparison: Comparison) -> str:
    """The page; the same comparison gives the same page."""
    charts = [_utilisation(comparison)]
    if comparison.step_times:
        charts.append(_step_times(comparison))
    charts += [_timeline(comparison, timeline) for timeline in comparison.timelines]
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
    return template.render(comparison=comparison, sheets=sheets(comparison), charts=charts)


def _utilisation(comparison: Comparison) -> Chart:
    figure, (axes,) = _panels(1, 0.45 * len(comparison.cases) + 0.7)
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
    return Chart("Utilisation", caption, _svg(figure))


def _step_times(comparison: Comparison) -> Chart:
    jobs = [job for job in comparison.jobs if any(s.job == job.name for s in comparison.step_times)]
    figure, panels = _panels(len(jobs), 1.6 * len(jobs) + 0.4)
    for number, (axes, job) in enumerate(zip(panels, jobs, strict=True)):
        for y, case in enumerate(comparison.cases):
            values = comparison.times(job.name, case.key)
            if not values:
                continue
            # The golden ratio spreads the dots evenly, the same way each time.
            spread = [y + 0.5 * ((i * 0.618034) % 1.0 - 0.5) for i in range(len(values))]
            axes.plot([1e3 * v for v in values], spread, ".", alpha=0.4, color=COLOURS[number % 4])
            low, median, high = spread_ms(values)
            axes.hlines(y, low, high, color="black")
            axes.vlines(median, y - 0.35, y + 0.35, color="black", linewidth=2)
        axes.set_yticks(range(len(comparison.cases)), [case.title for case in comparison.cases])
        axes.set(title=job.title, xlim=(0, None), xlabel="ms")
        axes.invert_yaxis()
    caption = "Each dot is one step, the tick the median, and the line the middle 80%."
    return Chart("Every step", caption, _svg(figure))


def _timeline(comparison: Comparison, timeline: CaseTimeline) -> Chart:
    titles = {job.name: job.title for job in comparison.jobs}
    figure, panels = _panels(len(timeline.lanes), 1.3 * len(timeline.lanes) + 0.5)
    rates = [rate for lane in timeline.lanes for _, rate in lane.rate_Bps]
    top = max([*rates, comparison.capacity_Bps or 0.0]) or 1.0
    for number, (axes, lane) in enumerate(zip(panels, timeline.lanes, strict=True)):
        colour = COLOURS[number % 4]
        axes.fill_between(
            [at for at, _ in lane.rate_Bps], [r / top for _, r in lane.rate_Bps], color=colour
        )
        axes.broken_barh(_spans(lane.computing), (1.15, 0.3), color=colour)
        axes.broken_barh(_spans(lane.waiting), (1.15, 0.3), facecolor="none", edgecolor=colour)
        axes.set(xlim=(0, timeline.length_s), ylim=(0, 1.6), xlabel="s")
        axes.set_yticks([0.5, 1.3], ["sending", titles.get(lane.job, lane.job)])
    caption = (
        "Above: solid while the job computes, outlined while it waits for communication. Below: "
        "what its connections sent, on the same scale for all jobs."
    )
    title = f"Timeline: {comparison.case_title(timeline.case)}"
    return Chart(title, caption, _svg(figure))


def _spans(intervals: tuple[Interval, ...]) -> list[tuple[float, float]]:
    return [(i.start, i.end - i.start) for i in intervals]


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # No date and no random names: the same comparison gives the same page. The namespaces that
    # matplotlib declares are addresses, which nothing in the page needs.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "crux"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]
