"""The suite itself: what fails is not taken for what passes, and costs nothing but its own test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rig.job import STOCK, Job
from rig.kind import Kind
from rig.outcome import DIED, VALUE, Outcome, plain
from rig.report import Report


def test_a_part_that_ends_its_process_costs_no_other_part(kind: Kind, tmp_path: Path) -> None:
    parts = ("all_reduce", "ends_its_process", "barriers")
    found = Job(kind, STOCK, 1, parts).run(tmp_path / "job")
    assert [found[name][0].kind for name in parts] == [VALUE, DIED, VALUE]
    assert "code 3" in found["ends_its_process"][0].value


def test_outcomes_differ_by_a_bit() -> None:
    tensor = torch.tensor([1.0, -0.0])
    other = torch.tensor([1.0, 0.0])
    assert Outcome(VALUE, plain(tensor)).same_as(Outcome(VALUE, plain(tensor.clone()), 1.0))
    assert not Outcome(VALUE, plain(tensor)).same_as(Outcome(VALUE, plain(other)))
    assert not Outcome(VALUE, plain(tensor)).same_as(Outcome(VALUE, plain(tensor.double())))
    assert not Outcome(VALUE, "same").same_as(Outcome(DIED, "same"))


def test_a_report_that_is_cut_off_says_so(kind: Kind, tmp_path: Path) -> None:
    report = Report(tmp_path / "suite", kind)
    report.test("a", "passed", 1.0)
    report.figure("ratio", 1.01)
    report.test("b", "failed", 2.0, "why")
    found = json.loads((tmp_path / "suite.json").read_text())
    assert not found["complete"]
    assert found["figures"] == {"ratio": 1.01}
    text = (tmp_path / "suite.txt").read_text()
    assert "CUT OFF" in text
    assert "1 failed, 1 passed" in text
    assert "(why)" in text
    report.end()
    assert "CUT OFF" not in (tmp_path / "suite.txt").read_text()
