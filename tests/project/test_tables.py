"""Tables hide nothing, however narrow the terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.report.tables import Grid, console, say


@given(
    width=st.integers(40, 200),
    headings=st.lists(st.text("ABCDEF ", max_size=12).map(str.strip), min_size=2, max_size=20),
    cells=st.lists(st.lists(st.integers(0, 10**8), min_size=20, max_size=20), max_size=4),
    names=st.lists(st.integers(1, 90), min_size=5, max_size=5),
)
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_lost(width, headings, cells, names):
    headings = [f"{i}{heading}" for i, heading in enumerate(headings)]
    rows = [
        {"job": "x" * names[n]} | {h: str(c) for h, c in zip(headings, row, strict=False)}
        for n, row in enumerate([[7] * 20, *cells])
    ]
    out = io.StringIO()
    Grid(rows, text=("job",)).print(console(out, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = [c.strip() for line in lines if line[0] in "┃│" for c in line[1:-1].split(line[0])]
    for row in rows:
        for heading, cell in row.items():
            assert heading in shown
            assert heading == "job" or cell in shown
    # Folded names are whole, too: each block has all of them.
    blocks = sum(line.startswith("┃") for line in lines)
    assert "".join(shown).count("x") == blocks * sum(len(row["job"]) for row in rows)


def test_a_table_that_fits_is_one_block_with_its_columns_in_order():
    out = io.StringIO()
    row = {"job": "a", "level": "6", "hosts": "h0,h1"}
    Grid([row], text=("job", "hosts"), title="Jobs").print(console(out, 80))
    assert out.getvalue().splitlines() == [
        "Jobs",
        "┏━━━━━┳━━━━━━━┳━━━━━━━┓",
        "┃ job ┃ level ┃ hosts ┃",
        "┡━━━━━╇━━━━━━━╇━━━━━━━┩",
        "│ a   │     6 │ h0,h1 │",
        "└─────┴───────┴───────┘",
    ]


@pytest.mark.parametrize(("told", "width"), [("62", 62), ("", 80), ("0", 80), ("many", 80)])
def test_a_pipe_is_as_wide_as_columns_says(monkeypatch, told, width):
    monkeypatch.setenv("COLUMNS", told)
    assert console(io.StringIO()).width == width


def test_prose_is_one_line_in_a_file_and_whole_words_at_a_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = "ok       store   " + "it answers " * 12
    file, terminal = io.StringIO(), io.StringIO()
    say(console(file, 60), text, indent=17)
    assert file.getvalue() == text + "\n"
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    say(console(terminal, 60), text, indent=17, start=2, style="green")
    first, *others = terminal.getvalue().splitlines()
    assert first.startswith("ok       store   it answers")
    assert others
    assert all(line.startswith(" " * 17 + "it") for line in others)
    assert max(map(len, terminal.getvalue().splitlines())) <= 60
    assert "\x1b" not in terminal.getvalue()
