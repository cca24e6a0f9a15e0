"""``crux sim compare``: a scenario under each scheduler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from crux_torch.cli.sim_compare import compare
from crux_torch.schedule.scheduler import SCHEDULERS


def scenario(**changes: object) -> dict:
    job = {"gpus": 8, "flops": 1e12, "compute_s": 0.05}
    paths = {"x": {"l0": 5e7}, "y": {"l1": 5e7}}
    jobs = {n: {**job, "paths": paths, "path": "x"} for n in ("a", "b")}
    horizon_s = changes.pop("horizon_s", 100)
    jobs["b"].update(changes)
    links = {"l0": {"capacity_Bps": 1e9}, "l1": {"capacity_Bps": 1e9}}
    return {"links": links, "jobs": jobs, "horizon_s": horizon_s}


def rows_of(file: Path, out: Path, *flags: str) -> dict[str, dict]:
    result = CliRunner().invoke(compare, [str(file), "--json", str(out), *flags])
    assert result.exit_code == 0, result.output
    return {row["scheduler"]: row for row in json.loads(out.read_text())["rows"]}


def test_all_schedulers_play_the_scenario(tmp_path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(scenario()))
    rows = rows_of(file, tmp_path / "out.json")
    assert set(rows) == set(SCHEDULERS)
    assert rows["ecmp"]["gpu_utilization"] == pytest.approx(1 / 3, abs=1e-3)
    assert rows["ecmp"]["jobs"]["a"]["slowdown"] == pytest.approx(1.5, abs=1e-2)
    for name in ("crux", "cassini", "ideal"):
        assert rows[name]["gpu_utilization"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": {"x": {"l0": 1.0}, "y": {"l1": 2.0}}}, "jobs.b.paths: expected the same bytes"),
        ({"iterations": 5}, "s.json: jobs.b.iterations"),
        ({"compute_s": 1e-8, "paths": None, "path": None, "horizon_s": 1e6}, "s.json: horizon_s"),
    ],
)
def test_what_a_cluster_cannot_hold_is_refused(tmp_path, changes, message) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(scenario(**changes)))
    result = CliRunner().invoke(compare, [str(file)])
    assert result.exit_code == 1
    assert message in result.output
    assert str(file) in result.output
    result = CliRunner().invoke(compare, [str(file), "--schedulers", "best"])
    assert result.exit_code == 2
    assert "expected some of" in result.output


def test_the_example_shows_what_crux_is_for(tmp_path) -> None:
    file = Path(__file__).parents[1] / "examples" / "spines.json"
    rows = rows_of(file, tmp_path / "out.json", "--schedulers", "ecmp,crux,ideal")
    assert rows["ecmp"]["gpu_utilization"] < 0.6 * rows["crux"]["gpu_utilization"]
    assert rows["crux"]["gpu_utilization"] <= rows["ideal"]["gpu_utilization"]


def test_the_simulators_commands_load_neither_torch_nor_plots_nor_what_is_not_installed() -> None:
    program = (
        "import sys, crux_torch.cli.sim; "
        "unwanted = {'torch', 'matplotlib', 'jinja2', 'networkx', 'evaluation', 'lab'}; "
        "print(sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
