"""``python -m evaluation trace``: the paper's bars stand beside the rows that they belong to."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from evaluation.__main__ import evaluation
from evaluation.commands.trace import PAPER, beside_the_paper, paper_cells


def test_rows_stand_beside_the_bar_of_the_paper(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("name,model,gpus,submit_s,duration_s\na,bert,16,0,60\n")
    few = ["--trace", str(jobs), "--schedulers", "ecmp,ideal", "--placement", "hived"]
    ran = CliRunner().invoke(evaluation, ["trace", *few, "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "paper" in ran.output
    assert "0.64" in ran.output
    rows = json.loads((tmp_path / "trace.json").read_text())["rows"]
    assert [row["paper_gpu_utilization"] for row in rows] == [0.64, None]


def test_the_papers_grid_has_every_bar_of_its_figures() -> None:
    schedulers = tuple(dict.fromkeys(scheduler for _, _, scheduler in PAPER))
    cells = paper_cells((*schedulers, "ideal"))
    assert len(cells) == len(set(cells))
    assert set(PAPER) <= set(cells)
    assert ("non-blocking", "none", "ideal") in cells
    row = dict(zip(("topology", "placement", "scheduler"), cells[0], strict=True), gpus=8)
    assert list(beside_the_paper(row))[4] == "paper_gpu_utilization"
