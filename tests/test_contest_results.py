"""What the contest writes when it is cut short, when a part fails, and beside earlier results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import contest
from lab.job import JobError


def turn(scenario: str, round_: int = 0) -> list[dict[str, Any]]:
    """The rows of a turn without Crux."""
    about = {"scenario": scenario, "policy": contest.NONE, "round": round_, "seed": 1}
    jobs = [
        {
            **about,
            "job": workload.name,
            "step_s": 0.5,
            "alone_s": 0.4,
            "predicted_s": 0.45,
            "completion_s": 250.0,
            "to_plan_s": None,
            "losses_equal": True,
        }
        for workload in contest.SCENARIOS[scenario].workloads
    ]
    seen = {
        "utilisation": 0.6,
        "ideal": 0.8,
        "overlap": None,
        "timeline": None,
        "corrections_per_minute": None,
        "on_paths": None,
        "drops": 3,
    }
    return [about | seen, *jobs]


def play(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit status, and the scenarios that were played; ``starve`` fails."""
    asked = []

    def run(scenario: contest.Scenario, policies: object, round_: int, *_: object) -> Any:
        asked.append(f"{scenario.name} {round_}")
        if scenario.name == "starve":
            raise JobError("a job ended")
        return turn(scenario.name, round_)

    monkeypatch.setattr(contest, "run", run)
    monkeypatch.setattr(contest.netns, "available", lambda: (True, ""))
    done = CliRunner().invoke(contest.main, ["--out", str(out), *arguments])
    return done.exit_code, asked


def written(out: Path) -> dict[str, Any]:
    return json.loads((out / "contest.json").read_text())


def test_a_scenario_that_fails_loses_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("--scenarios", "heavy-2,starve,pair", "--rounds", "1")
    status, asked = play(monkeypatch, tmp_path, *chosen)
    assert status != 0
    assert asked == ["heavy-2 0", "starve 0", "pair 0"]
    found = written(tmp_path)
    assert found["rows"] == [*turn("heavy-2"), *turn("pair")]
    assert "heavy-2" in (tmp_path / "contest.txt").read_text()


def test_all_scenarios_come_before_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("--scenarios", "heavy-2,pair", "--rounds", "2")
    assert play(monkeypatch, tmp_path, *chosen) == (
        0,
        ["heavy-2 0", "pair 0", "heavy-2 1", "pair 1"],
    )


def test_no_turn_begins_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, asked = play(monkeypatch, tmp_path, "--minutes", "1e-9")
    assert (status != 0, asked) == (True, [])
    assert not (tmp_path / "contest.json").exists()


def test_earlier_results_are_kept_and_their_rounds_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("--scenarios", "pair", "--rounds", "1")
    for _ in range(2):
        assert play(monkeypatch, tmp_path, *chosen)[0] == 0
        chosen = (*chosen, "--keep", str(tmp_path / "contest.json"))
    found = written(tmp_path)
    assert found["rows"] == [*turn("pair", 0), *turn("pair", 1)]
    assert len(found["settings"]["runs"]) == 2


def test_each_scenario_counts_once_however_many_rounds_it_has() -> None:
    def with_policy(rows: list[dict[str, Any]], utilisation: float) -> list[dict[str, Any]]:
        told = {"policy": "crux", "step_s": 1.0, "completion_s": 500.0}
        kept = [row | {k: v for k, v in told.items() if k in row} for row in rows]
        return [r | {"utilisation": utilisation} if "utilisation" in r else r for r in kept]

    rows = [*turn("pair"), *with_policy(turn("pair"), 0.3)]
    for round_ in range(3):
        rows += [*turn("clash", round_), *with_policy(turn("clash", round_), 0.9)]
    none, crux = contest.summary(rows).splitlines()[2:4]
    assert none.split() == ["none", "60.0%", "1.000", "1.000", "1.25", "1.000"]
    assert crux.split() == ["crux", "60.0%", "1.000", "0.500", "2.50", "2.000"]
