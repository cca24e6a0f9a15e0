"""``python -m evaluation beyond``: bounded slowdown, bursts and further schedulers.

Every plan is played on the same clusters, and jobs start at the same times. docs/fairness.md says
what is guaranteed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from crux_torch.cli.results import Result, json_option, publish
from evaluation.beyond import BUCKETS, KINDS, Summary, measure, summaries

#: The paper's jobs of the lowest priority lose 55.5% of their throughput (§7.2): 1 / (1 - 0.555).
PAPER_WORST = 2.25


@click.command()
@click.option("--small", "smalls", type=click.IntRange(0), default=100, show_default=True)
@click.option("--testbed", "testbeds", type=click.IntRange(0), default=8, show_default=True)
@click.option("--clos", "closes", type=click.IntRange(0), default=3, show_default=True)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first case."
)
@click.option(
    "--horizon", "horizon_s", type=click.FloatRange(10.0), default=120.0, show_default=True
)
@json_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write beyond.json, beyond.txt and beyond.png to this folder.",
)
def beyond(
    smalls: int,
    testbeds: int,
    closes: int,
    seed: int,
    horizon_s: float,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """Compare extensions of Crux with Crux-full: GPU utilisation and worst slowdown."""
    counts = {"small": smalls, "testbed": testbeds, "clos": closes}
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for kind, count in counts.items():
            for s in progress.track(range(seed, seed + count), description=kind):
                rows.extend(measure(KINDS[kind](s), horizon_s))
    settings = {
        "cases": counts,
        "seed": seed,
        "horizon_s": horizon_s,
        "buckets": BUCKETS,
        "paper_worst_slowdown": PAPER_WORST,
    }
    result = Result("beyond", settings, rows)
    found = summaries(rows)
    text = table(found)
    publish(result, text, json_path, out)
    if out is not None:
        from evaluation.figures.beyond import draw

        draw(found).savefig(out / "beyond.png", dpi=120)


def table(found: Sequence[Summary]) -> str:
    """Ratios to Crux-full, worst slowdowns and bounds, as text."""
    console = Console(file=io.StringIO(), width=160)
    for kind in dict.fromkeys(s.kind for s in found):
        mine = [s for s in found if s.kind == kind]
        shown = Table(
            title=f"{kind}: {len(mine[0].ratio)} clusters; utilisation and FLOPs over Crux-full's",
            title_justify="left",
            box=box.SIMPLE,
        )
        for head in ("plan", "use / crux", "quartiles", "least, most", "better, worse", "FLOPs"):
            shown.add_column(head, justify="left" if head == "plan" else "right")
        for head in ("worst slowdown", "p90, max", "certified", "p90, max", "decision"):
            shown.add_column(head, justify="right")
        for s in mine:
            q = np.quantile(s.ratio, (0.25, 0.5, 0.75))
            shown.add_row(
                s.plan,
                f"{q[1]:.3f}",
                f"{q[0]:.3f} {q[2]:.3f}",
                f"{s.ratio.min():.3f} {s.ratio.max():.3f}",
                f"{s.better:.0%} {s.worse:.0%}",
                f"{np.median(s.flops_ratio):.3f}",
                *_spread(s.worst),
                *_spread(s.certified),
                f"{s.decision_s * 1e3:.1f} ms",
            )
        console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _spread(values: np.ndarray) -> tuple[str, str]:
    """Median; 90th percentile and largest: not interpolated, since some are infinite."""
    median, high = np.quantile(values, (0.5, 0.9), method="higher")

    def shown(value: float) -> str:
        return f"{value:.2f}" if np.isfinite(value) else "none"

    return shown(median), f"{shown(high)} {shown(values.max())}"
