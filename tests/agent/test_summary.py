"""The summary at a job's end: what the leader keeps, and the lines that are made of it."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from crux_torch.agent.orders import Order
from crux_torch.agent.summary import (
    NEWS_PAUSE_S,
    WRITE_S,
    PlanNews,
    Summary,
    SummaryKeeper,
    read_summary,
    summary_lines,
)
from crux_torch.agreement.outcome import Outcome
from crux_torch.agreement.records import PathCounts, PlanEntry
from crux_torch.measure.iterations import IterationMarks
from crux_torch.measure.profile import JobProfile, ProfileBurst
from crux_torch.network.routes import PlannedPath
from crux_torch.settings import Marks

PROFILE = JobProfile(
    period_s=0.5, period_source="marks", compute_s=0.4, flops=2.5e15, flops_source="counted",
    gpus=8, bursts=(ProfileBurst(1.0, 1.0),), t_s=0.25, t_source="measured", t_measured_s=0.25,
    overlap=0.6, exposed_s=0.1, iterations=12, measured_alone=True,
)  # fmt: skip
MARKS = Marks(tcp=(0, 8, 16), usable=(0, 1, 2))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def entry(level: int, *paths: str) -> PlanEntry:
    planned = tuple(PlannedPath("a", end, ()) for end in paths)
    return PlanEntry(
        job="gpt", level=level, priority=1.0, intensity=1.0, correction=1.0, paths=planned
    )


def order(level: int, *paths: str, marks: Marks | None = MARKS) -> Order:
    planned = entry(level, *paths)
    return Order(
        incarnation="i", number=1, level=level, marks=marks, valid_s=9.0, entry=planned,
        generation=2,
    )  # fmt: skip


def keeper(folder: Path, clock: Clock) -> SummaryKeeper:
    marks = IterationMarks()
    marks._marks.extend(n * 200_000_000 for n in range(1, 42))
    marks.total = 41
    return SummaryKeeper(str(folder / "summary"), marks, clock)


def test_the_leader_counts_levels_and_plans_and_writes_now_and_then(tmp_path: Path) -> None:
    clock = Clock()
    kept = keeper(tmp_path, clock)
    assert kept.look(None)
    for after_s, heard in ((2.0, None), (10.0, order(2)), (30.0, order(1, "b")), (5.0, order(1))):
        clock.now_s += after_s
        kept.look(heard)
    clock.now_s += 1.0
    kept.look(order(1, marks=None))
    trial = {
        "before": {"mean_s": 0.25}, "after": {"mean_s": 0.2}, "verdict": "a plan is kept by gpt",
    }  # fmt: skip
    status = {"trial": trial, "left_out": ["no paths are chosen, because"] * 9}
    kept.write(status, PROFILE, PathCounts(as_planned=3, unknown=1), 2)
    assert not kept.look(order(1, marks=None))
    clock.now_s += WRITE_S
    assert kept.look(order(1, marks=None))
    found = read_summary(str(tmp_path / "summary"))
    assert found is not None
    assert found.held_s == {"none": 3.0, "2": 10.0, "1": 35.0}
    assert found.plans == 3
    assert (found.steps, found.lasted_s, found.step_s) == (41, 8.0, pytest.approx(0.2))
    assert (found.safe_s, found.planned_s) == (0.25, 0.2)
    assert len(found.left_out) == 4


def test_the_lines_say_what_was_measured_and_held() -> None:
    summary = Summary(
        at_s=1000.0, ended=True, steps=41, lasted_s=8.0, step_s=0.6, profile=PROFILE,
        held_s={"6": 90.0, "4": 150.0, "none": 0.2}, plans=3, connections=1,
        paths=PathCounts(as_planned=3, elsewhere=1), safe_s=0.75, planned_s=0.6,
        verdict="a plan is kept by gpt: +5.0% busy GPUs", left_out=("no paths, because",),
    )  # fmt: skip
    lines = list(summary_lines(summary, "gpt", 1001.0))
    assert lines[0] == "summary of gpt: 41 steps in 8 s"
    assert lines[1] == (
        "measured: a step computes 2.5 PFLOP (W), needs 250 ms of its slowest link (t) and takes "
        "500 ms, 20% of it waiting for communication (12 steps)"
    )
    assert lines[2] == (
        "steps of late: 600 ms (median), 1.20 times as long as measured alone; 33% of a step "
        "waits, by the compute time that was measured"
    )
    assert lines[3] == (
        "3 plans; level 4 for 2 min, level 6 for 90 s; new connections once; "
        "3 of 4 connections on their planned path"
    )
    assert lines[4] == "against the safe plan: a step took 600 ms instead of 750 ms (-20.0%)"
    assert lines[5:7] == ["a plan is kept by gpt: +5.0% busy GPUs", "no paths, because"]
    assert "crux explain" in lines[-1]


@pytest.mark.parametrize(
    ("at_s", "ended", "says"),
    [(90.0, True, "2 s"), (80.0, False, "known 20 s before"), (98.0, False, "ranks were ended")],
)
def test_a_job_that_was_killed_says_how_old_the_figures_are(
    at_s: float, ended: bool, says: str
) -> None:
    first, second, *_ = summary_lines(
        Summary(at_s=at_s, ended=ended, steps=3, lasted_s=2.0), "gpt", 100.0
    )
    assert first.endswith(says) or says in first
    assert ("as known" in first) is not ended
    assert second.startswith("not measured")


def test_a_file_that_nobody_can_read_is_no_summary(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    assert read_summary(str(file)) is None
    for raw in (b"", b"{", b"[1]", b'{"at_s": "x"}'):
        file.write_bytes(raw)
        assert read_summary(str(file)) is None
    file.write_bytes(msgspec.json.encode(Summary(at_s=1.0)))
    assert read_summary(str(file)) == Summary(at_s=1.0)


def test_one_line_about_each_plan_that_is_another_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "crux_torch")
    clock = Clock()
    told = PlanNews(clock)
    outcome = Outcome(epoch=7, author="bert\x1b", jobs=2)
    for heard in (entry(2), entry(2), entry(1, "b"), entry(1, "b")):
        told.tell(outcome, heard, 8)
    clock.now_s += NEWS_PAUSE_S
    told.tell(outcome, entry(1), None)
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert said == [
        (
            "crux_torch.news",
            r"first plan, number 7 by 'bert\x1b': level 2 (DSCP 8), paths: 0, jobs: 2",
        ),
        (
            "crux_torch.agent.summary",
            r"plan 7 by 'bert\x1b': level 2 -> 1 (DSCP 8), paths: 1 (others than before), jobs: 2",
        ),
        (
            "crux_torch.news",
            r"plan 7 by 'bert\x1b': level 1 (no mark), paths: 0 (others than before), jobs: 2",
        ),
    ]
