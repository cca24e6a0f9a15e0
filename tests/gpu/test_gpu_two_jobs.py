"""Two NCCL jobs of two ranks each on one congested link, all on one GPU: the demo, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rig.kind import ROOT, Kind
from rig.report import Report

from examples.demo import netns


@pytest.mark.slow
def test_the_job_with_the_higher_intensity_goes_first(
    kind: Kind, pair: int, report: Report, tmp_path: Path
) -> None:
    if not kind.is_cuda:
        pytest.skip("not on a fake device: `make run` is the same on CPUs")
    possible, why_not = netns.available()
    results = tmp_path / "results.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "examples.demo", "--device", "cuda", "--steps", "9"),
            *("--json", str(results), "--out", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    report.figure("two jobs", (done.stdout + done.stderr).splitlines())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(results.read_text())
    for job in found["jobs"]:
        assert job["losses_equal"], job
        assert job["steps_compared"] > 0
        assert job["flops"] > 0
    if not possible:
        pytest.skip(f"the jobs ran, but over the unshaped loopback: {why_not}")
    assert {job["name"]: job["dscp"] for job in found["jobs"]}["gpt"] > 0
    medians = {
        (times["job"], times["case"]): sorted(times["seconds"])[len(times["seconds"]) // 2]
        for times in found["step_times"]
    }
    together, crux = medians["gpt", "together"], medians["gpt", "with_crux"]
    assert crux < together, medians
