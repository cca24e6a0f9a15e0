"""``crux sim figures``: the paper's figures from result files."""

from __future__ import annotations

from pathlib import Path

import click

from crux_torch.sim.results import ResultError


@click.command()
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the PNG files and for figures.html.",
)
def figures(results: Path, out: Path) -> None:
    """Draw Figures 16 and 19 to 25 from the result files in RESULTS."""
    # Drawing needs matplotlib, which takes longer to import than other commands take to run.
    from crux_torch.sim.figures.catalogue import draw_all
    from crux_torch.sim.figures.page import write

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
