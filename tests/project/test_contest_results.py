"""What the contest writes when it is cut short, when a part fails, and beside earlier results."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import contest
from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job
from crux_torch.sim.play import play as simulate
from lab import contest_tables, prediction
from lab.contest import NONE, Scenario, Seen, Turn
from lab.contest_scenarios import SCENARIOS
from lab.job import JobError


def turn(scenario: str, round_: int = 0) -> list[dict[str, Any]]:
    """The rows of a turn without Crux."""
    about = {"scenario": scenario, "policy": NONE, "round": round_, "seed": 1}
    jobs = [
        {
            **about,
            "job": workload.name,
            "step_s": 0.5,
            "median_s": 0.44,
            "alone_s": 0.4,
            "predicted_s": 0.45,
            "completion_s": 250.0,
            "spine": 0,
            "to_plan_s": None,
            "losses_equal": True,
        }
        for workload in SCENARIOS[scenario].workloads
    ]
    seen = {
        "utilisation": 0.6,
        "ideal": 0.8,
        "overlap": None,
        "timeline": None,
        "corrections_per_minute": None,
        "on_paths": None,
        "levels": {},
        "window_s": 10.0,
        "bytes": {"leaf0->spine0": {"0": 75_000_000, "7": 25_000_000}},
        "drops": 3,
    }
    return [about | seen, *jobs]


def play(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit status, and the scenarios that were played; ``starve`` fails."""
    asked = []

    def run(scenario: Scenario, policies: object, round_: int, *_: object, **__: object) -> Any:
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
    none, crux = contest_tables.summary(rows).splitlines()[2:4]
    assert none.split() == ["none", "60.0%", "1.000", "1.000", "1.25", "1.000"]
    assert crux.split() == ["crux", "60.0%", "1.000", "0.500", "2.50", "2.000"]


ALL_OF_IT = prediction.Reached()
PATH = ("host->leaf", "leaf->spine", "spine->leaf", "leaf->host")
CAPACITY_BPS = dict.fromkeys(PATH, 1e6) | {PATH[0]: 1e9, PATH[-1]: 1e9}


def sender(name: str) -> Job:
    """It computes for 0.1 s, and then sends for 0.2 s."""
    return Job(name, 1, 1.0, 0.1, (Flow(2e5, (PATH,)),), (Burst(1.0, 1.0),), 0.3)


def steps_s(cluster: Cluster, **level: int) -> list[float]:
    jobs = tuple(job for job in cluster.jobs if job.name in level)
    decision = Decision(path=dict.fromkeys(level, (0,)), level=level)
    report = simulate(Cluster(cluster.capacity_Bps, jobs), decision, 60.0, slack_bytes=2e4)
    return [report.jobs[name].mean_iteration_s or math.inf for name in level]


@pytest.mark.parametrize(("alone_s", "share"), [(0.25, 1.0), (0.3, 1.0), (0.5, 0.5)])
def test_a_job_is_played_as_slow_as_it_was_alone(alone_s: float, share: float) -> None:
    """Alone its step is 0.3 s: it was shorter, as long, or longer."""
    cluster = Cluster(CAPACITY_BPS, (sender("A"),))
    job, found = prediction.as_alone(cluster, cluster.jobs[0], (0,), alone_s, 2e4)
    assert found == pytest.approx(share, abs=2e-3)
    reached = prediction.Reached(together=0.5, beside=0.5)  # of which a job alone knows nothing
    queued = prediction.with_queues(cluster, {"A": (0,)}, {"A": 3}, {"A": (job, found)}, reached)
    assert steps_s(queued, A=3) == pytest.approx([alone_s], rel=5e-3)


