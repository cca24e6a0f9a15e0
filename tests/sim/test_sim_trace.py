"""``crux sim trace``: rows, result files, and what is said about traces that can't be used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from crux_torch.cli.sim import sim
from crux_torch.sim.networks import INTENSITY_EDGES
from crux_torch.sim.replay import ReplayOptions, Run, run_row
from crux_torch.sim.traces import Workload

TINY = """name,model,gpus,submit_s,duration_s
a,bert,16,0,60
b,transformer-nlp,48,5,100
c,transformer-nlp,32,10,300
d,resnet,1,2000000,30
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.csv"
    file.write_text(TINY)
    return file


def crux_sim(*arguments: object) -> Result:
    return CliRunner().invoke(sim, ["trace", *map(str, arguments)])


def row_of(tiny: Path, **how: Any) -> dict[str, Any]:
    workload = Workload(str(tiny), days=30)
    options = ReplayOptions(placement="hived")
    return run_row(replace(Run(workload, "testbed", "ecmp", options), **how))


def test_rows_and_files(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = crux_sim(
        *("--trace", tiny, "--topology", "testbed", "--schedulers", "ecmp,ideal"),
        *("--placement", "hived", "--iterations-as-one", 1, "--out", out),
    )
    assert found.exit_code == 0, found.output
    assert "It is not the paper's trace" in " ".join(found.output.split())
    result = json.loads((out / "trace.json").read_text())
    assert result["benchmark"] == "trace"
    assert result["settings"]["trace"]["jobs"] == 3, "the fourth arrives after the 14 days"
    assert [row["scheduler"] for row in result["rows"]] == ["ecmp", "ideal"]
    for row in result["rows"]:
        assert row["jobs"] == 3
        assert 0 < row["held_utilization"] <= 1
        assert row["max_rss_MiB"] > 0
        for spans in row["series"]["carried"].values():
            assert all(len(span) == len(INTENSITY_EDGES) + 1 for span in spans)
    assert result["rows"][1]["slowdown_worst"] == pytest.approx(1.0)
    assert "ecmp" in (out / "trace.txt").read_text()


def test_the_network_is_seen_at_work(tiny: Path) -> None:
    options = ReplayOptions(placement="hived", grid_s=50.0)
    row = row_of(tiny, options=options)
    carried = row["series"]["carried"]
    assert sum(map(sum, carried["nic-tor"])) > 0
    assert sum(map(sum, carried["pcie-nic"])) > 0
    assert all(0 <= sum(span) <= 1 for spans in carried.values() for span in spans)
    assert row["network_utilization"] > 0


def test_a_generated_trace_needs_no_data() -> None:
    found = crux_sim(
        *("--topology", "clos", "--jobs", 20, "--days", 1, "--schedulers", "ideal"),
        *("--placement", "hived"),
    )
    assert found.exit_code == 0, found.output
    assert "generated from the published marginals" in found.output
    assert "generated trace: 20 jobs" in found.output


def test_what_is_cut_off_a_trace_is_said(tiny: Path) -> None:
    how = ("--topology", "testbed", "--schedulers", "ideal", "--placement", "hived")
    found = crux_sim("--trace", tiny, "--jobs", 2, *how)
    assert "Left out of the trace: 1 (after --days 14), 1 (beyond --jobs 2)." in found.output
    whole = crux_sim("--trace", tiny, "--days", 30, *how)
    assert "Left out" not in whole.output


def test_a_trace_whose_jobs_all_come_at_once_has_no_mean_demand(tmp_path: Path) -> None:
    file = tmp_path / "at_once.csv"
    file.write_text("name,model,gpus,submit_s,duration_s\na,bert,16,0,60\nb,bert,16,0,1e6\n")
    out = tmp_path / "out.json"
    how = ("--topology", "testbed", "--schedulers", "ideal", "--json", out)
    found = crux_sim("--trace", file, *how)
    assert found.exit_code == 0, found.output
    assert "2 jobs that arrive within 0 s" in " ".join(found.output.split())
    assert json.loads(out.read_text())["settings"]["trace"]["mean_gpus_wanted"] is None
    late = tmp_path / "late.csv"
    late.write_text("name,model,gpus,submit_s,duration_s\na,bert,16,2000000,60\n")
    found = crux_sim("--trace", late, *how)
    assert found.exit_code == 1
    assert "no job arrives within --days 14" in found.output


def test_what_can_not_be_used_is_named(tiny: Path, tmp_path: Path) -> None:
    for arguments, said in (
        (("--trace", "hybrid", "--data", tmp_path), "philly.csv.gz is missing"),
        (("--trace", "lingjun", "--data", tmp_path), "job.csv is missing"),
        (("--trace", tmp_path / "none.csv"), "none.csv"),
        (("--trace", tiny, "--topology", tmp_path / "none.yaml"), "none.yaml"),
        (("--trace", tiny, "--schedulers", "best"), "'best' is unknown"),
        (("--trace", tiny, "--placement", "best"), "'best' is unknown"),
    ):
        found = crux_sim(*arguments)
        assert found.exit_code != 0
        # Boxes break lines wherever they end.
        assert said.replace(" ", "") in "".join(found.output.split()).replace("│", "")
        assert "Traceback" not in found.output


def test_jobs_on_a_network_of_a_file(tiny: Path, tmp_path: Path) -> None:
    network = tmp_path / "network.yaml"
    network.write_text("version: 1\nbuilder: fat_tree\nparameters: {k: 4}\n")
    row = row_of(tiny, topology=str(network), scheduler="crux")
    assert row["gpus"] == 128
    assert row["jobs"] == 4
