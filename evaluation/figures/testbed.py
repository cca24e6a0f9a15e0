"""Figures 19 to 22: utilisation and completion times on the testbed."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.figures.fields import Value
from evaluation.figures.style import MARKERS, PAPER, colour, in_order, label, panels

#: Bars of the utilisation, of those that the result has.
BARS = ("ecmp", "crux-pa", "paths-only", "crux-paper", "crux", "alone", "ideal")
KINDS = {"gpt": "GPT", "bert": "BERT", "resnet": "ResNet"}
#: Where the paper gives the lowest and the highest of several cases.
RANGE: dict[str, Any] = {"color": PAPER["color"], "alpha": 0.16}
KIND_COLOURS = {"gpt": "#0072b2", "bert": "#d55e00", "resnet": "#009e73"}


def draw(rows: list[Value], number: int) -> Figure | None:
    """The figure of that number, or None if the result has none of its cases."""
    mine = [row for row in rows if row["figure"].number() == number]
    if not mine:
        return None
    cases = list(dict.fromkeys(row["case"].text() for row in mine))
    wide = max(10.0, 5.5 + 1.4 * len(cases))
    figure, (left, right) = panels(2, wide, 4.4, width_ratios=(3, 2))
    _utilization(left, mine, cases)
    _completion(right, mine, cases)
    return figure


def _utilization(axes: Axes, rows: list[Value], cases: list[str]) -> None:
    shown = [s for s in in_order(row["scheduler"].text() for row in rows) if s in BARS]
    width = 0.84 / len(shown)
    for row in rows:
        scheduler = row["scheduler"].text()
        if scheduler not in shown:
            continue
        at = cases.index(row["case"].text()) + (shown.index(scheduler) + 0.5) * width - 0.42
        spread = row["utilization"]
        median, low, high = (100 * spread[k].number() for k in ("median", "p10", "p90"))
        axes.bar(at, median, width * 0.92, color=colour(scheduler))
        axes.errorbar(
            at,
            median,
            [[median - low], [high - median]],
            color="#333333",
            elinewidth=0.9,
            capsize=2,
        )
        if scheduler == "crux-paper":
            gain = row["gain_pct.median"].number()
            axes.text(at, high + 1, f"{gain:+.1f}%", ha="center", fontsize=8, weight="bold")
    axes.set_xticks(range(len(cases)), [_broken(case) for case in cases])
    axes.set_ylabel("GPU utilisation (%)")
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    for scheduler in shown:
        axes.bar(0, 0, color=colour(scheduler), label=label(scheduler))
    axes.figure.legend(loc="outside upper left", ncols=len(shown), fontsize=8.5)


def _completion(axes: Axes, rows: list[Value], cases: list[str]) -> None:
    exact = False
    crux = [row for row in rows if row["scheduler"].text() == "crux-paper"]
    kinds = list(dict.fromkeys(kind for row in crux for kind, _ in row["jobs"].entries()))
    for row in crux:
        for kind, job in row["jobs"].entries():
            i = kinds.index(kind)
            at = cases.index(row["case"].text()) + (i - (len(kinds) - 1) / 2) * 0.26
            median, low, high = (job["jct_pct"][k].number() for k in ("median", "p10", "p90"))
            if (said := row["paper.jct_pct"].get(kind)) is not None:
                lowest, highest = said.numbers()
                exact = lowest == highest
                if exact:
                    axes.plot(at + 0.08, lowest, **PAPER)
                else:
                    axes.bar(at, highest - lowest, 0.22, lowest, **RANGE)
            axes.errorbar(
                at,
                median,
                [[median - low], [high - median]],
                color=KIND_COLOURS.get(kind, "#333333"),
                marker=MARKERS[i],
                capsize=2,
                linestyle="none",
            )
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.set_xticks(range(len(cases)), [_broken(case) for case in cases], fontsize=8.5)
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_ylabel("completion time, Crux against ECMP (%)")
    for i, kind in enumerate(kinds):
        name = KINDS.get(kind, kind)
        axes.plot([], [], color=KIND_COLOURS.get(kind), marker=MARKERS[i], ls="none", label=name)
    if exact:
        axes.plot([], [], label="the paper's", **PAPER)
    else:
        axes.bar(0, 0, label="the paper's", **RANGE)
    axes.use_sticky_edges = False
    axes.margins(y=0.05)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(kinds) + 1, fontsize=8.5)


def _broken(case: str) -> str:
    return case.replace(" + ", "\n+ ")
