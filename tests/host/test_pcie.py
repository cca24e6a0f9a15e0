"""The PCIe tree, read from made-up sysfs trees and checked against a plain graph search."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import networkx as nx
import pcie_layouts as layouts
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.host.interfaces import Nic, as_sysfs_writes
from crux_torch.host.pcie import ENCODING, WIDTHS, Distance, LinkRate, PciDevice, PcieTree


def nics_at(tree: PcieTree, speed_Bps: float = 50e9) -> tuple[Nic, ...]:
    return tuple(
        Nic(f"mlx5_{i}", speed_Bps, pci_address=address)
        for i, address in enumerate(tree.of_kind("nic"))
    )


@pytest.mark.parametrize(
    ("speed_GTps", "lanes", "GBps"),
    [(2.5, 1, 0.25), (5.0, 8, 4.0), (8.0, 16, 15.754), (16.0, 16, 31.508), (32.0, 16, 63.015)],
)
def test_rates_are_the_published_ones(speed_GTps: float, lanes: int, GBps: float) -> None:
    assert LinkRate(speed_GTps, lanes).Bps == pytest.approx(GBps * 1e9, rel=1e-4)


def test_hgx_h100(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.hgx_h100())
    gpus, nics = tree.of_kind("gpu"), nics_at(tree)
    assert (len(gpus), len(nics), len(tree.of_kind("nvswitch"))) == (8, 8, 4), "no BMC among them"
    assert tree.obstacle is None
    for gpu, nic in zip(gpus, nics, strict=True):
        assert tree.nic_of(gpu, nics) == nic
        assert tree.distance(gpu, nic.pci_address) == Distance.PIX
        path = tree.path(gpu, nic.pci_address)
        assert [link.address for link in path] == [gpu, nic.pci_address], "it turns at the switch"
        assert all(link.capacity_Bps == pytest.approx(63.015e9, rel=1e-4) for link in path)
    assert tree.distance(gpus[0], gpus[1]) == Distance.NODE
    assert tree.distance(gpus[0], gpus[7]) == Distance.SYS
    across = tree.path(gpus[0], gpus[7])
    assert len(across) == 4, (
        "own link, the switch's to the CPU, and down the same on the other side"
    )
    assert [link.address for link in across][::3] == [gpus[0], gpus[7]]


def test_dgx_a100_shares_nics_evenly(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.dgx_a100())
    gpus, nics = tree.of_kind("gpu"), nics_at(tree)
    assert (len(gpus), len(nics)) == (8, 8)
    chosen = [tree.nic_of(gpu, nics) for gpu in gpus]
    assert len(set(chosen)) == 8, "two GPUs with the same two NICs do not take the same one"
    for gpu, nic in zip(gpus, chosen, strict=True):
        assert nic is not None
        assert nic.pci_address is not None
        assert tree.distance(gpu, nic.pci_address) == Distance.PXB
        # The two GPUs below one inner switch share its link, and so do the NICs.
        assert len(tree.path(gpu, nic.pci_address)) == 4
    first, second = (tree.path(gpus[i], nics[0].pci_address) for i in (0, 1))
    assert {link.name for link in first} & {link.name for link in second} == {
        link.name for link in first[1:]
    }
    assert tree.distance(gpus[0], gpus[1]) == Distance.PIX


def test_virtual_machines_are_said_to_be_flat(tmp_path: Path) -> None:
    azure = layouts.read(tmp_path / "azure", layouts.azure_vm())
    first, second = azure.of_kind("gpu")
    assert azure.obstacle is not None
    assert "virtual machine" in azure.obstacle
    assert azure.path(first, second) == ()
    assert azure.distance(first, second) == Distance.NODE
    assert azure.nic_of(first, nics_at(azure)) == nics_at(azure)[0]
    flat = layouts.read(tmp_path / "flat", layouts.flat_vm())
    (gpu,), (nic,) = flat.of_kind("gpu"), flat.of_kind("nic")
    assert flat.obstacle == azure.obstacle
    assert [link.address for link in flat.path(gpu, nic)] == [gpu], "the link that the GPU tells of"
    assert flat.distance(gpu, nic) == Distance.PHB


def test_without_a_pci_bus(tmp_path: Path) -> None:
    tree = PcieTree.read(tmp_path / "nothing")
    assert tree.obstacle == "no PCI devices in sysfs"
    assert (tree.links(), tree.path("0000:01:00.0", "0000:02:00.0")) == ((), ())
    assert tree.nic_of("0000:01:00.0", (Nic("eth0", 1e9, pci_address="0000:02:00.0"),)) is None


def test_a_gpus_link_counts_at_its_full_rate_and_others_as_trained(tmp_path: Path) -> None:
    port = "pci0000:00/0000:00:01.0"
    slow = {"speed": "2.5 GT/s PCIe", "max_speed": layouts.GEN4}
    tree = layouts.read(
        tmp_path,
        [
            layouts.Entry(port, layouts.BRIDGE, **slow),
            layouts.Entry(f"{port}/0000:01:00.0", layouts.GPU, **slow),
            layouts.Entry(f"{port}/0000:01:00.1", 0x040300, **slow),
            layouts.Entry("pci0000:00/0000:00:02.0", layouts.BRIDGE, **slow),
            layouts.Entry(
                "pci0000:00/0000:00:02.0/0000:02:00.0", layouts.NIC, width=8, max_width=16, **slow
            ),
        ],
    )
    gpu, nic = tree.path("0000:01:00.0", "0000:02:00.0")
    assert gpu.capacity_Bps == LinkRate(16.0, 16).Bps
    assert (gpu.slow, gpu.narrow) == (True, False)
    assert nic.capacity_Bps == LinkRate(2.5, 8).Bps
    assert (nic.slow, nic.narrow) == (True, True)
    assert tree.links_above("0000:01:00.1") == (gpu,), "all functions of a device share its link"
    assert tree.path("0000:01:00.0", "0000:01:00.1") == ()
    assert tree.distance("0000:01:00.0", "0000:01:00.1") == Distance.LOC


def test_a_link_can_do_what_both_ends_can(tmp_path: Path) -> None:
    port = "pci0000:00/0000:00:01.0"
    tree = layouts.read(
        tmp_path,
        [
            layouts.Entry(port, layouts.BRIDGE, max_speed="8.0 GT/s PCIe", max_width=8),
            layouts.Entry(f"{port}/0000:01:00.0", layouts.GPU, speed=layouts.GEN5),
        ],
    )
    (link,) = tree.links()
    assert link.most == LinkRate(8.0, 8)


@pytest.mark.parametrize(
    ("attribute", "content"),
    [
        ("current_link_speed", "Unknown speed"),
        ("current_link_speed", "-1 GT/s"),
        ("current_link_speed", "nan GT/s"),
        ("current_link_width", "255"),
        ("current_link_width", "63"),
        ("current_link_width", "\x00\xff"),
        ("class", "garbage"),
        ("vendor", ""),
        ("numa_node", "1e99"),
    ],
)
def test_attributes_that_make_no_sense(tmp_path: Path, attribute: str, content: str) -> None:
    devices = layouts.hgx_h100()
    layouts.write(tmp_path, devices)
    for entry in devices:
        (tmp_path / "devices" / entry.place / attribute).write_text(content)
    tree = PcieTree.read(tmp_path)
    assert len(tree.devices) == len(devices)
    for link in tree.links():
        assert link.capacity_Bps is None or link.capacity_Bps > 0


def test_foreign_entries_are_passed_over(tmp_path: Path) -> None:
    layouts.write(tmp_path, layouts.flat_vm())
    bus = tmp_path / "bus/pci/devices"
    (bus / "dangling").symlink_to(tmp_path / "gone")
    (bus / "loop").symlink_to(bus / "loop")
    (bus / "file").write_text("")
    (tmp_path / "devices/pci0000:00/driver").mkdir()
    (bus / "0000:00:1f.0").symlink_to(tmp_path / "devices/pci0000:00/driver")
    assert len(PcieTree.read(tmp_path).devices) == len(layouts.flat_vm())


def test_nvml_writes_addresses_otherwise() -> None:
    assert as_sysfs_writes("00000000:3B:00.0") == "0000:3b:00.0"
    assert as_sysfs_writes("00010000:E0:06.0") == "10000:e0:06.0"
    assert as_sysfs_writes("0000:3b:00.0") == "0000:3b:00.0"


@st.composite
def trees(draw: st.DrawFn) -> tuple[PcieTree, nx.Graph, list[str]]:
    """A host with made-up root ports and switches, as the tree and as a graph of physical links.

    In the graph a switch and a root complex are one node each, so its edges are the links.
    """
    devices: list[PciDevice] = []
    graph = nx.Graph()
    ends: list[str] = []
    buses = itertools.count(1)
    rate = st.builds(LinkRate, st.sampled_from(sorted(ENCODING)), st.sampled_from(WIDTHS))

    def below(node: str, root: str, bridges: tuple[str, ...], numa: int, depth: int) -> None:
        """What hangs on the port that ``bridges`` ends with, a port of ``node``."""
        bus = next(buses)
        address = f"0000:{bus:02x}:00.0"
        current = draw(rate)
        graph.add_edge(node, address, name=f"pcie-{address}", Bps=current.Bps)
        if depth < 2 and draw(st.booleans()):
            devices.append(PciDevice(address, "bridge", root, bridges, current, current, numa))
            inner = next(buses)
            for port in range(draw(st.integers(1, 3))):
                down = f"0000:{inner:02x}:{port:02x}.0"
                above = (*bridges, address)
                devices.append(PciDevice(down, "bridge", root, above, current, current, numa))
                below(address, root, (*above, down), numa, depth + 1)
        else:
            kind = draw(st.sampled_from(("gpu", "nic")))
            devices.append(PciDevice(address, kind, root, bridges, current, current, numa))
            ends.append(address)

    for number in range(draw(st.integers(1, 3))):
        root, numa = f"pci0000:{number:02x}", draw(st.integers(0, 1))
        for port in range(draw(st.integers(1, 2))):
            address = f"000{number + 1}:00:{port:02x}.0"
            devices.append(PciDevice(address, "bridge", root, (), None, None, numa))
            below(root, root, (address,), numa, 0)
    for one, other in itertools.combinations([n for n in graph if n.startswith("pci")], 2):
        graph.add_edge(one, other, name=None)
    return PcieTree({device.address: device for device in devices}), graph, ends


@given(trees())
def test_paths_are_those_of_the_graph(built: tuple[PcieTree, nx.Graph, list[str]]) -> None:
    tree, graph, ends = built
    for a, b in itertools.product(ends, ends):
        nodes = nx.shortest_path(graph, a, b)
        crossed = [graph.edges[pair]["name"] for pair in itertools.pairwise(nodes)]
        path = tree.path(a, b)
        assert [link.name for link in path] == [name for name in crossed if name]
        assert [link.name for link in tree.path(b, a)] == [link.name for link in reversed(path)]
        switches = sum(not node.startswith("pci") for node in nodes[1:-1])
        roots = [node for node in nodes if node.startswith("pci")]
        distance = tree.distance(a, b)
        assert distance == tree.distance(b, a)
        if a == b:
            assert distance == Distance.LOC
        elif not roots:
            assert distance == (Distance.PIX if switches == 1 else Distance.PXB)
        elif len(roots) == 1:
            assert distance == Distance.PHB
        else:
            same = tree.devices[a].numa_node == tree.devices[b].numa_node
            assert distance == (Distance.NODE if same else Distance.SYS)


def end(address: str, kind: Any, root: str, *bridges: str, GTps: float = 16.0) -> PciDevice:
    return PciDevice(address, kind, root, bridges, LinkRate(GTps, 16), LinkRate(GTps, 16), 0)


def test_bandwidth_goes_before_nearness_as_in_nccl() -> None:
    """ncclTopoGetLocal takes the NICs with the widest path, and of these the nearest."""
    near, far = "0000:03:00.0", "0000:43:00.0"
    switch = ("0000:00:01.0", "0000:01:00.0")
    below = ("0000:02:00.0", "0000:02:01.0")
    ends = [
        end("0000:04:00.0", "gpu", "pci0000:00", *switch, below[0]),
        end(near, "nic", "pci0000:00", *switch, below[1]),
        end(far, "nic", "pci0000:40", "0000:40:01.0"),
    ]
    tree = PcieTree({device.address: device for device in ends})
    gpu = ends[0].address
    assert tree.distance(gpu, near) == Distance.PIX
    assert tree.distance(gpu, far) == Distance.NODE

    def chosen(near_Bps: float, far_Bps: float) -> str | None:
        nics = (Nic("a", near_Bps, pci_address=near), Nic("b", far_Bps, pci_address=far))
        nic = tree.nic_of(gpu, nics)
        return nic.name if nic is not None else None

    assert chosen(1.25e9, 12.5e9) == "b", "the near one is for management"
    assert chosen(12.5e9, 12.5e9) == "a"
    assert chosen(25e9, 50e9) == "a", "more than the GPU's link takes is no advantage"


def test_nics_of_one_numa_node_are_as_near_whatever_their_root_bus() -> None:
    ends = [
        end("0000:01:00.0", "gpu", "pci0000:00", "0000:00:01.0"),
        end("0000:02:00.0", "nic", "pci0000:00", "0000:00:02.0"),
        end("0000:41:00.0", "nic", "pci0000:40", "0000:40:01.0"),
    ]
    tree = PcieTree({device.address: device for device in ends})
    nics = nics_at(tree, 12.5e9)
    assert tree.nics_of("0000:01:00.0", nics) == nics, "NCCL knows one CPU for a NUMA node"


@given(trees())
def test_a_gpus_nic_is_one_that_it_reaches_best_and_gpus_share_them_evenly(
    built: tuple[PcieTree, nx.Graph, list[str]],
) -> None:
    tree, graph, _ = built
    nics = nics_at(tree, 12.5e9)
    rates = {link.name: link.capacity_Bps or 0.0 for link in tree.links()}

    def reach(gpu: str, nic: str) -> tuple[float, Distance]:
        edges = [
            graph.edges[pair] for pair in itertools.pairwise(nx.shortest_path(graph, gpu, nic))
        ]
        links_Bps = 0.75 * min(rates[edge["name"]] for edge in edges if edge["name"])
        distance = tree.distance(gpu, nic)
        sockets_Bps = 10e9 if distance == Distance.SYS else 12.5e9
        near = Distance.PHB if distance == Distance.NODE else distance
        return -min(12.5e9, links_Bps, sockets_Bps), near

    taken: dict[tuple[Nic, ...], list[Nic]] = {}
    for gpu in tree.of_kind("gpu"):
        nic = tree.nic_of(gpu, nics)
        if not nics:
            assert nic is None
            continue
        assert nic is not None
        assert nic.pci_address is not None
        assert reach(gpu, nic.pci_address) == min(reach(gpu, nic) for nic in tree.of_kind("nic"))
        taken.setdefault(tree.nics_of(gpu, nics), []).append(nic)
    for nearest, chosen in taken.items():
        counts = [chosen.count(nic) for nic in nearest]
        assert max(counts) - min(counts) <= 1


@given(trees())
def test_links_have_one_name_and_one_rate_each(built: tuple[PcieTree, nx.Graph, list[str]]) -> None:
    tree, graph, ends = built
    links = {link.name: link for link in tree.links()}
    assert len(links) == len(tree.links())
    assert set(links) == {name for *_, name in graph.edges(data="name") if name}
    assert all(link == links[link.name] for end in ends for link in tree.links_above(end))
