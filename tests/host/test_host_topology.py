"""The inside of a host as a part of a topology, and the command that prints it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pcie_layouts as layouts
import pytest
import yaml
from click.testing import CliRunner
from fake_nvml import FakeGpu, FakeNvml

from crux_torch.cli import host as host_cli
from crux_torch.cli.main import main
from crux_torch.host import nvml
from crux_torch.host.interfaces import Nic
from crux_torch.host.machine import Host, Inside, as_entries, inside_of, join
from crux_torch.host.nvml import Gpu, NvLink, read_nvml
from crux_torch.host.pcie import Distance, LinkRate, PcieTree
from crux_torch.network.builders import NVLINK3_Bps
from crux_torch.network.loaders import dump_yaml, parse_yaml
from crux_torch.network.topology import Topology, TopologyError

CABLE = "{between: [h0, tor0], capacity_Bps: 50e9}"
CLUSTER = """
version: 1
hosts: {{h0: , h1: }}
switches: {{tor0: tor}}
device_flops: 989e12
links: [{cables}, {{between: [h1, tor0], capacity_Bps: 50e9}}]
addresses: {{h0: [10.0.0.1]}}
tables: h0
qos: {{tcp: [{{dscp: 10}}]}}
"""


def host_at(tree: PcieTree, gpus: tuple[Gpu, ...] = (), speed_Bps: float | None = 50e9) -> Host:
    nics = tuple(
        Nic(f"mlx5_{i}/1", speed_Bps, f"mlx5_{i}", address)
        for i, address in enumerate(tree.of_kind("nic"))
    )
    return Host("h0", gpus, None, nics)


def joined(inside: Inside, cables: int) -> Topology:
    cluster = parse_yaml(CLUSTER.format(cables=", ".join([CABLE] * cables)))
    return join(cluster, inside)


@pytest.mark.parametrize("layout", [layouts.hgx_h100, layouts.dgx_a100])
def test_paths_in_the_topology_are_those_of_the_pcie_tree(layout: Any, tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layout())
    inside = inside_of(host_at(tree), tree)
    assert inside.notes == []
    topology = joined(inside, 8)
    nics = tree.of_kind("nic")
    for gpu in tree.of_kind("gpu"):
        by_cost = topology.nearest_nics(inside.node_of[gpu])
        near = min(tree.distance(gpu, nic) for nic in nics)
        assert by_cost == tuple(
            inside.node_of[nic] for nic in nics if tree.distance(gpu, nic) == near
        )
        for nic in (n for n in nics if tree.distance(gpu, n) == near):
            (path,) = topology.candidate_paths(inside.node_of[gpu], inside.node_of[nic])
            links = tree.path(gpu, nic)
            assert [topology.capacity_Bps[name] for name in path] == [x.capacity_Bps for x in links]
    assert topology.gpus("h0") == tuple(f"h0/gpu{i}" for i in range(8))


def test_gpus_of_two_jobs_meet_on_the_link_that_they_share(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.dgx_a100())
    topology = joined(inside_of(host_at(tree), tree), 8)
    first = set(topology.candidate_paths("h0/gpu0", "h0/mlx5_0:1")[0])
    second = set(topology.candidate_paths("h0/gpu1", "h0/mlx5_1:1")[0])
    assert {topology.ends(link) for link in first & second} == {
        ("h0/pcie-0000:15:00.0", "h0/pcie-0000:11:00.0"),
        ("h0/pcie-0000:11:00.0", "h0/pcie-0000:1a:00.0"),
    }
    other = set(topology.candidate_paths("h0/gpu2", "h0/mlx5_2:1")[0])
    assert not first & other


def test_nvlink(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.hgx_h100())
    links = tuple(NvLink(f"0000:0{3 + i}:00.0", "switch", 4, NVLINK3_Bps / 4) for i in range(4))
    inside = inside_of(host_at(tree, layouts.gpus_at(tree, nvlinks=links)), tree)
    topology = joined(inside, 8)
    (path,) = topology.candidate_paths("h0/gpu0", "h0/gpu7")
    assert [topology.layer(link) for link in path] == ["gpu-nvswitch", "gpu-nvswitch"]
    assert {topology.capacity_Bps[link] for link in path} == {NVLINK3_Bps}


def test_nvlink_between_two_gpus_and_to_what_is_not_known(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.dgx_a100())
    first, second, *others = tree.of_kind("gpu")
    gpus = layouts.gpus_at(tree)
    linked = (
        Gpu(0, "A", "GPU-0", 1, first, None, (NvLink(second, "gpu", 2, 50e9),)),
        Gpu(1, "A", "GPU-1", 1, second, None, (NvLink(first, "gpu", 2, 50e9),)),
        Gpu(2, "A", "GPU-2", 1, others[0], None, (NvLink("", "other", 1, 25e9),)),
        Gpu(3, "A", "GPU-3", 1, others[1], None, (NvLink(first, "gpu", 1, None),)),
        *gpus[4:],
    )
    inside = inside_of(host_at(tree, linked), tree)
    assert [(a, b, x.capacity_Bps) for a, b, x in inside.cables if x.cost == 1] == [
        ("h0/gpu0", "h0/gpu1", 50e9)
    ]
    assert inside.notes == [
        "1 NVLinks of h0/gpu2 lead to what is not known",
        "1 NVLinks of h0/gpu3 lead to what is not known",
    ]


def test_two_ports_of_one_card_share_its_link(tmp_path: Path) -> None:
    port = "pci0000:00/0000:00:01.0"
    entries = [layouts.Entry(port, layouts.BRIDGE)]
    entries += [layouts.Entry(f"{port}/0000:01:00.{i}", layouts.NIC, 0x15B3) for i in range(2)]
    tree = layouts.read(tmp_path, entries)
    topology = joined(inside_of(host_at(tree), tree), 2)
    card = "h0/pcie-0000:01:00.0"
    assert {ends for ends in map(topology.ends, topology.links) if "h0" in ends} == {
        (card, "h0"),
        ("h0", card),
    }
    assert topology.inside("h0", "nic") == ("h0/mlx5_0:1", "h0/mlx5_1:1")


def test_a_virtual_machine_is_noted_and_still_usable(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.azure_vm())
    inside = inside_of(host_at(tree), tree)
    assert len([note for note in inside.notes if "can't be seen" in note]) == 3
    topology = joined(inside, 1)
    (path,) = topology.candidate_paths("h0/gpu0", "h0/mlx5_0:1")
    assert topology.capacity_Bps[path[0]] == pytest.approx(LinkRate(16.0, 16).Bps)
    assert topology.capacity_Bps[path[1]] == 50e9, "a NIC's link carries what its network does"


def test_nics_that_are_down_are_left_out_where_others_are_up(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.dgx_a100())
    host = host_at(tree)
    up, *down = host.nics
    mixed = Host("h0", (), None, (up, *(Nic(n.name, None, None, n.pci_address) for n in down)))
    assert inside_of(mixed, tree).nics == ("h0/mlx5_0:1",)
    assert len(inside_of(host_at(tree, speed_Bps=None), tree).nics) == 8


def test_joining_keeps_the_cluster_and_moves_the_cables(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.dgx_a100())
    topology = joined(inside_of(host_at(tree), tree), 8)
    assert topology.hosts == ("h0", "h1")
    assert topology.device_flops == 989e12
    assert topology.addresses == {"h0": ("10.0.0.1",)}
    assert topology.tables == "h0"
    assert topology.qos is not None
    assert len(topology.candidate_paths("h0", "h1")) == 8
    again = parse_yaml(dump_yaml(topology))
    assert (again.nodes, again.edges) == (topology.nodes, topology.edges)
    assert again.device_flops == topology.device_flops
    other = inside_of(host_at(tree), tree, "h1")
    everything = join(topology, other, ["h1/mlx5_3:1"])
    (path,) = everything.candidate_paths("h0/gpu0", "h1/gpu6", 1)
    assert {everything.layer(link) for link in path} >= {"pcie-nic", "nic-tor"}


def test_what_can_not_be_joined(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.dgx_a100())
    inside = inside_of(host_at(tree), tree)
    with pytest.raises(TopologyError, match="8 NICs and 3 cables"):
        joined(inside, 3)
    with pytest.raises(TopologyError, match="no host 'h9'"):
        join(parse_yaml(CLUSTER.format(cables=CABLE)), inside_of(host_at(tree), tree, "h9"))
    with pytest.raises(TopologyError, match="described already"):
        join(joined(inside, 8), inside)
    with pytest.raises(TopologyError, match="has no NIC"):
        joined(Inside("h0"), 1)
    cluster = parse_yaml(CLUSTER.format(cables=CABLE))
    with pytest.raises(TopologyError, match="expected the NICs of the 1 cables"):
        join(cluster, inside, ["h0/eth9"])
    assert join(cluster, inside, ["h0/mlx5_3:1"]).layer("h0/mlx5_3:1->tor0") == "nic-tor"


def test_entries_fit_into_a_topology_file(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.hgx_h100())
    entries: Any = yaml.safe_load(yaml.safe_dump(as_entries(inside_of(host_at(tree), tree))))
    document = {
        "version": 1,
        "hosts": entries["hosts"] | {"h1": None},
        "switches": {"tor0": "tor"},
        "links": [
            *entries["links"],
            {"between": ["h0/mlx5_0:1", "tor0"], "capacity_Bps": 50e9},
            {"between": ["h1", "tor0"], "capacity_Bps": 50e9},
        ],
    }
    topology = parse_yaml(yaml.safe_dump(document))
    assert len(topology.candidate_paths("h0/gpu0", "h1")[0]) == 4


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PcieTree:
    """The command sees eight H100s in the manner of an HGX board."""
    tree = layouts.read(tmp_path, layouts.hgx_h100())
    fakes = [
        FakeGpu(address=f"0000{address.upper()}", uuid=f"GPU-{i}", peers={1: (40, 0)})
        for i, address in enumerate(tree.of_kind("gpu"))
    ]
    monkeypatch.setattr(PcieTree, "read", classmethod(lambda cls: tree))
    monkeypatch.setattr(host_cli, "read_nics", lambda: host_at(tree).nics)
    monkeypatch.setattr(nvml, "read_nvml", lambda **kw: read_nvml(FakeNvml(fakes), **kw))
    return tree


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["host", *arguments, "--name", "h0"])


def test_the_table(machine: PcieTree) -> None:
    shown = run().output
    assert shown.count("NVIDIA H100 80GB HBM3") == 8
    assert "mlx5_0/1 (PIX)" in shown
    assert "63.02" in shown
    assert "note:" not in shown


def test_the_json(machine: PcieTree) -> None:
    told = json.loads(run("--json").output)
    assert (told["host"], told["driver"], told["nvml"]) == ("h0", "580.65.06", "ok")
    assert [gpu["nic"] for gpu in told["gpus"]] == [f"mlx5_{i}/1" for i in range(8)]
    assert told["gpus"][7]["numa_node"] == 1
    assert told["pairs"][0] == {"a": 0, "b": 1, "distance": "NODE", "peer_access": "ok"}
    assert told["distances"][machine.of_kind("gpu")[0]]["mlx5_7/1"] == Distance.SYS.name
    assert len(told["pcie_links"]) == 8 * 3 + 1 + 4
    assert told["pcie_links"][0]["capacity_Bps"] > 0


def test_the_yaml_and_the_joined_topology(machine: PcieTree, tmp_path: Path) -> None:
    entries = yaml.safe_load(run("--yaml").output)
    assert entries["hosts"]["h0"]["h0/gpu0"] == "gpu"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.format(cables=", ".join([CABLE] * 8)))
    topology = parse_yaml(run("--join", str(cluster)).output)
    assert len(topology.gpus("h0")) == 8
    cluster.write_text(CLUSTER.format(cables=CABLE))
    refused = run("--join", str(cluster))
    assert refused.exit_code == 1
    assert "8 NICs and 1 cables" in refused.output
    chosen = run("--join", str(cluster), "--nic", "h0/mlx5_2:1")
    assert "tor0" in parse_yaml(chosen.output).nodes


def test_options_that_exclude_each_other() -> None:
    assert run("--json", "--yaml").exit_code == 2
    assert run("--nic", "h0/eth0").exit_code == 2


def test_this_machine_can_be_shown_as_it_is() -> None:
    shown = run()
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("h0: ")
    assert run("--json").exit_code == run("--yaml").exit_code == 0
