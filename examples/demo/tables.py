"""A comparison as tables on a terminal."""

from __future__ import annotations

import html
import statistics

from rich.console import Console
from rich.table import Table

from crux_torch.report.comparison import Comparison
from crux_torch.report.html import milliseconds, quantity


def show(console: Console, comparison: Comparison) -> None:
    """Print the setting, the profiles and the plan, the step times, utilisation and the link."""
    for line in (*comparison.setting, *comparison.notes):
        console.print(line, style="dim")
    console.print(_profiles(comparison))
    console.print(_step_times(comparison))
    if comparison.links:
        console.print(_links(comparison))


def _profiles(comparison: Comparison) -> Table:
    table = Table(title="Profile and plan", title_justify="left")
    heads = ("job", "W", "t", "period", "overlap", "I = W/t", "k", "P = kI", "level", "DSCP")
    for head in heads:
        table.add_column(head, justify="left" if head == "job" else "right")
    table.add_column("losses against the stock backend")
    for job in comparison.jobs:
        table.add_row(
            job.title,
            _text(quantity(job.flops, "FLOP")),
            _text(milliseconds(job.t_s)),
            _text(milliseconds(job.period_s)),
            _number(job.overlap, "{:.0%}"),
            _text(quantity(job.intensity, "FLOP/s")),
            _number(job.correction, "{:.2f}"),
            _text(quantity(job.priority, "FLOP/s")),
            _number(job.level, "{}"),
            _number(job.dscp, "{}"),
            {None: "–", True: "equal", False: "[red]DIFFERENT[/]"}[job.losses_equal]
            + f" ({job.steps_compared} steps)",
        )
    return table


def _step_times(comparison: Comparison) -> Table:
    table = Table(title="Median step time (p10-p90), × its time alone", title_justify="left")
    table.add_column("")
    for case in comparison.cases:
        table.add_column(case.title, justify="right")
    for job in comparison.jobs:
        alone = comparison.times(job.name, comparison.baseline)
        cells = []
        for case in comparison.cases:
            values = comparison.times(job.name, case.key)
            cells.append(_spread(values, alone) if values else "–")
        table.add_row(job.title, *cells)
    utilised = (_number(case.utilisation, "{:.1%}") for case in comparison.cases)
    table.add_section()
    table.add_row("cluster utilisation", *utilised)
    return table


def _spread(values: tuple[float, ...], alone: tuple[float, ...]) -> str:
    median = statistics.median(values)
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [median]
    ratio = median / statistics.median(alone) if alone else float("nan")
    return (
        f"{1e3 * median:.0f} ms ({1e3 * tenths[0]:.0f}-{1e3 * tenths[-1]:.0f}) "
        f"×{ratio:.2f} n={len(values)}"
    )


def _links(comparison: Comparison) -> Table:
    table = Table(title="Bytes on the shared link, by its queues", title_justify="left")
    table.add_column("case")
    table.add_column("link")
    levels = sorted({n for link in comparison.links for n, v in link.by_level.items() if v})
    for level in levels:
        table.add_column(f"level {level}", justify="right")
    for link in comparison.links:
        sent = (_text(quantity(link.by_level.get(level, 0), "B")) for level in levels)
        table.add_row(comparison.case_title(link.case), link.link, *sent)
    return table


def _text(markup: str) -> str:
    return html.unescape(markup).replace("\xa0", " ")


def _number(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)
