"""topograph's graph and node labels: published examples, each family, and a round trip."""

from __future__ import annotations

import json

import pytest

from crux_torch.network.builders import GpuServer, fat_tree
from crux_torch.network.formats import format_of, read_network
from crux_torch.network.formats.draft import Imported
from crux_torch.network.formats.groups import Group, hierarchy
from crux_torch.network.formats.topograph import write_graph
from crux_torch.network.topology import TopologyError

CAPACITIES = {"host-tor": 1.0, "tor-aggregation": 2.0, "aggregation-core": 3.0}
#: topograph's model small-tree.yaml: S1 above S2 with three nodes and S3 with three.
SMALL_TREE = {
    "instances": [
        {"id": name, "network_layers": [leaf, "S1"], "labels": {"x": "y"}}
        for leaf, names in (("S2", ("I21", "I22", "I25")), ("S3", ("I34", "I35", "I36")))
        for name in names
    ]
}


def read(document: object, capacities: dict[str, float] = CAPACITIES) -> Imported:
    text = json.dumps(document)
    return read_network({"f": text}, format_of(text), capacities)


def nodes(*labels: dict[str, str]) -> dict[str, object]:
    """Output of ``kubectl get nodes -o json``, as far as it is read."""
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "kind": "Node",
                "metadata": {"name": f"n{i}", "labels": {"kubernetes.io/os": "linux"} | each},
                "status": {
                    "addresses": [
                        {"type": "InternalIP", "address": f"10.0.0.{i}"},
                        {"type": "Hostname", "address": f"n{i}"},
                    ]
                },
            }
            for i, each in enumerate(labels)
        ],
    }


def shape(group: Group) -> tuple[str, tuple[str, ...], list[object]]:
    below = sorted(map(shape, group.groups), key=str)
    return group.name, tuple(sorted(group.hosts)), list(below)


def test_a_published_graph() -> None:
    topology, notes = read(SMALL_TREE)
    leaves = [("S2", ("I21", "I22", "I25"), []), ("S3", ("I34", "I35", "I36"), [])]
    assert shape(hierarchy(topology)) == ("S1", (), leaves)
    assert any("gives no paths" in note for note in notes)


def test_a_graph_is_the_same_after_a_round_trip() -> None:
    written = json.loads(write_graph(read(SMALL_TREE).topology))
    for instance in SMALL_TREE["instances"]:
        del instance["labels"]
    assert written == SMALL_TREE


def test_a_fat_tree_is_written_as_its_groups() -> None:
    tree = fat_tree(k=4, server=GpuServer(gpus=1, nics=1, pcie_switches=1))
    first = json.loads(write_graph(tree))["instances"][0]
    assert first == {"id": "h0", "network_layers": ["pod0/tor0", "pod0/agg0_x2", "core0_x4"]}


@pytest.mark.parametrize(
    "keys",
    [
        [f"fabric.topograph.run/tier-{n}" for n in range(3)],
        [f"network.topology.nvidia.com/{layer}" for layer in ("leaf", "spine", "core")],
        [f"network.topology.kubernetes.io/{n}" for n in ("block", "spine", "datacenter")],
        [f"topology.k8s.aws/network-node-layer-{n}" for n in (3, 2, 1)],
        [
            f"oci.oraclecloud.com/rdma.{n}_id"
            for n in ("local_block", "network_block", "hpc_island")
        ],
    ],
)
def test_each_family_of_labels(keys: list[str]) -> None:
    places = (("l0", "s0", "c"), ("l0", "s0", "c"), ("l1", "s0", "c"), ("l2", "s1", "c"))
    topology, _ = read(nodes(*(dict(zip(keys, place, strict=True)) for place in places)))
    assert shape(hierarchy(topology)) == (
        "c",
        (),
        [
            ("s0", (), [("l0", ("n0", "n1"), []), ("l1", ("n2",), [])]),
            ("s1", (), [("l2", ("n3",), [])]),
        ],
    )
    assert topology.addresses_of("n3") == ("10.0.0.3",)


def test_layers_that_all_nodes_share_are_left_out_but_one() -> None:
    place = {"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/region": "r"}
    key = "cloud.google.com/gce-topology-"
    google = [place | {f"{key}block": "b", f"{key}subblock": s} for s in ("s0", "s1")]
    topology, _ = read(nodes(*google))
    assert shape(hierarchy(topology)) == ("b", (), [("s0", ("n0",), []), ("s1", ("n1",), [])])


def test_zones_alone() -> None:
    zone, region = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
    topology, _ = read(nodes({zone: "a", region: "r"}, {zone: "b", region: "r"}))
    assert shape(hierarchy(topology)) == ("r", (), [("a", ("n0",), []), ("b", ("n1",), [])])


def test_a_file_for_each_node() -> None:
    leaf = "network.topology.nvidia.com/leaf"
    listed = nodes({leaf: "l0"}, {leaf: "l0"})["items"]
    assert isinstance(listed, list)
    texts = {f"{i}": json.dumps(node) for i, node in enumerate(listed)}
    assert {format_of(text) for text in texts.values()} == {"kubernetes"}
    topology = read_network(texts, "kubernetes", CAPACITIES).topology
    assert topology.hosts == ("n0", "n1")
    assert set(topology.nodes) == {"n0", "n1", "l0"}


def test_nodes_without_labels_are_named() -> None:
    leaf = "network.topology.nvidia.com/leaf"
    topology, notes = read(nodes({leaf: "l0"}, {}, {leaf: "l1"}))
    assert topology.hosts == ("n0", "n2")
    assert "left out, without such labels: nodes n1" in notes
    assert any("the switch 'above' stands for" in note for note in notes)
    with pytest.raises(TopologyError, match="no node has a label of its place"):
        read(nodes({}, {}))


def test_a_label_that_repeats_on_another_level_is_another_switch() -> None:
    topology, _ = read({"instances": [{"id": "1", "network_layers": ["1", "1"]}]})
    assert len(topology.nodes) == 3
    assert [node.kind for node in topology.nodes.values()] == ["host", "tor", "aggregation"]


@pytest.mark.parametrize("wrong", [{"instances": 3}, {"instances": [{"id": 1}]}, {"instances": []}])
def test_errors(wrong: object) -> None:
    with pytest.raises(TopologyError, match=r"Expected|there is no host"):
        read(wrong)
