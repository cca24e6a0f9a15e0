"""CASSINI's Figure 15: the use of a link over time, with and without time shifts."""

from __future__ import annotations

from matplotlib.figure import Figure

from evaluation.figures.fields import Value
from evaluation.figures.style import colour, panels

#: The rows' schemes, and what their lines show.
HOWS = {"themis": ("ecmp", "started together"), "th+cassini": ("cassini", "CASSINI")}


def draw_snapshots(settings: Value, rows: list[Value]) -> Figure | None:
    """A panel for each snapshot, over the periods that the study measured."""
    mine = [row for row in rows if row["figure"].number() == 15]
    numbers = sorted({row["snapshot"].number() for row in mine})
    if not numbers:
        return None
    figure, axes = panels(len(numbers), 2.8 * len(numbers), 3.2, sharey=True)
    for at, number in zip(axes, numbers, strict=True):
        for row in (row for row in mine if row["snapshot"].number() == number):
            scheduler, label = HOWS[row["scheme"].text()]
            used = [100 * share for share in row["used"].numbers()]
            time_s = [row["step_s"].number() * i for i in range(len(used))]
            at.step(time_s, used, where="post", color=colour(scheduler), label=label)
            score = row["paper_score"].number()
        at.set_title(f"snapshot {number:.0f}, score {score}", loc="left", fontsize=10)
        at.set_xlabel("s")
    axes[0].set_ylabel("use of the link (%)")
    axes[0].set_ylim(0, 103)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
