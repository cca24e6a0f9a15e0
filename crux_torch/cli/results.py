"""Outputs of a command: ``--json [FILE|-]``, and the files of a benchmark.

Options that several simulator commands share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from crux_torch.files import write_file
from crux_torch.report.tables import bounded
from crux_torch.sim.workers import ADDRESS, Workers

#: Types of a file that must be there, and of one that is written.
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
#: ``--json`` without a file, or with ``-``: standard output has the JSON and nothing else.
STDOUT = Path("-")

json_option = click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value="-",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="[FILE|-]",
    help="Also write the results to FILE as JSON; without FILE, or with -, print that only.",
)


def number(
    names: str,
    least: float,
    most: float | None,
    default: float,
    words: str,
    metavar: str | None = None,
) -> Callable[..., Any]:
    """An option for a number from ``least`` to ``most``, with spaces between its names.

    Args:
        default: a whole one makes the option take whole numbers.
        words: its help.
    """
    kind: Any = click.IntRange if isinstance(default, int) else click.FloatRange
    type_ = kind(least, most)
    return click.option(*names.split(), type=type_, default=default, metavar=metavar, help=words)


def put_json(json_path: Path | None, text: str) -> bool:
    """Write the JSON ``text`` to where ``--json`` says, if it was given.

    Returns:
        True if it went to standard output, where nothing else may then be printed.

    Raises:
        ClickException: the file can't be written.
    """
    if json_path == STDOUT:
        click.echo(text, nl=False)
        return True
    if json_path is not None:
        write_text(json_path, text)
    return False


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one benchmark: its settings, and a row a measurement."""

    benchmark: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        """The text of the file. Each row has its own line, so that diffs stay small."""
        head = {"benchmark": self.benchmark, "settings": self.settings}
        rows = ",\n".join(json.dumps(bounded(row), separators=(",", ":")) for row in self.rows)
        return json.dumps(bounded(head))[:-1] + f', "rows": [\n{rows}\n]}}\n'

    def write(self, text: str, json_path: Path | None, folder: Path | None) -> None:
        """Write the JSON to the file ``json_path``, and both to ``folder``.

        There they are ``BENCHMARK.json`` and, for ``text``, ``BENCHMARK.txt``.
        """
        if folder is not None:
            write_text(folder / f"{self.benchmark}.json", self.to_json(), make_folder=True)
            write_text(folder / f"{self.benchmark}.txt", text, make_folder=True)
        if json_path is not None and json_path != STDOUT:
            write_text(json_path, self.to_json())


def write_text(file: Path, text: str, *, make_folder: bool = False) -> None:
    """Write ``file``; what it held stays if that fails.

    Args:
        make_folder: make its folder, too, if there is none.

    Raises:
        ClickException: it can't be written.
    """
    try:
        if make_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text)
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None


def publish(result: Result, text: str, json_path: Path | None, folder: Path | None) -> None:
    """Write the result files, see :meth:`Result.write`, and print ``text`` or the JSON."""
    result.write(text, json_path, folder)
    click.echo(result.to_json() if json_path == STDOUT else text, nl=False)


scenario_argument = click.argument("file", type=FILE)


def _workers(_context: click.Context, _option: click.Parameter, value: str) -> Workers:
    if value.isdecimal() and int(value):
        return int(value)
    if not ADDRESS.fullmatch(value):
        expected = "a number of processes, dask://HOST:PORT or ray://HOST:PORT"
        raise click.BadParameter(f"{value!r} is unknown; expected {expected}")
    return value


workers_option = click.option(
    "--workers",
    metavar="N|ADDRESS",
    callback=_workers,
    default="1",
    show_default=True,
    help="Runs at a time, in as many processes; or dask://HOST:PORT or ray://HOST:PORT, a cluster.",
)


def names_option(flag: str, name: str, known: Iterable[str], default: str) -> Callable[..., Any]:
    """An option for a comma-separated list of ``known`` names; ``all`` stands for all of them."""
    known = list(known)
    return click.option(
        flag,
        name,
        default=default,
        show_default=True,
        callback=lambda _context, _option, value: chosen(value, known),
        help=f"Comma-separated: {', '.join(known)}; or all.",
    )


def chosen(value: str, known: list[str]) -> tuple[str, ...]:
    names = tuple(known) if value == "all" else tuple(value.split(","))
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; expected some of {', '.join(known)}")
    return names
