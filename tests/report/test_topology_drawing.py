"""Drawings of a topology: 80 columns without colour, and an SVG that is one."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from crux_torch.network.builders import BUILDERS, GpuServer, crux_testbed, fat_tree, two_layer_clos
from crux_torch.network.topology import Link, Topology, TopologyBuilder
from crux_torch.report.topology_drawing import print_tree, to_svg

SVG = "{http://www.w3.org/2000/svg}"


def tree(topology: Topology, width: int = 80) -> list[str]:
    file = io.StringIO()
    print_tree(topology, Console(file=file, width=width, highlight=False))
    return file.getvalue().splitlines()


def test_the_testbed() -> None:
    assert tree(crux_testbed())[:4] == [
        "agg[0-7]  8 × aggregation",
        "├── tor0  tor, 16 × 100 Gbps up",
        "│   └── h[0-1]  2 × host of 8 GPUs, each 4 × 200 Gbps up",
        "├── tor1  tor, 16 × 100 Gbps up",
    ]


def test_many_groups_are_counted_and_lines_fit() -> None:
    lines = tree(two_layer_clos(hosts=80, tors=40, aggregations=16))
    assert len(lines) == 1 + 2 * 16 + 1
    assert lines[-1] == "└── and 24 more groups with 48 hosts"
    server = GpuServer(gpus=1, nics=1, pcie_switches=1)
    builder = TopologyBuilder()
    for i in range(30):
        name = builder.node(f"some-very-long-name-{'ab'[i % 2]}{i}x" * 2, "host")
        builder.cable(name, "tor", Link(1.0 + i % 3))
    builder.node("tor", "tor")
    for topology in (builder.build(), fat_tree(8, server=server)):
        for width in (80, 60):
            lines = tree(topology, width)
            assert max(map(len, lines)) <= width
            assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_an_svg_has_a_box_for_each_switch_or_group_and_all_hosts(name: str) -> None:
    parameters = {
        "fat_tree": {"k": 4},
        "torus": {"shape": (3, 3)},
        "rail_optimised": {"hosts": 8, "hosts_per_group": 4, "spines": 2},
    }
    topology = BUILDERS[name](**parameters.get(name, {}))
    root = ElementTree.fromstring(to_svg(topology))
    boxes = root.findall(f"{SVG}g")
    counts = [box.findall(f"{SVG}text")[1].text or "" for box in boxes]
    total = sum(int(c.partition(" ")[0]) if " × " in c else 1 for c in counts)
    outside = sum(node.host is None for node in topology.nodes.values())
    assert total == len(topology.hosts) + outside
    places = {(line.get("x1"), line.get("y1")) for line in root.findall(f"{SVG}line")}
    assert len(places) >= 1


def test_names_are_escaped() -> None:
    builder = TopologyBuilder()
    builder.cable(builder.node("<h&0>", "host"), builder.node('"t"', "tor"), Link(1.0))
    root = ElementTree.fromstring(to_svg(builder.build()))
    assert [box.get("id") for box in root.findall(f"{SVG}g")] == ["<h&0>", '"t"']
