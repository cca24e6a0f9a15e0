"""Reads the fields of a result file's rows, and says which one is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crux_torch.sim.results import ResultError, read_result


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
                raise ResultError(f"{self.file}: {found.place} has no {part!r}; expected one")
            found = Value(self.file, f"{found.place}.{part}", found.plain[part])
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

    def _wrong(self, expected: str) -> ResultError:
        shown = repr(self.plain)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        return ResultError(f"{self.file}: {self.place} is {shown}; expected {expected}")


def read_rows(file: Path) -> tuple[Value, list[Value]]:
    """Settings and rows of a result file.

    Raises:
        ResultError: it can't be read, is no result or has no rows.
    """
    result = read_result(file)
    if not result.rows:
        raise ResultError(f"{file}: rows is empty; expected one or more")
    rows = [Value(file, f"rows[{i}]", row) for i, row in enumerate(result.rows)]
    return Value(file, "settings", result.settings), rows
