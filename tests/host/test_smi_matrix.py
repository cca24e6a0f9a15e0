"""``nvidia-smi topo -m``: matrices from issue threads, and what of them is concluded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.host.machine import Inside
from crux_torch.host.smi_matrix import is_smi_matrix, read_smi_matrix
from crux_torch.network.topology import TopologyError

RATES = {"pcie": 1.0, "nvlink": 10.0}


def matrix(names: list[str], relation: dict[tuple[str, str], str], default: str) -> str:
    """The matrix with ``default`` for pairs that ``relation`` does not have."""

    def cell(a: str, b: str) -> str:
        return " X " if a == b else relation.get((a, b)) or relation.get((b, a)) or default

    rows = [f"{a}\t" + "\t".join(cell(a, b) for b in names) + "\t0-79\t0\t\tN/A" for a in names]
    head = "\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    return "\n".join([head, *rows]) + "\n\nLegend:\n\n  X    = Self\n  SYS  = Connection\n"


def h100() -> str:
    """The pairs of NCCL's issue 1453: eight GPUs on NVSwitches, each PIX to one of nine NICs."""
    gpus, nics = [f"GPU{i}" for i in range(8)], [f"NIC{i}" for i in range(9)]
    relation = {(a, b): "NV18" for a in gpus for b in gpus}
    relation |= {(f"GPU{i}", f"NIC{8 - i}"): "PIX" for i in range(8)}
    legend = "\nNIC Legend:\n\n" + "".join(f"  {nic}: mlx5_ib{nic[3:]}\n" for nic in nics)
    return matrix(gpus + nics, relation, "SYS") + legend


def shares(inside: Inside) -> dict[str, list[str]]:
    """The devices on each PCIe switch."""
    found: dict[str, list[str]] = {}
    for low, high, link in inside.cables:
        if link.cost != 1:
            found.setdefault(high, []).append(low.partition("/")[2])
    return found


def test_gpus_on_nvswitches_with_a_nic_each() -> None:
    assert is_smi_matrix(h100())
    inside = read_smi_matrix(h100(), "h0", RATES)
    groups = shares(inside)
    assert ["gpu0", "mlx5_ib8"] in groups.values()
    assert ["gpu7", "mlx5_ib1"] in groups.values()
    assert groups["h0"].count("mlx5_ib0") == 1
    to_switch = [link.capacity_Bps for _, high, link in inside.cables if high == "h0/nvswitch"]
    assert to_switch == [180.0] * 8


def test_switches_below_a_switch() -> None:
    """Two NICs each PIX to a GPU, PXB to the other (nccl-tests' issue 78, a DGX-2's first four)."""
    relation = {("GPU0", "mlx5_0"): "PIX", ("GPU1", "mlx5_0"): "PIX", ("GPU2", "mlx5_1"): "PIX",
                ("GPU0", "mlx5_1"): "PXB", ("GPU0", "GPU1"): "NV6", ("GPU0", "GPU2"): "NV6",
                ("GPU1", "GPU2"): "NV6", ("GPU1", "mlx5_1"): "PXB", ("GPU2", "mlx5_0"): "PXB",
                ("mlx5_0", "mlx5_1"): "PXB"}  # fmt: skip
    names = ["GPU0", "GPU1", "GPU2", "mlx5_0", "mlx5_1", "mlx5_2"]
    inside = read_smi_matrix(matrix(names, relation, "NODE"), "h0", RATES)
    assert shares(inside) == {
        "h0": ["pcie0", "mlx5_2"],
        "h0/pcie0": ["pcie1", "pcie2"],
        "h0/pcie1": ["gpu0", "mlx5_0", "gpu1"],
        "h0/pcie2": ["gpu2", "mlx5_1"],
    }


def test_few_nvlinks_join_gpus_directly() -> None:
    """Four A100 with four links between each two: twelve a GPU need no NVSwitch."""
    gpus = [f"GPU{i}" for i in range(4)]
    text = matrix(gpus, {(a, b): "NV4" for a in gpus for b in gpus}, "SYS")
    inside = read_smi_matrix(text, "h0", RATES)
    nvlinks = [(a, b, link.capacity_Bps) for a, b, link in inside.cables if link.cost == 1]
    assert len(nvlinks) == 6
    assert nvlinks[0] == ("h0/gpu0", "h0/gpu1", 40.0)
    assert "h0/nvswitch" not in inside.nodes


def test_pasted_text_may_have_spaces_and_lost_its_escapes() -> None:
    pasted = h100().replace("\x1b", "").replace("\t", "    ")
    assert is_smi_matrix(pasted)
    assert read_smi_matrix(pasted, "h0", RATES) == read_smi_matrix(h100(), "h0", RATES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected the output of nvidia-smi topo -m"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV1\n", "no row of GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \tfoo\n", "row GPU0: 'X foo'; expected 2 entries"),
        ("\t" + "\t".join(f"GPU{i}" for i in range(300)), "over 256 devices"),
    ],
)
def test_errors(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        read_smi_matrix(text, "h0", RATES)


def test_capacities_have_to_be_given() -> None:
    with pytest.raises(TopologyError, match=r"nvlink \(\d+ links\), pcie"):
        read_smi_matrix(h100(), "h0", {})


WORDS = st.sampled_from(
    ["GPU0", "GPU1", "NIC0", "X", "NV18", "NV999", "PIX", "PXB", "SYS", "\n", "?"]
)


@given(st.text(max_size=200) | st.lists(WORDS, max_size=40).map("\t".join))
def test_any_text_gives_an_inside_or_an_error(text: str) -> None:
    try:
        read_smi_matrix(text, "h0", RATES)
    except TopologyError:
        return
