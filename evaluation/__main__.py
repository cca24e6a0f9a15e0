"""``python -m evaluation``: the paper's evaluation, run again in the simulator."""

from __future__ import annotations

from pathlib import Path

import click

from crux_torch.cli.main import CleanGroup
from crux_torch.cli.plots import drawing
from evaluation.beyond import beyond
from evaluation.cassini import cassini
from evaluation.dispatch_contention import dispatch_contention
from evaluation.dispatch_tables import dispatch
from evaluation.optimality import optimality
from evaluation.precision import precision
from evaluation.saturated import saturated
from evaluation.snapshots import snapshots
from evaluation.spraying import spraying
from evaluation.testbed_runs import testbed
from evaluation.torus import torus
from evaluation.trace import trace
from evaluation.variants import variants


@click.command()
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the PNG files and for figures.html.",
)
def figures(results: Path, out: Path) -> None:
    """Draw Figures 16 and 19 to 25, LiteGD's 9 and 10, and CASSINI's 15, from files in RESULTS."""
    # Only this command needs matplotlib, which takes long to import.
    with drawing():
        from evaluation.figures.catalogue import draw_all, write
        from evaluation.figures.fields import ResultError
    try:
        drawn, left_out = draw_all(results)
        files, page = write(drawn, left_out, out)
    except ResultError as error:
        raise click.ClickException(str(error)) from None
    for file in (*files, page):
        click.echo(file)
    for item in left_out:
        click.echo(f"Figure {item.plate.number} is not drawn: {item.reason}", err=True)
    if not drawn:
        raise click.ClickException(f"{results}: no result file that a figure could be drawn from")


@click.group(cls=CleanGroup, context_settings={"help_option_names": ["-h", "--help"]})
def evaluation() -> None:
    """The paper's evaluation, run again in the simulator (docs/research/evaluation.md)."""


for _command in (
    testbed,
    optimality,
    trace,
    saturated,
    torus,
    snapshots,
    precision,
    cassini,
    spraying,
    beyond,
    variants,
    dispatch,
    dispatch_contention,
    figures,
):
    evaluation.add_command(_command)

if __name__ == "__main__":
    evaluation(prog_name="python -m evaluation")
