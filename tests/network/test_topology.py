"""The graph: what it refuses, and its paths against networkx on random networks."""

from __future__ import annotations

import zlib
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import networks
from shared_core import shared_core

from crux_torch.network.paths import hashed_choice, spread
from crux_torch.network.topology import Edge, Link, Node, Topology, TopologyBuilder, TopologyError


def reference_paths(topology: Topology, src: str, dst: str) -> set[tuple[str, ...]]:
    """All shortest paths by networkx, in three layers: source's host, network, target's host."""
    first, last = topology.host_of(src), topology.host_of(dst)
    layer_of = {first: 0, None: 1, last: 2}
    graph = nx.MultiDiGraph()
    for edge in topology.edges:
        owners = topology.host_of(edge.src), topology.host_of(edge.dst)
        gpus = {n for n in (edge.src, edge.dst) if topology.nodes[n].kind == "gpu"}
        if all(owner in layer_of for owner in owners) and gpus <= {src, dst}:
            u, v = (layer_of[owner] for owner in owners)
            if u <= v:
                graph.add_edge(edge.src, edge.dst, key=edge.name, cost=edge.link.cost)
    found: set[tuple[str, ...]] = set()
    for nodes in nx.all_shortest_paths(graph, src, dst, weight="cost"):
        partial: list[tuple[str, ...]] = [()]
        for u, v in pairwise(nodes):
            parallel = graph[u][v]
            cheapest = min(data["cost"] for data in parallel.values())
            keys = [k for k, data in parallel.items() if data["cost"] == cheapest]
            partial = [(*p, k) for p in partial for k in keys]
        found.update(partial)
    return found


@settings(deadline=None, max_examples=60)
@given(networks())
def test_candidates_of_gpus_are_all_the_shortest_paths(topology: Topology) -> None:
    switches = [name for name, node in topology.nodes.items() if node.host is None]
    for src in ("h0/gpu0", *switches):
        for dst in {"h1/gpu1", "h1/nic0", "h0/nic0", switches[0], switches[-1]} - {src}:
            found = topology.candidate_paths(src, dst, limit=None)
            assert len(set(found)) == len(found) == topology.path_count(src, dst)
            assert set(found) == reference_paths(topology, src, dst)


@settings(deadline=None, max_examples=60)
@given(networks())
def test_candidates_of_hosts_are_the_best_over_their_nics(topology: Topology) -> None:
    def cost(path: tuple[str, ...]) -> int:
        return sum(topology.links[name].cost for name in path)

    pairs = [
        path
        for a in topology.inside("h0", "nic")
        for b in topology.inside("h1", "nic")
        for path in topology.candidate_paths(a, b, limit=None)
    ]
    # A NIC may also lead through its own host to a better placed one; then that one is the start.
    direct = [p for p in pairs if not any("pcie" in name for name in p)]
    best = min(map(cost, direct))
    found = topology.candidate_paths("h0", "h1", limit=None)
    assert set(found) == {p for p in direct if cost(p) == best}


@settings(deadline=None, max_examples=40)
@given(networks(), st.integers(1, 12))
def test_a_limit_keeps_some_of_the_same_paths_in_the_same_order(
    topology: Topology, limit: int
) -> None:
    every = topology.candidate_paths("h0", "h1", limit=None)
    some = topology.candidate_paths("h0", "h1", limit)
    assert len(some) == min(limit, len(every))
    assert list(some) == [p for p in every if p in set(some)]


@given(st.integers(1, 5000), st.integers(1, 200))
def test_spread_gives_distinct_ranks(total: int, limit: int) -> None:
    ranks = list(spread(total, limit))
    assert len(set(ranks)) == len(ranks) == min(total, limit)
    assert all(0 <= r < total for r in ranks)


