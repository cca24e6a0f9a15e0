"""From a draft to a topology: rates, tiers, names, and any text in any format."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.network.formats import LINGJUN, READERS, WRITERS, format_of, read_network
from crux_torch.network.formats.draft import Cable, Draft, parse_rate
from crux_torch.network.formats.groups import hierarchy
from crux_torch.network.loaders import dump_yaml, parse_yaml
from crux_torch.network.topology import KINDS, TopologyError

#: Every tier that there may be.
ALL_TIERS = {f"{a}-{b}": 1.0 for a in KINDS for b in KINDS}


@pytest.mark.parametrize(
    ("text", "Bps"),
    [
        ("400Gbps", 50e9),
        ("100 Gbit/s", 12.5e9),
        ("31.5GB/s", 31.5e9),
        ("8bps", 1.0),
        ("2MBps", 2e6),
    ],
)
def test_rates(text: str, Bps: float) -> None:
    assert parse_rate(text) == Bps


@pytest.mark.parametrize(
    "text", ["", "400", "400G", "0Gbps", "-1Gbps", "1e9bps", "Gbps", "nan bps"]
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(TopologyError, match="is no rate; expected one such as 400Gbps"):
        parse_rate(text)


def clos() -> Draft:
    """Two hosts, of which one has two NICs, two ToRs and two aggregation switches."""
    draft = Draft(hosts={"h0": ["h0/a", "h0/b"], "h1": []})
    draft.switches = dict.fromkeys(["t0", "t1", "a0", "a1"])
    draft.cables = [Cable("h0/a", "t0", 5.0), Cable("h0/b", "t1"), Cable("h1", "t1")]
    draft.cables += [Cable(t, a, count=2) for t in ("t0", "t1") for a in ("a0", "a1")]
    return draft


def test_capacities_of_the_file_win_and_others_are_those_of_their_tier() -> None:
    topology, notes = clos().to_topology({"host-tor": 7.0, "tor-aggregation": 3.0, "x": 1.0})
    assert topology.capacity_Bps["h0/a->t0"] == 5.0
    assert topology.capacity_Bps["h0/b->t1"] == topology.capacity_Bps["t1->h1"] == 7.0
    assert topology.capacity_Bps["a1->t0#1"] == 3.0
    assert notes == ("--capacity of x is not used",)
    kinds = {n: k.kind for n, k in topology.nodes.items() if k.host is None}
    assert kinds == {"t0": "tor", "t1": "tor", "a0": "aggregation", "a1": "aggregation"}


def test_a_host_at_a_spine_makes_it_no_tor() -> None:
    draft = Draft(hosts={f"h{i}": [] for i in range(8)} | {"manager": []})
    draft.switches = dict.fromkeys(["s0", "s1", "t0", "t1", "t2"])
    # The last ToR has one host only, as the spine with the manager has.
    draft.cables = [Cable(f"h{i}", f"t{i // 4}") for i in range(7)] + [Cable("h7", "t2")]
    draft.cables += [Cable(t, s) for t in ("t0", "t1", "t2") for s in ("s0", "s1")]
    draft.cables.append(Cable("manager", "s0"))
    topology, _ = draft.to_topology(ALL_TIERS)
    kinds = {n: k.kind for n, k in topology.nodes.items() if k.host is None}
    assert kinds == dict.fromkeys(("s0", "s1"), "aggregation") | dict.fromkeys(
        ("t0", "t1", "t2"), "tor"
    )
    root = hierarchy(topology)
    assert (root.switches, root.hosts) == (("s0", "s1"), ("manager",))


def test_every_tier_without_a_capacity_is_named() -> None:
    with pytest.raises(TopologyError, match=r"host-tor \(2 links\), tor-aggregation \(8 links\)"):
        clos().to_topology({})


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\x00"])
def test_names_that_are_none(name: str) -> None:
    draft = clos()
    draft.hosts[name] = []
    with pytest.raises(TopologyError, match="is no name of a node"):
        draft.to_topology(ALL_TIERS)


def test_ends_that_are_not_described_or_are_both_hosts() -> None:
    draft = clos()
    draft.cables.append(Cable("t0", "t9"))
    with pytest.raises(TopologyError, match="a cable ends at 't9'"):
        draft.to_topology(ALL_TIERS)
    draft.cables[-1] = Cable("h1", "h0/a")
    with pytest.raises(TopologyError, match="'h1' and 'h0' are hosts and joined directly"):
        draft.to_topology(ALL_TIERS)


def test_a_number_of_cables_that_no_network_has_is_refused() -> None:
    draft = clos()
    draft.cables.append(Cable("t0", "t1", count=1 << 40))
    with pytest.raises(TopologyError, match="a network of over"):
        draft.to_topology(ALL_TIERS)


LINGJUN_CSV = "ip,DSW,PSW,ASW\n10.0.0.1,D,P,A\n10.0.0.2,D,P,B\n"


def test_the_csv_takes_no_options() -> None:
    assert format_of(LINGJUN_CSV) == LINGJUN
    topology, notes = read_network({"f": LINGJUN_CSV}, LINGJUN, {})
    assert topology.hosts == ("10.0.0.1", "10.0.0.2")
    assert len(notes) == 1
    with pytest.raises(TopologyError, match="expected no options"):
        read_network({"f": LINGJUN_CSV}, LINGJUN, {"host-tor": 1.0})


@pytest.mark.parametrize(
    "text", ["", "version: 1\nhosts: {h0: }\n", "{", "[[[", '{"a": 1}', "hello"]
)
def test_other_texts_have_no_format(text: str) -> None:
    assert format_of(text) == ""


JSON_KEYS = [
    *("lldp", "interface", "chassis", "name", "id", "type", "value", "port", "descr", "items"),
    *("instances", "network_layers", "metadata", "labels", "kind", "status", "addresses"),
    *("fabric.topograph.run/tier-0", "topology.kubernetes.io/zone"),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.sampled_from([*JSON_KEYS, "", "a", "\x00"])
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(JSON_KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)
WORDS = [
    *("SwitchName=", "Switches=", "Nodes=", "BlockName=", "a", "b[1-3]", "[", ",", " ", "\n", "#"),
    *(
        "- topology: t\n",
        "  tree:\n",
        "    switches:\n",
        "      - switch: ",
        "        nodes: ",
        "{",
    ),
    *('Switch\t1 "S-a"\t# "x y"\n', 'Ca\t1 "H-b"\t# "h mlx5_0"\n', '[1]\t"S-a"[1]\t# 4xNDR\n'),
    *('[1](b)\t"H-b"[1]\n', "ip,DSW,PSW,ASW\n", "1,2,3,4\n"),
]


def lldp(document: Any) -> str:
    return json.dumps({"lldp": document})


@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from(WORDS), max_size=25).map("".join)
    | DOCUMENTS.map(json.dumps)
    | DOCUMENTS.map(lldp),
    st.sampled_from([*READERS, LINGJUN]),
)
def test_any_text_gives_a_topology_that_can_be_written_or_an_error(text: str, name: str) -> None:
    format_of(text)
    try:
        topology, _ = read_network({"f.json": text}, name, {} if name == LINGJUN else ALL_TIERS)
    except TopologyError:
        return
    again = parse_yaml(dump_yaml(topology))
    assert again.edges == topology.edges
    for write in WRITERS.values():
        # Slurm can't take some names, and a host alone is no tree.
        with suppress(TopologyError):
            write(topology)


LONG = [
    "\n",
    " ",
    "a",
    "[",
    "1",
    "SwitchName=a ",
    "SwitchName=a\n",
    'Ca 1 "',
    'Ca 1 "a" # "x',
    "GPU0 ",
    "- topology: a\n",
    "<system ",
    '{"lldp":',
]


@pytest.mark.parametrize("piece", LONG)
@pytest.mark.parametrize("name", [*READERS, LINGJUN])
def test_a_long_text_takes_no_longer_than_it_is_long(piece: str, name: str) -> None:
    """A reader whose time grows with the square never ends here."""
    text = piece * ((1 << 18) // len(piece))
    format_of(text)
    with suppress(TopologyError):
        read_network({"f": text}, name, {} if name == LINGJUN else ALL_TIERS)
