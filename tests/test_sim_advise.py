"""``crux sim advise``: who slows a job down, and what each policy would change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from crux_torch.cli.sim import sim

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
    page = tmp_path / "page.html"
    _, text = advised(tmp_path, SPINES, "--schedulers", "ecmp", "--html", str(page))
    written = page.read_text()
    assert written.startswith("<!DOCTYPE html>")
    for word in ("without b", "under ecmp", "0.1500 s an iteration"):
        assert word in text
        assert word in written
