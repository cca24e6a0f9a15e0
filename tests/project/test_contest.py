"""The contest's smallest scenarios: real jobs on one link, without Crux and shifted in time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import contest
from crux_torch.schedule.papers.cassini_grid import ROUNDING
from lab import contest_tables, netns
from lab.contest import NONE, Scenario, Seen, Turn
from lab.contest_scenarios import SCENARIOS

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.skipif(not _OK, reason=_REASON)]

WINDOW_S = 10.0
RATE_BPS = SCENARIOS["pair"].rate_mbit * 1e6 / 8
#: Turns until two equal jobs were measured as that, and keep to their slots: other work on the
#: machine slows one of them.
TURNS = 4
#: Of two jobs that know nothing of each other's phase, how often shifted jobs send at once.
LESS = 0.5


def turn(scenario: Scenario, policy: str, folder: Path, window_s: float = WINDOW_S) -> Seen:
    with scenario.fabric() as fabric:
        return Turn(scenario, policy, fabric, folder, seed=1, window_s=window_s).play()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("pair")
    scenario = SCENARIOS["pair"]
    stock = turn(scenario, NONE, folder / NONE)
    for number in range(TURNS):
        shifted = turn(scenario, "cassini", folder / f"cassini-{number}")
        if measured_alike(shifted) and overlap(shifted) < LESS * chance(shifted):
            break
    return {NONE: stock, "cassini": shifted}


def periods_s(seen: Seen) -> list[float]:
    return [job["profile"]["period_s"] for job in seen.status["jobs"]]


def measured_alike(seen: Seen) -> bool:
    """Whether the jobs' iterations, as they were measured, can share a grid."""
    return max(periods_s(seen)) < (1 + ROUNDING) * min(periods_s(seen))


def overlap(seen: Seen) -> float:
    found = seen.overlap(RATE_BPS)
    assert found is not None
    return found


def chance(seen: Seen) -> float:
    found = seen.chance(RATE_BPS)
    assert found is not None
    return found


def entries(seen: Seen) -> dict[str, dict[str, Any]]:
    return {entry["job"]: entry for entry in seen.status["plan"]["entries"]}


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_two_compatible_jobs_take_turns_on_their_link(pair: dict[str, Seen]) -> None:
    shifted = pair["cassini"]
    grids = [entry.get("grid") for entry in entries(shifted).values()]
    assert len(grids) == 2
    assert all(grids), f"{grids}; iterations were measured as {periods_s(shifted)} s"
    assert chance(shifted) > 0.05
    assert overlap(shifted) < LESS * chance(shifted), "iterations miss their slots"
    for seen in pair.values():
        for job, sent in seen.sent.items():
            assert sent[-1][1] > sent[0][1], job


def test_training_is_the_same_as_without_crux(pair: dict[str, Seen]) -> None:
    for job, steps in pair[NONE].steps.items():
        shifted = pair["cassini"].steps[job]
        both = min(len(steps), len(shifted))
        assert both > 20
        assert [s.loss for s in steps[:both]] == [s.loss for s in shifted[:both]]


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_the_benchmark_makes_rows_tables_and_predictions(
    pair: dict[str, Seen], tmp_path: Path
) -> None:
    scenario = SCENARIOS["pair"]
    with scenario.fabric() as fabric:
        records = Turn(scenario, contest.MEASURED_BY, fabric, tmp_path, 1, WINDOW_S).profile()
    assert [record["job"] for record in records] == ["A", "B"]
    played = [
        row for seen in pair.values() for row in contest.rows_of(scenario, seen, pair[NONE], 0, 1)
    ]
    rows = contest.predicted([*played, {"scenario": "pair", "round": 0, "records": records}])
    jobs = [row for row in rows if "job" in row]
    assert len(jobs) == 4
    for job in jobs:
        assert job["losses_equal"]
        assert job["predicted_s"] > 0.95 * job["alone_s"]
        assert job["completion_s"] > 100 * job["step_s"]
    text = contest_tables.table(scenario, rows) + contest_tables.summary(rows)
    assert "losses equal to stock: 4 of 4 jobs" in text


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_jobs_that_no_shift_parts_are_left_alone(tmp_path: Path) -> None:
    scenario = replace(SCENARIOS["clash"], arrivals_s=0.5)
    # What is looked at is the plan.
    seen = turn(scenario, "cassini", tmp_path, window_s=0.5)
    assert [entry.get("grid") for entry in entries(seen).values()] == [None, None]
    assert [job["corrections_per_minute"] for job in seen.status["jobs"]] == [None, None]
