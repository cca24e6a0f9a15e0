"""Charts of pages and of plot files: who computes and sends when, shares over time, slowdowns."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from crux_torch.logs import one_line

#: Okabe and Ito's, which readers with any common colour blindness tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d", "#999933")
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")
WIDTH_IN = 9.0
#: Text stays text, names are not formulas, and ids are not random.
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "crux", "text.parse_math": False}
#: Height of a title in a file of charts.
TITLE_IN = 0.45
#: Letters of a name.
LETTERS = 32

Span = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """A drawing, and the sentence that says how to read it.

    Attributes:
        height_in: of the drawing.
        draw: draws it on an empty figure, or a part of one.
    """

    title: str
    caption: str
    height_in: float
    draw: Callable[[FigureBase], None]

    @property
    def svg(self) -> str:
        """The drawing as an element of a page."""
        with matplotlib.rc_context(SETTINGS):
            figure = Figure(figsize=(WIDTH_IN, self.height_in), layout="constrained")
            self.draw(figure)
            return _svg(figure)


def file_of(charts: Sequence[Chart]) -> str:
    """Returns an SVG file with all charts below each other, each under its title."""
    heights = [chart.height_in + TITLE_IN for chart in charts]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part, chart in zip(parts, charts, strict=True):
            part.suptitle(chart.title)
            chart.draw(part)
        return _svg(figure) + "\n"


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def label(name: str) -> str:
    """Returns a name from outside as a drawing has room for it, on one line."""
    shown = one_line(name)
    return shown if len(shown) <= LETTERS else f"{shown[: LETTERS - 1]}…"


def panels(figure: FigureBase, count: int) -> list[Axes]:
    """Returns ``count`` drawings below each other."""
    return list(figure.subplots(count, 1, squeeze=False)[:, 0])


@dataclass(frozen=True)
class Lane:
    """One job's part of a timeline; times in seconds.

    Attributes:
        sending: times, and the height of what it sends from there to the next one; 1 is the most.
    """

    title: str
    computing: Sequence[Span]
    waiting: Sequence[Span]
    sending: Sequence[tuple[float, float]]


def timeline(title: str, lanes: Sequence[Lane], span_s: Span, about_sending: str) -> Chart:
    """Returns the chart of who computes, waits and sends when.

    Args:
        about_sending: what the height says.
    """

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for number, lane in enumerate(lanes):
            colour, base = COLOURS[number % len(COLOURS)], -1.9 * number
            times = [at for at, _ in lane.sending]
            heights = [base + share for _, share in lane.sending]
            axes.fill_between(times, base, heights, color=colour, step="post", linewidth=0)
            axes.broken_barh(_widths(lane.computing), (base + 1.15, 0.3), color=colour)
            axes.broken_barh(
                _widths(lane.waiting), (base + 1.15, 0.3), facecolor="none", edgecolor=colour
            )
        middles = [0.75 - 1.9 * number for number in range(len(lanes))]
        axes.set_yticks(middles, [label(lane.title) for lane in lanes])
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=span_s, ylim=(0.2 - 1.9 * len(lanes) + 1.6, 1.6), xlabel="s")

    caption = (
        "Above: solid while the job computes, outlined while it waits for communication. Below: "
        f"{about_sending}."
    )
    return Chart(title, caption, 0.55 * len(lanes) + 0.6, draw)


def over_time(
    title: str, caption: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> Chart:
    """Returns the chart of shares over time.

    Args:
        series: the borders of the spans in seconds, and the share in each, by name.
    """
    last_s = max((borders[-1] for borders, _ in series.values()), default=0.0)
    unit_s, unit = next(
        (u for u in ((86400.0, "days"), (3600.0, "h")) if last_s > 2 * u[0]), (1, "s")
    )

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for number, (name, (borders_s, shares)) in enumerate(series.items()):
            axes.stairs(
                [100 * share for share in shares],
                [at_s / unit_s for at_s in borders_s],
                baseline=None,
                color=COLOURS[number % len(COLOURS)],
                linestyle=("-", "--", "-.", ":")[number // len(COLOURS) % 4],
                linewidth=1.4,
                label=label(name),
            )
        axes.set(xlim=(0, last_s / unit_s or 1), ylim=(0, 105), xlabel=unit, ylabel="%")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)

    return Chart(title, caption, max(2.4, 0.22 * len(series) + 0.6), draw)


def slowdowns(title: str, caption: str, times: Mapping[str, Mapping[str, float | None]]) -> Chart:
    """Returns the chart of slowdowns: a line for each job, with a mark for each case.

    Args:
        times: by case and job; None: not known, drawn nowhere.
    """
    jobs = list(dict.fromkeys(job for found in times.values() for job in found))

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for number, (case, found) in enumerate(times.items()):
            known = {y: value for y, job in enumerate(jobs) if (value := found.get(job))}
            axes.plot(
                list(known.values()),
                list(known),
                MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                alpha=0.8,
                label=label(case),
            )
        axes.axvline(1.0, color="0.5", linewidth=0.8)
        axes.set_yticks(range(len(jobs)), [label(job) for job in jobs])
        axes.set(ylim=(len(jobs) - 0.5, -0.5), xlabel="times its iteration alone")
        axes.set_xlim(left=min(0.95, axes.get_xlim()[0]))
        axes.grid(axis="y", color="0.9")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)

    height_in = max(0.28 * len(jobs) + 0.7, 0.22 * len(times) + 0.6)
    return Chart(title, caption, height_in, draw)


def distribution(title: str, percentiles: Mapping[str, Sequence[float]]) -> Chart:
    """Returns the chart of which share of the jobs is slowed down by at most so much.

    Args:
        percentiles: the slowdown at each percent of the jobs, from 0 to 100, by case.
    """

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for number, (case, values) in enumerate(percentiles.items()):
            shares = [100 * at / (len(values) - 1) for at in range(len(values))]
            axes.plot(values, shares, color=COLOURS[number % len(COLOURS)], label=label(case))
        axes.set(ylim=(0, 101), ylabel="% of the jobs", xlabel="times its iteration alone, at most")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)

    caption = "Share of the jobs whose mean iteration is at most so many times the one alone."
    return Chart(title, caption, max(2.4, 0.22 * len(percentiles) + 0.6), draw)


def _widths(spans: Sequence[Span]) -> list[Span]:
    return [(start, end - start) for start, end in spans]
