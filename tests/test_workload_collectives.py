"""Bytes are conserved whatever the algorithm, and flows cross the links that they should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.fabric.builders import GpuServer, crux_testbed, rail_optimised, two_layer_clos
from crux_torch.fabric.shared_core import shared_core
from crux_torch.fabric.topology import Topology
from crux_torch.profile import traffic
from crux_torch.schedule.model import Burst
from crux_torch.sim.catalogue import MODELS, WorkloadError, model
from crux_torch.sim.collectives import build_job, contended, transfers
from crux_torch.sim.parallelism import Collective, Layout

CLUSTER = two_layer_clos(hosts=6, tors=3, aggregations=2)
RAILS = rail_optimised(hosts=4, hosts_per_group=4, spines=2)
SIZE = 7e6

placements = st.lists(st.sampled_from(CLUSTER.gpus()), min_size=1, max_size=24, unique=True)


def collective(op: str, ranks: int) -> Collective:
    return Collective(op, SIZE, (tuple(range(ranks)),), 0.5, "data")  # type: ignore[arg-type]


def hosts_of(count: int, topology: Topology = CLUSTER) -> list[str]:
    return [gpu for host in topology.hosts[:count] for gpu in topology.gpus(host)]


def nic_bytes(moved: dict[tuple[str, str], float], topology: Topology) -> dict[str, float]:
    """Bytes that leave each NIC for the network."""
    total: dict[str, float] = {}
    for (src, dst), size in contended(moved, topology).items():
        path = topology.candidate_paths(src, dst)[0]
        nics = [link for link in path if topology.layer(link) == "nic-tor"]
        total[nics[0]] = total.get(nics[0], 0.0) + size
    return total


@settings(deadline=None)
@given(placements, st.sampled_from(["ring", "tree", "hierarchical"]))
def test_every_all_reduce_moves_the_same_bytes(gpus: list[str], algorithm: str) -> None:
    # n - 1 additions and n - 1 copies of S bytes, however they are arranged.
    moved = transfers(collective("allreduce", len(gpus)), gpus, CLUSTER, algorithm)  # type: ignore[arg-type]
    assert sum(moved.values()) == pytest.approx(2 * (len(gpus) - 1) * SIZE)
    assert all(src != dst for src, dst in moved)


@settings(deadline=None)
@given(placements)
def test_an_all_to_all_moves_all_but_ones_own(gpus: list[str]) -> None:
    moved = transfers(collective("alltoall", len(gpus)), gpus, CLUSTER)
    assert sum(moved.values()) == pytest.approx((len(gpus) - 1) * SIZE)
    home = CLUSTER.host_of
    for host in {home(gpu) for gpu in gpus}:
        local = sum(home(gpu) == host for gpu in gpus)
        out = sum(b for (s, d), b in moved.items() if home(s) == host != home(d))
        assert out == pytest.approx(local * (len(gpus) - local) / len(gpus) * SIZE)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_whole_hosts_load_all_their_nics_alike(algorithm: str) -> None:
    gpus = hosts_of(4)
    moved = transfers(collective("allreduce", 32), gpus, CLUSTER, algorithm)  # type: ignore[arg-type]
    loads = nic_bytes(moved, CLUSTER)
    assert len(loads) == 4 * 4
    assert max(loads.values()) == pytest.approx(min(loads.values()))


def test_a_ring_enters_and_leaves_a_host_by_one_nic() -> None:
    gpus = hosts_of(4)
    moved = contended(transfers(collective("allreduce", 32), gpus, CLUSTER), CLUSTER)
    assert len(moved) == 4 * 4, "four rings of four hops between hosts"
    for src, dst in moved:
        assert CLUSTER.nearest_nics(src)[0][-1] == CLUSTER.nearest_nics(dst)[0][-1]
    each = 2 * 31 / 32 * SIZE / 4
    assert all(size == pytest.approx(each) for size in moved.values())


def test_rings_stay_on_their_rails() -> None:
    gpus = hosts_of(4, RAILS)
    moved = contended(transfers(collective("allreduce", 32), gpus, RAILS), RAILS)
    for src, dst in moved:
        (path,) = RAILS.candidate_paths(src, dst)
        assert sum(RAILS.layer(link) == "nic-tor" for link in path) == 2
        assert not any("aggregation" in RAILS.layer(link) for link in path)


def test_a_tree_sends_both_ways_between_hosts() -> None:
    moved = contended(transfers(collective("allreduce", 48), hosts_of(6), CLUSTER, "tree"), CLUSTER)
    for (src, dst), size in moved.items():
        assert moved[dst, src] == size
    # Two trees over six hosts have 2 x 5 edges, S/2 each way, in four channels.
    assert sum(moved.values()) == pytest.approx(2 * 5 * SIZE)


def test_hierarchical_rings_carry_an_eighth_of_it() -> None:
    moved = contended(
        transfers(collective("allreduce", 16), hosts_of(2), CLUSTER, "hierarchical"), CLUSTER
    )
    assert set(moved) == {(f"h{a}/gpu{i}", f"h{1 - a}/gpu{i}") for a in range(2) for i in range(8)}
    assert all(size == pytest.approx(SIZE / 8) for size in moved.values())


def test_counts_multiply() -> None:
    once = Collective("send", SIZE, ((0, 1), (1, 0)), 0.0, "pipeline")
    often = Collective("send", SIZE, ((0, 1), (1, 0)), 0.0, "pipeline", 5)
    gpus = ["h0/gpu0", "h1/gpu0"]
    assert transfers(once, gpus, CLUSTER) == dict.fromkeys([tuple(gpus), tuple(gpus[::-1])], SIZE)
    assert transfers(often, gpus, CLUSTER)["h0/gpu0", "h1/gpu0"] == 5 * SIZE


def test_places_may_be_hosts() -> None:
    topology = shared_core(["a", "b", "c"], 1e9)
    places = ["a", "a", "b", "c"]
    moved = contended(transfers(collective("allreduce", 4), places, topology), topology)
    assert moved == pytest.approx(traffic.flows("allreduce", int(SIZE), range(4), places))
    job = build_job("j", model("bert"), places, topology)
    assert {flow.candidates[0][1] for flow in job.flows} == {"core"}


def test_a_job_in_one_host_with_nvlink_has_nothing_to_contend_for() -> None:
    job = build_job("j", model("bert"), hosts_of(1), CLUSTER)
    assert job.flows == ()
    assert job.bursts == (Burst(1.0, 1.0),)


def test_without_nvlink_it_contends_for_pcie() -> None:
    topology = crux_testbed(server=GpuServer(nvlink_Bps=0))
    job = build_job("j", model("bert"), list(topology.gpus("h0")), topology)
    layers = {topology.layer(link) for f in job.flows for p in f.candidates for link in p}
    assert layers == {"gpu-pcie", "host-pcie"}


def test_a_job_is_its_model_times_its_gpus() -> None:
    bert = model("bert")
    job = build_job("j", bert, hosts_of(2), CLUSTER)
    assert (job.name, job.gpus) == ("j", 16)
    assert job.flops == pytest.approx(16 * 16 * bert.flops_per_sample)
    assert job.compute_s == pytest.approx(16 / 78)
    assert job.bursts == (Burst(0.5, 1.0),)
    assert sum(f.bytes for f in job.flows) == pytest.approx(2 * 2 * 15 / 16 * bert.gradient_bytes)


def test_connections_split_hops_over_paths() -> None:
    one = build_job("j", model("bert"), hosts_of(4), CLUSTER)
    two = build_job("j", model("bert"), hosts_of(4), CLUSTER, connections=2)
    assert len(two.flows) == 2 * len(one.flows)
    assert sum(f.bytes for f in two.flows) == pytest.approx(sum(f.bytes for f in one.flows))


def test_candidates_are_shared_and_limited() -> None:
    a = build_job("a", model("bert"), hosts_of(4), CLUSTER)
    b = build_job("b", model("gpt"), hosts_of(4), CLUSTER)
    assert {id(f.candidates) for f in a.flows} == {id(f.candidates) for f in b.flows}
    limited = build_job("c", model("gpt"), hosts_of(4), CLUSTER, candidate_limit=1)
    assert {len(f.candidates) for f in limited.flows} == {1}


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical"])
def test_every_model_makes_a_job(name: str, algorithm: str) -> None:
    job = build_job("j", model(name), hosts_of(6), CLUSTER, algorithm=algorithm)  # type: ignore[arg-type]
    assert job.flows
    assert sum(burst.share for burst in job.bursts) == pytest.approx(1.0)
    assert [burst.at for burst in job.bursts] == sorted(burst.at for burst in job.bursts)
    assert all(flow.bytes > 0 and flow.candidates[0] for flow in job.flows)


def test_errors() -> None:
    with pytest.raises(WorkloadError, match="a layout of 4 ranks on 8 GPUs"):
        build_job("j", model("bert"), hosts_of(1), CLUSTER, layout=Layout(4))
    with pytest.raises(WorkloadError, match="connections is 0"):
        build_job("j", model("bert"), hosts_of(1), CLUSTER, connections=0)