def test_spread_takes_every_branch_of_a_power_of_two() -> None:
    ranks = list(spread(2048, 64))
    for radix in (2, 4, 8, 16):
        assert {r % radix for r in ranks} == set(range(radix)), "branches far from the start"
        assert {r * radix // 2048 for r in ranks} == set(range(radix)), "branches at the start"


def test_a_path_names_its_links_and_stays_empty_within_one_place() -> None:
    topology = shared_core(["a", "b", "c"], 1.25e9)
    assert topology.hosts == ("a", "b", "c")
    assert topology.candidate_paths("b", "a") == (("up:b", "core", "down:a"),)
    assert topology.candidate_paths("c", "c") == ((),)
    assert set(topology.capacity_Bps.values()) == {1.25e9}


def test_hosts_never_forward_for_others() -> None:
    builder = TopologyBuilder()
    for name in ("a", "b", "c"):
        builder.node(name, "host")
    for name in ("s", "t", "u"):
        builder.node(name, "tor")
    # a-s, b on both s and t, c-t: through b would be shorter than through u.
    for x, y in (("a", "s"), ("b", "s"), ("b", "t"), ("c", "t"), ("s", "u"), ("u", "t")):
        builder.cable(x, y, Link(1.0, cost=3 if "u" in (x, y) else 1))
    (path,) = builder.build().candidate_paths("a", "c")
    assert path == ("a->s", "s->u", "u->t", "t->c")


def test_the_topology_can_not_be_changed() -> None:
    topology = shared_core(["a", "b"], 1e9)
    with pytest.raises(TypeError):
        topology.capacity_Bps["core"] = 0.0  # type: ignore[index]
    with pytest.raises(TypeError):
        topology.nodes["x"] = Node("host", "x")  # type: ignore[index]


GOOD = {"a": Node("host", "a"), "b": Node("host", "b"), "s": Node("tor")}


def cable(name: str, src: str, dst: str, **figures: float) -> Edge:
    return Edge(name, src, dst, Link(**{"capacity_Bps": 1.0, **figures}))  # type: ignore[arg-type]


WHOLE = [cable(src + dst, src, dst) for src, dst in ("as", "sa", "bs", "sb")]


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ({"s": Node("tor")}, [], "there is no host"),
        ({**GOOD, "x": Node("hub")}, WHOLE, "unknown kind 'hub'"),
        ({**GOOD, "g": Node("gpu")}, WHOLE, "a gpu needs a host"),
        ({**GOOD, "g": Node("gpu", "s")}, WHOLE, "a gpu needs a host; 's'"),
        ({**GOOD, "t": Node("tor", "a")}, WHOLE, "a tor belongs to no host"),
        ({**GOOD, "c": Node("host", "a")}, WHOLE, "a host belongs to itself"),
        (GOOD, [*WHOLE, cable("as", "a", "s")], "link 'as' is there twice"),
        (GOOD, [*WHOLE, cable("x", "a", "z")], "unknown end 'z'"),
        (GOOD, [*WHOLE, cable("x", "a", "a")], "both ends are 'a'"),
        (GOOD, [*WHOLE, cable("x", "a", "b")], "joins two hosts directly"),
        (GOOD, [*WHOLE, cable("x", "a", "s", capacity_Bps=0)], "capacity 0"),
        (GOOD, [*WHOLE, cable("x", "a", "s", capacity_Bps=float("nan"))], "capacity nan"),
        (GOOD, [*WHOLE, cable("x", "a", "s", delay_s=-1)], "delay -1"),
        (GOOD, [*WHOLE, cable("x", "a", "s", cost=0)], "cost 0"),
        (GOOD, WHOLE[:3], "host 'b' cannot be reached from 'a'"),
        (GOOD, [WHOLE[0], WHOLE[1], WHOLE[3]], "host 'b' cannot reach 'a'"),
    ],
)
def test_what_is_wrong_is_named(nodes: dict[str, Node], edges: list[Edge], words: str) -> None:
    with pytest.raises(TopologyError, match=words.replace("(", r"\(")):
        Topology(nodes, edges)


def test_unknown_ends_are_named() -> None:
    topology = shared_core(["a", "b"], 1e9)
    with pytest.raises(TopologyError, match="unknown host or node 'z'"):
        topology.candidate_paths("a", "z")
    with pytest.raises(TopologyError, match="unknown host 'z'"):
        topology.inside("z")
    with pytest.raises(TopologyError, match="unknown node 'z'"):
        topology.host_of("z")


def test_the_hash_is_zlibs_crc32_over_the_packet_bytes() -> None:
    v4 = bytes([10, 0, 0, 1, 10, 0, 0, 2, 0xC0, 1, 0x12, 0xB7, 17])
    assert hashed_choice("10.0.0.1", "10.0.0.2", 0xC001, 1 << 32) == zlib.crc32(v4)
    v6 = bytes(15) + b"\1" + bytes(15) + b"\2" + v4[8:]
    assert hashed_choice("::1", "::2", 0xC001, 1 << 32) == zlib.crc32(v6)


def test_source_ports_reach_every_path() -> None:
    ports = range(49152, 49152 + 1024)
    assert {hashed_choice("h0/nic0", "h2/nic0", port, 32) for port in ports} == set(range(32))
