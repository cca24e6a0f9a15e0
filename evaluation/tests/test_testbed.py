"""The testbed's cases: where jobs stand, what they move, and what the rows say."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from crux_torch.network.topology import Topology
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.collectives import hashed_paths
from crux_torch.sim.play import play
from evaluation import testbed_runs
from evaluation.__main__ import evaluation
from evaluation.testbed import CASES, Case, Part, Setup, cluster_of, jobs_of, place
from evaluation.testbed_runs import Draws, communication_share, evaluate, paths_only, scheduler
from evaluation.trace import PAPER, beside_the_paper, paper_cells

FEW = Draws(count=3, horizon_s=20.0)


@pytest.fixture(scope="module")
def topology() -> Topology:
    return Setup().topology()


def case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


def tor_of(topology: Topology, gpu: str) -> str:
    host = topology.host_of(gpu)
    (tor,) = {e.dst for e in topology.edges if e.src == f"{host}/nic0" and "tor" in e.dst}
    return tor


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_host_of_a_job_has_a_tor_of_its_own(case: Case, topology: Topology) -> None:
    placed = place(case, topology)
    everyone = [gpu for gpus in placed for gpu in gpus]
    assert len(everyone) == len(set(everyone)) == sum(part.gpus for part in case.parts)
    for part, gpus in zip(case.parts, placed, strict=True):
        assert len(gpus) == part.gpus
        on_host = Counter(topology.host_of(gpu) for gpu in gpus)
        assert set(on_host.values()) == {part.per_host}
        assert len({tor_of(topology, gpu) for gpu in gpus}) == len(on_host)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_jobs_share_pcie_switches_where_they_should(case: Case, topology: Topology) -> None:
    jobs_at: dict[tuple[str, ...], set[int]] = {}
    for i, gpus in enumerate(place(case, topology)):
        for gpu in gpus:
            jobs_at.setdefault(topology.nearest_nics(gpu), set()).add(i)
    shared = [at for at, jobs in jobs_at.items() if len(jobs) > 1]
    assert bool(shared) == case.on_pcie


def test_a_job_without_room_is_named(topology: Topology) -> None:
    full = replace(CASES[0], name="full", parts=(Part("gpt", 48, 8), Part("bert", 56, 8)))
    with pytest.raises(WorkloadError, match=r"full: no room for bert of 56 GPUs: 7 ToRs.*6 have"):
        place(full, topology)


def test_jobs_follow_their_recipes(topology: Topology) -> None:
    gpt, bert, _ = jobs_of(case("GPT-32 + 2 BERT-8"), topology, Setup())
    # 24 layers of width 1024 and 51,200 + 2048 positions: 357 million parameters, 4 bytes each,
    # in a ring of 32 GPUs over 4 hosts: 4 hops between hosts, 2 x 31/32 of all bytes on each.
    assert sum(f.bytes for f in gpt.flows) == pytest.approx(4 * 2 * 31 / 32 * 4 * 356.7e6, rel=1e-3)
    # Half of its 8 GPUs on each of 2 hosts; 335 million parameters, 2 bytes each.
    assert sum(f.bytes for f in bert.flows) == pytest.approx(2 * 2 * 7 / 8 * 2 * 334.3e6, rel=1e-2)
    # A global batch of 256 sequences: 8 of 32 on each GPU, against 32 in the catalogue.
    assert gpt.compute_s == pytest.approx(0.3275, rel=1e-2)
    assert bert.compute_s == pytest.approx(256 / 8 / 78)


def test_more_computation_means_a_smaller_share_of_communication() -> None:
    mixed = case("GPT-48 + 2 ResNet-8 + 2 BERT-16")
    shares = [communication_share(mixed, Setup(batch_scale=b)) for b in (0.5, 1.0, 2.0)]
    for kind in ("gpt", "bert", "resnet"):
        values = [share[kind] for share in shares]
        assert values == sorted(values, reverse=True)
        assert 0 < values[-1] < values[0] < 1


def test_hashed_paths_differ_between_seeds_and_only_there(topology: Topology) -> None:
    gpt, *_ = jobs_of(CASES[0], topology, Setup())
    first = hashed_paths(gpt, topology, seed=1)
    assert first == hashed_paths(gpt, topology, seed=1) != hashed_paths(gpt, topology, seed=2)
    assert all(0 <= i < len(f.candidates) for i, f in zip(first, gpt.flows, strict=True))


def test_rows_compare_with_ecmp_on_the_same_draws() -> None:
    found = case("BERT-16 + 2 ResNet-4")
    rows = evaluate(found, ("ecmp", "crux-paper", "ideal"), FEW)
    by_name = {row["scheduler"]: row for row in rows}
    assert list(by_name) == ["ecmp", "crux-paper", "ideal"]
    assert set(by_name["ecmp"]["gain_pct"].values()) == {0.0}
    assert (
        by_name["ideal"]["utilization"]["median"] >= by_name["crux-paper"]["utilization"]["median"]
    )
    for row in rows:
        spread = row["utilization"]
        assert 0 < spread["p10"] <= spread["median"] <= spread["p90"] <= 1
        assert row["jobs"]["resnet"]["count"] == 2
        assert row["jobs"]["bert"]["iteration_s"]["p10"] >= row["jobs"]["bert"]["compute_s"]
    assert evaluate(found, ("crux-paper",), FEW) == [by_name["crux-paper"]]


def test_a_job_alone_at_its_bound_takes_compute_and_transfer(topology: Topology) -> None:
    alone = replace(CASES[0], parts=CASES[0].parts[:1])
    (gpt,) = jobs_of(alone, topology, Setup())
    cluster = cluster_of((gpt,), topology)
    report = play(cluster, scheduler("ideal")(cluster, SchedulerOptions()), 50.0)
    share = communication_share(alone)["gpt"]
    assert report.jobs["gpt0"].mean_iteration_s == pytest.approx(gpt.compute_s / (1 - share))


def test_paths_only_has_the_paths_of_crux_and_one_level(topology: Topology) -> None:
    cluster = cluster_of(jobs_of(CASES[4], topology, Setup()), topology)
    options = SchedulerOptions()
    decision = paths_only(cluster, options)
    assert decision.path == scheduler("crux-paper")(cluster, options).path
    assert len(set(decision.level.values())) == 1


def test_command(tmp_path: Path) -> None:
    few = ["--draws", "2", "--horizon", "10", "--schedulers", "ecmp,crux-paper"]
    ran = CliRunner().invoke(
        evaluation, ["testbed", "--figure", "20", *few, "--out", str(tmp_path)]
    )
    assert ran.exit_code == 0, ran.output
    assert "Figure 20" in ran.stdout
    assert "Figure 19" not in ran.stdout
    assert (tmp_path / "testbed.txt").read_text() == ran.stdout
    plain = json.loads((tmp_path / "testbed.json").read_text())
    assert plain["benchmark"] == "testbed"
    assert [row["scheduler"] for row in plain["rows"]] == ["ecmp", "crux-paper"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedulers", "ecmp,cruks"], "'cruks' is unknown; expected some of"),
        (["--figure", "18"], "'18' is not one of"),
        (["--horizon", "1"], "x>=10.0"),
    ],
)
def test_command_refuses(arguments: list[str], words: str) -> None:
    ran = CliRunner().invoke(evaluation, ["testbed", *arguments])
    assert ran.exit_code == 2
    assert words in ran.output


def test_sensitivity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        testbed_runs, "SENSITIVITY", (("batch_scale", (0.5, 2.0)), ("gradient_start", (None,)))
    )
    few = ["--sensitivity", "--draws", "2", "--horizon", "10"]
    ran = CliRunner().invoke(evaluation, ["testbed", *few, "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    rows = json.loads((tmp_path / "testbed_sensitivity.json").read_text())["rows"]
    assert len(rows) == 3 * len(testbed_runs.SENSITIVE_CASES)
    share = {(r["case"], r["value"]): r["communication_share"] for r in rows}
    gain = {(r["case"], r["value"]): r["gain_pct"]["median"] for r in rows}
    for name in testbed_runs.SENSITIVE_CASES:
        assert share[name, 0.5] > share[name, None] > share[name, 2.0]
        assert gain[name, 0.5] > gain[name, 2.0]
        assert name in ran.stdout


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
