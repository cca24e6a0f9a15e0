"""Topology files: a round trip of everything, and errors that say where, what and what instead."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from shared_core import shared_core

from crux_torch.network.builders import BUILDERS, GpuServer, fat_tree
from crux_torch.network.loaders import dump_yaml, load_topology, parse_csv, parse_yaml
from crux_torch.network.topology import Link, Topology, TopologyBuilder, TopologyError

REAL_CSV = ROOT.parent / "shared" / "data" / "lingjun_topo.csv"

HAND_WRITTEN = """
version: 1
hosts:
  h0:
  h1: {h1/gpu0: gpu, h1/nic0: nic}
switches: {tor0: tor, tor1: tor}
links:
  - {between: [h0, tor0], capacity_Bps: 25e9}
  - {between: [tor0, tor1], capacity_Bps: 12.5e9, delay_s: 1e-6, count: 2}
  - {between: [tor1, h1/nic0], capacity_Bps: 25e9}
  - {between: [h1/nic0, h1/gpu0], capacity_Bps: 31.5e9, cost: 2}
"""


def assert_same(a: Topology, b: Topology) -> None:
    assert dict(a.nodes) == dict(b.nodes)
    assert a.hosts == b.hosts
    assert a.edges == b.edges


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(HAND_WRITTEN)
    topology = load_topology(file)
    assert topology.hosts == ("h0", "h1")
    assert topology.capacity_Bps["h0->tor0"] == 25e9
    assert topology.delay_s["tor0->tor1#1"] == 1e-6
    assert topology.candidate_paths("h0", "h1") == (
        ("h0->tor0", "tor0->tor1", "tor1->h1/nic0"),
        ("h0->tor0", "tor0->tor1#1", "tor1->h1/nic0"),
    )
    assert topology.candidate_paths("h0", "h1/gpu0")[0][-1] == "h1/nic0->h1/gpu0"


def test_a_file_that_names_a_builder() -> None:
    text = """
