"""What jobs move inside hosts: charged to PCIe links in the profile and in the plan."""

from __future__ import annotations

from typing import Any

import pcie_layouts as layouts
import pytest
from control_fakes import profile as profile_of
from control_fakes import record
from measure_stream import plain_sample

from crux_torch.agreement.inputs import plan_inputs
from crux_torch.agreement.planner import compute_entries
from crux_torch.host.interfaces import Nic
from crux_torch.host.machine import Host, inside_of, join
from crux_torch.host.pcie import PcieTree
from crux_torch.measure.device import DeviceUse
from crux_torch.measure.merge import inside_flows, merge
from crux_torch.measure.profile import HostFlow
from crux_torch.measure.sample import GroupRow, RankSample, TrafficRow
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.topology import Topology
from crux_torch.schedule.papers.crux import link_time_s

CABLES = ", ".join("{between: [h0, tor0], capacity_Bps: 50e9}" for _ in range(8))
BARE = f"""
version: 1
hosts: {{h0: , h1: }}
switches: {{tor0: tor}}
links: [{CABLES}, {CABLES.replace("h0", "h1")}]
"""


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """Two DGX A100s on one switch."""
    tree = PcieTree.read(layouts.write(tmp_path_factory.mktemp("sysfs"), layouts.dgx_a100()))
    nics = tuple(
        Nic(f"mlx5_{i}", 25e9, None, address) for i, address in enumerate(tree.of_kind("nic"))
    )
    network = parse_yaml(BARE)
    for name in ("h0", "h1"):
        network = join(network, inside_of(Host(name, (), None, nics), tree))
    return network


def sample(rank: int, world: int, host: str, gpu: int | None) -> RankSample:
    return plain_sample(
        rank,
        world,
        host=host,
        groups=(GroupRow("world", rank, (0, world, 1)),),
        traffic=(TrafficRow(0, "allreduce", -1, 10 * 1_000_000_000),),
        device=None if gpu is None else DeviceUse(name="NVIDIA A100", gpu=gpu),
    )


def two_by(gpus: tuple[int, ...]) -> list[RankSample]:
    world = 2 * len(gpus)
    return [
        sample(rank, world, f"h{rank // len(gpus)}", gpus[rank % len(gpus)])
        for rank in range(world)
    ]


def test_gpus_share_what_leaves_and_enters_their_host(topology: Topology) -> None:
    matrix = {("h0", "h1"): 8e9, ("h1", "h0"): 4e9}
    found = inside_flows(matrix, two_by((0, 1)), topology, whole_hosts=False)
    assert found == {
        ("h0/gpu0", "h0/mlx5_0"): 4e9,
        ("h0/mlx5_0", "h0/gpu0"): 2e9,
        ("h0/gpu1", "h0/mlx5_1"): 4e9,
        ("h0/mlx5_1", "h0/gpu1"): 2e9,
        ("h1/gpu0", "h1/mlx5_0"): 2e9,
        ("h1/mlx5_0", "h1/gpu0"): 4e9,
        ("h1/gpu1", "h1/mlx5_1"): 2e9,
        ("h1/mlx5_1", "h1/gpu1"): 4e9,
    }


def test_a_host_of_ones_own_is_met_by_nobody(topology: Topology) -> None:
    matrix = {("h0", "h1"): 8e9}
    everything = two_by(tuple(range(8)))
    assert inside_flows(matrix, everything, topology, whole_hosts=False) == {}
    assert len(inside_flows(matrix, everything, topology, whole_hosts=True)) == 16


@pytest.mark.parametrize("unknown", [None, 99])
def test_nothing_is_told_of_a_host_with_a_rank_that_nobody_can_place(
    topology: Topology, unknown: int | None
) -> None:
    samples = [sample(0, 3, "h0", 0), sample(1, 3, "h0", unknown), sample(2, 3, "h1", 0)]
    found = inside_flows({("h0", "h1"): 1e9}, samples, topology, whole_hosts=True)
    assert set(found) == {("h1/mlx5_0", "h1/gpu0")}
    twice = [sample(0, 3, "h0", 0), sample(1, 3, "h0", 0), sample(2, 3, "h1", 0)]
    assert set(inside_flows({("h0", "h1"): 1e9}, twice, topology, whole_hosts=True)) == set(found)


