"""``crux sim compare``: a scenario under each scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim.commands.compare import compare


def scenario(**changes: object) -> dict:
    job = {"gpus": 8, "flops": 1e12, "compute_s": 0.05}
    paths = {"x": {"l0": 5e7}, "y": {"l1": 5e7}}
    jobs = {n: {**job, "paths": paths, "path": "x"} for n in ("a", "b")}
    jobs["b"].update(changes)
    links = {"l0": {"capacity_Bps": 1e9}, "l1": {"capacity_Bps": 1e9}}
    return {"links": links, "jobs": jobs, "horizon_s": 100}


def test_all_schedulers_play_the_scenario(tmp_path) -> None:
    file, out = tmp_path / "s.json", tmp_path / "out.json"
    file.write_text(json.dumps(scenario()))
    result = CliRunner().invoke(compare, [str(file), "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = {row["scheduler"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == set(SCHEDULERS)
    assert rows["ecmp"]["gpu_utilization"] == pytest.approx(1 / 3, abs=1e-3)
    assert rows["ecmp"]["jobs"]["a"]["slowdown"] == pytest.approx(1.5, abs=1e-2)
    for name in ("crux", "cassini", "ideal"):
        assert rows[name]["gpu_utilization"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": {"x": {"l0": 1.0}, "y": {"l1": 2.0}}}, "jobs.b.paths: expected the same bytes"),
        ({"iterations": 5}, "jobs.b.iterations"),
    ],
)
def test_what_a_cluster_cannot_hold_is_refused(tmp_path, changes, message) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(scenario(**changes)))
    result = CliRunner().invoke(compare, [str(file)])
    assert result.exit_code == 1
    assert message in result.output
    result = CliRunner().invoke(compare, [str(file), "--schedulers", "best"])
    assert result.exit_code == 2
    assert "expected some of" in result.output


def test_the_example_shows_what_crux_is_for(tmp_path) -> None:
    file, out = Path(__file__).parents[1] / "examples" / "spines.json", tmp_path / "out.json"
    chosen = "ecmp,crux,ideal"
    result = CliRunner().invoke(compare, [str(file), "--schedulers", chosen, "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = {row["scheduler"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["ecmp"]["gpu_utilization"] < 0.6 * rows["crux"]["gpu_utilization"]
    assert rows["crux"]["gpu_utilization"] <= rows["ideal"]["gpu_utilization"]
