"""NCCL's XML: published files' structure, a GPU's way to its NIC, and hostile XML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.host.machine import Inside, join
from crux_torch.host.nccl_topology import is_nccl_xml, parse_xml, read_nccl_topology
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.topology import Topology, TopologyError


def pci(address: str, kind: str, inner: str = "", speed: str = "16.0 GT/s PCIe") -> str:
    code = {"bridge": "0x060400", "gpu": "0x030200", "nic": "0x020700"}[kind]
    return (
        f'<pci busid="{address}" class="{code}" vendor="0x1000" device="0xc010" '
        f'link_speed="{speed}" link_width="16">{inner}</pci>'
    )


def system(*cpus: str) -> str:
    inner = "".join(
        f'<cpu host_hash="0x1" numaid="{i}" affinity="0f" arch="x86_64">{cpu}</cpu>'
        for i, cpu in enumerate(cpus)
    )
    return f'<!-- dumped -->\n<system version="1">{inner}</system>'


def p4d() -> str:
    """The structure of aws-ofi-nccl's p4d-24xl-topo.xml: 2 GPUs and a NIC on each of 4 switches."""
    ends = (("1c", "gpu"), ("1d", "gpu"), ("1b", "nic"))
    switches = [
        pci(
            f"ffff:ff:0{i}.0",
            "bridge",
            "".join(pci(f"0000:{bus}:{end}.0", kind, speed="8 GT/s") for end, kind in ends),
            speed="8 GT/s",
        )
        for i, bus in enumerate(("10", "20", "90", "a0"), start=1)
    ]
    return system("".join(switches[:2]), "".join(switches[2:]))


def net(name: str, speed: int = 200_000) -> str:
    return f'<net name="{name}" dev="0" speed="{speed}" port="1" gdr="1"/>'


def dgx_a100() -> str:
    """A part of the dump in NCCL's issue 1505: GPUs on NVSwitches below two bridges, mlx5 NICs."""
    sockets = []
    for dev, buses in enumerate((("01", "03", "05", "07", "0a", "0c"),
                                 ("41", "43", "45", "0f", "42", "12"))):  # fmt: skip
        at = [f"0000:{bus}:00.0" for bus in buses]
        links = "".join(
            f'<nvlink target="0000:c{n}:00.0" count="2" tclass="0x068000"/>' for n in range(4, 10)
        )
        gpu = pci(at[3], "gpu", f'<gpu dev="{dev}" sm="80" rank="{dev}" gdr="1">{links}</gpu>')
        nic = pci(at[5], "nic", f"<nic>{net(f'mlx5_{dev}')}</nic>")
        chain = pci(at[1], "bridge", pci(at[2], "bridge", gpu))
        sockets.append(pci(at[0], "bridge", chain + pci(at[4], "bridge", nic)))
    storage = f"<nic>{net('mlx5_4')}{net('mlx5_5', 100_000)}</nic>"
    return system("".join(sockets), pci("0000:61:00.0", "nic", storage))


def topology_of(inside: Inside) -> Topology:
    cables = "".join("  - {between: [h0, tor0], capacity_Bps: 25e9}\n" for _ in inside.nics)
    cluster = "version: 1\nhosts: {h0: }\nswitches: {tor0: tor}\nlinks:\n"
    return join(parse_yaml(cluster + cables), inside)


def test_a_file_for_virtual_machines() -> None:
    assert is_nccl_xml(p4d())
    topology = topology_of(read_nccl_topology(p4d(), "h0", {}))
    assert [len(topology.inside("h0", kind)) for kind in ("gpu", "nic", "pcie")] == [8, 4, 4]
    assert topology.nearest_nics("h0/gpu5") == ("h0/nic2",)
    rates = {topology.capacity_Bps[name] for name in topology.links if "tor" not in name}
    assert list(rates) == [pytest.approx(8e9 * 16 * 128 / 130 / 8)]


def test_a_dump_with_nvswitches_and_named_nics() -> None:
    inside = read_nccl_topology(dgx_a100(), "h0", {})
    topology = topology_of(inside)
    assert topology.inside("h0", "nic") == ("h0/mlx5_0", "h0/mlx5_1", "h0/mlx5_4")
    assert topology.nearest_nics("h0/gpu0") == ("h0/mlx5_0",)
    assert topology.nearest_nics("h0/gpu1") == ("h0/mlx5_1",)
    # 6 NVSwitches of 2 links, 25 GB/s each.
    assert topology.capacity_Bps["h0/gpu0->h0/nvswitch"] == 12 * 25e9
    assert "mlx5_5 is another port of h0/mlx5_4" in inside.notes
    # A chain of bridges without a branch is one link.
    assert len(topology.inside("h0", "pcie")) == 2


