"""A comparison as one self-contained HTML page: no script, no font, no image from elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from crux_torch.report import svg
from crux_torch.report.comparison import Comparison, JobRow

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2330; --faint: #626c7a; --rule: #dde2e8;
  --panel: #f6f8fa; --job0: #1f6fb2; --job1: #c2570c; --job2: #2d7d46; --job3: #7a4bb0;
  --bar: #44546a; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --ink: #e4e8ee; --faint: #98a3b1;
  --rule: #2c3440; --panel: #1a2028; --job0: #5aa7e8; --job1: #f0924e; --job2: #62bd80;
  --job3: #b48be6; --bar: #93a5bd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 .5rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 1.25rem 0 .25rem; }
p { margin: .35rem 0; max-width: 48rem; }
.faint, caption { color: var(--faint); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; font-size: .9rem; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--rule); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { font-weight: 600; font-size: .85rem; color: var(--faint); vertical-align: bottom; }
tbody th { font-weight: 500; }
.ratio { color: var(--faint); font-size: .88em; padding-left: .4em; }
.key { display: inline-block; width: .75em; height: .75em; border-radius: 2px;
  margin-right: .45em; }
.key.job0 { background: var(--job0); } .key.job1 { background: var(--job1); }
.key.job2 { background: var(--job2); } .key.job3 { background: var(--job3); }
figure { margin: .5rem 0 0; padding: .75rem; background: var(--panel); border-radius: 8px; }
figure + figure { margin-top: .75rem; }
figcaption { font-size: .9rem; color: var(--faint); padding: 0 .25rem .25rem; }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg text.faint { fill: var(--faint); font-size: 12px; }
svg text.strong { font-weight: 600; }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .bar { fill: var(--bar); }
svg .job0 { --c: var(--job0); } svg .job1 { --c: var(--job1); }
svg .job2 { --c: var(--job2); } svg .job3 { --c: var(--job3); }
svg .dots { fill: var(--c); fill-opacity: .38; }
svg .range { stroke: var(--c); stroke-width: 2; } svg .median { stroke: var(--c); stroke-width: 3; }
svg .computing { fill: var(--c); }
svg .waiting { fill: var(--c); fill-opacity: .14; stroke: var(--c); stroke-width: .8; }
svg .area { fill: var(--c); fill-opacity: .55; }
@media print { figure { break-inside: avoid; } }
"""


