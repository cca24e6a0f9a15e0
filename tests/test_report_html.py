"""The HTML report: a self-contained, well-formed page that shows what it is given."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.report import svg
from crux_torch.report.comparison import (
    Case,
    Comparison,
    Interval,
    JobRow,
    Lane,
    LinkBytes,
    StepTimes,
    Timeline,
)
from crux_torch.report.html import quantity, render

_VOID = {"meta", "br", "hr", "link", "img"}


class _Structure(HTMLParser):
    """Checks that tags nest; collects text and attributes that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "script":
            self.loads.append(tag)
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def _parse(page: str) -> _Structure:
    structure = _Structure()
    structure.feed(page)
    assert structure.open == []
    return structure


def _comparison(**changes: object) -> Comparison:
    values = {
        "title": "Two jobs on one link",
        "setting": ("200 Mbit/s", "two hosts"),
        "notes": ("Emulated.",),
        "capacity_Bps": 25e6,
        "baseline": "alone",
        "cases": (
            Case(key="alone", title="Alone", utilisation=0.25, seconds=4.0),
            Case(key="stock", title="Together", utilisation=0.36, seconds=5.0),
            Case(key="crux", title="Together, Crux", utilisation=0.44, seconds=5.0),
        ),
        "jobs": (
            JobRow(
                name="a",
                title="GPT <small>",
                flops=2.14e9,
                t_s=0.103,
                period_s=0.234,
                overlap=0.4,
                intensity=2.08e10,
                correction=1.2,
                priority=2.5e10,
                level=6,
                dscp=48,
                losses_equal=True,
                steps_compared=60,
            ),
            JobRow(name="b", title="MLP", losses_equal=False, steps_compared=3),
        ),
        "step_times": (
            StepTimes(job="a", case="alone", seconds=(0.2, 0.21, 0.22)),
            StepTimes(job="a", case="stock", seconds=(0.3, 0.315, 0.33)),
            StepTimes(job="a", case="crux", seconds=(0.21, 0.212, 0.2205)),
            StepTimes(job="b", case="alone", seconds=(0.4,)),
        ),
        "timelines": (
            Timeline(
                case="stock",
                length_s=2.0,
                lanes=(
                    Lane(
                        job="a",
                        computing=(Interval(0.0, 0.15),),
                        waiting=(Interval(0.15, 0.3),),
                        rate_Bps=((0.0, 0.0), (0.1, 2e7), (0.2, 0.0)),
                    ),
                    Lane(job="b"),
                ),
            ),
        ),
        "links": (LinkBytes(case="crux", link="leaf0->spine0", by_level={0: 5_000_000, 6: 2500}),),
    }
    return msgspec.convert(values | changes, Comparison)


def test_shows_medians_ratios_profile_and_link() -> None:
    structure = _parse(render(_comparison()))
    text = " ".join("".join(structure.text).replace("\xa0", " ").split())
    for expected in (
        "210 ms",
        "315 ms×1.50",
        "212 ms×1.01",
        "2.14 GFLOP",
        "103 ms",
        "20.8 GFLOP/s",
        "1.20",
        "equal (60 steps)",
        "DIFFERENT (3 steps)",
        "44.0%",
        "5 MB",
        "Emulated.",
    ):
        assert expected in text


def test_loads_nothing_from_elsewhere() -> None:
    page = render(_comparison())
    assert _parse(page).loads == []
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_text_cannot_become_markup() -> None:
    page = render(_comparison(title="<script>alert(1)</script>", notes=("a < b & c",)))
    assert "<script>" not in page
    assert "GPT &lt;small&gt;" in page
    assert "a &lt; b &amp; c" in page


def test_every_chart_is_well_formed_and_says_what_it_shows() -> None:
    charts = re.findall(r"<svg.*?</svg>", render(_comparison()), flags=re.S)
    assert len(charts) == 4
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert root.get("role") == "img"
        assert root.findtext("title")
        assert root.findtext("desc")


def test_survives_json() -> None:
    comparison = _comparison()
    again = msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison)
    assert again == comparison
    assert render(again) == render(comparison)


def test_a_comparison_without_optional_parts_still_renders() -> None:
    bare = _comparison(timelines=(), links=(), notes=(), setting=(), step_times=())
    structure = _parse(render(bare))
    assert "Timelines" not in structure.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "&ndash;"),
        (0, "0&nbsp;B"),
        (999, "999&nbsp;B"),
        (1500, "1.5&nbsp;kB"),
        (2e15, "2&nbsp;PB"),
    ],
)
def test_quantities(value: float | None, text: str) -> None:
    assert quantity(value, "B") == text


@given(st.floats(1e-6, 1e9), st.integers(2, 12))
def test_ticks_cover_the_axis_without_crowding(end: float, about: int) -> None:
    marks = svg.ticks(end, about)
    assert marks[0] == 0
    assert end / 2 < marks[-1] * 2
    assert marks[-1] <= end * 1.00001
    assert len(marks) <= about + 2


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0, 1))
def test_quantiles_lie_among_the_values(values: list[float], share: float) -> None:
    assert min(values) <= svg.quantile(values, share) <= max(values) + 1e-9
