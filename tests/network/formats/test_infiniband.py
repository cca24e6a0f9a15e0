"""ibnetdiscover: a small subnet in the form of a published output, and its quirks."""

from __future__ import annotations

from collections import Counter

import pytest

from crux_torch.network.formats import format_of, read_network
from crux_torch.network.formats.infiniband import LANE_bps
from crux_torch.network.topology import Topology, TopologyError

HEAD = "#\n# Topology file: generated on Wed Aug  6 16:11:23 2025\n#\n"


def switch(guid: str, name: str, ports: dict[int, str]) -> str:
    """A switch as in topograph's tests/output/ibnetdiscover/example.out (NDR, DGX hosts)."""
    lines = [f'{at}\t"{peer[0]}-{peer[2:].partition("[")[0]}"{rest(peer)}' for at, peer in
             ((f"[{n}]", p) for n, p in ports.items())]  # fmt: skip
    return (
        f"vendid=0x2c9\ndevid=0xd2f2\nsysimgguid=0x{guid}\nswitchguid=0x{guid}({guid})\n"
        f'Switch\t65 "S-{guid}"\t\t# "{name}" enhanced port 0 lid 73 lmc 0\n'
        + "\n".join(lines)
        + "\n\n"
    )


def rest(peer: str) -> str:
    port = peer.partition("[")[2]
    known = f"({peer[2:].partition('[')[0]}) " if peer[0] == "H" else ""
    return f'[{port}{known}\t\t# "peer" lid 647 4xNDR'


def adapter(guid: str, description: str, leaf: str, port: int, rate: str = "4xNDR") -> str:
    return (
        f"vendid=0x2c9\ndevid=0x1021\nsysimgguid=0x{guid}\ncaguid=0x{guid}\n"
        f'Ca\t1 "H-{guid}"\t\t# "{description}"\n'
        f'[1]({guid}) \t"S-{leaf}"[{port}]\t\t# lid 647 lmc 0 "leaf" lid 73 {rate}\n\n'
    )


SUBNET = HEAD + "".join(
    [
        switch("00a0", "MF0;LEAF-01:MQM9701/U1", {1: "H-00c0[1]", 2: "H-00c1[1]", 3: "H-00c2[1]",
                                                 35: "S-00b0[1]", 36: "S-00b0[2]", 37: "S-00b1[1]",
                                                 65: "H-00f0[1]"}),
        switch("00a1", "MF0;LEAF-02:MQM9701/U1", {1: "H-00c3[1]", 35: "S-00b0[3]", 36: "S-00b0[4]",
                                                 37: "S-00b1[3]"}),
        switch("00b0", "Quantum Mellanox Technologies", {1: "S-00a0[35]", 2: "S-00a0[36]",
                                                        3: "S-00a1[35]", 4: "S-00a1[36]"}),
        switch("00b1", "Quantum Mellanox Technologies", {1: "S-00a0[37]", 3: "S-00a1[37]"}),
        adapter("00c0", "dgx-01 mlx5_0", "00a0", 1),
        adapter("00c1", "dgx-01 mlx5_5", "00a0", 2),
        adapter("00c2", "MT4129 ConnectX7   Mellanox Technologies", "00a0", 3),
        adapter("00c3", "dgx-02 HCA-1", "00a1", 1),
        adapter("00f0", "Mellanox Technologies Aggregation Node", "00a0", 65),
    ]
)  # fmt: skip


def read(text: str, **options: object) -> tuple[Topology, tuple[str, ...]]:
    assert format_of(text) == "ibnetdiscover"
    found = read_network({"f": text}, "ibnetdiscover", {}, **options)  # type: ignore[arg-type]
    return found.topology, found.notes


def test_hosts_switches_and_cables() -> None:
    topology, notes = read(SUBNET)
    assert topology.hosts == ("dgx-01", "H-00c2", "dgx-02")
    assert topology.inside("dgx-01", "nic") == ("dgx-01/mlx5_0", "dgx-01/mlx5_5")
    kinds = {name: node.kind for name, node in topology.nodes.items() if node.host is None}
    assert kinds == {
        "LEAF-01": "tor",
        "LEAF-02": "tor",
        "Quantum Mellanox Technologies S-00b0": "aggregation",
        "Quantum Mellanox Technologies S-00b1": "aggregation",
    }
    # 4 x NDR carry 400 Gbps; each cable is told by both ends and counts once.
    assert set(topology.capacity_Bps.values()) == {50e9}
    ends = Counter((edge.src, edge.dst) for edge in topology.edges)
    assert ends["LEAF-01", "Quantum Mellanox Technologies S-00b0"] == 2
    assert topology.path_count("dgx-01", "dgx-02") == 2 * (2 * 2 + 1)
    assert any("1 aggregation nodes inside of switches" in note for note in notes)
    assert any("count as hosts: H-00c2" in note for note in notes)


def test_the_smaller_of_two_subnets_is_left_out_and_named() -> None:
    other = switch("00a9", "MF0;STORE:MQM9701/U1", {1: "H-00c9[1]"})
    topology, notes = read(SUBNET + other + adapter("00c9", "store-01 mlx5_0", "00a9", 1))
    assert "store-01" not in topology.hosts
    assert "left out, joined to none of the others: hosts store-01" in notes


def test_hosts_and_switches_can_be_left_out() -> None:
    topology, notes = read(SUBNET, without=("H-*", "*S-00b1"))
    assert topology.hosts == ("dgx-01", "dgx-02")
    assert topology.path_count("dgx-01", "dgx-02") == 8
    assert any(note.startswith("left out as asked: H-00c2") for note in notes)


@pytest.mark.parametrize(
    ("rate", "Gbps"),
    [("4xSDR", 8), ("4xQDR", 32), ("4xFDR10", 40), ("4xEDR", 100), ("2xHDR", 100), ("4xXDR", 800)],
)
def test_rates_are_those_of_the_data(rate: str, Gbps: float) -> None:
    text = switch("00a0", "s", {}) + adapter("00c0", "h0 mlx5_0", "00a0", 1, rate)
    topology, _ = read(text)
    assert topology.capacity_Bps["h0/mlx5_0->s"] == Gbps * 1e9 / 8
    assert LANE_bps["FDR"] == pytest.approx(13.64e9, rel=1e-3)


def test_a_cable_without_a_rate_needs_one() -> None:
    text = switch("00a0", "s", {}) + adapter("00c0", "h0 mlx5_0", "00a0", 1, "")
    with pytest.raises(
        TopologyError, match=r"no capacity of host-tor \(1 links\).*host-tor=400Gbps"
    ):
        read(text)


def test_an_output_without_cables_is_refused() -> None:
    with pytest.raises(TopologyError, match="no cable joins two nodes"):
        read('Switch\t65 "S-00a0"\t\t# "s" base port 0 lid 1 lmc 0\n')
