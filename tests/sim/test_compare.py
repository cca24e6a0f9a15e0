"""``crux sim compare`` and ``advise``: a scenario under each scheduler, and without rivals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

from crux_torch.cli.sim import compare, sim
from crux_torch.schedule.schedulers import SCHEDULERS


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
    file = ROOT / "examples" / "spines.json"
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


SPINES = {
    "links": {"l0": {"capacity_Bps": 1e9}, "l1": {"capacity_Bps": 1e9}},
    "jobs": {
        name: {
            "gpus": 8,
            "flops": 1e12,
            "compute_s": 0.05,
            "paths": {"x": {"l0": 5e7}, "y": {"l1": 5e7}},
            "path": path,
        }
        for name, path in (("a", "x"), ("b", "x"), ("c", "y"))
    },
    "horizon_s": 100,
}


def advised(tmp_path: Path, scenario: dict, *flags: str) -> tuple[dict, str]:
    file, out = tmp_path / "s.json", tmp_path / "out.json"
    file.write_text(json.dumps(scenario))
    found = CliRunner().invoke(sim, ["advise", str(file), "--json", str(out), *flags])
    assert found.exit_code == 0, found.output
    return json.loads(out.read_text())["jobs"], found.output


def test_a_rival_costs_what_the_job_gains_without_it(tmp_path: Path) -> None:
    jobs, text = advised(tmp_path, SPINES, "--schedulers", "ecmp,crux")
    assert jobs["a"]["iteration_s"] == pytest.approx(0.15, rel=1e-3)
    assert jobs["a"]["alone_s"] == pytest.approx(0.1, rel=1e-3)
    assert jobs["a"]["without_s"] == {"b": pytest.approx(0.1, rel=1e-3)}
    assert jobs["a"]["under_s"]["ecmp"] == jobs["a"]["iteration_s"]
    assert jobs["c"]["without_s"] == {}, "nobody else is on its link"
    assert "without b" in text
    assert "-33.3%" in text


def test_of_many_jobs_there_is_a_row_each_and_all_of_those_that_are_named(tmp_path: Path) -> None:
    many = {"links": {}, "jobs": {}, "horizon_s": 10}
    for i in range(5):
        many["links"][f"l{i}"] = {"capacity_Bps": 1e9}
        for name, share in (("light", 0.2), ("heavy", 1.0)):
            traffic = {f"l{i}": (i + 1) * share * 1e8}
            many["jobs"][f"{name}{i}"] = {"gpus": 1, "compute_s": 0.1, "traffic": traffic}
    jobs, text = advised(tmp_path, many, "--schedulers", "ecmp,crux")
    assert len(jobs) == 10
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == 10, "no table of one job"
    slowdown = [float(row[3]) for row in rows]
    assert slowdown == sorted(slowdown, reverse=True)
    by_job = {row[1].strip(): row[4].strip() for row in rows}
    assert by_job["light4"] == "heavy4"
    assert "--job NAME" in text
    one, text = advised(tmp_path, many, "--schedulers", "ecmp", "--job", "light4")
    assert one == {"light4": jobs["light4"] | {"under_s": {"ecmp": jobs["light4"]["iteration_s"]}}}
    assert "without heavy4" in text


def test_a_job_that_is_not_there_is_named_with_those_like_it(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SPINES | {"jobs": {"train": SPINES["jobs"]["a"]}}))
    found = CliRunner().invoke(sim, ["advise", str(file), "--job", "trian"])
    assert found.exit_code == 1
    assert "no job 'trian', but train" in found.output


def test_who_never_ends_an_iteration_is_said(tmp_path: Path) -> None:
    jobs, text = advised(tmp_path, {**SPINES, "horizon_s": 0.01}, "--schedulers", "crux")
    assert jobs["a"]["iteration_s"] is None
    assert "no iteration ends" in text


def test_what_cannot_be_played_is_named(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps({**SPINES, "horizon_s": 1e15}))
    found = CliRunner().invoke(sim, ["advise", str(file)])
    assert found.exit_code == 1
    assert "s.json: horizon_s" in found.output


def test_the_page_has_what_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    _, text = advised(tmp_path, SPINES, "--schedulers", "ecmp", "--html", str(page))
    written = page.read_text()
    assert written.startswith("<!doctype html>")
    for word in ("without b", "under ecmp", "0.1500 s an iteration"):
        assert word in text
        assert word in written
