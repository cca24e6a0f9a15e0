"""CASSINI's snapshots, and networks that spray packets."""

from __future__ import annotations

import pytest

from evaluation import spraying
from evaluation.snapshots import DEMANDS, HOWS, PERIODS, SNAPSHOTS, Snapshot, rows_of, table


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return list(rows_of(hows=[how for how in HOWS if how != "mltcp"]))


def gain_of(snapshot: Snapshot, found: dict, how: str) -> float:
    both = zip(found["comm_ms"][how], found["comm_ms"]["cassini"], strict=True)
    return sum(a / b for a, b in both) / len(snapshot.rows)


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=lambda s: str(s.number))
def test_the_papers_gain_lies_within_what_the_assumptions_give(rows, snapshot) -> None:
    mine = [r for r in rows if r["snapshot"] == snapshot.number]
    assert len(mine) == len(DEMANDS) * len(PERIODS)
    fit = [r for r in mine if r["consistent"]]
    assert fit
    paper = sum(r.themis / r.with_cassini for r in snapshot.rows) / len(snapshot.rows)
    gains = [gain_of(snapshot, r, how) for r in fit for how in ("together", "random")]
    assert min(gains) <= paper <= max(gains)


def test_jobs_that_fit_gain_and_those_of_the_lowest_score_are_left_alone(rows) -> None:
    for snapshot in SNAPSHOTS:
        fit = [r for r in rows if r["snapshot"] == snapshot.number and r["consistent"]]
        for row in fit:
            assert row["shifted"] or row["comm_ms"]["cassini"] == row["comm_ms"]["random"]
            assert gain_of(snapshot, row, "random") >= 0.99
        if snapshot.score == 1.0:
            assert all(row["shifted"] for row in fit)
        if snapshot.score == 0.6:
            assert not any(row["shifted"] for row in fit)


def test_without_coordination_jobs_come_as_far_as_with_shifts() -> None:
    rows = list(rows_of(SNAPSHOTS[3:4]))
    gains = [gain_of(SNAPSHOTS[3], row, "mltcp") for row in rows if row["consistent"]]
    assert len(gains) == 6
    assert all(0.97 <= gain <= 1.01 for gain in gains)
    text = table(rows)
    assert all(text.count(f"  {row.model} ") for s in SNAPSHOTS for row in s.rows)


def test_a_short_run_has_a_row_for_each_network_and_scheduler() -> None:
    rows = list(spraying.rows_of(1, 20.0))
    assert [row["oversubscription"] for row in rows] == [1] * 10 + [2] * 10 + [4] * 10
    used = {
        (row["oversubscription"], row["balancing"], row["scheduler"]): row["gpu_utilization"][0]
        for row in rows
    }
    for ratio in (1, 2, 4):
        # Spread evenly, no link of a job carries more than where its flows collide.
        assert used[ratio, "sprayed", "ecmp"] >= used[ratio, "hashed", "ecmp"]
    assert used[4, "sprayed", "ecmp"] <= used[1, "sprayed", "ecmp"]
    assert spraying.table(rows).count("oversubscribed, 1 seeds") == 3
