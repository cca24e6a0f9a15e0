"""Each promise in docs/guarantees.md names what it rests on, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guarantees.md"
#: A file below this folder, or a test in it.
NAMED = re.compile(r"`([\w/]+\.(?:py|cc))(?:::(\w+))?`")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under ``heading``."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [re.split(r"\s+\|\s+", line.strip("| ")) for line in lines[1:]]


TABLES = ("What is promised, and on what it rests", "What fails, and what happens")


@pytest.mark.parametrize("heading", TABLES)
def test_each_row_names_tests_that_exist(heading: str) -> None:
    assert len(rows(heading)) > 10
    for cells in rows(heading):
        assert len(cells) == 4, cells
        named = NAMED.findall(cells[3])
        assert named, cells[0]
        for file, function in named:
            assert (TESTS / file).is_file(), file
            if function:
                body = ast.parse((TESTS / file).read_text()).body
                assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}