def test_t_is_that_of_a_pcie_link_where_it_is_the_slowest(topology: Topology) -> None:
    # All of h0's GPUs 0 and 1 below one inner switch of 31.5 GB/s, their NICs below another.
    profile = merge(two_by((0, 1)), topology=topology, link_time_s=link_time_s)
    out = sum(flow.bytes for flow in profile.flows if flow.src == "h0")
    pcie = topology.capacity_Bps["h0/pcie-0000:15:00.0->h0/pcie-0000:11:00.0"]
    assert profile.t_s == pytest.approx(out / pcie)
    assert profile.t_s > out / 50e9, "the network alone would be faster"
    assert {(f.src, f.dst) for f in profile.inside} >= {("h0/gpu0", "h0/mlx5_0")}
    bare = merge(two_by((0, 1)), topology=parse_yaml(BARE), link_time_s=link_time_s)
    assert bare.inside == ()
    assert bare.t_s == pytest.approx(out / 50e9)


def test_two_jobs_that_meet_on_pcie_only_are_ordered(topology: Topology) -> None:
    """Figure 3b: jobs on one host whose GPUs share a PCIe switch, on NICs of their own."""

    def job(name: str, gpu: int, flops: float) -> Any:
        inside = (HostFlow(f"h0/gpu{gpu}", f"h0/mlx5_{gpu}", 20e9),)
        found = profile_of(flows=(), inside=inside, flops=flops, t_s=0.7, t_source="topology")
        return record(name, hosts=("h0",), gpus=1, profile=found)

    light, heavy, apart = job("light", 0, 1e13), job("heavy", 1, 1e15), job("apart", 6, 1e12)
    cluster = plan_inputs([light, heavy, apart], topology)
    links = {j.name: set(j.flows[0].candidates[0]) for j in cluster.jobs}
    assert links["light"] & links["heavy"]
    assert not links["apart"] & (links["light"] | links["heavy"])
    entries = compute_entries([light, heavy], topology, policy="crux-paper", levels=(0, 1))
    level = {entry.job: entry.level for entry in entries}
    assert level == {"heavy": 1, "light": 0}
    assert all(entry.paths == () for entry in entries), "nobody chooses a path inside a host"


def test_parts_that_a_topology_does_not_know_count_for_nothing(topology: Topology) -> None:
    strange = (
        HostFlow("h0/gpu0", "h0/eth9", 1e9),
        HostFlow("h0/gpu0", "h1/mlx5_0", 1e9),
        HostFlow("tor0", "tor0", 1e9),
    )
    found = profile_of(inside=strange)
    (job,) = plan_inputs([record("a", profile=found)], topology).jobs
    assert len(job.flows) == len(found.flows)
    (job,) = plan_inputs([record("a", profile=found)], None).jobs
    assert len(job.flows) == len(found.flows)


def test_flows_inside_a_host_have_the_part_that_moves_most_there(topology: Topology) -> None:
    def sent(rank: int, size: int) -> RankSample:
        return plain_sample(
            rank,
            2,
            host=f"h{rank}",
            groups=(GroupRow("world", rank, (0, 2, 1)),),
            traffic=(TrafficRow(0, "send", 1 - rank, 10 * size),),
            device=DeviceUse(name="NVIDIA A100", gpu=0),
        )

    found = merge([sent(0, 1_000), sent(1, 3_000)], topology=topology)
    assert {flow.src: flow.part for flow in found.flows} == {"h0": 1, "h1": 0}
    assert [flow.part for flow in found.inside] == [0] * 4
    inside = (*found.inside[:1], HostFlow("h0/gpu1", "h0/mlx5_1", 1e9, 2))
    told = profile_of(flows=found.flows, inside=inside, t_source="topology")
    (job,) = plan_inputs([record("j", hosts=("h0", "h1"), profile=told)], topology).jobs
    assert job.parts == (1, 0, 0, 2)
