"""Result files: what a benchmark found, as JSON and as the table that it printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crux_torch.errors import CruxError


class ResultError(CruxError, ValueError):
    """A result file that can't be used: which file and key, what was expected."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark found.

    Attributes:
        benchmark: its name.
        settings: it ran with.
        rows: one for each measurement.
    """

    benchmark: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        """The file's text: a line for each row, which keeps differences between versions small."""
        head = {"benchmark": self.benchmark, "settings": self.settings}
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in self.rows)
        return json.dumps(head)[:-1] + f', "rows": [\n{rows}\n]}}\n'


def write_result(result: Result, text: str, folder: Path) -> tuple[Path, Path]:
    """Writes ``BENCHMARK.json`` and the table ``BENCHMARK.txt`` to ``folder``; returns both.

    Raises:
        ResultError: they can't be written.
    """
    data, table = (folder / f"{result.benchmark}.{kind}" for kind in ("json", "txt"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data.write_text(result.to_json(), encoding="utf-8")
        table.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{folder}: can't be written: {error}") from None
    return data, table


def read_result(file: Path) -> Result:
    """The result in ``file``.

    Raises:
        ResultError: it can't be read, or is no result.
    """
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{file}: can't be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ResultError(f"{file}: line {error.lineno}: {error.msg}; expected JSON") from None
    if not isinstance(plain, dict):
        raise ResultError(f"{file}: expected an object with benchmark, settings and rows")
    for key, kind, words in (
        ("benchmark", str, "a name"),
        ("settings", dict, "an object"),
        ("rows", list, "a list"),
    ):
        if not isinstance(plain.get(key), kind):
            raise ResultError(f"{file}: {key} is {_shown(plain.get(key))}; expected {words}")
    for i, row in enumerate(plain["rows"]):
        if not isinstance(row, dict):
            raise ResultError(f"{file}: rows[{i}] is {_shown(row)}; expected an object")
    return Result(plain["benchmark"], plain["settings"], plain["rows"])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