version: 1
builder: fat_tree
parameters: {k: 4, server: {gpus: 4, nics: 2, pcie_switches: 2, nic_Bps: 12.5e9}}
"""
    server = GpuServer(gpus=4, nics=2, pcie_switches=2, nic_Bps=12.5e9)
    assert_same(parse_yaml(text), fat_tree(4, server))


@pytest.mark.parametrize("name", ["testbed", "fat_tree", "torus", "rail_optimised"])
def test_round_trip_of_builders(name: str) -> None:
    topology = BUILDERS[name]()
    assert_same(parse_yaml(dump_yaml(topology)), topology)


def test_round_trip_of_named_links() -> None:
    topology = shared_core(["a", "b"], 1e9)
    assert_same(parse_yaml(dump_yaml(topology)), topology)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=12), st.data())
def test_round_trip_of_random_networks(
    more: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    builder = TopologyBuilder()
    switches = [builder.node(f"s{i}", "core") for i in range(4)]
    for i in range(2):
        host = builder.node(f"host {i}: x", "host")
        builder.cable(host, switches[i], Link(1e9))
    builder.cable("s0", "s1", Link(1e9))
    for a, b, delay, cost in more:
        link = Link(1e9 / 3, delay / 7e6, cost + 1)
        if a != b and data.draw(st.booleans()):
            builder.cable(switches[a], switches[b], link)
        elif a != b:
            builder.arrow(switches[a], switches[b], link, data.draw(st.sampled_from(["", None])))
    topology = builder.build()
    assert_same(parse_yaml(dump_yaml(topology)), topology)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("version: 1", "version: 7", "version is 7; expected 1"),
        ("capacity_Bps: 12.5e9", "capacity_Bps: fast", r"\$.links\[1\].capacity_Bps"),
        ("capacity_Bps: 12.5e9", "capacity_Bps: -3", "capacity -3.0; expected bytes per second"),
        ("capacity_Bps: 12.5e9, ", "", "missing required field `capacity_Bps` - at `\\$.links"),
        ("delay_s: 1e-6", "delay: 1e-6", "unknown field `delay` - at `\\$.links\\[1\\]`"),
        ("count: 2", "count: 0", r"links\[1\].count is 0"),
        ("between: [tor0, tor1]", "from: tor0", r"links\[1\]: expected either between"),
        ("[tor0, tor1]", "[tor0]", r"\$.links\[1\].between"),
        ("[tor0, tor1]", "[tor0, tor9]", "unknown end 'tor9'"),
        ("h1/nic0: nic", "h1/nic0: modem", "Invalid enum value 'modem' - at `\\$.hosts"),
        ("  h1:", "  h0:", "line 5: key 'h0' is there twice"),
        ("switches: {", "switches: [", "line 6: "),
        ("count: 2}", "count: 2, name: x}", r"links\[1\]"),
    ],
)
def test_yaml_errors_name_the_key(old: str, new: str, words: str) -> None:
    assert old in HAND_WRITTEN
    with pytest.raises(TopologyError, match=f"cluster.yaml: .*{words}"):
        parse_yaml(HAND_WRITTEN.replace(old, new, 1), "cluster.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mapping"),
        ("[1, 2]", "expected a mapping"),
        ("version: 1\nbuilder: star\n", "'star' is unknown; expected one of double_sided"),
        ("version: 1\nbuilder: fat_tree\nparameters: {k: 3}\n", "k is 3; expected an even"),
        ("version: 1\nbuilder: fat_tree\nparameters: {q: 3}\n", "parameters: .*'q'"),
        (
            "version: 1\nbuilder: fat_tree\nparameters: {server: {gpus: x}}\n",
            "parameters.server: Expected `int`",
        ),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("version: 1\nhosts: {h: !!bool abc}\nlinks: []\n", "does not fit its tag: 'abc'"),
        ("version: !!int abc\n", "does not fit its tag"),
        ("version: !!float abc\n", "does not fit its tag"),
        ("version: 1\nhosts: {h: 2001-99-99}\nlinks: []\n", "does not fit its tag"),
        ("version: 1\nhosts: {h: !!timestamp abc}\nlinks: []\n", "does not fit its tag"),
        ("[" * 50_000, "line 1: expected at most 16 levels"),
        ("{a: " * 50_000, "line 1: expected at most 16 levels"),
        ("- " * 50_000, "line 1: expected at most 16 levels"),
        ("a: &a [1]\nb: *a\n", "line 2: expected no alias"),
        (
            "version: 1\nhosts: {a: , b: }\nlinks: [{between: [a, b], capacity_Bps: 1,"
            " count: 1000000000}]\n",
            "a network of over",
        ),
        (
            "version: 1\nhosts: {a: , b: }\nlinks: [{from: a, to: b, capacity_Bps: 1,"
            " count: 1000000000}]\n",
            "a network of over",
        ),
        ("version: 1\nbuilder: fat_tree\nparameters: {k: 400}\n", "a network of over"),
        ("version: 1\nbuilder: torus\nparameters: {shape: [9999, 9999]}\n", "a network of over"),
        *(
            (
                f"version: 1\nbuilder: {name}\nparameters: {{{parameter}: 1000000000}}\n",
                "a network of over",
            )
            for name, parameter in (
                ("two_layer_clos", "hosts"),
                ("two_layer_clos", "tors"),
                ("double_sided", "hosts"),
                ("double_sided", "cores"),
                ("rail_optimised", "hosts"),
                ("rail_optimised", "spines"),
            )
        ),
        (
            "version: 1\nbuilder: fat_tree\nparameters: {server: {gpus: 1000000000,"
            " pcie_switches: 1, nics: 1}}\n",
            "a network of over",
        ),
    ],
)
def test_other_yaml_errors(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        parse_yaml(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"none\.yaml.*No such file"):
        load_topology(tmp_path / "none.yaml")


def test_many_links_between_two_nodes_take_no_longer_each() -> None:
    builder = TopologyBuilder()
    builder.cable(builder.node("a", "host"), builder.node("b", "host"), Link(1.0), 100_000)
    assert builder.edges[-1].name == "b->a#99999"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TopologyError, match=r"huge\.yaml: it holds more than 64 MiB"):
        load_topology(file.name)


def test_csv_groups() -> None:
    # S1 repeats in both PSW groups and is another switch there.
    text = "ip,DSW,PSW,ASW\na,G1,P1,S1\nb,G1,P1,S1\nc,G1,P1,S2\nd,G1,P2,S1\n"
    topology = parse_csv(text)
    count = Counter(node.kind for node in topology.nodes.values())
    assert (count["tor"], count["aggregation"], count["core"]) == (6, 8, 32)
    assert [len(topology.candidate_paths("a", to)[0]) for to in "bcd"] == [2, 4, 6]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: expected the columns ip,DSW,PSW,ASW"),
        ("ip,DSW\n", "line 1"),
        ("ip,DSW,PSW,ASW\na,G1,P1,S1\nb,G1,P1\n", "line 3: 'b,G1,P1'"),
        ("ip,DSW,PSW,ASW\na,G1,,S1\n", "line 2"),
        ("ip,DSW,PSW,ASW\na,G1,P1,S1\na,G1,P1,S2\n", "line 3: host 'a' is there twice"),
        ("ip,DSW,PSW,ASW\n", "there is no host"),
        (f"ip,DSW,PSW,ASW\n{'x' * 200_000},a,b,c\n", "field larger than"),
        ("ip,DSW,PSW,ASW\na,G1,P1,S1\nb,G2,P2,S1\n", "cannot be reached"),
    ],
)
def test_csv_errors_name_the_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "topo.csv"
    file.write_text(text)
    with pytest.raises(TopologyError, match=words):
        load_topology(file)


@pytest.mark.skipif(not REAL_CSV.exists(), reason=f"the public topology is not at {REAL_CSV}")
def test_the_published_topology() -> None:
    topology = load_topology(REAL_CSV)
    assert len(topology.hosts) == 847
    groups = {(n.kind, name.rsplit("/", 1)[0]) for name, n in topology.nodes.items()}
    counts = Counter(kind for kind, _ in groups)
    assert (counts["tor"], counts["aggregation"]) == (119, 3)


ADDRESSED = """
version: 1
hosts: {h0: , h1: }
switches: {s0: tor}
links:
  - {between: [h0, s0], capacity_Bps: 1e9}
  - {between: [s0, h1], capacity_Bps: 1e9}
addresses: {h0: [10.0.0.2], s0: [10.0.0.1, "fd00:0::1"]}
"""


def test_addresses_name_nodes_and_survive_a_round_trip():
    topology = parse_yaml(ADDRESSED)
    assert topology.addresses == {"h0": ("10.0.0.2",), "s0": ("10.0.0.1", "fd00::1")}
    assert topology.node_at == {"10.0.0.2": "h0", "10.0.0.1": "s0", "fd00::1": "s0"}
    assert parse_yaml(dump_yaml(topology)).addresses == topology.addresses


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{h9: [10.0.0.9]}", "'h9'"),
        ("{h0: [10.0.0.300]}", "10.0.0.300"),
        ("{h0: [10.0.0.2], s0: [10.0.0.2]}", "10.0.0.2"),
    ],
)
def test_addresses_that_cant_be_right_are_refused(line, problem):
    text = ADDRESSED.replace('{h0: [10.0.0.2], s0: [10.0.0.1, "fd00:0::1"]}', line)
    with pytest.raises(TopologyError, match=problem):
        parse_yaml(text)
