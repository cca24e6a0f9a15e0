"""``python -m evaluation snapshots``: CASSINI's Table 2, with and without its shifts."""

from __future__ import annotations

from pathlib import Path

import click

from crux_torch.cli.results import Result, json_option, publish
from evaluation.snapshots import DEMANDS, DRAWS, ITERATIONS, PERIODS, rows_of, table


@click.command()
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/snapshots.{json,txt}.")
def snapshots(json_path: Path | None, out: Path | None) -> None:
    """Plays the jobs of CASSINI's Table 2 on one link, under every period that fits its scores."""
    rows = list(rows_of())
    settings = {
        "demands": list(DEMANDS),
        "periods": list(PERIODS),
        "iterations": ITERATIONS,
        "draws": DRAWS,
    }
    publish(Result("snapshots", settings, rows), table(rows), json_path, out)