def test_jobs_lose_to_the_queue_of_their_level_and_leave_the_rest_to_others() -> None:
    jobs = {"A": (sender("A"), 0.8), "B": (replace(sender("B"), compute_s=0.0), 0.8)}
    cluster = Cluster(CAPACITY_BPS, tuple(job for job, _ in jobs.values()))
    path = dict.fromkeys("AB", (0,))

    def carried_MBps(reached: prediction.Reached = ALL_OF_IT, **level: int) -> float:
        queued = prediction.with_queues(cluster, path, level, jobs, reached)
        return sum(0.2 / each for each in steps_s(queued, **level))

    # B always sends. Beside A it fills what a level has of the link.
    assert carried_MBps(A=0, B=0) == pytest.approx(0.8, rel=1e-2)
    # Below A, it has a fifth of the link while A sends for 0.25 s, and a level's share for 0.1 s.
    assert carried_MBps(A=1, B=0) == pytest.approx((0.25 + 0.8 * 0.1) / 0.35, rel=2e-2)
    # Together they reach less, and so does the one that is first.
    less = prediction.Reached(together=0.9, beside=0.75)
    assert carried_MBps(less, A=0, B=0) == pytest.approx(0.8 * 0.9, rel=1e-2)
    first_s = 0.2 / (0.8 * 0.75)
    both = (first_s + 0.8 * 0.75 * 0.1) / (first_s + 0.1)
    assert carried_MBps(less, A=1, B=0) == pytest.approx(both, rel=2e-2)


def test_no_turn_tells_what_its_own_jobs_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are as long as if jobs reached 0.9 together and 0.94 beside others; longer in one."""
    true = prediction.Reached(together=0.9, beside=0.94)
    slow = prediction.Reached(together=0.87, beside=0.87)

    def predict(alone: str, turn: dict[str, Any], reached: prediction.Reached) -> dict[str, float]:
        share = reached.together * (reached.beside if turn["policy"] != NONE else 1.0)
        return {"A": 1.0 / share}

    monkeypatch.setattr(prediction, "predict", predict)
    names = ["heavy-2", "heavy-3", "heavy-4", "five", "pair"]
    played: list[Any] = []
    for name, policy in itertools.product(names, (NONE, prediction.ORDERED_BY)):
        row = {"scenario": name, "policy": policy}
        step_s = predict("", row, slow if name == "five" else true)["A"]
        played.append((row, [{"job": "A", "step_s": step_s}], ""))
    assert prediction.fitted(played) == dict.fromkeys(names, true)
    assert prediction.fitted(played[:2]) == {"heavy-2": ALL_OF_IT}, "there are no others"


def test_a_policy_without_a_topology_is_an_entrant_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plays beside the same policy with one, and the columns of both begin alike."""
    asked: list[tuple[str, str, bool]] = []

    class Stopped:
        def __init__(self, _: object, entrant: str, *__: object) -> None:
            found = Turn(SCENARIOS["pair"], entrant, fabric, tmp_path, 1, 1.0)
            asked.append((found.seen.policy, found._policy, found._gives_topology))

        def play(self) -> Seen:
            return Seen("")

        profile = play

    fabric = SCENARIOS["pair"].fabric()
    monkeypatch.setattr(contest, "Turn", Stopped)
    monkeypatch.setattr(Scenario, "fabric", lambda _: contextlib.nullcontext(fabric))
    monkeypatch.setattr(contest, "rows_of", lambda *_: [])
    crux = ["crux", "crux:no-topology"]
    contest.run(SCENARIOS["pair"], crux, 1, 1, 1.0, math.inf, tmp_path, print)
    assert asked == [
        ("none", "none", True), ("crux", "crux", True), ("crux:no-topology", "crux", False)
    ]  # fmt: skip

    def named(policy: str) -> list[dict[str, Any]]:
        return [row | {"policy": policy} for row in turn("pair")]

    rows = [*turn("pair"), *itertools.chain(*map(named, crux))]
    for text in (contest_tables.table(SCENARIOS["pair"], rows), contest_tables.summary(rows)):
        (at,) = {line.index("60.0%") for line in text.splitlines() if "60.0%" in line}
        assert at > len("  crux:no-topology")