def test_nvlinks_between_gpus() -> None:
    """Two of the pairs of a DGX-1 (NCCL's issue 671)."""

    def gpu(bus: str, dev: int, peers: dict[str, int]) -> str:
        links = "".join(f'<nvlink target="0000:{peer}:00.0" count="{n}" tclass="0x030200"/>'
                        for peer, n in peers.items())  # fmt: skip
        return pci(
            f"0000:{bus}:00.0", "gpu", f'<gpu dev="{dev}" sm="70" rank="{dev}">{links}</gpu>'
        )

    text = system(
        gpu("06", 0, {"07": 1, "0a": 2, "99": 1})
        + gpu("07", 1, {"06": 1})
        + gpu("0a", 2, {"06": 2})
    )
    inside = read_nccl_topology(text, "h0", {})
    nvlinks = {(a, b): link.capacity_Bps for a, b, link in inside.cables if link.cost == 1}
    assert nvlinks == {("h0/gpu0", "h0/gpu1"): 25e9, ("h0/gpu0", "h0/gpu2"): 50e9}
    assert inside.notes == ["NVLinks of h0/gpu0 lead to what is not known"]


def test_nics_that_the_cluster_names_keep_their_cables() -> None:
    ends = (("h0/mlx5_1", "b"), ("h0/mlx5_0", "a"), ("h0/mlx5_4", "a"), ("a", "s"), ("b", "s"))
    cables = (f"  - {{between: [{a}, {b}], capacity_Bps: 25e9}}\n" for a, b in ends)
    cluster = parse_yaml(
        "version: 1\nhosts: {h0: {h0/mlx5_1: nic, h0/mlx5_0: nic, h0/mlx5_4: nic}}\n"
        "switches: {a: tor, b: tor, s: aggregation}\naddresses: {h0/mlx5_0: [10.0.0.1]}\nlinks:\n"
        + "".join(cables)
    )
    joined = join(cluster, read_nccl_topology(dgx_a100(), "h0", {}))
    assert {"h0/mlx5_0->a", "h0/mlx5_1->b", "h0/mlx5_4->a"} <= set(joined.links)
    assert joined.addresses["h0/mlx5_0"] == ("10.0.0.1",)
    # Other names: by the order of the cables, and the addresses go to the host.
    renamed = join(cluster, read_nccl_topology(dgx_a100().replace("mlx5_", "ib"), "h0", {}))
    assert {"h0/ib0->b", "h0/ib1->a", "h0/ib4->a"} <= set(renamed.links)
    assert renamed.addresses["h0"] == ("10.0.0.1",)


def test_a_rate_that_is_missing_has_to_be_given() -> None:
    text = system(pci("0000:06:00.0", "gpu", '<gpu dev="0" sm="12"/>', "Unknown speed"))
    with pytest.raises(TopologyError, match=r"no capacity of pcie \(1 links\)"):
        read_nccl_topology(text, "h0", {})
    (cable,) = read_nccl_topology(text, "h0", {"pcie": 5.0}).cables
    assert cable[2].capacity_Bps == 5.0


BILLION_LAUGHS = '<!DOCTYPE a [<!ENTITY x "&#60;"><!ENTITY y "&x;&x;">]><system>&y;</system>'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BILLION_LAUGHS, "document type"),
        ("<system>" + "<pci>" * 70, "over 64 levels"),
        ("<system>" + "<pci/>" * 70_000, "elements"),
        ("<system>", "it is no XML"),
        ("", "it is no XML"),
        ('<graphs version="1"/>', "NCCL_GRAPH_DUMP_FILE only the rings"),
        ("<system/>", "no GPU and no NIC"),
        (system(p4d()[:0]).replace("</system>", '<cpu host_hash="0x2"/></system>'), "2 hosts"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        read_nccl_topology(text, "h0", {})


TAGS = st.sampled_from(["system", "cpu", "pci", "gpu", "nic", "net", "nvlink"])
ATTRIBUTES = st.dictionaries(
    st.sampled_from(["busid", "class", "link_speed", "link_width", "dev", "sm", "name", "count",
                     "target", "tclass", "speed"]),
    st.sampled_from(["", "0x030200", "0x0680", "16 GT/s", "16", "-1", "a/b", "9" * 30, "٣"]),
)  # fmt: skip
TOKENS = st.lists(st.tuples(TAGS, ATTRIBUTES, st.integers(0, 2)), max_size=20)


def nested(tokens: list[tuple[str, dict[str, str], int]]) -> str:
    """An XML of elements; after each so many of the open ones end."""
    text, above = "<system>", ["system"]
    for tag, attributes, ends in tokens:
        given = "".join(f' {name}="{value}"' for name, value in attributes.items())
        text += f"<{tag}{given}>"
        above.append(tag)
        text += "".join(f"</{above.pop()}>" for _ in range(min(ends, len(above) - 1)))
    return text + "".join(f"</{tag}>" for tag in reversed(above))


@given(st.text(max_size=300) | TOKENS.map(nested))
def test_any_text_gives_an_inside_or_an_error(text: str) -> None:
    try:
        inside = read_nccl_topology(text, "h0", {"pcie": 1.0, "nvlink": 1.0})
    except TopologyError:
        return
    if inside.nics:
        topology_of(inside)


def test_comments_are_no_elements() -> None:
    assert parse_xml("<!-- x --><system><!-- y --></system>").children == []
