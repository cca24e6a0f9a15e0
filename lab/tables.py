"""A comparison as tables: the same on a terminal and in the report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from crux_torch.report.page import Sheet
from crux_torch.words import BOUNDLESS
from lab.comparison import Comparison, JobRow

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def sheets(comparison: Comparison) -> list[Sheet]:
    """The profiles and the plan, the step times with the utilisation, and the shared link."""
    found = [_profiles(comparison), _step_times(comparison)]
    return [*found, _links(comparison)] if comparison.links else found


def show(console: Console, comparison: Comparison) -> None:
    """Prints the setting, the notes and all tables."""
    for line in (*comparison.setting, *comparison.notes):
        console.print(line, style="dim")
    for sheet in sheets(comparison):
        table = Table(title=sheet.title, title_justify="left")
        for head in sheet.heads:
            words = head in ("", "job", "case", "link") or head.startswith("losses")
            table.add_column(head, justify="left" if words else "right")
        for row in sheet.rows:
            table.add_row(*row)
        if sheet.total:
            table.add_section()
            table.add_row(*sheet.total)
        console.print(table)


def _profiles(comparison: Comparison) -> Sheet:
    heads = ("job", "W", "t", "period", "overlap", "I = W/t", "k", "P = kI", "level", "DSCP")
    rows = [
        (
            job.title,
            quantity(job.flops, "FLOP"),
            _number(job.t_s and 1e3 * job.t_s, "{:.0f} ms"),
            _number(job.period_s and 1e3 * job.period_s, "{:.0f} ms"),
            _number(job.overlap, "{:.0%}"),
            quantity(job.intensity, "FLOP/s"),
            _number(job.correction, "{:.2f}"),
            quantity(job.priority, "FLOP/s"),
            _number(job.level, "{}"),
            _number(job.dscp, "{}"),
            _losses(job),
        )
        for job in comparison.jobs
    ]
    return Sheet("Profile and plan", (*heads, "losses against the stock backend"), rows)


def _losses(job: JobRow) -> str:
    if job.losses_equal is None:
        return "–"
    return f"{'equal' if job.losses_equal else 'DIFFERENT'} ({job.steps_compared} steps)"


def _step_times(comparison: Comparison) -> Sheet:
    rows = []
    for job in comparison.jobs:
        alone = comparison.times(job.name, comparison.baseline)
        values = (comparison.times(job.name, case.key) for case in comparison.cases)
        rows.append((job.title, *(_spread(mine, alone) for mine in values)))
    return Sheet(
        "Median step time (p10-p90), × its time alone",
        ("", *(case.title for case in comparison.cases)),
        rows,
        (
            "cluster utilisation",
            *(_number(case.utilisation, "{:.1%}") for case in comparison.cases),
        ),
    )


def _spread(values: Sequence[float], alone: Sequence[float]) -> str:
    if not values:
        return "–"
    low, median, high = spread_ms(values)
    ratio = median / 1e3 / statistics.median(alone) if alone else float("nan")
    return f"{median:.0f} ms ({low:.0f}-{high:.0f}) ×{ratio:.2f} n={len(values)}"


def spread_ms(values: Sequence[float]) -> tuple[float, float, float]:
    """10th percentile, median and 90th percentile of seconds, in milliseconds."""
    if len(values) < 2:
        return (1e3 * values[0],) * 3
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return 1e3 * tenths[0], 1e3 * statistics.median(values), 1e3 * tenths[-1]


def _links(comparison: Comparison) -> Sheet:
    levels = sorted({n for link in comparison.links for n, v in link.by_level.items() if v})
    rows = [
        (
            comparison.case_title(link.case),
            link.link,
            *(quantity(link.by_level.get(level, 0), "B") for level in levels),
        )
        for link in comparison.links
    ]
    heads = ("case", "link", *(f"level {level}" for level in levels))
    return Sheet("Bytes on the shared link, by its queues", heads, rows)


def quantity(value: float | None, unit: str) -> str:
    """``value`` with three digits and a decimal prefix: ``2.14 GFLOP``."""
    if value is None:
        return "–"
    if abs(value) >= BOUNDLESS:
        return "inf"
    for factor, prefix in PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _number(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)
