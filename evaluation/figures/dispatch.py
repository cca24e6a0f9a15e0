"""LiteGD's Figures 9 and 10: bandwidth efficacy by the number of GPUs, and by hosts' links."""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure

from evaluation.figures.fields import Value
from evaluation.figures.style import DASHES, MARKERS, panels

#: The ways to choose that are drawn, with Okabe and Ito's hues.
SHOWN = {
    "strongest, links fitted": ("exact search, fitted links", "#d55e00"),
    "Algorithm 1, true": ("Algorithm 1, true bandwidths", "#0072b2"),
    "Algorithm 1, network": ("Algorithm 1, network", "#56b4e9"),
    "topology": ("topology", "#009e73"),
    "by index": ("by index", "#8c8c8c"),
    "at random": ("at random", "#e69f00"),
}
MIXED, RANDOM_LINKS = "4090+V100+A6000+A800", "20 to 40"


def draw_by_gpus(settings: Value, rows: list[Value]) -> Figure | None:
    """Figure 9: mean efficacy of each number of GPUs, on the mixed cluster."""
    mine = [row for row in _mixed(rows) if row["link_GBps"].text() == RANDOM_LINKS]
    if not mine:
        return None
    figure, (at,) = panels(1, 8.0, 4.6)
    for i, (name, (label, colour)) in enumerate(SHOWN.items()):
        if (found := mine[0]["by_k"].get(name)) is None:
            continue
        ks = sorted(map(int, found.plain))
        efficacy = [100 * found[str(k)].number() for k in ks]
        at.plot(ks, efficacy, color=colour, linestyle=DASHES[i % len(DASHES)], label=label)
    at.set_xlabel("GPUs asked for")
    at.set_ylabel("GPU bandwidth efficacy (%)")
    at.set_ylim(0, 103)
    at.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return figure


def draw_by_links(settings: Value, rows: list[Value]) -> Figure | None:
    """Figure 10: mean efficacy over all numbers of GPUs, by the rate of hosts' links."""
    mine = _mixed(rows)
    if len(mine) < 2:
        return None
    figure, (at,) = panels(1, 8.0, 4.6)
    links = [row["link_GBps"].text() for row in mine]
    for i, (name, (label, colour)) in enumerate(SHOWN.items()):
        points = [
            (place, 100 * statistics.fmean(found.numbers()))
            for place, row in enumerate(mine)
            if (found := row["gbe"].get(name)) is not None
        ]
        if points:
            marker = MARKERS[i % len(MARKERS)]
            at.plot(*zip(*points, strict=True), marker, color=colour, label=label)
    at.set_xticks(range(len(links)), links)
    at.set_xlabel("links of hosts (GB/s)")
    at.set_ylabel("GPU bandwidth efficacy (%)")
    at.set_ylim(0, 103)
    at.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return figure


def _mixed(rows: list[Value]) -> list[Value]:
    efficacy = [row for row in rows if row["study"].text() == "efficacy"]
    return [row for row in efficacy if row["hosts"].text() == MIXED]
