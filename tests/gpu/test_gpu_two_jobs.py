"""Two NCCL jobs of two ranks each on one congested link, all on one GPU: the demo, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rig.kind import ROOT, Kind
from rig.report import Report

from lab import netns

#: Seconds that the demo may take, and to end once it is asked to.
LIMIT_S, GRACE_S = 220.0, 30.0


def test_the_job_with_the_higher_intensity_goes_first(
    kind: Kind, pair: int, report: Report, tmp_path: Path
) -> None:
    if not kind.is_gpu:
        pytest.skip("not on the rig: `make run` is the same on CPUs")
    possible, why_not = netns.available()
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "lab", "--device", "cuda", "--steps", "9"]
    command += ["--json", str(results), "--out", str(tmp_path / "out")]
    # To a file: what it said is kept however it ends.
    with (tmp_path / "said").open("w+") as said:
        demo = subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT)
        try:
            code: int | None = demo.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            # Asked to end, it takes its jobs and its network with it.
            demo.terminate()
            demo.wait(GRACE_S)
            code = None
        finally:
            demo.kill()
        said.seek(0)
        lines = said.read().splitlines()
    report.figure("two jobs", lines)
    assert code == 0, f"{code}: " + "\n".join(lines[-60:])
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
