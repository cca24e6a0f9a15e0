"""``python -m evaluation variants``: what Crux's differences from the paper's text are worth."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from crux_torch.cli.results import Result, json_option, publish
from evaluation.beyond import KINDS
from evaluation.paper_variants import measure, table


@click.command()
@click.option("--small", type=click.IntRange(0), default=200, show_default=True)
@click.option("--testbed", type=click.IntRange(0), default=20, show_default=True)
@click.option("--clos", type=click.IntRange(0), default=3, show_default=True)
@click.option("--horizon", "horizon_s", type=click.FloatRange(1.0), default=120.0)
@json_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write variants.json and variants.txt to this folder.",
)
def variants(
    small: int,
    testbed: int,
    clos: int,
    horizon_s: float,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """Take one decision at a time as the paper words it, and compare GPU utilisation."""
    counts = {"small": small, "testbed": testbed, "clos": clos}
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for kind, count in counts.items():
            for seed in progress.track(range(count), description=kind):
                rows.extend(measure(KINDS[kind](seed), horizon_s))
    result = Result("variants", {"cases": counts, "horizon_s": horizon_s}, rows)
    publish(result, table(rows), json_path, out)
