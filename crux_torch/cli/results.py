"""Result files: what a benchmark measured, as JSON and as the table that it printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark measured: the settings that it ran with, and a row a measurement."""

    benchmark: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        """The text of the file. Each row has its own line, so that diffs stay small."""
        head = {"benchmark": self.benchmark, "settings": self.settings}
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in self.rows)
        return json.dumps(head)[:-1] + f', "rows": [\n{rows}\n]}}\n'

    def write(self, text: str, json_path: Path | None, folder: Path | None) -> None:
        """Writes the JSON to ``json_path``, and ``BENCHMARK.json`` and ``.txt`` to ``folder``."""
        if folder is not None:
            write_text(folder / f"{self.benchmark}.json", self.to_json(), make_folder=True)
            write_text(folder / f"{self.benchmark}.txt", text, make_folder=True)
        if json_path is not None:
            write_text(json_path, self.to_json())


def write_text(file: Path, text: str, *, make_folder: bool = False) -> None:
    """Writes ``file`` (``make_folder``: also its folder), or raises ClickException."""
    try:
        if make_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None


def publish(result: Result, text: str, json_path: Path | None, folder: Path | None) -> None:
    """Prints ``text``, then writes the result files, see :meth:`Result.write`."""
    click.echo(text, nl=False)
    result.write(text, json_path, folder)
