"""Choices beside running jobs: what their traffic leaves, and what Crux makes of it."""

from __future__ import annotations

from itertools import permutations

import msgspec
import numpy as np
import pytest
from control_fakes import profile, record
from dscp_maps import MARKS

from crux_torch.agreement.inputs import plan_inputs
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import JobRecord
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Ints, count, table_of
from crux_torch.dispatch.contention import Contention, Newcomer, like, star, typical, uplinks_Bps
from crux_torch.dispatch.dispatcher import Dispatcher, Running, measured_by_jobs
from crux_torch.dispatch.samples import fit_uplinks
from crux_torch.dispatch.search import in_ring_order, ring_of_devices, ring_of_hosts, strongest
from crux_torch.measure.profile import HostFlow
from crux_torch.network.builders import GpuServer, two_layer_clos
from crux_torch.network.topology import Topology
from evaluation.litegd import host_table

NEWCOMER = Newcomer(reduced_bytes=1e9, compute_s=0.1)


def hosts_of(number: int, rate_Bps: float = 10e9) -> DispatchCluster:
    tables = [msgspec.structs.replace(host_table("A800"), host=f"h{i}") for i in range(number)]
    return DispatchCluster(tables, np.full(number, rate_Bps))


def job_between(one: str, other: str, size: float = 5e9, name: str = "busy") -> JobRecord:
    flows = (HostFlow(one, other, size), HostFlow(other, one, size))
    told = profile(compute_s=0.1, t_s=size / 10e9, t_source="topology", flows=flows)
    return record(name, hosts=(one, other), profile=told)


def beside(
    cluster: DispatchCluster,
    running: Running,
    topology: Topology | None = None,
    model: str | None = None,
    policy: str = "crux",
) -> Contention | None:
    given = (cluster, cluster.everything, topology, running, model, policy)
    return Dispatcher(*given).contention()


def four_of_each(number: int) -> Ints:
    return np.full(number, 0b1111)


def test_a_newcomer_keeps_off_links_that_are_busy() -> None:
    cluster = hosts_of(4)
    running = plan_inputs([job_between("h0", "h1")], star(cluster))
    scored = Contention(cluster, star(cluster), running, NEWCOMER)
    best = scored.best(four_of_each(4), 8)[0]
    assert set(cluster.names(best.devices)) == {"h2", "h3"}
    assert (best.alone_Bps, best.now_Bps) == pytest.approx((10e9, 10e9))
    beside = scored.scored(np.array([0b1111, 0, 0b1111, 0]))
    assert beside.alone_Bps == pytest.approx(10e9)
    # The job keeps the link busy all the time. An even share of two is half of it.
    assert beside.now_Bps == pytest.approx(5e9)
    assert beside.utilisation < best.utilisation


def test_utilisation_is_that_of_gpus_that_compute() -> None:
    """Alone: 0.1 s of computation, 1e9 · 2 · 7/8 bytes at 10 GB/s from its half on."""
    cluster = hosts_of(2)
    scored = Contention(cluster, star(cluster), plan_inputs([], star(cluster)), NEWCOMER)
    found = scored.scored(four_of_each(2))
    assert found.utilisation == pytest.approx(0.1 / (0.05 + 0.175), rel=1e-3)
    # One host: 200 GB/s within it.
    inside = scored.scored(np.array([0xFF, 0]))
    assert inside.utilisation == 1.0
    assert inside.alone_Bps == pytest.approx(200e9)


@pytest.mark.slow
def test_the_best_is_no_worse_than_the_strongest_and_free() -> None:
    rng = np.random.default_rng(5)
    topology = two_layer_clos(8, 4, 2, GpuServer(nics=1, pcie_switches=1), oversubscription=2.0)
    kinds = ("V100", "A6000", "4090")
    tables = [
        msgspec.structs.replace(host_table(kinds[i % 3]), host=host)
        for i, host in enumerate(topology.hosts)
    ]
    rates = uplinks_Bps(topology, topology.hosts)
    cluster = DispatchCluster(tables, np.array([rates[host] for host in topology.hosts]))
    jobs = [job_between(f"h{i}", f"h{i + 3}", name=f"job{i}") for i in range(3)]
    scored = Contention(cluster, topology, plan_inputs(jobs, topology), NEWCOMER)
    free = rng.integers(1, 256, 8)
    for k in (2, 9, int(count(free))):
        found = scored.best(free, k)
        assert all(count(p.devices) == k and not (p.devices & ~free).any() for p in found)
        by_bandwidth = scored.scored(strongest(cluster, free, k))
        assert found[0].utilisation >= by_bandwidth.utilisation - 1e-3
        assert all(p.now_Bps <= p.alone_Bps * (1 + 1e-9) for p in found)


def test_a_newcomer_like_a_job_moves_what_that_job_does() -> None:
    cluster = hosts_of(3)
    job, _ = NEWCOMER.job("j", cluster, four_of_each(3), star(cluster))
    between = [f for f in job.flows if not f.candidates[0][0].startswith("within")]
    assert {f.bytes for f in between} == {1e9 * 2 * 11 / 12}
    assert len(between) == 3
    told = profile(
        gpus=12, flops=12.0, compute_s=0.1, flows=(HostFlow("h0", "h1", between[0].bytes),)
    )
    alike = like(record("r", profile=told))
    assert alike.reduced_bytes == pytest.approx(1e9)
    assert (alike.compute_s, alike.device_flops) == (0.1, 1.0)
    assert typical([record("r", profile=told), record("s", profile=None)]) == alike
    assert typical([record("s", profile=profile(flows=()))]) is None
    for unfit in (None, profile(flows=())):
        with pytest.raises(DispatchError, match="job 's'"):
            like(record("s", profile=unfit))


