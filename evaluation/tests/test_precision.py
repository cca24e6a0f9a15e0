"""Circles of few and of many angles."""

from __future__ import annotations

import pytest

from evaluation import precision
from evaluation.snapshots import SNAPSHOTS


def test_a_finer_circle_loses_less_and_the_finest_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "ANGLES", (9, 72, 360))
    monkeypatch.setattr(precision, "DEMANDS", (0.8, 1.0))
    rows = list(precision.rows_of(SNAPSHOTS[:1]))
    lost = {
        angles: sum(row["lost"] for row in rows if row["angles"] == angles)
        for angles in (9, 72, 360)
    }
    assert lost[9] > lost[72] >= lost[360] == pytest.approx(0.0, abs=1e-9)
    text = precision.table(rows)
    assert text.splitlines()[2].split()[:2] == ["72", "5.0"]
    assert f"{len(rows) // 3} cases" in text
