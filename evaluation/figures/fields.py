"""Reads the fields of a result file's rows, and says which one is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crux_torch.errors import CruxError


class ResultError(CruxError, ValueError):
    """A result file that can't be used: which file and key, and what was expected."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a result file with the place where it stands."""

    file: Path
    place: str
    plain: Any

    def __getitem__(self, key: str) -> Value:
        """The entry ``key`` of an object; ``a.b`` goes down two."""
        found = self
        for part in key.split("."):
            if not isinstance(found.plain, Mapping) or part not in found.plain:
                raise ResultError(f"{self.file}: {found._named} has no {part!r}; expected one")
            found = Value(self.file, f"{found.place}.{part}".lstrip("."), found.plain[part])
        return found

    def get(self, key: str) -> Value | None:
        """The entry ``key`` of an object; None where there is none."""
        return self[key] if isinstance(self.plain, Mapping) and key in self.plain else None

    def number(self) -> float:
        """This as a number."""
        if isinstance(self.plain, bool) or not isinstance(self.plain, int | float):
            raise self._wrong("a number")
        return float(self.plain)

    def text(self) -> str:
        """This as a string."""
        if not isinstance(self.plain, str):
            raise self._wrong("a string")
        return self.plain

    def numbers(self) -> list[float]:
        """This as a list of numbers."""
        return [item.number() for item in self.items()]

    def items(self) -> list[Value]:
        """The entries of a list."""
        if not isinstance(self.plain, Sequence) or isinstance(self.plain, str):
            raise self._wrong("a list")
        return [Value(self.file, f"{self.place}[{i}]", v) for i, v in enumerate(self.plain)]

    def entries(self) -> Iterator[tuple[str, Value]]:
        """The entries of an object by key."""
        if not isinstance(self.plain, Mapping):
            raise self._wrong("an object")
        for key in self.plain:
            yield key, Value(self.file, f"{self.place}.{key}", self.plain[key])

    @property
    def _named(self) -> str:
        return self.place or "the file"

    def _wrong(self, expected: str) -> ResultError:
        shown = repr(self.plain)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        return ResultError(f"{self.file}: {self._named} is {shown}; expected {expected}")


def read_rows(file: Path) -> tuple[Value, list[Value]]:
    """Settings and rows of a result file.

    Raises:
        ResultError: it can't be read, is no result or has no rows.
    """
    try:
        whole = Value(file, "", json.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{file}: can't be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ResultError(f"{file}: line {error.lineno}: {error.msg}; expected JSON") from None
    rows = whole["rows"].items()
    if not rows:
        raise ResultError(f"{file}: rows is empty; expected one or more")
    return whole["settings"], rows