def render(comparison: Comparison) -> str:
    """The page for ``comparison``; a pure function of its argument."""
    sections = [
        _header(comparison),
        _step_time_table(comparison),
        _utilisation(comparison),
        _job_table(comparison),
        _distributions(comparison),
        _timelines(comparison),
        _links(comparison),
        _notes(comparison),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(comparison.title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _header(comparison: Comparison) -> str:
    paragraphs = "".join(f'<p class="faint">{escape(line)}</p>\n' for line in comparison.setting)
    return f"<header>\n<h1>{escape(comparison.title)}</h1>\n{paragraphs}</header>\n"


def _step_time_table(comparison: Comparison) -> str:
    head = ["Job", *(case.title for case in comparison.cases)]
    rows = []
    for index, job in enumerate(comparison.jobs):
        alone = comparison.times(job.name, comparison.baseline)
        cells = [_job_cell(index, job)]
        for case in comparison.cases:
            values = comparison.times(job.name, case.key)
            cells.append(_step_time(values, alone, case.key == comparison.baseline))
        rows.append(cells)
    count = min((len(s.seconds) for s in comparison.step_times), default=0)
    against = comparison.case_title(comparison.baseline).lower()
    caption = (
        f"Median step time and its ratio to {escape(against)}; {count} steps or more in each cell."
    )
    return _section("Step time", _table(head, rows, caption))


def _step_time(values: Sequence[float], alone: Sequence[float], is_baseline: bool) -> str:
    if not values:
        return "&ndash;"
    median = statistics.median(values)
    text = f"{1e3 * median:.0f}&nbsp;ms"
    if alone and not is_baseline:
        text += f'<span class="ratio">&times;{median / statistics.median(alone):.2f}</span>'
    return text


def _utilisation(comparison: Comparison) -> str:
    if all(case.utilisation is None for case in comparison.cases):
        return ""
    text = (
        "<p>Of the time that the cluster&rsquo;s devices had, the share in which they computed: "
        "&Sigma;<sub>j</sub>&nbsp;(compute time of j within T)&nbsp;&times;&nbsp;devices of j, "
        "over T&nbsp;&times;&nbsp;devices. A step counts with the compute time it takes when its "
        "job is alone.</p>\n"
    )
    figure = f"<figure>{svg.utilisation_chart(comparison)}</figure>\n"
    return _section("Utilisation", text + figure)


def _job_table(comparison: Comparison) -> str:
    head = [
        "Job",
        "W",
        "t",
        "Period",
        "Overlap",
        "I = W/t",
        "k",
        "P = kI",
        "Level",
        "DSCP",
        "Losses",
    ]
    rows = [
        [
            _job_cell(index, job),
            quantity(job.flops, "FLOP"),
            milliseconds(job.t_s),
            milliseconds(job.period_s),
            _plain(job.overlap, "{:.0%}"),
            quantity(job.intensity, "FLOP/s"),
            _plain(job.correction, "{:.2f}"),
            quantity(job.priority, "FLOP/s"),
            _plain(job.level, "{}"),
            _plain(job.dscp, "{}"),
            _losses(job),
        ]
        for index, job in enumerate(comparison.jobs)
    ]
    caption = (
        "What was measured of each job and decided about it. W: FLOPs of one iteration; t: seconds "
        "that its traffic needs on its slowest link; losses: against a run with the stock backend, "
        "bit for bit."
    )
    return _section("Profile and plan", _table(head, rows, caption))


def _losses(job: JobRow) -> str:
    if job.losses_equal is None:
        return "&ndash;"
    return f"{'equal' if job.losses_equal else 'DIFFERENT'} ({job.steps_compared} steps)"


def _distributions(comparison: Comparison) -> str:
    figures = [
        f"<figure><figcaption>{escape(job.title)}</figcaption>"
        f"{svg.step_time_chart(comparison, job.name, job.title, index)}</figure>\n"
        for index, job in enumerate(comparison.jobs)
        if any(comparison.times(job.name, case.key) for case in comparison.cases)
    ]
    text = "<p>Each dot is one step; the tick is the median, the line the middle 80%.</p>\n"
    return _section("Every step", text + "".join(figures)) if figures else ""


def _timelines(comparison: Comparison) -> str:
    if not comparison.timelines:
        return ""
    text = (
        "<p>Solid: the job computes. Outlined: it waits for communication. Below: what its "
        "connections sent, on the same scale for all.</p>\n"
    )
    figures = "".join(
        f"<figure><figcaption>{escape(comparison.case_title(t.case))}</figcaption>"
        f"{svg.timeline_chart(comparison, t)}</figure>\n"
        for t in comparison.timelines
    )
    return _section("Timelines", text + figures)


def _links(comparison: Comparison) -> str:
    if not comparison.links:
        return ""
    levels = sorted({n for link in comparison.links for n, v in link.by_level.items() if v})
    head = ["Case", "Link", *(f"Level {level}" for level in levels)]
    rows = [
        [
            escape(comparison.case_title(link.case)),
            escape(link.link),
            *(quantity(link.by_level.get(level, 0), "B") for level in levels),
        ]
        for link in comparison.links
    ]
    return _section(
        "What the link carried", _table(head, rows, "Counted by the link&rsquo;s own queues.")
    )


def _notes(comparison: Comparison) -> str:
    if not comparison.notes:
        return ""
    return _section("Notes", "".join(f"<p>{escape(note)}</p>\n" for note in comparison.notes))


def quantity(value: float | None, unit: str) -> str:
    """``value`` with three digits and a decimal prefix: ``2.14&nbsp;GFLOP``."""
    if value is None:
        return "&ndash;"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}&nbsp;{prefix}{unit}"
    return f"{value:.3g}&nbsp;{unit}"


def milliseconds(seconds: float | None) -> str:
    return "&ndash;" if seconds is None else f"{1e3 * seconds:.0f}&nbsp;ms"


def _plain(value: float | None, pattern: str) -> str:
    return "&ndash;" if value is None else escape(pattern.format(value))


def _job_cell(index: int, job: JobRow) -> str:
    return f'<span class="key job{index}"></span>{escape(job.title)}'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table whose cells are HTML already; the heads are text."""
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>\n'
        for row in rows
    )
    return (
        f'<div class="scroll"><table>\n<caption>{caption}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n"
