"""``crux topology check`` finds every mistake alone, and none in the paper's networks."""

from __future__ import annotations

import pytest

from crux_torch.network.builders import BUILDERS, crux_testbed, rail_optimised
from crux_torch.network.check import Finding, compare, examine, far_hosts
from crux_torch.network.loaders import dump_yaml, parse_yaml
from crux_torch.network.topology import Topology

CLOS = """
version: 1
hosts: {h0: , h1: , h2: , h3: }
switches: {t0: tor, t1: tor, a0: aggregation, a1: aggregation}
links:
  - {between: [h0, t0], capacity_Bps: 4}
  - {between: [h1, t0], capacity_Bps: 4}
  - {between: [h2, t1], capacity_Bps: 4}
  - {between: [h3, t1], capacity_Bps: 4}
  - {between: [t0, a0], capacity_Bps: 2}
  - {between: [t0, a1], capacity_Bps: 2}
  - {between: [t1, a0], capacity_Bps: 2}
  - {between: [t1, a1], capacity_Bps: 2}
addresses:
  h0: [10.0.0.1]
  h1: [10.0.0.2]
  h2: [10.0.0.3]
  h3: [10.0.0.4]
  a0: [10.1.0.1]
  a1: [10.1.0.2]
"""


def found(text: str, state: str = "wrong") -> list[str]:
    return [finding.text for finding in examine(parse_yaml(text)) if finding.state == state]


def test_a_network_with_all_that_paths_need() -> None:
    assert examine(parse_yaml(CLOS)) == [
        Finding("info", "hosts: 4; switches: 2 tor, 2 aggregation"),
        Finding("info", "all tor: 128 bps below, 64 bps above, oversubscription 2:1"),
    ]


def test_addresses_are_missing_only_where_there_is_a_choice() -> None:
    assert found(
        CLOS.replace("  h3: [10.0.0.4]\n", "").replace("  a0: [10.1.0.1]\n", ""), "missing"
    ) == [
        "addresses of hosts h3: no paths over them are chosen",
        "addresses of switches a0: no paths over them are chosen",
    ]
    alone = CLOS.partition("addresses")[0]
    assert found(alone, "missing") == ["there are no addresses: jobs are ordered, but get no paths"]
    tree = alone.replace("  - {between: [t0, a1], capacity_Bps: 2}\n", "")
    tree = tree.replace("  - {between: [t1, a1], capacity_Bps: 2}\n", "")
    tree = tree.replace(", a1: aggregation", "")
    assert found(tree, "missing") == [
        "no host has a choice of paths: jobs are ordered, but get no paths"
    ]


def more(link: str) -> tuple[str, str]:
    """A further link."""
    return "addresses:", f"  - {{{link}}}\naddresses:"


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (
            [("between: [t1, a1]", "from: t1, to: a1")],
            "from t1 to a1 there are 1 links, and 0 back",
        ),
        (
            [("[t0, a1], capacity_Bps: 2", "[t0, a1], capacity_Bps: 1")],
            "tor-aggregation links of t0 differ: 1 × 16 bps, 1 × 8 bps",
        ),
        (
            [("between: [t0, a1]", "from: t0, to: a1"), more("from: a1, to: t0, capacity_Bps: 1")],
            "the directions of a1->t0 have 16 bps and 8 bps",
        ),
        (
            [("a1: agg", "t9: tor, a1: agg"), more("between: [a0, t9], capacity_Bps: 2")],
            "tor t9 leads to a0 alone",
        ),
        ([("a1: agg", "t9: tor, a1: agg")], "tor t9 leads nowhere"),
        ([("h3", "H2.example.com")], "hosts h2, H2.example.com may be one"),
        ([more("between: [h3, t1], capacity_Bps: 4")], "host h3 has 2 links up, the others 1"),
    ],
)
def test_each_mistake(changes: list[tuple[str, str]], finding: str) -> None:
    text = CLOS
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    assert finding in found(text)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_nothing_looks_wrong_in_what_builders_make(name: str) -> None:
    parameters = {"fat_tree": {"k": 4}, "torus": {"shape": (3, 3)}}
    small = {"rail_optimised": {"hosts": 8, "hosts_per_group": 4, "spines": 2}} | parameters
    topology = BUILDERS[name](**small.get(name, {}))
    states = {finding.state for finding in examine(topology)}
    assert states == {"missing", "info"}


def test_oversubscription_of_the_paper_s_testbed_and_of_rails() -> None:
    def oversubscription(topology: Topology) -> list[str]:
        return [
            f.text.rpartition(" ")[2] for f in examine(topology) if "oversubscription" in f.text
        ]

    assert oversubscription(crux_testbed()) == ["1:1"]
    rails = rail_optimised(hosts=16, hosts_per_group=8, spines=2)
    assert oversubscription(rails) == ["8:1"]
    assert oversubscription(parse_yaml(dump_yaml(rails))) == ["8:1"]


def test_many_mistakes_are_counted() -> None:
    hosts = ", ".join(f"h{i}: , H{i}: " for i in range(60))
    text = f"version: 1\nhosts: {{{hosts}}}\nswitches: {{t: tor}}\nlinks:\n" + "".join(
        f"  - {{between: [{h}{i}, t], capacity_Bps: 1}}\n" for i in range(60) for h in "hH"
    )
    assert len(found(text)) == 51
    assert found(text)[-1] == "and 10 more"


def test_answers_are_compared_with_the_file() -> None:
    topology = parse_yaml(CLOS)
    assert far_hosts(topology, "h0", 16) == ["h2"]
    assert compare(topology, "h0", {"h2": {"10.1.0.1", "10.1.0.2"}}) == []
    texts = [text for _, text in compare(topology, "h0", {"h2": {"10.1.0.1", "10.9.9.9"}})]
    assert texts == [
        "10.9.9.9 answers on the way to h2, and is not in the file",
        "switches that did not answer from any of their addresses: a1",
    ]
    below = [text for _, text in compare(topology, "h0", {"h1": {"10.1.0.1"}})]
    assert below == ["a0 (10.1.0.1) answers on the way to h1, by no path in the file"]