def test_what_runs_decides_who_the_newcomer_is_like_and_what_is_free() -> None:
    cluster = hosts_of(2)
    nothing = Running((), None, {})
    assert beside(cluster, nothing) is None
    with pytest.raises(DispatchError, match="no job 'gpt' runs; there are none"):
        beside(cluster, nothing, model="gpt")
    some = Running((job_between("h0", "h1"),), None, {"h0": {"0": "x", "7": "y"}, "h9": {"1": "z"}})
    assert beside(cluster, some, model="busy") is not None
    left = Dispatcher(cluster, cluster.everything, running=some).free
    assert left.tolist() == [0b01111110, 0xFF]
    with pytest.raises(DispatchError, match="host 'h1' has a table, and is not in the topology"):
        beside(cluster, some, star(hosts_of(1)))


def test_profiles_of_running_jobs_are_live_samples_of_links() -> None:
    cluster = hosts_of(3)
    told = job_between("h0", "h2").profile
    assert told is not None
    alone = msgspec.structs.replace(told, t_measured_s=0.25)
    contended = msgspec.structs.replace(alone, measured_alone=False)
    jobs = (
        record("known", hosts=("h0", "h2"), profile=alone),
        record("unclaimed", hosts=("h1", "h2"), profile=alone),
        record("contended", hosts=("h0", "h1"), profile=contended),
        record("elsewhere", hosts=("h0", "x"), profile=alone),
        record("starting", hosts=("h0", "h1"), profile=None),
        record("within", hosts=("h0",), profile=msgspec.structs.replace(alone, flows=())),
    )
    taken = {"h0": {"1": "known", "2": "other"}, "h2": {"6": "known", "7": "known"}}
    found = measured_by_jobs(cluster, Running(jobs, None, taken))
    assert found.choices.tolist() == [[0b10, 0, 0b11000000], [0, 1, 1]]
    assert found.bandwidth_Bps.tolist() == [20e9, 20e9]
    assert fit_uplinks(cluster, found).uplink_Bps.tolist() == [20e9] * 3
    assert len(measured_by_jobs(cluster, Running((), None, {}))) == 0


def test_live_samples_of_claimed_devices_are_of_those_devices() -> None:
    cluster = hosts_of(3)
    told = job_between("h0", "h2").profile
    assert told is not None
    alone = msgspec.structs.replace(told, t_measured_s=0.25)
    jobs = tuple(
        record(name, hosts=("h0", "h2"), gpus=3, profile=alone)
        for name in ("known", "in part", "unclaimed")
    )
    taken = {"h0": {"1": "known", "2": "in part"}, "h2": {"6": "known", "7": "known"}}
    found = measured_by_jobs(cluster, Running(jobs, None, taken), claimed=True)
    assert found.choices.tolist() == [[0b10, 0, 0b11000000]]


def test_a_drained_job_gives_way_to_the_newcomer() -> None:
    cluster = hosts_of(2)
    free = four_of_each(2)
    jobs = (msgspec.structs.replace(job_between("h0", "h1", size=1e9), marks=MARKS),)
    heard, drained = (
        beside(cluster, Running(jobs, None, {}, settings), model="busy", policy="crux-paper")
        for settings in (OperatorSettings(pins={"busy": 7}), OperatorSettings(drained=("busy",)))
    )
    assert heard is not None
    assert drained is not None
    assert drained.scored(free).utilisation != heard.scored(free).utilisation


def test_a_set_that_was_not_measured_has_no_score() -> None:
    cluster = DispatchCluster([table_of("h0", "abc", {0b011: 1e9})], np.array([1e9]))
    scored = Contention(cluster, star(cluster), plan_inputs([], star(cluster)), NEWCOMER)
    with pytest.raises(DispatchError, match="'h0' was not measured"):
        scored.scored(np.array([0b111]))


def test_uplinks_of_a_topology() -> None:
    topology = two_layer_clos(4, 2, 2, GpuServer(nics=4, nic_Bps=5e9))
    assert set(uplinks_Bps(topology, topology.hosts).values()) == {20e9}
    with pytest.raises(DispatchError, match="host 'x' is not in the topology"):
        uplinks_Bps(topology, ["x"])


def test_ring_neighbours_are_near() -> None:
    # 0 and 2, 2 and 3, 3 and 1 of a DGX-1 have two NVLinks or so; 0 and 4 have none.
    v100 = host_table("V100")
    slowest = {}
    for order in permutations("0235"):
        ring = zip(order, (*order[1:], order[0]), strict=True)
        slowest[order] = min(v100.array[1 << int(a) | 1 << int(b)] for a, b in ring)
    chosen = tuple(ring_of_devices(v100, list("0235")))
    assert slowest[chosen] == max(slowest.values())
    assert ring_of_devices(v100, ["3"]) == ["3"]
    many = table_of(
        "h", map(str, range(9)), {1 << a | 1 << b: 1e9 for b in range(9) for a in range(b)}
    )
    assert sorted(ring_of_devices(many, list(many.devices))) == sorted(many.devices)


def test_ring_neighbours_are_below_one_leaf() -> None:
    topology = two_layer_clos(4, 2, 2, GpuServer(nics=1, pcie_switches=1))
    assert ring_of_hosts(["h0", "h2", "h1", "h3"], topology) == ["h0", "h1", "h2", "h3"]
    assert ring_of_hosts(["h0", "x", "h1"], topology) == ["h0", "x", "h1"]
    cluster = hosts_of(4)
    order = in_ring_order(cluster, np.array([1, 0, 1, 3]), topology)
    assert order == [("h0", "0"), ("h2", "0"), ("h3", "0"), ("h3", "1")]
