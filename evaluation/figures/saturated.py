"""Figures 23 and 25: a cluster whose GPUs are all held."""

from __future__ import annotations

import statistics
from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.figures.fields import Value
from evaluation.figures.style import PAPER, colour, in_order, label, on_top_of, panels

#: Rate below a layer of the network over the rate above it; the paper does not say its own.
OVERSUBSCRIPTION = 4
NETWORKS = {"clos": "two-layer Clos", "double-sided": "three-layer, double-sided"}
#: What stands for the paper's "no job scheduler", and its job schedulers.
UNSCHEDULED = "hosts"
PLACEMENTS = {UNSCHEDULED: "none (whole hosts)", "muri": "Muri", "hived": "HiveD"}
#: Rows of each seed, by network, placement and scheduler.
Cells = dict[tuple[str, str, str], list[Value]]


def draw_schedulers(settings: Value, rows: list[Value]) -> Figure | None:
    """Figure 23: utilisation by scheduler, a panel for each network."""
    cells = _cells(rows)
    names = {n: in_order(s for at, p, s in cells if (at, p) == (n, UNSCHEDULED)) for n in NETWORKS}
    networks = [network for network in NETWORKS if names[network]]
    if not networks:
        return None
    figure, axes = panels(len(networks), 5.2 * len(networks), 4.6)
    for at, network in zip(axes, networks, strict=True):
        shown = names[network][::-1]
        for y, name in enumerate(shown):
            _bar(at, y, cells[network, UNSCHEDULED, name], name)
        at.set_yticks(range(len(shown)), [label(name) for name in shown])
        at.set_title(NETWORKS[network], loc="left", fontsize=10)
    _finish(figure)
    return figure


def draw_placements(settings: Value, rows: list[Value]) -> Figure | None:
    """Figure 25: job schedulers alone and with Crux, on the two-layer network."""
    cells = _cells(rows)
    names = ("crux-paper", "ecmp")
    placements = [p for p in PLACEMENTS if all(("clos", p, name) in cells for name in names)]
    if len(placements) < 2:
        return None
    figure, (at,) = panels(1, 7.5, 4.0)
    ticks = []
    for i, placement in enumerate(reversed(placements)):
        for j, name in enumerate(names):
            y = 2.6 * i + j
            _bar(at, y, cells["clos", placement, name], name)
            ticks.append((y, f"{PLACEMENTS[placement]}, {label(name)}"))
    at.set_yticks([y for y, _ in ticks], [text for _, text in ticks])
    _finish(figure)
    return figure


def _cells(rows: list[Value]) -> Cells:
    found: Cells = defaultdict(list)
    for row in rows:
        if row["oversubscription"].number() == OVERSUBSCRIPTION:
            cell = (row["network"].text(), row["placement"].text(), row["scheduler"].text())
            found[cell].append(row)
    return dict(found)


def _bar(axes: Axes, y: float, rows: list[Value], name: str) -> None:
    used = [100 * row["gpu_utilization"].number() for row in rows]
    mean = statistics.fmean(used)
    axes.barh(y, mean, 0.72, color=colour(name))
    reach = [[mean - min(used)], [max(used) - mean]]
    # Below the middle, where the text stands.
    axes.errorbar(mean, y - 0.24, xerr=reach, color="#333333", elinewidth=0.9, capsize=2)
    starved = statistics.fmean(row["starved"].number() for row in rows)
    text = f"{mean:.1f}" + (f", {starved:.1f} jobs starve" if starved else "")
    axes.text(1, y + 0.08, text, va="center", fontsize=8, color=on_top_of(name), weight="bold")
    if (said := rows[0]["paper_gpu_utilization"]).plain is not None:
        axes.plot(100 * said.number(), y, **PAPER)


def _finish(figure: Figure) -> None:
    for axes in figure.axes:
        axes.set_xlim(0, 100)
        axes.set_xlabel("utilisation of all GPUs (%)")
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
    figure.axes[0].plot([], [], label="the paper's, of its own trace", **PAPER)
    figure.legend(loc="outside upper left", ncols=2)
