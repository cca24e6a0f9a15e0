"""``--plot`` and ``--html``: results of a command as a picture or as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crux_torch.cli.results import NEW_FILE, write_text

if TYPE_CHECKING:
    from crux_torch.report.page.charts import Chart
    from crux_torch.report.tables import Grid


@contextmanager
def drawing() -> Iterator[None]:
    """Turns the lack of a package that draws into one line with the remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"drawing needs {error.name}: pip install 'crux-torch[plots]'"
        ) from None


def can_draw(
    _context: click.Context, parameter: click.Parameter, given: Path | None
) -> Path | None:
    """Refuses, as the callback of an option, what can't be drawn before anything is played."""
    if given is None:
        return None
    if parameter.name == "plot_path" and given.suffix not in (".svg", ".html"):
        raise click.BadParameter(f"expected a name that ends in .svg or .html, not {given.name!r}")
    with drawing():
        import crux_torch.report.page.charts  # noqa: F401
    return given


plot_option = click.option(
    "--plot",
    "plot_path",
    type=NEW_FILE,
    callback=can_draw,
    metavar="FILE.svg|FILE.html",
    help="Draw the results to this file: a picture, or a page that has the tables, too.",
)


def put_plot(path: Path, title: str, tables: Sequence[Grid], charts: Sequence[Chart]) -> None:
    """Write the charts, and to a page the tables before them.

    Raises:
        ClickException: the file can't be written.
    """
    from crux_torch.report.page import report, sheet_of
    from crux_torch.report.page.charts import file_of

    if path.suffix == ".svg":
        write_text(path, file_of(charts))
    else:
        write_text(path, report(title, [sheet_of(table) for table in tables], charts))
