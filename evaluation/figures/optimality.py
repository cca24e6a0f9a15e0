"""Figures of the study of small cases, and of bounded slowdown and further schedulers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from evaluation.beyond import BASE, LIMITS, Summary, capped_name
from evaluation.figures.fields import Value
from evaluation.figures.style import DASHES, PAPER, colour, in_order, label, panels

TITLES = {
    "paths": "path selection",
    "priority": "priority assignment",
    "compression": "priority compression",
}
#: Errors are shown from here on; a smaller one is drawn as this.
SMALLEST_PCT = 0.01


def draw(settings: Value, rows: list[Value]) -> Figure | None:
    """The distribution of the error over all cases, a panel for each mechanism."""
    names = [m for m in TITLES if any(row["mechanism"].text() == m for row in rows)]
    if not names:
        return None
    figure, axes = panels(len(names), 3.9 * len(names), 5.2, sharey=True)
    for at, mechanism in zip(axes, names, strict=True):
        by_name = {r["scheduler"].text(): r for r in rows if r["mechanism"].text() == mechanism}
        for i, name in enumerate(in_order(by_name)):
            row = by_name[name]
            points = np.array([point.numbers() for point in row["error_cdf"].items()])
            at.step(
                [*np.maximum(100 * points[:, 0], SMALLEST_PCT), 100.0],
                [*(100 * points[:, 1]), 100.0],
                where="post",
                color=colour(name),
                linestyle=DASHES[i % len(DASHES)],
                linewidth=1.8,
                label=f"{label(name)}, mean {100 - 100 * row['share_mean'].number():.2f}%",
            )
            if (said := row["paper_share"]).plain is not None:
                error = 100 * (1 - said.number())
                at.plot(error, 50, label=f"the paper's Crux, mean {error:.2f}%", **PAPER)
        at.set_xscale("log")
        at.set_xlim(0.8 * SMALLEST_PCT, 100)
        at.set_ylim(0, 103)
        at.set_xlabel("error from the optimum (%)")
        at.set_title(TITLES[mechanism], loc="left", fontsize=10)
        at.grid(visible=True, axis="x")
        at.legend(loc="upper left", bbox_to_anchor=(0, -0.18), fontsize=8)
    axes[0].set_ylabel("cases with at most this error (%)")
    return figure


def draw_beyond(found: Sequence[Summary]) -> Figure:
    """The frontier: median utilisation over Crux-full's against the median worst slowdown."""
    kinds = list(dict.fromkeys(s.kind for s in found))
    figure = Figure(figsize=(4.5 * len(kinds), 3.8))
    axes = figure.subplots(1, len(kinds), squeeze=False)
    frontier = [capped_name(limit) for limit in LIMITS]
    beside = (BASE, "ecmp", "crux paths, fair")
    for axis, kind in zip(axes[0], kinds, strict=True):
        mine = {s.plan: s for s in found if s.kind == kind}
        # Where the median cluster has a starving job there is no such point.
        points = [
            (f"{limit:g}", mine[name])
            for limit, name in zip(LIMITS, frontier, strict=True)
            if np.isfinite(np.median(mine[name].worst))
        ]
        x = [np.median(s.worst) for _, s in points]
        y = [np.mean(s.ratio) for _, s in points]
        axis.plot(x, y, "o-", color="tab:blue", label="crux, by its cap")
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
        for marker, name in zip("s^D", beside, strict=True):
            one = mine.get(name)
            if one and np.isfinite(np.median(one.worst)):
                axis.plot(np.median(one.worst), np.mean(one.ratio), marker, label=name)
        axis.set_title(f"{kind} ({len(mine[BASE].ratio)} clusters)", fontsize=10)
        if max(x) > 20 * min(x):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.set_xlabel("worst slowdown of a job, median")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GPU utilisation / Crux-full, mean")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    return figure
