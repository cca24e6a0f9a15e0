"""``python -m evaluation spraying``: what scheduling gains where packets are sprayed."""

from __future__ import annotations

from pathlib import Path

import click

from crux_torch.cli.results import Result, json_option, publish
from evaluation.spraying import SIZES, STARTS_S, rows_of, table


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--horizon",
    "horizon_s",
    type=click.FloatRange(min=2 * STARTS_S),
    default=60.0,
    show_default=True,
    help="Seconds played.",
)
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/spraying.{json,txt}.")
def spraying(seeds: int, horizon_s: float, json_path: Path | None, out: Path | None) -> None:
    """Plays random jobs on Clos networks that hash flows, and on those that spray packets."""
    rows = list(rows_of(seeds, horizon_s))
    settings = {"seeds": seeds, "horizon_s": horizon_s, "job_gpus": list(SIZES)}
    publish(Result("spraying", settings, rows), table(rows), json_path, out)
