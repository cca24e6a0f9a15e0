"""Beyond the paper, beside Crux-full: bounded slowdown, bursts, further schedulers.

    python benchmarks/beyond.py [--out benchmarks/results]

Every plan is played in the engine on the same clusters from the same phases. docs/fairness.md says
what is guaranteed; the paper's jobs of lowest priority lose 55.5% of their throughput (§7.2), a
slowdown of 2.25.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import click
import matplotlib
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from crux_torch.sim import beyond
from crux_torch.sim.commands.publish import publish
from crux_torch.sim.results import Result

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import ScalarFormatter

#: 1 / (1 - 0.555): the worst job of the paper's trace (§7.2).
PAPER_WORST = 2.25


@click.command()
@click.option("--small", "smalls", type=click.IntRange(0), default=100, show_default=True)
@click.option("--testbed", "testbeds", type=click.IntRange(0), default=8, show_default=True)
@click.option("--clos", "closes", type=click.IntRange(0), default=3, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the first.")
@click.option(
    "--horizon", "horizon_s", type=click.FloatRange(10.0), default=120.0, show_default=True
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write rows here."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write beyond.json, beyond.txt and beyond.png to this folder.",
)
def main(
    smalls: int,
    testbeds: int,
    closes: int,
    seed: int,
    horizon_s: float,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """Utilisation against worst slowdown, and what each extension gains over Crux-full."""
    counts = {"small": smalls, "testbed": testbeds, "clos": closes}
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for kind, count in counts.items():
            for s in progress.track(range(seed, seed + count), description=kind):
                rows.extend(beyond.measure(beyond.KINDS[kind](s), horizon_s))
    settings = {
        "cases": counts,
        "seed": seed,
        "horizon_s": horizon_s,
        "buckets": beyond.BUCKETS,
        "paper_worst_slowdown": PAPER_WORST,
    }
    result = Result("beyond", settings, rows)
    found = beyond.summaries(rows)
    text = table(found)
    publish(result, text, json_path, out)
    if out is not None:
        draw(found, out / "beyond.png")


def table(found: Sequence[beyond.Summary]) -> str:
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
    """Median; 90th percentile and largest: infinite ones are among them, hence no interpolation."""
    median, high = np.quantile(values, (0.5, 0.9), method="higher")

    def shown(value: float) -> str:
        return f"{value:.2f}" if np.isfinite(value) else "none"

    return shown(median), f"{shown(high)} {shown(values.max())}"


def draw(found: Sequence[beyond.Summary], file: Path) -> None:
    """The frontier: median utilisation over Crux-full's against the median worst slowdown."""
    kinds = list(dict.fromkeys(s.kind for s in found))
    figure, axes = plt.subplots(1, len(kinds), figsize=(4.5 * len(kinds), 3.8), squeeze=False)
    frontier = [beyond.fair_name(limit) for limit in beyond.LIMITS]
    beside = ("crux", "ecmp", "crux paths, fair", "crux+", "crux-joint")
    for axis, kind in zip(axes[0], kinds, strict=True):
        mine = {s.plan: s for s in found if s.kind == kind}
        # Where the median cluster has a starving job there is no such point.
        points = [
            ("none" if limit is None else f"{limit:g}", mine[name])
            for limit, name in zip(beyond.LIMITS, frontier, strict=True)
            if np.isfinite(np.median(mine[name].worst))
        ]
        x = [np.median(s.worst) for _, s in points]
        y = [np.mean(s.ratio) for _, s in points]
        axis.plot(x, y, "o-", color="tab:blue", label="crux-fair, by its bound")
        at: dict[tuple[str, str], list[int]] = {}
        for i in range(len(points)):
            at.setdefault((f"{x[i]:.2g}", f"{y[i]:.2f}"), []).append(i)
        for same in at.values():
            # Bounds that come to the same point share a label.
            ends = dict.fromkeys((points[same[0]][0], points[same[-1]][0]))
            place = (x[same[-1]], y[same[-1]])
            axis.annotate(
                " to ".join(ends), place, textcoords="offset points", xytext=(4, 6), fontsize=8
            )
        for marker, name in zip("s^Dv*", beside, strict=True):
            one = mine.get(name)
            if one and np.isfinite(np.median(one.worst)):
                axis.plot(np.median(one.worst), np.mean(one.ratio), marker, label=name)
        axis.set_title(f"{kind} ({len(mine[beyond.BASE].ratio)} clusters)", fontsize=10)
        if max(x) > 20 * min(x):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.set_xlabel("worst slowdown of a job, median")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GPU utilisation / Crux-full, mean")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
