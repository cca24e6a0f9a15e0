"""W of a job that trains on the device, as its profile says it, against arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rig.job import ATTACHED, Job
from rig.kind import Kind
from rig.outcome import VALUE
from rig.part import ALONE
from rig.report import Report

#: layers, width, tokens of a row, rows; and channels, rows.
SHAPES = {
    "cuda": {"gpt": "8,1024,512,8", "resnet": "64,128"},
    "rig": {"gpt": "2,64,32,2", "resnet": "8,2"},
}
#: A job that is measured soon and keeps to itself.
MEASURE_SOON = {"CRUX_PROFILE_S": "20", "CRUX_TUNING": "profile_iterations=8"}


@pytest.mark.parametrize("part", ["w_of_a_gpt", "w_of_a_resnet"])
def test_w_is_what_arithmetic_gives(part: str, kind: Kind, report: Report, tmp_path: Path) -> None:
    job = Job(
        kind, ATTACHED, ALONE, (part,), limit_s=300.0, arguments=SHAPES[kind.name], env=MEASURE_SOON
    )
    (outcome,) = job.run(tmp_path / "job")[part]
    assert outcome.kind == VALUE, outcome.value
    found: dict[str, Any] = outcome.value
    report.figure(part, found)
    profile = found["profile"]
    assert profile["flops_source"] == "counted"
    assert abs(profile["flops"] / found["analytic"] - 1) <= 0.01, found
    if kind.is_gpu:
        # The rate of the device is known, and the job reaches some of it.
        assert 0 < found["utilization"] <= 1, found
        assert abs(profile["period_s"] / found["step_s"] - 1) < 0.2, found
