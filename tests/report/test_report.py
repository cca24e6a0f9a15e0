"""The demo's report: a self-contained, well-formed page that shows what the terminal shows."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from lab.comparison import Comparison
from lab.demo import render
from lab.tables import quantity, show

PLAIN = {
    "title": "Two <jobs> on one link",
    "setting": ["200 Mbit/s", "two hosts"],
    "notes": ["a < b & c"],
    "capacity_Bps": 25e6,
    "baseline": "alone",
    "cases": [
        {"key": "alone", "title": "Alone", "utilisation": 0.25, "seconds": 4.0},
        {"key": "crux", "title": "Together, Crux", "utilisation": 0.44, "seconds": 5.0},
    ],
    "jobs": [
        {"name": "a", "title": "GPT", "flops": 2.14e9, "t_s": 0.103, "overlap": 0.4, "level": 6}
        | {"intensity": 2.08e10, "correction": 1.2, "losses_equal": True, "steps_compared": 60},
        {"name": "b", "title": "MLP", "losses_equal": False, "steps_compared": 3},
    ],
    "step_times": [
        {"job": "a", "case": "alone", "seconds": [0.2, 0.21, 0.22]},
        {"job": "a", "case": "crux", "seconds": [0.3, 0.315, 0.33]},
        {"job": "b", "case": "alone", "seconds": [0.4]},
    ],
    "timelines": [{"case": "crux", "length_s": 2.0, "lanes": [{"job": "a"}, {"job": "b"}]}],
    "links": [{"case": "crux", "link": "leaf0->spine0", "by_level": {0: 5_000_000, 6: 2500}}],
}
PLAIN["timelines"][0]["lanes"][0] |= {
    "computing": [{"start": 0.0, "end": 0.15}],
    "waiting": [{"start": 0.15, "end": 0.3}],
    "rate_Bps": [[0.0, 0.0], [0.1, 2e7], [0.2, 0.0]],
}
SHOWN = ("315 ms (303-327) ×1.50 n=3", "400 ms (400-400) ×1.00 n=1", "2.14 GFLOP", "103 ms")
SHOWN += ("20.8 GFLOP/s", "1.20", "equal (60 steps)", "DIFFERENT (3 steps)", "44.0%", "5 MB")


def comparison(**changes: object) -> Comparison:
    return msgspec.convert(PLAIN | changes, Comparison, strict=False)


def test_page_and_terminal_show_the_same_figures() -> None:
    terminal = io.StringIO()
    show(Console(file=terminal, width=200), comparison())
    page = render(comparison())
    for figure in SHOWN:
        assert figure in terminal.getvalue()
        assert figure in page
    assert "leaf0-&gt;spine0" in page


def test_the_page_is_well_formed_loads_nothing_and_escapes_text() -> None:
    page = render(comparison())
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.S):
        ElementTree.fromstring(svg)
    assert page.count("<svg") == page.count('role="img"') == 3
    assert not re.search(r"<script|<link|<img|@import|(src|href)=\"(?!#)", page)
    assert "Two &lt;jobs&gt; on one link" in page
    assert "a &lt; b &amp; c" in page


def test_the_same_comparison_gives_the_same_page_also_after_json() -> None:
    again = msgspec.json.decode(msgspec.json.encode(comparison()), type=Comparison)
    assert again == comparison()
    assert render(again) == render(comparison())


def test_a_comparison_without_optional_parts_is_shown() -> None:
    bare = comparison(timelines=[], links=[], notes=[], setting=[], step_times=[])
    page = render(bare)
    assert "Timeline" not in page
    assert "Profile and plan" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e15, "2 PB"), (1.7e308, "inf")],
)
def test_quantities_have_three_digits_and_a_prefix(value: float | None, text: str) -> None:
    assert quantity(value, "B") == text
