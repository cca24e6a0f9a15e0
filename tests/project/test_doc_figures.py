"""Figures in the pages are those of the results files.

A line ``<!-- figures: paths.txt -->`` in a page says where the figures of the next block come from:
a paragraph, table or code block, up to the next blank line. Each number of that block which has a
decimal point or a thousands separator must be, rounded, a number of one of the named files of
benchmarks/results. With ``<!-- figures: torus.txt within 12 lines -->`` all figures of a row of the
page must stand within so many lines of the file, which leaves little room for chance.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = re.compile(
    r"^<!-- figures: (?P<files>[\w. ]+?)(?: within (?P<span>\d+) lines)? -->\n", re.MULTILINE
)
NUMBER = re.compile(r"(?<![\w§.])\d[\d,]*(?:\.\d+)?|(?<=\.\.)\d[\d,]*(?:\.\d+)?")


@cache
def lines(file: str) -> list[list[float]]:
    """The numbers of each line of a results file."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    # JSON separates its numbers by commas that are no thousands separators.
    text = text.replace(",", ", ") if file.endswith(".json") else text
    found = (re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", line) for line in text.splitlines())
    return [[float(number.replace(",", "")) for number in numbers] for numbers in found]


def missing(text: str, known: list[float]) -> list[str]:
    """The figures of ``text`` that are not among the ``known`` numbers."""
    found = []
    for shown in (number.rstrip(",") for number in NUMBER.findall(text)):
        plain = shown.replace(",", "")
        decimals = len(plain.partition(".")[2])
        # What lies in the middle may be rounded either way.
        reach = 0.5001 * 10.0**-decimals
        is_figure = decimals or "," in shown
        if is_figure and not any(abs(number - float(plain)) <= reach for number in known):
            found.append(shown)
    return found


def unknown_figures(block: str, files: str, span: int | None = None) -> list[str]:
    """The figures of ``block`` that the files don't have, or not within ``span`` lines."""
    content = [line for file in files.split() for line in lines(file)]
    if span is None:
        return missing(block, [n for line in content for n in line])
    windows = [[n for line in content[i : i + span] for n in line] for i in range(len(content))]
    best = [min((missing(row, w) for w in windows), key=len) for row in block.splitlines()]
    return [figure for row in best for figure in row]


def marked(page: str) -> list[tuple[str, str, int | None]]:
    """Block, files and span of every marker."""
    return [
        (
            page[found.end() :].split("\n\n", 1)[0],
            found["files"],
            int(found["span"]) if found["span"] else None,
        )
        for found in MARKER.finditer(page)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_marked_figures_are_those_of_the_results_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- figures:") == len(marked(text)), "a marker that can't be read"
    for block, files, span in marked(text):
        assert unknown_figures(block, files, span) == [], block
        assert re.search(r"\d[.,]\d", block), f"nothing to check: {block}"


def test_pages_that_report_results_are_checked() -> None:
    checked = {page.stem for page in PAGES if marked(page.read_text(encoding="utf-8"))}
    assert {"README", "evaluation", "paths", "host", "handover", "transport"} <= checked


def test_a_figure_that_no_file_has_is_found() -> None:
    block = "| 1,700 cases | 0.1195 | 12 | 98.77% |"
    assert unknown_figures(block, "optimality.txt") == ["1,700", "0.1195", "98.77"]
    first, second = "| 271 | 1.27-1.45 |", "| 271 | 1.27-1.83 |"
    assert unknown_figures(f"{first}\n{second}", "paths.txt") == []
    assert unknown_figures(f"{first}\n{second}", "paths.txt", 1) == ["1.83"]
