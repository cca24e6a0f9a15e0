"""``python -m evaluation trace``: ``crux sim trace`` beside the paper's Figures 23 and 25."""

from __future__ import annotations

from itertools import product
from typing import Any

import click

from crux_torch.cli import sim_trace
from crux_torch.cli.sim_trace import Cell, Row

#: The paper's GPU utilisation by network, placement and scheduler. The scheduler called ``crux`` is
#: the paper's Crux-full, and ``taccl`` is its TACCL*.
PAPER: dict[Cell, float] = {
    # Figure 23.
    ("clos", "none", "sincronia"): 0.39,
    ("clos", "none", "taccl"): 0.49,
    ("clos", "none", "cassini"): 0.48,
    ("clos", "none", "crux-pa"): 0.51,
    ("clos", "none", "crux-ps-pa"): 0.62,
    ("clos", "none", "crux-paper"): 0.62,
    ("double-sided", "none", "sincronia"): 0.43,
    ("double-sided", "none", "taccl"): 0.46,
    ("double-sided", "none", "cassini"): 0.45,
    ("double-sided", "none", "crux-pa"): 0.48,
    ("double-sided", "none", "crux-ps-pa"): 0.51,
    ("double-sided", "none", "crux-paper"): 0.50,
    # Figure 25, on the two-layer network: job schedulers alone, and with Crux.
    ("clos", "none", "ecmp"): 0.39,
    ("clos", "muri", "ecmp"): 0.59,
    ("clos", "muri", "crux-paper"): 0.73,
    ("clos", "hived", "ecmp"): 0.64,
    ("clos", "hived", "crux-paper"): 0.75,
}
#: Schedulers of Figure 25's rows and of the network without contention.
STACKED = ("ecmp", "crux-paper", "ideal")


@click.command(
    context_settings=sim_trace.trace.context_settings,
    params=[
        *sim_trace.trace.params,
        click.Option(
            ["--paper"],
            is_flag=True,
            help="Play all rows of Figures 23 and 25, and a network without contention, instead of "
            "what --topology and --placement say.",
        ),
    ],
)
def trace(
    topologies: str,
    placements: tuple[str, ...],
    schedulers: tuple[str, ...],
    paper: bool,
    **how: Any,
) -> None:
    """Play weeks of arriving jobs, with the bars of Figures 23 and 25 beside the rows."""
    cells = list(product(topologies.split(","), placements, schedulers))
    if paper:
        cells = paper_cells(schedulers)
    sim_trace.play_rows(cells, row_of=beside_the_paper, columns={"paper": _paper}, **how)


def paper_cells(schedulers: tuple[str, ...]) -> list[Cell]:
    """The rows of Figures 23 and 25 under ``schedulers``, and a network without contention."""
    stacked = [name for name in STACKED if name in schedulers]
    return [
        *product(("clos", "double-sided"), ("none",), schedulers),
        *product(("clos",), ("muri", "hived"), stacked),
        *product(("non-blocking",), ("none",), stacked),
    ]


def beside_the_paper(row: Row) -> Row:
    """``row`` with the paper's utilisation, None where the paper has no such bar."""
    cell = {key: row[key] for key in ("topology", "placement", "scheduler")}
    reported = PAPER.get(tuple(cell.values()))  # type: ignore[arg-type]
    return {**cell, "gpus": row["gpus"], "paper_gpu_utilization": reported, **row}


def _paper(row: Row) -> str:
    reported = row["paper_gpu_utilization"]
    return "-" if reported is None else f"{reported:.2f}"
