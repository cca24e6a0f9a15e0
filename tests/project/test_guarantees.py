"""Each promise in docs/operate/guarantees.md has a table of cases, with tests that exist."""

from __future__ import annotations

import ast
import re

import pytest
from places import TESTS

#: Tests by the names of their files, which are unique.
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}
PAGE = (TESTS.parent / "docs" / "operate" / "guarantees.md").read_text(encoding="utf-8")
#: A file below tests/, or a test in it.
NAMED = re.compile(r"`([\w/]+\.(?:py|cc))(?:::(\w+))?`")
HEADER = "| case | result | test |\n|---|---|---|\n"
SECTIONS = {
    section.partition("\n")[0]: section for section in re.split(r"^## ", PAGE, flags=re.M)[1:]
}
PROMISES = [heading for heading in SECTIONS if HEADER in SECTIONS[heading]]


def test_the_page_has_its_promises() -> None:
    assert len(PROMISES) == 14
    assert set(SECTIONS) - set(PROMISES) == {"Faults that the tests draw", "Limits"}


@pytest.mark.parametrize("heading", PROMISES)
def test_each_case_names_a_test_that_exists(heading: str) -> None:
    before, _, table = SECTIONS[heading].partition(HEADER)
    promise = before.partition("\n")[2].strip().split("\n\n")[0]
    assert promise.count(". ") <= 1, "one sentence"
    rows = table.partition("\n\n")[0].splitlines()
    assert rows
    for row in rows:
        cells = re.split(r"\s+\|\s+", row.strip("| "))
        assert len(cells) == 3, row
        named = NAMED.findall(cells[2])
        assert named, row
        for file, function in named:
            path = FILES.get(file, TESTS / file)
            assert path.is_file(), file
            if function:
                body = ast.parse(path.read_text()).body
                assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}
