"""Slurm's two files: published examples, a round trip of trees, and errors that say the line."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.network.builders import GpuServer, double_sided, rail_optimised
from crux_torch.network.formats import format_of, read_network
from crux_torch.network.formats.groups import Group, hierarchy
from crux_torch.network.formats.slurm import write_conf, write_topology_yaml
from crux_torch.network.topology import Topology, TopologyError

#: What topograph writes for its model of an OCI cluster (its tests/ci, slinky-oci-sim-tree): six
#: spines of two leaves of eight nodes.
OCI_TREE = "SwitchName=switch.3.1 Switches=switch.2.[1-6]\n" + "".join(
    f"# switch.2.{s}=spine-{s}\n"
    f"SwitchName=switch.2.{s} Switches=switch.1.[{2 * s - 1}-{2 * s}]\n"
    f"SwitchName=switch.1.{2 * s - 1} Nodes=srv[{s}101-{s}108]\n"
    f"SwitchName=switch.1.{2 * s} Nodes=srv[{s}201-{s}208]\n"
    for s in range(1, 7)
)
#: The blocks of Slurm's testsuite (python/tests).
BLOCKS = "BlockName=b1 Nodes=node[1-4]\n  blockname=b2 NODES=node[5-8] # rack 2\nBlockSizes=4,8\n"
#: The topologies of Slinky's documentation (docs/concepts, slurm-bridge).
SLINKY = """---
- topology: topo-block
  cluster_default: false
  block:
    block_sizes: [2, 4]
    blocks:
      - block: b1
        nodes: slurm-node[1-2]
      - block: b2
        nodes: slurm-node[3-4]
- topology: topo-switch
  cluster_default: true
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
      - switch: s1
        nodes: slurm-node[1-2]
      - switch: s2
        nodes: slurm-node[3-4]
