"""Style of the figures: one colour for each scheduler; lines differ without colours, too.

The hues are Okabe and Ito's, which readers with any common colour blindness tell apart; lines also
differ by dash and markers, bars by their labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

COLOURS = {
    "ecmp": "#8c8c8c",
    "sincronia": "#e69f00",
    "varys": "#b8a500",
    "taccl": "#cc79a7",
    "cassini": "#009e73",
    "crux-pa": "#a3cdea",
    "crux-ps-pa": "#56b4e9",
    "paths-only": "#7fbfd0",
    "crux-paper": "#0072b2",
    "crux": "#d55e00",
    "crux-uncapped": "#e79b66",
    "intensity": "#999933",
    "weighted": "#882255",
    "alone": "#4d4d4d",
    "ideal": "#1a1a1a",
}
OTHER = "#b3b3b3"
LABELS = {
    "ecmp": "ECMP",
    "sincronia": "Sincronia",
    "varys": "Varys",
    "taccl": "TACCL*",
    "cassini": "CASSINI",
    "crux-pa": "Crux-PA",
    "crux-ps-pa": "Crux-PS-PA",
    "paths-only": "Crux's paths only",
    "crux-paper": "Crux (paper)",
    "crux": "crux",
    "crux-uncapped": "crux, no cap",
    "intensity": "intensity alone",
    "weighted": "Crux, all pairs weighted",
    "alone": "alone, ECMP's paths",
    "ideal": "alone, best paths",
}
#: What the paper reports, wherever it stands beside ours.
PAPER: dict[str, Any] = {"color": "#c00000", "marker": "D", "markersize": 6, "linestyle": "none"}
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "v", "P", "X")

SETTINGS: Any = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
}


def colour(scheduler: str) -> str:
    """The scheduler's colour; grey for one without."""
    return COLOURS.get(scheduler, OTHER)


def on_top_of(scheduler: str) -> str:
    """Black or white, whichever reads better on the scheduler's colour."""
    red, green, blue = to_rgb(colour(scheduler))
    return "#1a1a1a" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


def label(scheduler: str) -> str:
    """The scheduler's name in a figure."""
    return LABELS.get(scheduler, scheduler)


def in_order(schedulers: Iterable[str]) -> list[str]:
    """Each once, baselines first, bounds last; those without a colour at the end."""
    known = list(COLOURS)
    found = dict.fromkeys(schedulers)
    return sorted(found, key=lambda s: known.index(s) if s in known else len(known))


def panels(
    count: int, width: float = 10.0, height: float = 3.8, **how: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels side by side that needs no display."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, count, squeeze=False, **how)[0]
    return figure, list(axes)
