"""Tables that hide nothing: what is wider than the terminal is shown in several blocks."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Where neither COLUMNS nor a terminal says how wide lines may be.
WIDTH = 80
#: A column of text takes no more than this share of the width where the table is too wide.
TEXT_SHARE = 0.3
#: Letters that stand between two cells, and at the two ends of a line.
_BETWEEN, _ENDS = 3, 4


def console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console for results: as wide as COLUMNS or the terminal says, without colour if NO_COLOR.

    Args:
        file: in place of standard output.
        width: in place of what the environment says.
    """
    made = Console(file=file, width=width, highlight=False)
    if width is None and not made.is_terminal:
        told = os.environ.get("COLUMNS", "")
        made.width = int(told) if told.isdecimal() and int(told) > 0 else WIDTH
    return made


def say(
    to: Console,
    text: str,
    *,
    indent: int = 0,
    start: int = 0,
    style: str = "",
    fold: bool = False,
) -> None:
    """Print a line of prose: a terminal gets it in lines of whole words, a file in one.

    Args:
        indent: of the lines after the first.
        start, style: so many letters at the start have this style.
        fold: a file gets it as a terminal does.
    """
    if to.is_terminal or fold:
        words = textwrap.TextWrapper(to.width, break_long_words=False, break_on_hyphens=False)
        words.subsequent_indent = " " * min(indent, to.width // 2)
        text = "\n".join(words.wrap(text))
    line = Text(text)
    line.stylize(style, 0, start)
    to.print(line, soft_wrap=True)


@dataclass(frozen=True)
class Grid:
    """A table's content.

    Attributes:
        rows: the cells of each row by heading; all rows have the same headings.
        text: headings of columns of text, whose cells may be folded; the others are numbers.
        title: printed above it, if any.
        keys: how many columns say what a row is about, so that each block begins with them.
    """

    rows: Sequence[Mapping[str, str]]
    text: Sequence[str] = ()
    title: str = ""
    keys: int = 1

    def print(self, to: Console) -> None:
        """Print it to ``to``, in as many blocks as its width needs."""
        if self.title:
            to.print(Text(self.title, style="italic"))
        for block in self._blocks(to.width):
            to.print(self._table(block))

    def _blocks(self, width: int) -> Iterator[dict[str, int]]:
        """Headings and widths of the columns of each block."""
        wanted = {heading: self._width(heading) for heading in self.rows[0]}
        least = dict(wanted)
        if _total(wanted) > width:
            for heading in wanted.keys() & set(self.text):
                share = max(int(TEXT_SHARE * width), cell_len(heading))
                least[heading] = min(wanted[heading], share)
        headings = list(wanted)
        keys = {heading: least[heading] for heading in headings[: self.keys]}
        block = dict(keys)
        for heading in headings[self.keys :]:
            if len(block) > len(keys) and _total({**block, heading: least[heading]}) > width:
                yield _widened(block, wanted, width)
                block = dict(keys)
            block[heading] = least[heading]
        yield _widened(block, wanted, width)

    def _width(self, heading: str) -> int:
        return max(cell_len(heading), *(cell_len(row[heading]) for row in self.rows))

    def _table(self, block: Mapping[str, int]) -> Table:
        table = Table()
        for heading, width in block.items():
            side = "left" if heading in self.text else "right"
            table.add_column(Text(heading), justify=side, overflow="fold", width=width)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(Text(row[heading]) for heading in block))
        return table


def _widened(block: Mapping[str, int], wanted: Mapping[str, int], width: int) -> dict[str, int]:
    """The widths of ``block``, with the room that is left given to those that want more."""
    given = dict(block)
    for heading in block:
        room = max(0, width - _total(given))
        given[heading] = min(wanted[heading], given[heading] + room)
    return given


def _total(widths: Mapping[str, int]) -> int:
    """Letters of a line of columns that are so wide."""
    return sum(widths.values()) + _BETWEEN * (len(widths) - 1) + _ENDS
