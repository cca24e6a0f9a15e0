"""Every builder: counts of what the sources say, path counts, capacities, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.network.builders import (
    BUILDERS,
    GBPS,
    Cabling,
    GpuServer,
    crux_testbed,
    double_sided,
    fat_tree,
    rail_optimised,
    torus,
    two_layer_clos,
)
from crux_torch.network.topology import Topology, TopologyError

SMALL = GpuServer(gpus=2, nics=1, pcie_switches=1)


def kinds(topology: Topology) -> Counter[str]:
    return Counter(node.kind for node in topology.nodes.values())


def rates(topology: Topology, layer: str) -> set[float]:
    return {e.link.capacity_Bps for e in topology.edges if topology.layer(e.name) == layer}


def assert_symmetric(topology: Topology) -> None:
    there = Counter((e.src, e.dst, e.link) for e in topology.edges)
    back = Counter((e.dst, e.src, e.link) for e in topology.edges)
    assert there == back


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_cable_is_the_same_in_both_directions(name: str) -> None:
    assert_symmetric(BUILDERS[name]())


def test_testbed_is_figure_18() -> None:
    topology = crux_testbed()
    inside = {"host": 12, "gpu": 96, "pcie": 48, "nic": 48, "nvswitch": 12}
    assert kinds(topology) == {**inside, "tor": 6, "aggregation": 8}
    assert rates(topology, "nic-tor") == {200 * GBPS}
    assert rates(topology, "tor-aggregation") == {100 * GBPS}
    # Two links of 100 Gbps in each direction between each of 6 ToRs and 8 aggregation switches.
    assert sum(topology.layer(e.name) == "tor-aggregation" for e in topology.edges) == 6 * 8 * 2 * 2
    # Hosts 0 and 1 share a ToR, 0 and 2 do not.
    assert topology.path_count("h0/nic0", "h1/nic0") == 1
    assert topology.path_count("h0/nic0", "h2/nic0") == 2 * 8 * 2
    assert len(topology.candidate_paths("h0", "h2")) == 4 * 32 * 4


def test_every_two_gpus_of_the_testbed_share_a_pcie_link() -> None:
    topology = crux_testbed()
    first_out = [
        {link for path in topology.candidate_paths(f"h0/gpu{g}", "h2") for link in path[:3]}
        for g in range(8)
    ]
    shared = [[g for g in range(8) if f"h0/pcie{p}->h0/nic{p}" in first_out[g]] for p in range(4)]
    assert shared == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_gpus_of_one_host_use_nvlink_if_there_is_any() -> None:
    def path(topology: Topology, peer: str) -> tuple[str, ...]:
        (only,) = topology.candidate_paths("h0/gpu0", peer)
        return only

    testbed = crux_testbed()
    for peer in ("h0/gpu1", "h0/gpu5"):
        assert path(testbed, peer) == ("h0/gpu0->h0/nvswitch", f"h0/nvswitch->{peer}")
    without = crux_testbed(server=GpuServer(nvlink_Bps=0))
    assert path(without, "h0/gpu1") == ("h0/gpu0->h0/pcie0", "h0/pcie0->h0/gpu1")
    far = ("h0/gpu0->h0/pcie0", "h0/pcie0->h0", "h0->h0/pcie3", "h0/pcie3->h0/gpu7")
    assert path(without, "h0/gpu7") == far


def test_two_layer_clos_is_the_papers() -> None:
    topology = two_layer_clos()
    count = kinds(topology)
    assert (count["tor"], count["aggregation"]) == (173, 16)
    assert count["gpu"] > 2000
    assert topology.path_count("h0/nic0", topology.hosts[-1] + "/nic0") == 16
    up = sum(e.link.capacity_Bps for e in topology.edges if e.src == "tor0" and "agg" in e.dst)
    assert up == pytest.approx(2 * 4 * 200 * GBPS)


def test_double_sided_is_the_papers() -> None:
    topology = double_sided()
    count = kinds(topology)
    assert (count["tor"], count["aggregation"], count["core"]) == (6, 12, 32)
    assert count["gpu"] > 2000
    up = [e for e in topology.edges if topology.host_of(e.src) == "h0" and e.link.delay_s]
    assert len(up) == 8, "eight links a host"
    assert len({e.dst for e in up}) == 2, "to two ToRs"
    assert {e.link.capacity_Bps for e in up} == {100 * GBPS}


@pytest.mark.parametrize("oversubscription", [1.0, 2.0, 4.0])
def test_oversubscription_is_met_at_every_layer(oversubscription: float) -> None:
    topology = double_sided(hosts=24, cores=8, oversubscription=oversubscription)
    rate = Counter[tuple[str, str]]()
    for e in topology.edges:
        rate[e.src, topology.nodes[e.dst].kind] += e.link.capacity_Bps  # type: ignore[assignment]
    for kind, below, above in (("tor", "nic", "aggregation"), ("aggregation", "tor", "core")):
        for name in (name for name, node in topology.nodes.items() if node.kind == kind):
            assert rate[name, below] / rate[name, above] == pytest.approx(oversubscription)


@pytest.mark.parametrize("k", [2, 4, 6])
def test_fat_tree_counts(k: int) -> None:
    topology = fat_tree(k, SMALL)
    count = kinds(topology)
    assert count["host"] == k**3 // 4
    assert count["tor"] == count["aggregation"] == k * k // 2
    assert count["core"] == topology.path_count("h0", topology.hosts[-1]) == k * k // 4
    ports = Counter(e.src for e in topology.edges)
    assert {ports[name] for name, node in topology.nodes.items() if node.host is None} == {k}


def test_rail_optimised_keeps_rails_apart() -> None:
    topology = rail_optimised(hosts=4, hosts_per_group=2, spines=3)
    assert kinds(topology)["tor"] == 2 * 8
    assert topology.path_count("h0/nic0", "h1/nic0") == 1
    assert len(topology.candidate_paths("h0/nic0", "h1/nic0")[0]) == 2
    assert topology.path_count("h0/nic0", "h1/nic1") == 3, "across rails: through a spine"
    assert topology.path_count("h0", "h1") == 8, "hosts of a group: one path a rail"


@pytest.mark.parametrize(
    ("shape", "far", "count"),
    [
        ((4, 4), "h10", 2 * 2 * 6),  # (2, 2): both ways round in both, 4! / 2! 2! orders
        ((5, 5), "h6", 2),  # (1, 1): either dimension first
        ((3, 3, 3), "h13", 6),  # (1, 1, 1): 3! orders
        ((2, 2, 2), "h7", 6),
    ],
)
def test_torus_path_counts(shape: tuple[int, ...], far: str, count: int) -> None:
    topology = torus(shape, SMALL)
    assert topology.path_count("h0", far) == count


def test_torus_link_count() -> None:
    between = [e for e in torus((4, 5, 3), SMALL).edges if e.src[0] == e.dst[0] == "r"]
    assert len(between) == 60 * 3 * 2


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: two_layer_clos(hosts=0), "hosts is 0; expected a whole number, 1 or more"),
        (lambda: two_layer_clos(tors=1.5), "tors is 1.5"),  # type: ignore[arg-type]
        (lambda: two_layer_clos(4, 2, 2, oversubscription=0), "oversubscription is 0"),
        (lambda: double_sided(tors_per_pod=3), "tors_per_pod is 3; expected an even"),
        (lambda: fat_tree(5), "k is 5; expected an even number"),
        (lambda: torus((4,)), "shape is"),
        (lambda: torus((4, 1)), r"shape\[1\] is 1"),
        (lambda: torus(link_Bps=-1), "link_Bps is -1"),
        (lambda: rail_optimised(spines=0), "spines is 0"),
        (lambda: GpuServer(gpus=8, pcie_switches=3), "do not divide evenly"),
        (lambda: GpuServer(nic_Bps=float("inf")), "server.nic_Bps is inf"),
        (lambda: Cabling(link_delay_s=-1), "cabling.link_delay_s is -1"),
        (lambda: Cabling(tor_aggregation_links=True), "cabling.tor_aggregation_links is True"),
    ],
)
def test_bad_parameters_are_named(build: Callable[[], object], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        build()


@settings(deadline=None, max_examples=30)
@given(
    hosts=st.integers(1, 12),
    tors=st.integers(1, 5),
    aggregations=st.integers(1, 4),
    links=st.integers(1, 3),
    switches=st.sampled_from([1, 2]),
)
def test_random_clos(hosts: int, tors: int, aggregations: int, links: int, switches: int) -> None:
    server = GpuServer(gpus=4, nics=2, pcie_switches=switches)
    topology = two_layer_clos(
        hosts, tors, aggregations, server, Cabling(tor_aggregation_links=links)
    )
    assert_symmetric(topology)
    assert kinds(topology)["gpu"] == 4 * hosts
    assert len(topology.gpus()) == 4 * hosts
    for host in topology.hosts:
        (home,) = {e.dst for e in topology.edges if e.src == f"{host}/nic0" and "tor" in e.dst}
        (first,) = {e.dst for e in topology.edges if e.src == "h0/nic0" and "tor" in e.dst}
        expected = 1 if home == first else aggregations * links * links
        if host != "h0":
            assert topology.path_count("h0/nic0", f"{host}/nic0") == expected
