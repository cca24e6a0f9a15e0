"""Figure 16: how far from the optimum each mechanism's decisions are."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

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
