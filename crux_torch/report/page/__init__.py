"""Self-contained HTML pages: they load no script, font or image from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from crux_torch.report.tables import Grid

if TYPE_CHECKING:
    from crux_torch.report.page.charts import Chart

FOLDER = Path(__file__).parent
#: Letters of a piece of a page.
PIECE = 16 << 10


@dataclass(frozen=True)
class Sheet:
    """One table. ``total`` is a last row of its own."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    total: tuple[str, ...] | None = None

    @property
    def all_rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows, and the total if there is one."""
        return (*self.rows, self.total) if self.total else tuple(self.rows)


def sheet_of(grid: Grid) -> Sheet:
    """Returns the table that a command prints as one of a page."""
    rows = [tuple(row.values()) for row in grid.rows]
    return Sheet(grid.title, tuple(grid.rows[0]) if grid.rows else (), rows)


def report(
    title: str,
    sheets: Sequence[Sheet],
    charts: Sequence[Chart],
    *,
    setting: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Returns a page of tables and charts.

    Args:
        setting: lines above the tables.
        notes: lines below the charts.
    """
    given: dict[str, Any] = {"sheets": sheets, "charts": charts, "setting": setting, "notes": notes}
    return render("report.html.jinja", title=title, **given)


def render(template: str, folder: Path = FOLDER, **values: Any) -> str:
    """Returns the page of a template, which extends ``base.html.jinja``; values are escaped.

    Args:
        template: name of the file.
        folder: where it is.
    """
    return "".join(stream(template, folder, **values))


def stream(template: str, folder: Path = FOLDER, **values: Any) -> Iterator[str]:
    """Yields the page of :func:`render`, the first lines while the rest is still to be made."""
    piece, size = [], 0
    for text in _environment(folder).get_template(template).generate(**values):
        piece.append(text)
        size += len(text)
        if size >= PIECE:
            yield "".join(piece)
            piece, size = [], 0
    yield "".join(piece)


@lru_cache
def _environment(folder: Path) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(list(dict.fromkeys((folder, FOLDER)))),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
