"""Fabrics that answer probes, joined: the map that comes out against the true one."""

from __future__ import annotations

from ipaddress import ip_address
from itertools import permutations
from typing import Any

import pytest
from answering import AnsweringNetwork, clos2, clos3, rails
from hypothesis import given
from hypothesis import strategies as st
from map_score import Score, pairs_of, path_of, score
from msgspec.structs import replace

from crux_torch.network.discover.assembly import DEFAULT_Bps
from crux_torch.network.discover.evidence import canonical
from crux_torch.network.discover.join import Discovered, join
from crux_torch.network.loaders import dump_yaml, parse_yaml

PORTS = range(50000, 50040)

TOLD: dict[str, tuple[Any, dict[str, Any]]] = {
    "/31": (clos2(), {}),
    "/30": (clos2(), {"numbering": "/30"}),
    "/24": (clos2(), {"numbering": "/24", "gateway": "leaf"}),
    "/24 of two ends": (clos2(), {"numbering": "/24 ends"}),
    "two leaves": (clos2(leaves=2), {"numbering": "/24 ends"}),
    "IPv6": (clos2(), {"numbering": "/127"}),
    "loopbacks": (clos2(), {"mode": "loopback"}),
    "two leaves, loopbacks": (clos2(leaves=2), {"mode": "loopback"}),
    "loopbacks of spines": (clos2(), {"modes": {f"spine{j}": "loopback" for j in range(4)}}),
    "unequal spines": (clos2(unequal=2), {}),
    "a silent spine": (clos2(), {"silent": ["spine1"]}),
    "a silent leaf": (clos2(), {"silent": ["leaf1"]}),
    "three layers": (clos3(), {}),
    "three layers, loopbacks": (clos3(), {"mode": "loopback"}),
    "a silent core": (clos3(), {"silent": ["core0-0"]}),
    "a silent aggregation": (clos3(), {"silent": ["agg0-0"]}),
    "rails": (rails(), {}),
}


def discovered(network: AnsweringNetwork) -> Discovered:
    return join({"discover": network.fragment(all_pairs(network), PORTS)})


def all_pairs(network: AnsweringNetwork) -> list[tuple[str, str]]:
    """Between all interfaces of different hosts, of whatever rail."""
    nic = {address: network.nic(address) for address in network.end_at}
    return [(a, b) for a, b in permutations(nic, 2) if nic[a].host != nic[b].host]


def scored(network: AnsweringNetwork, found: Discovered) -> Score:
    return score(network, found, pairs_of(network), PORTS)


@pytest.mark.parametrize("case", TOLD)
def test_a_fabric_is_found_as_it_is(case: str) -> None:
    topology, options = TOLD[case]
    network = AnsweringNetwork(topology, **options)
    found = discovered(network)
    assert scored(network, found) == (1, 1, 1, 1)
    switches = [n for n, node in found.topology.nodes.items() if node.host is None]
    expected = [n for n, node in topology.nodes.items() if node.host is None]
    assert len(switches) == len(expected)
    assert sorted(found.topology.nodes[n].kind for n in switches) == sorted(
        topology.nodes[n].kind for n in expected
    )


@pytest.mark.parametrize("case", TOLD)
def test_paths_that_were_seen_are_candidates(case: str) -> None:
    topology, options = TOLD[case]
    network = AnsweringNetwork(topology, **options)
    found = discovered(network)
    for src, dst in pairs_of(network)[:40]:
        for port in PORTS[:10]:
            path = path_of(network, found, (src, dst, port))
            assert path is not None
            ends = found.topology.ends(path[0])[0], found.topology.ends(path[-1])[1]
            assert path in found.topology.candidate_paths(*ends)


def test_where_answers_vary_with_the_way_back_all_is_shared_and_said() -> None:
    network = AnsweringNetwork(clos2(), mode="back")
    found = discovered(network)
    assert scored(network, found).recall == 1
    assert any("answer from the way back" in note for note in found.notes)


def test_a_map_is_written_and_read_as_any_topology() -> None:
    found = discovered(AnsweringNetwork(clos3()))
    again = parse_yaml(dump_yaml(found.topology))
    assert again.nodes == found.topology.nodes
    assert again.edges == found.topology.edges
    assert again.addresses == found.topology.addresses


@pytest.mark.parametrize(
    ("told_Bps", "reached_Bps", "expected_Bps"),
    [(0.0, 30e9, 30e9), (0.0, 1e9, DEFAULT_Bps), (5e9, 30e9, 5e9)],
)
def test_an_interface_without_a_speed_carries_what_a_job_reached(
    told_Bps: float, reached_Bps: float, expected_Bps: float
) -> None:
    network = AnsweringNetwork(clos2())
    fragment = network.fragment(all_pairs(network), PORTS)
    speeds = {"speed_Bps": told_Bps, "switch_speed_Bps": 0.0, "reached_Bps": reached_Bps}
    hosts = tuple(
        replace(host, nics=tuple(replace(nic, **speeds) for nic in host.nics))
        for host in fragment.hosts
    )
    found = join({"job": replace(fragment, hosts=hosts)})
    assert set(found.topology.capacity_Bps.values()) == {expected_Bps}
    assert (found.assumed == set(found.topology.capacity_Bps)) == (told_Bps == 0)


def test_jobs_that_saw_parts_have_together_what_one_run_has() -> None:
    network = AnsweringNetwork(clos2())
    pairs = pairs_of(network)
    jobs = {f"job{i}": network.fragment(pairs[i::5], PORTS) for i in range(5)}
    found = join(jobs)
    again = join(dict(reversed(jobs.items())))
    assert dump_yaml(again.topology) == dump_yaml(found.topology)
    assert again.notes == found.notes
    assert scored(network, found) == (1, 1, 1, 1)


@given(
    st.one_of(
        st.ip_addresses().map(str),
        st.sampled_from(
            ["127.0.0.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "0.0.0.0", "0.1.2.3"]
        ),
        st.lists(st.text("0123456789", max_size=3), max_size=5).map(".".join),
        st.text(max_size=12),
    )
)
def test_addresses_have_the_form_that_the_standard_library_gives_them(address: str) -> None:
    try:
        parsed = ip_address(address)
    except ValueError:
        assert canonical(address) is None
        return
    alone = not (parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified)
    assert canonical(address) == (str(parsed) if alone else None)
