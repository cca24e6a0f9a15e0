"""Groups of switches: those of known networks, and the property that defines them."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.network.builders import (
    GpuServer,
    double_sided,
    fat_tree,
    rail_optimised,
    torus,
    two_layer_clos,
)
from crux_torch.network.formats.groups import Group, heights, hierarchy
from crux_torch.network.topology import (
    NETWORK_KINDS,
    Link,
    Topology,
    TopologyBuilder,
    TopologyError,
)

SERVER = GpuServer(gpus=2, nics=2, pcie_switches=1)


def shape(group: Group) -> tuple[int, int, list[object]]:
    """(switches, hosts, shapes below) of a group."""
    return len(group.switches), len(group.hosts), [shape(each) for each in group.groups]


def test_a_clos_has_its_spines_above_one_group_a_leaf() -> None:
    root = hierarchy(two_layer_clos(hosts=4, tors=2, aggregations=3, server=SERVER))
    assert shape(root) == (3, 0, [(1, 2, []), (1, 2, [])])
    assert root.name == "agg0_x3"
    assert root.groups[1].name == "tor1"
    assert root.all_hosts() == ("h0", "h1", "h2", "h3")


def test_switches_side_by_side_are_one_group() -> None:
    pods = hierarchy(double_sided(hosts=6, pods=3, cores=4, server=SERVER))
    assert shape(pods) == (4, 0, [(4, 0, [(2, 2, [])])] * 3)
    rails = hierarchy(rail_optimised(hosts=4, hosts_per_group=2, spines=2))
    assert shape(rails) == (2, 0, [(8, 2, []), (8, 2, [])])
    tree = hierarchy(fat_tree(k=4, server=SERVER))
    assert shape(tree) == (4, 0, [(2, 0, [(1, 2, []), (1, 2, [])])] * 4)
    assert shape(hierarchy(torus((3, 3), SERVER))) == (9, 9, [])


def test_one_switch_is_the_root() -> None:
    assert shape(hierarchy(two_layer_clos(2, 1, 1, SERVER))) == (1, 0, [(1, 2, [])])


def test_a_host_alone_has_no_group() -> None:
    builder = TopologyBuilder()
    builder.node("h0", "host")
    with pytest.raises(TopologyError, match="expected 1 to 16 layers of switches, not 0"):
        hierarchy(builder.build())


def test_a_chain_of_switches_is_refused() -> None:
    builder = TopologyBuilder()
    low = builder.node("h0", "host")
    for i in range(2000):
        builder.cable(low, builder.node(f"s{i}", "router"), Link(1.0))
        low = f"s{i}"
    with pytest.raises(TopologyError, match="not 2000"):
        hierarchy(builder.build())


@st.composite
def networks(draw: st.DrawFn) -> Topology:
    """Connected networks of hosts at any of a few switches, which are cabled at random."""
    builder = TopologyBuilder()
    switches = [
        builder.node(f"s{i}", draw(st.sampled_from(NETWORK_KINDS)))
        for i in range(draw(st.integers(1, 7)))
    ]
    hosts = [builder.node(f"h{i}", "host") for i in range(draw(st.integers(1, 6)))]
    for i, switch in enumerate(switches[1:], start=1):
        builder.cable(switch, switches[draw(st.integers(0, i - 1))], Link(1.0))
    for host in hosts:
        for switch in draw(st.sets(st.sampled_from(switches), min_size=1, max_size=3)):
            builder.cable(host, switch, Link(1.0))
    for a, b in draw(st.lists(st.sampled_from(list(combinations(switches, 2)) or [("", "")]))):
        if a:
            builder.cable(a, b, Link(1.0))
    return builder.build()


@given(networks())
def test_hosts_of_a_group_reach_each_other_below_its_level(topology: Topology) -> None:
    root, height = hierarchy(topology), heights(topology)
    near: dict[str, set[str]] = {}
    for edge in topology.edges:
        near.setdefault(edge.src, set()).add(edge.dst)
    assert sorted(root.all_hosts()) == sorted(topology.hosts)
    for group in root.walk():
        inside = {group.switches[0]}
        todo = [group.switches[0]]
        for node in todo:
            new = {n for n in near[node] if height[n] <= group.level} - inside
            inside |= new
            todo += new
        assert set(group.all_hosts()) == inside.intersection(topology.hosts)
        assert set(group.switches) == {n for n in inside if height[n] == group.level}