"""
CAPACITIES = {"host-tor": 1.0, "tor-aggregation": 2.0, "aggregation-core": 3.0}


def read(text: str, name: str = "") -> Topology:
    return read_network({"f": text}, name or format_of(text), CAPACITIES).topology


def shape(group: Group) -> tuple[str, tuple[str, ...], list[object]]:
    return group.name, tuple(sorted(group.hosts)), [shape(each) for each in group.groups]


def test_a_published_tree() -> None:
    assert format_of(OCI_TREE) == "slurm"
    topology, notes = read_network({"f": OCI_TREE}, "slurm", CAPACITIES)
    kinds = Counter(node.kind for node in topology.nodes.values())
    assert kinds == {"host": 96, "tor": 12, "aggregation": 6, "core": 1}
    assert topology.capacity_Bps["srv1101->switch.1.1"] == 1.0
    assert topology.capacity_Bps["switch.2.6->switch.3.1"] == 3.0
    assert topology.path_count("srv1101", "srv6208") == 1
    assert any("gives no paths" in note for note in notes)


def test_blocks_are_joined_by_a_switch_that_the_file_does_not_have() -> None:
    topology, notes = read_network({"f": BLOCKS}, format_of(BLOCKS), CAPACITIES)
    assert shape(hierarchy(topology)) == (
        "between_blocks",
        (),
        [(f"b{i}", tuple(f"node{4 * i - 3 + n}" for n in range(4)), []) for i in (1, 2)],
    )
    assert any("'between_blocks' stands for" in note for note in notes)


def test_the_default_of_several_topologies_is_read() -> None:
    assert format_of(SLINKY) == "slurm-yaml"
    topology, notes = read_network({"f": SLINKY}, "slurm-yaml", CAPACITIES)
    assert [group.name for group in hierarchy(topology).walk()] == ["sw_root", "s1", "s2"]
    assert "read topo-switch, left out topo-block" in notes


@pytest.mark.parametrize("write", [write_conf, write_topology_yaml])
def test_a_tree_is_the_same_after_a_round_trip(write: object) -> None:
    assert callable(write)
    before = read(OCI_TREE)
    text = write(before)
    assert format_of(text) == ("slurm" if write is write_conf else "slurm-yaml")
    assert shape(hierarchy(read(text))) == shape(hierarchy(before))


def test_a_network_of_many_paths_is_written_as_the_tree_of_its_groups() -> None:
    rails = rail_optimised(hosts=4, hosts_per_group=2, spines=2)
    assert write_conf(rails) == (
        "# spine0_x2: spine[0-1]\n"
        "SwitchName=spine0_x2 Switches=group0/rail0_x8,group1/rail0_x8\n"
        "# group0/rail0_x8: group0/rail[0-7]\n"
        "SwitchName=group0/rail0_x8 Nodes=h[0-1]\n"
        "# group1/rail0_x8: group1/rail[0-7]\n"
        "SwitchName=group1/rail0_x8 Nodes=h[2-3]\n"
    )
    server = GpuServer(gpus=1, nics=1, pcie_switches=1)
    pods = double_sided(hosts=9, pods=3, cores=2, server=server)
    again = hierarchy(read(write_topology_yaml(pods)))
    assert [len(group.all_hosts()) for group in again.groups] == [3, 3, 3]


LEAVES = st.integers(1, 3)
TREES = LEAVES
for _ in range(2):
    TREES = LEAVES | st.lists(TREES, min_size=1, max_size=3)


@given(TREES)
def test_any_tree_is_the_same_after_a_round_trip(tree: object) -> None:
    lines: list[str] = []

    def add(node: object, name: str) -> int:
        if isinstance(node, int):
            lines.append(f"SwitchName={name} Nodes={name}n[1-{node}]")
            return 1
        assert isinstance(node, list)
        deep = {add(each, f"{name}_{i}") for i, each in enumerate(node)}
        lines.append(
            f"SwitchName={name} Switches={','.join(f'{name}_{i}' for i in range(len(node)))}"
        )
        return 1 + max(deep)

    add(tree, "s")
    capacities = CAPACITIES | {"tor-core": 1.0}
    before = read_network({"f": "\n".join(lines)}, "slurm", capacities).topology
    again = read_network({"f": write_conf(before)}, "slurm", capacities).topology
    assert shape(hierarchy(again)) == shape(hierarchy(before))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SwitchName=s Nodes=a[1-\n", "'a\\[1-' is no host list"),
        ("SwitchName=s Nodes=a\nNode=x\n", "f: line 2: 'Node=x'; expected SwitchName="),
        ("SwitchName=s Nodes=a\nBlockName=b Nodes=c\n", "switches and blocks"),
        ("SwitchName=s Switches=t Nodes=h\n", "a cable ends at 't'"),
        ("SwitchName=s\n", "there is no host"),
        (
            "SwitchName=a Switches=b Nodes=h\nSwitchName=b Switches=c\nSwitchName=c Switches=a\n",
            "a, b, c are above each other",
        ),
        ("SwitchName=a Nodes=a\n", "'a' is both a host and a switch"),
        ("- topology: a\n  flat: true\n", "flat has no switches"),
        ("- topology: a\n  tree: 3\n", "expected a list of switches"),
        ("- topology: a\n  tree: {switches: [{switch: [1]}]}\n", "switch is '\\[1\\]'"),
    ],
)
def test_errors_say_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        read(text)


def test_a_missing_capacity_is_named_by_its_tier() -> None:
    with pytest.raises(
        TopologyError, match=r"aggregation-core \(6 links\), tor-agg.* \(12 links\)"
    ):
        read_network({"f": OCI_TREE}, "slurm", {"host-tor": 1.0})


def test_a_name_that_slurm_can_not_take_is_refused() -> None:
    server = GpuServer(gpus=1, nics=1, pcie_switches=1)
    topology = double_sided(hosts=3, server=server)
    bad = Topology(
        {n.replace("h0", "h[0"): type(k)(k.kind, k.host and k.host.replace("h0", "h[0"))
         for n, k in topology.nodes.items()},
        [type(e)(e.name, e.src.replace("h0", "h[0"), e.dst.replace("h0", "h[0"), e.link)
         for e in topology.edges],
    )  # fmt: skip
    with pytest.raises(TopologyError, match="can't take the name 'h\\[0'"):
        write_conf(bad)
