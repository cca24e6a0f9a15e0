"""Joining, piece by piece: names, capacities, what is silent or hidden, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from crux_torch.network.addresses import cable_mates
from crux_torch.network.discover.assembly import UNSEEN, DEFAULT_Bps
from crux_torch.network.discover.evidence import Nic
from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.discover.join import Discovered, join
from crux_torch.network.topology import TopologyError

Hops = tuple[str | None, ...]


def address(host: str) -> str:
    return f"10.9.{host[1:]}.2"


def host(name: str, speed_Bps: float = 0.0, switch: str = "") -> SeenHost:
    return SeenHost(name, (SeenNic("eth0", (address(name),), speed_Bps, switch),))


def pair(src: str, dst: str, *paths: Hops, sprays: bool = False) -> SeenPair:
    seen = tuple(SeenPath(hops) for hops in paths)
    return SeenPair(src, address(src), dst, address(dst), seen, 0.99, sprays)


def fragment(*pairs: SeenPair, hosts: tuple[SeenHost, ...] = ()) -> Fragment:
    names = dict.fromkeys(name for p in pairs for name in (p.src, p.dst))
    return Fragment.of(hosts=hosts or tuple(map(host, names)), pairs=pairs)


def alone(*pairs: SeenPair, hosts: tuple[SeenHost, ...] = ()) -> Discovered:
    return join({"run": fragment(*pairs, hosts=hosts)})


def nodes(found: Discovered, src: str, dst: str, hops: Hops) -> list[str]:
    path = found.path_between(Nic(src, "eth0"), Nic(dst, "eth0"), hops)
    assert path is not None
    return [found.topology.ends(link)[1] for link in path[:-1]]


#: h1 and h2 below one leaf, h3 below another; two spines, told by /31 numbering.
OVER_1: Hops = ("10.0.0.1", "10.1.0.1", "10.1.0.4")
OVER_2: Hops = ("10.0.0.1", "10.1.0.3", "10.1.0.6")
BACK_1: Hops = ("10.0.0.9", "10.1.0.5", "10.1.0.0")
FABRIC = (
    pair("h1", "h3", OVER_1, OVER_2),
    pair("h3", "h1", BACK_1, ("10.0.0.9", "10.1.0.7", "10.1.0.2")),
    pair("h2", "h1", ("10.0.0.5",)),
)


def test_two_directions_of_a_cable_lead_through_one_router() -> None:
    found = alone(*FABRIC)
    there, back = nodes(found, "h1", "h3", OVER_1), nodes(found, "h3", "h1", BACK_1)
    assert there == back[::-1] == ["tor-10.0.0.1", "aggregation-10.1.0.1", "tor-10.0.0.9"]
    assert found.topology.is_symmetric
    assert found.topology.candidate_paths("h1", "h2") == (("h1->tor-10.0.0.1", "tor-10.0.0.1->h2"),)
    assert found.certain == set(found.topology.links)
    assert found.notes == ()


def test_names_by_lldp_need_most_votes_below_a_leaf() -> None:
    told = (host("h1", switch="leaf-a"), host("h2", switch="leaf-a"), host("h3"))
    assert "leaf-a" in alone(*FABRIC, hosts=told).topology.nodes
    liar = fragment(FABRIC[2], hosts=(host("h1", switch="x"), host("h2", switch="x")))
    honest = fragment(*FABRIC, hosts=told)
    found = join({"a": honest, "b": honest, "liar": liar})
    assert "leaf-a" in found.topology.nodes
    assert "x" not in found.topology.nodes


def test_two_switches_of_one_name_keep_their_addresses_as_names() -> None:
    told = tuple(host(name, switch="leaf") for name in ("h1", "h2", "h3"))
    assert {"tor-10.0.0.1", "tor-10.0.0.9"} <= alone(*FABRIC, hosts=told).topology.nodes.keys()


def test_capacities_are_told_or_assumed_from_below() -> None:
    told = (host("h1", 2e9), host("h2", 2e9), host("h3"))
    found = alone(*FABRIC, hosts=told)
    capacity_Bps = found.topology.capacity_Bps
    assert capacity_Bps["h1->tor-10.0.0.1"] == 2e9
    assert "h1->tor-10.0.0.1" not in found.assumed
    assert capacity_Bps["h3->tor-10.0.0.9"] == 2e9
    assert {"h3->tor-10.0.0.9", "tor-10.0.0.1->aggregation-10.1.0.1"} <= found.assumed
    unknown = alone(*FABRIC).topology.capacity_Bps
    assert set(unknown.values()) == {DEFAULT_Bps}


def test_one_owner_has_one_vote_on_a_speed() -> None:
    honest = fragment(*FABRIC, hosts=(host("h1", 2e9), host("h2", 2e9), host("h3", 2e9)))
    liar = fragment(*FABRIC, hosts=(host("h1", 1.0), host("h2", 1.0), host("h3", 1.0)))
    found = join({"a": honest, "b": honest, "liar": liar})
    assert set(found.topology.capacity_Bps.values()) == {2e9}


def test_sprayed_packets_tell_the_leaves_only() -> None:
    crossed: Hops = (OVER_1[0], OVER_1[1], OVER_2[2])
    found = alone(pair("h1", "h3", OVER_1, crossed, sprays=True))
    assert len([n for n in found.topology.nodes.values() if n.kind == "aggregation"]) == 1
    assert any("sprayed" in note and "h1 to h3" in note for note in found.notes)


def test_hosts_without_a_router_between_them_share_a_bridge() -> None:
    found = alone(pair("h1", "h2", ()), pair("h2", "h3", ()))
    assert found.topology.candidate_paths("h1", "h3") == (
        ("h1->bridge-h1/eth0", "bridge-h1/eth0->h3"),
    )
    assert any("bridge or a tunnel" in note for note in found.notes)


def test_leaves_beside_each_other_may_hide_routers() -> None:
    found = alone(pair("h1", "h3", ("10.0.0.1", "10.0.0.9")))
    assert any("tunnel may hide routers" in note for note in found.notes)


def test_leaves_that_answer_from_one_anycast_address_are_not_one() -> None:
    gate = "10.0.0.254"
    found = alone(
        pair("h1", "h3", (gate, *OVER_1[1:]), (gate, *OVER_2[1:])),
        pair("h3", "h1", (gate, *BACK_1[1:])),
    )
    first, spine, last = nodes(found, "h1", "h3", (gate, *OVER_1[1:]))
    assert len({first, spine, last}) == 3


def test_parts_that_no_path_joins_are_joined_by_what_nobody_saw() -> None:
    found = alone(
        pair("h1", "h2", ("10.0.0.1",)),
        pair("h3", "h4", ("10.0.0.9",)),
        hosts=tuple(map(host, ("h1", "h2", "h3", "h4", "h5"))),
    )
    (path,) = found.topology.candidate_paths("h1", "h4")
    assert UNSEEN in {found.topology.ends(link)[0] for link in path}
    assert found.topology.candidate_paths("h1", "h5")
    assert any(UNSEEN in note for note in found.notes)
    assert any("no path seen: h5" in note for note in found.notes)


JOINED = """
import sys, msgspec
from crux_torch.network.discover.fragment import Fragment
from crux_torch.network.discover.join import join
from crux_torch.network.loaders import dump_yaml
fragments = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Fragment])
print(dump_yaml(join(fragments).topology))
"""


def test_processes_with_other_hash_seeds_have_the_same_network() -> None:
    """The fragments have one first router that answers from several addresses."""
    over: Hops = ("10.0.0.4", None, "10.1.0.8")
    other: Hops = ("10.0.4.4", "10.1.0.11", None)
    fragments = {
        "a": fragment(pair("h0", "h1", ("10.0.0.4", None, "10.1.0.12"), (), other)),
        "b": fragment(pair("h0", "h1", ()), pair("h2", "h0", ("10.0.0.4", "10.1.0.3", None))),
        "c": fragment(
            pair("h0", "h1", (), over), pair("h2", "h0", (), other), pair("h2", "h1", over)
        ),
    }
    found = {
        subprocess.run(
            [sys.executable, "-c", JOINED],
            input=msgspec.json.encode(fragments),
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(6)
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (SeenPair("h1", "10.9.1.99", "h3", address("h3"), (SeenPath(OVER_1),)), "interfaces"),
        (SeenPair("h7", address("h7"), "h3", address("h3"), (SeenPath(OVER_1),)), "interfaces"),
        (pair("h1", "h3", (*OVER_1, OVER_1[1])), "twice"),
        (pair("h1", "h3", (OVER_1[0], address("h2"), OVER_1[2])), "is a host"),
    ],
)
def test_what_can_not_be_is_refused_and_said(bad: SeenPair, why: str) -> None:
    found = alone(*FABRIC, bad, hosts=tuple(map(host, ("h1", "h2", "h3"))))
    assert found.topology.edges == alone(*FABRIC).topology.edges
    assert any("refused" in note and why in note for note in found.notes)


def test_without_a_host_there_is_no_network() -> None:
    with pytest.raises(TopologyError, match="no host"):
        join({"empty": Fragment()})


@pytest.mark.parametrize(
    ("addresses", "mates"),
    [
        (("10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.3"), {"10.0.0.2": "10.0.0.3"}),
        (("10.0.0.1", "10.0.0.2", "10.0.0.5", "10.0.0.6"), {"10.0.0.5": "10.0.0.6"}),
        (("10.0.0.1", "10.0.0.254", "10.0.1.7"), {"10.0.0.254": "10.0.0.1"}),
        (("2001:db8::2", "2001:db8::3"), {"2001:db8::2": "2001:db8::3"}),
        (("10.0.0.9", "?h1/eth0", "no address"), {}),
    ],
)
def test_two_ends_of_a_cable_by_their_numbers(
    addresses: tuple[str, ...], mates: dict[str, str]
) -> None:
    found = cable_mates(addresses)
    assert found.items() >= mates.items()
    assert all(found[found[one]] == one for one in found)
    assert bool(found) == bool(mates)
