"""Bytes are conserved whatever the algorithm, and flows cross the links that they should."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_core import shared_core

from crux_torch.measure import traffic
from crux_torch.network.builders import GpuServer, crux_testbed, rail_optimised, two_layer_clos
from crux_torch.network.topology import Topology
from crux_torch.schedule.model import Burst, Job
from crux_torch.sim.catalogue import MODELS, Collective, model
from crux_torch.sim.collectives import build_job, contended, transfers

CLUSTER = two_layer_clos(hosts=6, tors=3, aggregations=2)
RAILS = rail_optimised(hosts=4, hosts_per_group=4, spines=2)
SIZE = 7e6

placements = st.lists(st.sampled_from(CLUSTER.gpus()), min_size=1, max_size=24, unique=True)


def collective(op: str, ranks: int) -> Collective:
    return Collective(op, SIZE, (tuple(range(ranks)),), 0.5)  # type: ignore[arg-type]


def hosts_of(count: int, topology: Topology = CLUSTER) -> list[str]:
    return [gpu for host in topology.hosts[:count] for gpu in topology.gpus(host)]


@settings(deadline=None)
@given(placements)
def test_an_all_reduce_moves_the_bytes_of_a_ring(gpus: list[str]) -> None:
    # n - 1 additions and n - 1 copies of S bytes, however they are arranged.
    moved = transfers(collective("allreduce", len(gpus)), gpus, CLUSTER)
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


def test_a_ring_enters_and_leaves_a_host_by_one_nic() -> None:
    gpus = hosts_of(4)
    moved = contended(transfers(collective("allreduce", 32), gpus, CLUSTER), CLUSTER)
    assert len(moved) == 4 * 4, "four rings of four hops between hosts"
    assert len({CLUSTER.nearest_nics(src) for src, _ in moved}) == 4 * 4, "all NICs are in use"
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


def test_counts_multiply() -> None:
    once = Collective("send", SIZE, ((0, 1), (1, 0)), 0.0)
    often = Collective("send", SIZE, ((0, 1), (1, 0)), 0.0, 5)
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


def test_a_job_in_one_host_contends_for_pcie_only_without_nvlink() -> None:
    job = build_job("j", model("bert"), hosts_of(1), CLUSTER)
    assert (job.flows, job.bursts) == ((), (Burst(1.0, 1.0),))
    topology = crux_testbed(server=GpuServer(nvlink_Bps=0))
    job = build_job("j", model("bert"), topology.gpus("h0"), topology)
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
    first = partial(CLUSTER.candidate_paths, limit=1)
    limited = build_job("c", model("gpt"), hosts_of(4), CLUSTER, paths=first)
    assert {len(f.candidates) for f in limited.flows} == {1}


@pytest.mark.parametrize("topology", [CLUSTER, RAILS])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_rings_apart_move_the_same_bytes_at_the_same_times(name: str, topology: Topology) -> None:
    def moved(job: Job) -> Counter[object]:
        total: Counter[object] = Counter()
        for flow in job.flows:
            total[flow.candidates] += flow.bytes
        return total

    gpus = hosts_of(4, topology)
    whole = build_job("j", model(name), gpus, topology)
    apart = build_job("j", model(name), gpus, topology, apart=True)
    assert len(apart.parts) == len(apart.flows)
    assert moved(apart) == pytest.approx(moved(whole))
    assert [b.at for b in apart.bursts] == [b.at for b in whole.bursts]
    assert [b.share for b in apart.bursts] == pytest.approx([b.share for b in whole.bursts])


def test_each_ring_is_a_part() -> None:
    job = build_job("j", model("bert"), hosts_of(3), CLUSTER, connections=2, apart=True)
    # Four rings, of which each crosses three times from host to host over two connections.
    assert Counter(job.parts) == dict.fromkeys(range(4), 3 * 2)
    for part in range(4):
        ends = {f.candidates for f, own in zip(job.flows, job.parts, strict=True) if own == part}
        assert len(ends) == 3


def test_a_job_of_one_ring_has_no_parts() -> None:
    gpus = [CLUSTER.gpus(host)[0] for host in CLUSTER.hosts[:3]]
    whole = build_job("j", model("bert"), gpus, CLUSTER)
    assert whole.flows
    assert whole == build_job("j", model("bert"), gpus, CLUSTER, apart=True)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_makes_a_job(name: str) -> None:
    job = build_job("j", model(name), hosts_of(6), CLUSTER)
    assert job.flows
    assert sum(burst.share for burst in job.bursts) == pytest.approx(1.0)
    assert [burst.at for burst in job.bursts] == sorted(burst.at for burst in job.bursts)
    assert all(flow.bytes > 0 and flow.candidates[0] for flow in job.flows)