@pytest.mark.parametrize("entrant", ["none:no-topology", "mlcc:no-topology", "crux:topology"])
def test_entrants_that_cannot_be_played_are_refused(entrant: str) -> None:
    done = CliRunner().invoke(contest.main, ["--policies", f"crux,{entrant}"])
    assert done.exit_code == 2
    assert f"{entrant}; expected some of none, crux" in done.output


def test_errors_are_told_by_whom_a_job_meets() -> None:
    """In heavy-3, A is first, B waits for it, C and D share a level on the other spine."""
    rows = turn("heavy-3")
    rows[0]["levels"] = {"A": 6, "B": 5, "C": 4, "D": 4}
    for row, spine, predicted_s in zip(rows[1:], (0, 0, 1, 1), (0.5, 0.6, 0.4, 0.3), strict=True):
        row |= {"spine": spine, "predicted_s": predicted_s}
    told = [line.strip() for line in contest_tables.summary(rows).splitlines()[-5:-1]]
    assert [line.rpartition(" ")[2] for line in told[1:]] == ["+0.0%", "+20.0%", "-30.0%"]
    assert told[0].endswith("of 4 jobs")
    assert [line.split(":")[0] for line in told[1:]] == list(contest_tables.MEETS)


def test_the_tables_tell_how_busy_a_link_was_and_how_slow_the_heavy_job() -> None:
    rows = turn("heavy-2")
    table = contest_tables.table(SCENARIOS["heavy-2"], rows)
    (row,) = (line for line in table.splitlines() if line.startswith("  none"))
    assert row.split()[3:5] == ["3", "80%"]  # 100 MB in 10 s on a link of 100 Mbit/s
    (heavy,) = (
        line for line in contest_tables.summary(rows).splitlines() if line.startswith("    none")
    )
    assert heavy.split() == ["none", "1.25", "(1.10)"]


def test_what_jobs_want_of_a_link_is_what_they_carry_alone() -> None:
    """Each job of heavy-2 sends 1 MB each way in 0.4 s: 20% of a link, and two are on spine 0."""
    flows = [{"src": "h0-{}", "dst": "h1-{}"}, {"src": "h1-{}", "dst": "h0-{}"}]
    records = [
        {
            "job": name,
            "incarnation": "1",
            "hosts": [f"h0-{n}", f"h1-{n}"],
            "gpus": 2,
            "state": "running",
            "profile": {
                "period_s": 0.4,
                "period_source": "marks",
                "compute_s": 0.3,
                "flops": 1.0,
                "flops_source": "time",
                "gpus": 2,
                "flows": [
                    {end: host.format(n) for end, host in f.items()} | {"bytes": 1e6} for f in flows
                ],
                "bursts": [{"at": 1.0, "share": 1.0}],
                "t_s": 0.08,
                "t_source": "topology",
                "t_measured_s": 0.08,
                "overlap": 0.0,
                "exposed_s": 0.1,
                "iterations": 8,
                "measured_alone": True,
            },
        }
        for n, name in enumerate("ABC")
    ]
    rows = turn("heavy-2")
    for row, spine in zip(rows[1:], (0, 1, 0), strict=True):
        row["spine"] = spine
    found = contest.predicted([*rows, {"scenario": "heavy-2", "round": 0, "records": records}])
    assert found[0]["wanted"] == pytest.approx(2 * 0.2 / prediction.PAYLOAD)
    assert all(row["predicted_s"] >= 0.399 for row in found[1:4])
    # A record that was measured while the machine did other things is not taken.
    slower = [r | {"profile": r["profile"] | {"period_s": 0.5, "compute_s": 0.1}} for r in records]
    again = contest.predicted([*found, {"scenario": "heavy-2", "round": 1, "records": slower}])
    assert again[:4] == found[:4]


def test_without_records_rows_keep_their_predictions() -> None:
    rows = turn("pair")
    assert contest.predicted(rows) == rows
