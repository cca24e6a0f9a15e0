"""``python -m evaluation figures``: the paper's figures from result files."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the PNG files and for figures.html.",
)
def figures(results: Path, out: Path) -> None:
    """Draw Figures 16 and 19 to 25, and LiteGD's 9 and 10, from the result files in RESULTS."""
    try:
        # Only this command needs matplotlib, which takes long to import.
        from evaluation.figures.catalogue import draw_all
        from evaluation.figures.fields import ResultError
        from evaluation.figures.page import write
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"drawing needs {error.name}: pip install 'crux-torch[plots]'"
        ) from None
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
