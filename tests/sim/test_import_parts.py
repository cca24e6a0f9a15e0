"""Parts of imported jobs: what moves on its own, where the file names the process groups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from profiled import collective, event, kineto

from crux_torch.cli.sim import sim
from crux_torch.measure import traffic
from crux_torch.network.builders import GpuServer, two_layer_clos
from crux_torch.network.topology import Topology
from crux_torch.sim import importers
from crux_torch.sim.catalogue import Collective
from crux_torch.sim.importers import scenario_of
from crux_torch.sim.importers.chakra import read_chakra
from crux_torch.sim.importers.chrome import read_chrome
from crux_torch.sim.importers.goal import read_goal
from crux_torch.sim.importers.simai import read_simai
from crux_torch.sim.importers.workload import ImportedJob
from crux_torch.sim.play import run_scenario
from crux_torch.sim.scenario import Scenario, cluster_of, parse_scenario

SIMAI = """\
HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 2 pp: 2 vpp: 1 ga: 2 all_gpus: 16 \
checkpoints: 0 checkpoint_initiates: 0 pp_comm: 8388608.0
3
grad_gather\t-1\t1\tNONE\t0\t1\tNONE\t0\t1\tALLGATHER\t1000\t100
embedding_layer\t-1\t622731\tALLREDUCE\t50331648\t1\tNONE\t0\t15091072\tNONE\t0\t100
mlp_moelayer\t-1\t1\tALLTOALL_EP\t100663296\t1\tALLTOALL_EP\t100663296\t1\tNONE\t0\t100
"""
#: Two groups of two ranks, each of which computes and sends the other 1,000 bytes.
GOAL = "num_ranks 4\n" + "".join(
    f"rank {r} {{\nl1: calc 1000\nl2: send 1000b to {r ^ 2}\nl2 requires l1\n"
    f"l3: recv 1000b from {r ^ 2}\n}}\n"
    for r in range(4)
)


def hosts_of_one_gpu(hosts: int) -> Topology:
    server = GpuServer(gpus=1, nics=1, pcie_switches=1, nvlink_Bps=0)
    return two_layer_clos(hosts, max(hosts // 2, 1), 2, server=server)


def imported(job: ImportedJob, topology: Topology, **how: Any) -> Scenario:
    given: dict[str, Any] = {"placement": "hosts", "bursts": 4, "seed": 0, "horizon_s": 1.0}
    return scenario_of({"a": job}, topology, **given | how)[0]


def hosts(part: Mapping[str, float], topology: Topology) -> set[str]:
    """Hosts whose links a part uses."""
    ends = {end for link in part for end in topology.ends(link)}
    return {host for end in ends if (host := topology.host_of(end))}


def chakra(group: str) -> ImportedJob:
    """Four ranks; the even and the odd ones reduce in groups of their own, if these have names."""

    def rank(number: int) -> bytes:
        named = {"name": "pg_name", "stringVal": group + str(number % 2)}
        about: list[dict[str, object]] = [
            {"name": "comm_type", "int64Val": 0},
            {"name": "comm_size", "int64Val": 1000},
        ]
        nodes = [
            {"id": 1, "type": "COMP_NODE", "durationMicros": 10},
            {
                "id": 2,
                "type": "COMM_COLL_NODE",
                "dataDeps": [1],
                "attr": [*about, *([named] if group else [])],
            },
        ]
        return "".join(map(json.dumps, [{"version": "1"}, *nodes])).encode()

    return read_chakra({f"t.{r}.json": rank(r) for r in range(4)})


def test_each_process_group_of_a_profilers_trace_is_a_part() -> None:
    about = collective("allreduce", "Float", 1000, 1000, 2) | {"Process Group Ranks": "[0, 2]"}
    events = [
        event("gemm", "kernel", 0, 50),
        event("ncclDevKernel_AllReduce", "kernel", 40, 30, 20, **about),
    ]
    topology = hosts_of_one_gpu(8)
    scenario = imported(read_chrome({"trace": kineto(events, world=8)}), topology)
    (burst,) = scenario.jobs["a"].sent
    # The trace stands for all ranks: 0 and 2, 1 and 3, 4 and 6, 5 and 7.
    touched = [hosts(part, topology) for part in burst.parts]
    assert [len(one) for one in touched] == [2] * 4
    assert set.union(*touched) == {f"h{i}" for i in range(8)}
    # Schedulers see the same parts, and the engine plays them.
    (job,) = cluster_of(scenario)[0].jobs
    assert set(job.parts) == {0, 1, 2, 3}
    assert run_scenario(scenario).jobs["a"].completed > 0


@pytest.mark.parametrize("spray", [True, False])
def test_parts_of_a_simai_workload_carry_what_the_job_does(spray: bool) -> None:
    job, topology = read_simai(SIMAI), two_layer_clos(16, 8, 4)
    apart, together = (
        imported(one, topology, placement="none", spray=spray).jobs["a"].sent
        for one in (job, replace(job, apart=False))
    )
    assert [burst.at for burst in apart] == [burst.at for burst in together]
    for ours, whole in zip(apart, together, strict=True):
        total: dict[str, float] = {}
        for part in ours.parts:
            traffic.add_flows(total, part)
        assert isinstance(whole.traffic, dict)
        if spray:
            assert total == pytest.approx(whole.traffic)
        else:  # every flow has a hash of its own, but the same ends
            nics = [link for link in total if "nic" in link]
            assert {n: total[n] for n in nics} == pytest.approx({n: whole.traffic[n] for n in nics})
    counts = {len(burst.parts) for burst in apart}
    assert len(counts) == 1, "every burst carries a share of every part"
    assert counts.pop() > 1


@pytest.mark.parametrize(
    ("job", "parts"),
    [(read_goal(GOAL), 1), (chakra(""), 1), (chakra("group"), 2)],
    ids=["goal", "chakra without groups", "chakra with groups"],
)
def test_a_file_without_process_groups_is_one_part(job: ImportedJob, parts: int) -> None:
    topology = hosts_of_one_gpu(4)
    (burst,) = imported(job, topology).jobs["a"].sent
    assert len(burst.parts) == parts
    assert isinstance(burst.traffic, list) == (parts > 1)
    assert set.union(*(hosts(part, topology) for part in burst.parts)) == {"h0", "h1", "h2", "h3"}


def test_sends_between_the_same_hosts_are_one_part() -> None:
    topology = two_layer_clos(3, 3, 2)  # of 8 GPUs each
    pairs = tuple((r, r + 8) for r in range(16))
    job = ImportedJob(24, 1.0, (Collective("send", 1000.0, pairs, 0.5),))
    (burst,) = imported(job, topology, placement="hived").jobs["a"].sent
    assert sorted(len(hosts(part, topology)) for part in burst.parts) == [2, 2]


@pytest.mark.parametrize("count", [3, 4])
def test_a_job_of_too_many_parts_is_one_and_says_so(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(importers, "MOST_PARTS", 3)
    topology = hosts_of_one_gpu(8)
    pairs = tuple((2 * i, 2 * i + 1) for i in range(count))
    job = ImportedJob(8, 1.0, (Collective("send", 1000.0, pairs, 0.5),))
    scenario, notes = scenario_of(
        {"a": job}, topology, placement="hosts", bursts=1, seed=0, horizon_s=1.0
    )
    (burst,) = scenario.jobs["a"].sent
    assert len(burst.parts) == (3 if count == 3 else 1)
    touched = set.union(*(hosts(part, topology) for part in burst.parts))
    assert len(touched) == 2 * count
    assert notes == (
        {}
        if count == 3
        else {
            "a": ("it has 4 parts that move on their own, more than 3: all moves as one transfer",)
        }
    )


def test_the_command_says_how_many_parts_there_are(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text(SIMAI)
    out = tmp_path / "s.json"
    given = ["import", f"gpt={tmp_path / 'w.txt'}", "--out", str(out), "--topology", "testbed"]
    (row,) = json.loads(CliRunner().invoke(sim, [*given, "--json"]).output)
    (job,) = parse_scenario(out.read_text()).jobs.values()
    assert row["parts"] == len(job.sent[0].parts) > 1
    assert row["bytes"] == pytest.approx(
        sum(sum(part.values()) for burst in job.sent for part in burst.parts)
    )
    assert f", {row['parts']} parts, " in CliRunner().invoke(sim, given).output
    again = CliRunner().invoke(sim, ["compare", str(out), "--schedulers", "ecmp,crux-paper"])
    assert again.exit_code == 0, again.output
