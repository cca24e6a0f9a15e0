"""The timeline in characters shows what the engine plays."""

from __future__ import annotations

import heavy3
import pytest

from crux_torch.report.explanation import explain
from crux_torch.report.top_app import JOBS, NAME, TIMELINE_LEGEND, timeline_lines

WIDTH = 78


@pytest.fixture
def crowd():
    """All jobs on one spine and level: (status, topology)."""
    plan = heavy3.one_level(dict.fromkeys(heavy3.JOBS, 1), heavy3.measured())
    status = heavy3.status_of(heavy3.measured(), plan, heavy3.steps_s(plan, heavy3.measured()))
    return status, heavy3.topology()


def test_lines_have_the_width_and_a_mark_for_each_moment(crowd) -> None:
    found = explain(*crowd, (), "A")
    heading, *lines, legend = timeline_lines(*crowd, "A", found.played_s, ("B", "C", "D"), WIDTH)
    assert heading.startswith("Who computes and sends when, as played, in ")
    assert legend == TIMELINE_LEGEND
    assert [line[:NAME].strip() for line in lines] == ["A", "B", "C", "D"]
    assert {len(line) for line in lines} == {WIDTH}
    marks = lines[0][NAME + 1 :]
    assert set(marks) <= set("#+=-.")
    # Its computation is all of a step but what it waits for, in each of the steps shown.
    computing = (marks.count("#") + marks.count("+")) / len(marks)
    assert computing == pytest.approx(found.computes_s / found.played_s, abs=0.1)


def test_of_many_jobs_the_first_are_shown(crowd) -> None:
    found = explain(*crowd, (), "A")
    lines = list(timeline_lines(*crowd, "A", found.played_s, ("B", "C", "D") * 4, WIDTH))
    assert len(lines) == 1 + JOBS + 1


def test_the_higher_level_sends_first() -> None:
    records = heavy3.measured()
    plan = heavy3.plan("crux-paper", records)
    status = heavy3.status_of(records, plan, heavy3.steps_s(plan, records))
    level = {entry.job: entry.level for entry in plan.entries}
    for job in heavy3.JOBS:
        found = explain(status, heavy3.topology(), (), job)
        below = [rival.job for rival in found.rivals if level[rival.job] > level[job]]
        if below:
            lines = timeline_lines(status, heavy3.topology(), job, found.played_s, below, WIDTH)
            _, own, first, *_ = lines
            both = list(zip(own[NAME + 1 :], first[NAME + 1 :], strict=True))
            assert ("=", "=") not in both, "nobody sends at full rate beside a higher level"
            return
    pytest.fail("no job has a rival of a higher level")
