"""The commands of docs/start/two-jobs.md, on jobs with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from crux_torch.sim.scenario import read_scenario

PAGE = (ROOT / "docs/start/two-jobs.md").read_text("utf-8")


# Beside other work on the machine a job computes for so long that the two hardly meet.
@pytest.mark.full
@pytest.mark.flaky(reruns=2)
def test_the_pages_commands_say_what_the_jobs_cost_each_other(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    commands, fabric = re.findall(r"```(?:yaml)?\n(.*?)```", PAGE, re.S)[:2]
    (tmp_path / "fabric.yaml").write_text(fabric)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = commands.replace("train_mlp.py", "train_mlp.py --steps 300")
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│ ")]
    by_job = {row[1].strip(): row for row in rows if len(row) == 9}
    assert {name: by_job[name][4].strip() for name in "ab"} == {"a": "b", "b": "a"}
    assert all(float(by_job[name][3]) > 1.05 for name in "ab")
    links = [
        {link for burst in job.sent for part in burst.parts for link in part}
        for job in read_scenario(tmp_path / "both.json").jobs.values()
    ]
    shared = set.intersection(*links)
    assert shared, "the page says that they have a common link"
