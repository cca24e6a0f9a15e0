"""Figure 24: weeks of jobs on a whole cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from evaluation.figures.fields import Value
from evaluation.figures.style import colour, label

DAY_S = 86400.0
#: Columns of Figure 24, of those that the result has.
OVER_TIME = ("sincronia", "taccl", "cassini", "crux-pa", "crux-ps-pa", "crux-paper", "crux")
LAYERS = {
    "pcie-nic": "PCIe to NIC",
    "nic-tor": "NIC to ToR",
    "tor-aggregation": "ToR to aggregation",
    "aggregation-core": "aggregation to core",
}


def draw_over_time(settings: Value, rows: list[Value]) -> Figure | None:
    """Figure 24: whose traffic the layers of the two-layer network carry, and utilisation."""
    by_name = {
        r["scheduler"].text(): r
        for r in rows
        if r["topology"].text() == "clos" and r["placement"].text() == "none"
    }
    names = [n for n in OVER_TIME if n in by_name]
    if not names:
        return None
    edges = settings["intensity_edges"].numbers()
    series = {name: by_name[name]["series"] for name in names}
    layers = [k for k, _ in series[names[0]]["carried"].entries() if k in LAYERS]
    carried = {
        (name, layer): 100 * _matrix(series[name]["carried"][layer], len(edges) + 1)
        for name in names
        for layer in layers
    }
    used = np.flatnonzero(sum(m.sum(axis=0) for m in carried.values()))
    first, last = int(used[0]), int(used[-1])
    count = last - first + 1
    shades = matplotlib.colormaps["cividis_r"](np.linspace(0.03, 1, count))
    width = 1.2 + 2.1 * len(names)
    figure = Figure(figsize=(width, 1.7 * (len(layers) + 1) + 0.6), layout="constrained")
    grid = figure.subplots(len(layers) + 1, len(names), squeeze=False, sharex=True, sharey="row")
    for column, name in enumerate(names):
        days = np.array(series[name]["time_s"].numbers()) / DAY_S
        for row, layer in enumerate(layers):
            _stack(grid[row][column], days, carried[name, layer][:, first : last + 1], shades)
        share = 100 * np.array(series[name]["gpu_utilization"].numbers())
        below = grid[-1][column]
        below.stairs(share, days, color=colour(name), fill=True)
        below.set_ylim(0, 100)
        below.set_xlabel("day")
        grid[0][column].set_title(label(name), fontsize=10)
        mean = by_name[name]["gpu_utilization"].number()
        below.text(0.03, 0.9, f"mean {mean:.1%}", transform=below.transAxes, fontsize=8, va="top")
    for row, layer in enumerate(layers):
        top = max(carried[name, layer].sum(axis=1).max() for name in names)
        grid[row][0].set_ylim(0, 1.05 * top)
        grid[row][0].set_ylabel(f"{LAYERS[layer]}\n(% of capacity)")
    grid[-1][0].set_ylabel("GPU utilisation\n(%)")
    _scale(figure, grid, list(shades), edges[max(first - 1, 0) : last + 1])
    return figure


def _matrix(value: Value, width: int) -> np.ndarray:
    rows = [item.numbers() for item in value.items()]
    for item, row in zip(value.items(), rows, strict=True):
        if len(row) != width:
            raise item._wrong(f"{width} numbers")
    return np.array(rows).reshape(-1, width)


def _stack(axes: Axes, days: np.ndarray, spans: np.ndarray, shades: np.ndarray) -> None:
    tops = np.cumsum(spans, axis=1)
    for i in reversed(range(spans.shape[1])):
        axes.stairs(tops[:, i], days, fill=True, color=shades[i], linewidth=0)


def _scale(figure: Figure, grid: np.ndarray, shades: Sequence[Any], edges: Sequence[float]) -> None:
    """A bar of the classes' colours; the outer classes are open."""
    borders = np.log10(edges)
    step = 0.5
    low = borders[0] if len(borders) > len(shades) else borders[0] - step
    bounds = [low + step * i for i in range(len(shades) + 1)]
    mappable = ScalarMappable(BoundaryNorm(bounds, len(shades)), ListedColormap(shades))
    bar = figure.colorbar(mappable, ax=grid, aspect=50, pad=0.01, ticks=bounds[::2])
    bar.set_ticklabels([f"$10^{{{b:g}}}$" for b in bounds[::2]])
    bar.set_label("GPU intensity of the job whose data it is (FLOP/s)")
