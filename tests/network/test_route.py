"""From a chosen path to a plan and to routes: properties on random networks, small exact cases."""

from __future__ import annotations

from ipaddress import ip_address

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import LEAF_SPINE, networks

from crux_torch.network.builders import BUILDERS, GpuServer
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.routes import (
    MAX_HOP_ADDRESSES,
    HostRoute,
    PlannedHop,
    PlannedPath,
    Routes,
    planned_paths,
    routers,
    routes_of,
)
from crux_torch.network.topology import Link, Topology, TopologyBuilder


def routes(topology: Topology, *chosen: tuple[str, str, int]) -> Routes:
    """The routes of a job whose pairs of hosts take the candidates of these numbers."""
    paths = {(src, dst): topology.candidate_paths(src, dst)[n] for src, dst, n in chosen}
    told = msgspec.json.encode(planned_paths(paths, topology))
    planned = msgspec.json.decode(told, type=tuple[PlannedPath, ...])
    return routes_of(planned, topology.hosts, topology)


def address(node: int, interface: int) -> str:
    return str(ip_address(0x0A000000 + 256 * node + interface))


def with_addresses(topology: Topology, without: frozenset[str] = frozenset()) -> Topology:
    """``topology`` with two addresses of every node that is not in ``without``."""
    addresses = {
        node: (address(i, 1), address(i, 2))
        for i, node in enumerate(topology.nodes)
        if node not in without
    }
    return Topology(topology.nodes, topology.edges, addresses)


def matches(route: HostRoute, path: tuple[str, ...], topology: Topology) -> bool:
    """Whether a probe along ``path`` would be answered as ``route`` wants it."""
    nodes = routers(path, topology)
    return all(
        ttl <= len(nodes) and set(topology.addresses.get(nodes[ttl - 1], ())) & set(addresses)
        for ttl, addresses in route.hops
    )


@settings(deadline=None, max_examples=120)
@given(networks(), st.data())
def test_hops_tell_the_wanted_path_from_every_other(bare: Topology, data: st.DataObject) -> None:
    switches = [n for n in bare.nodes if bare.host_of(n) is None]
    silent = data.draw(st.frozensets(st.sampled_from(switches), max_size=2))
    topology = with_addresses(bare, silent)
    candidates = topology.candidate_paths("h0", "h1")
    chosen = data.draw(st.integers(0, len(candidates) - 1))
    wanted = routers(candidates[chosen], topology)
    end = topology.ends(candidates[chosen][-1])[1]
    there = [c for c in candidates if topology.ends(c[-1])[1] == end]
    others = {routers(c, topology) for c in there} - {wanted}

    found, problems = routes(topology, ("h0", "h1", chosen))
    there_only = tuple(route for route in found if route.src == "h0")

    if not others:
        assert there_only == ()
    elif not there_only:
        # Some other path goes by the same nodes wherever the wanted one has addresses.
        known = [t for t, node in enumerate(wanted, 1) if node not in silent]
        assert any(all(len(o) >= t and o[t - 1] == wanted[t - 1] for t in known) for o in others)
        assert any(name in problem for problem in problems for name in silent)
    else:
        (route,) = there_only
        assert (route.src, route.dst) == ("h0", "h1")
        assert route.destinations == topology.addresses[end]
        taken = {routers(c, topology) for c in there if matches(route, c, topology)}
        assert taken == {wanted}
        ttls = [ttl for ttl, _ in route.hops]
        assert ttls == sorted(set(ttls))
        for ttl in ttls:
            assert any(len(o) < ttl or o[ttl - 1] != wanted[ttl - 1] for o in others)
        assert msgspec.json.decode(msgspec.json.encode(route), type=HostRoute) == route


@pytest.mark.parametrize(("chosen", "spine"), [(0, "spine0"), (1, "spine1")])
def test_a_leaf_and_spine_network_differs_at_the_second_router(chosen: int, spine: str) -> None:
    topology = parse_yaml(LEAF_SPINE)
    (there, back), problems = routes(topology, ("h0", "h1", chosen))
    assert (there.src, there.dst, back.src, back.dst) == ("h0", "h1", "h1", "h0")
    assert there.destinations == ("10.1.0.2", "fd00::2")
    assert back.destinations == ("10.0.0.2",)
    assert there.hops == back.hops == ((2, topology.addresses[spine]),)
    assert problems == ()


def test_bytes_that_flow_back_have_a_path_of_their_own() -> None:
    topology = parse_yaml(LEAF_SPINE)
    (there, back), _ = routes(topology, ("h0", "h1", 0), ("h1", "h0", 1))
    assert there.hops == ((2, topology.addresses["spine0"]),)
    assert back.hops == ((2, topology.addresses["spine1"]),)


@settings(deadline=None, max_examples=60)
@given(networks(), st.data())
def test_the_way_back_passes_the_same_routers(bare: Topology, data: st.DataObject) -> None:
    topology = with_addresses(bare)
    candidates = topology.candidate_paths("h0", "h1")
    chosen = data.draw(st.integers(0, len(candidates) - 1))
    forward = {route.src: route for route in routes(topology, ("h0", "h1", chosen)).routes}
    if "h1" in forward:
        mirrored = routers(candidates[chosen], topology)[::-1]
        back = topology.candidate_paths("h1", "h0")
        taken = {routers(c, topology) for c in back if matches(forward["h1"], c, topology)}
        assert mirrored in taken


def test_pairs_without_a_choice_get_none() -> None:
    found, problems = routes(parse_yaml(LEAF_SPINE), ("h0", "h2", 0), ("h1", "h0", 1))
    assert [(r.src, r.dst) for r in found] == [("h1", "h0"), ("h0", "h1")]
    assert problems == ()


def test_the_way_back_is_looked_up_if_links_cost_more_in_one_direction() -> None:
    """From h1 the only shortest path crosses spine1, so no bytes come back over spine0."""
    topology = parse_yaml(
        LEAF_SPINE.replace(
            "{between: [leaf1, spine0], capacity_Bps: 1e8}",
            "{from: spine0, to: leaf1, capacity_Bps: 1e8}\n"
            "  - {from: leaf1, to: spine0, capacity_Bps: 1e8, cost: 2}",
        )
    )
    assert not topology.is_symmetric
    assert [r.src for r in routes(topology, ("h0", "h1", 0)).routes] == ["h0"]
    assert [r.src for r in routes(topology, ("h1", "h0", 0)).routes] == ["h0"]


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ('  h1: [10.1.0.2, "fd00::2"]\n', "no addresses of h1"),
        ("  spine0: [10.100.0.2, 10.100.16.2]\n", "no addresses of spine0"),
    ],
)
def test_what_lacks_addresses_is_named_and_left_to_the_network(gone: str, named: str) -> None:
    topology = parse_yaml(LEAF_SPINE.replace(gone, ""))
    found, problems = routes(topology, ("h0", "h1", 0), ("h2", "h1", 0), ("h1", "h0", 1))
    assert problems == (named,)
    assert [(r.src, r.dst) for r in found if r.dst == "h0"] == [("h1", "h0")]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (PlannedPath("h0", "h2", ()), "does not join hosts of the job"),
        (PlannedPath("leaf0", "h1", ()), "does not join hosts of the job"),
        (PlannedPath("h0", "elsewhere", ()), "unknown node 'elsewhere'"),
    ],
)
def test_a_path_that_does_not_join_the_jobs_hosts_is_refused(
    path: PlannedPath, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        routes_of([path], ("h0", "h1"), parse_yaml(LEAF_SPINE))


def test_a_path_that_no_known_router_tells_is_named() -> None:
    topology = parse_yaml(LEAF_SPINE)
    untold = PlannedPath("h0", "h1", ())
    assert routes_of([untold], ("h0", "h1"), topology) == Routes(
        (), ("no router that tells a path from h0 to h1",)
    )
    unknown = PlannedPath("h0", "h1", (PlannedHop(2, 2, "gone"),))
    assert routes_of([unknown], ("h0", "h1"), topology).problems == ("no addresses of gone",)


def test_a_path_ends_at_the_nic_that_has_the_destination_address() -> None:
    topology = with_addresses(
        BUILDERS["rail_optimised"](hosts=8, hosts_per_group=4, spines=2), frozenset()
    )
    candidates = topology.candidate_paths("h0", "h7")
    nics = {topology.ends(path[-1])[1] for path in candidates}
    assert len(nics) > 1
    for chosen, path in enumerate(candidates[:16]):
        (route, _), problems = routes(topology, ("h0", "h7", chosen))
        assert problems == ()
        assert route.destinations == topology.addresses[topology.ends(path[-1])[1]]


def test_a_three_layer_network_is_told_apart_at_the_layers_between() -> None:
    topology = with_addresses(
        BUILDERS["fat_tree"](k=4, server=GpuServer(gpus=1, nics=1, pcie_switches=1))
    )
    hosts = topology.hosts
    candidates = topology.candidate_paths(hosts[0], hosts[-1])
    assert len(candidates) == 4
    for chosen, path in enumerate(candidates):
        (route, _), _ = routes(topology, (hosts[0], hosts[-1], chosen))
        assert [ttl for ttl, _ in route.hops] == [2, 3, 4]
        assert [a for _, a in route.hops] == [
            topology.addresses[node] for node in routers(path, topology)[1:4]
        ]


def test_no_more_addresses_than_a_route_takes() -> None:
    bare = BUILDERS["fat_tree"](k=4, server=GpuServer(gpus=1, nics=1, pcie_switches=1))
    hosts = bare.hosts
    path = bare.candidate_paths(hosts[0], hosts[-1])[0]
    _, up, core, down, _ = routers(path, bare)

    def topology(counts: dict[str, int]) -> Topology:
        addresses = {
            node: [address(i, n) for n in range(1, counts.get(node, 1) + 1)]
            for i, node in enumerate(bare.nodes)
        }
        return Topology(bare.nodes, bare.edges, addresses)

    # A core leads to one aggregation switch on either side, so these can be left out.
    pairs = (hosts[0], hosts[-1], 0), (hosts[-1], hosts[0], 3)
    (route, _), problems = routes(topology({up: 9, down: 9}), *pairs)
    assert [ttl for ttl, _ in route.hops] == [3, 4]
    assert problems == ()
    (route, _), _ = routes(topology({core: MAX_HOP_ADDRESSES}), *pairs)
    assert [ttl for ttl, _ in route.hops] == [3]
    (route,), (problem,) = routes(topology({core: 17}), *pairs)
    assert route.src == hosts[-1]
    assert "17 addresses" in problem
    assert core in problem


def test_of_a_large_switch_the_address_of_the_cable_counts() -> None:
    """40 leaves below two spines: a spine has 40 addresses, and answers from one on each path."""
    leaves, spines = 40, 2
    builder = TopologyBuilder()
    for s in range(spines):
        builder.node(f"s{s}", "aggregation")
    for leaf in range(leaves):
        builder.node(f"t{leaf}", "tor")
        builder.node(f"h{leaf}", "host")
        builder.addresses[f"h{leaf}"] = [f"10.1.{leaf}.2"]
        builder.addresses[f"t{leaf}"] = [f"10.1.{leaf}.1"]
        builder.cable(f"h{leaf}", f"t{leaf}", Link(1e9))
        for s in range(spines):
            builder.cable(f"t{leaf}", f"s{s}", Link(1e9))
            at_spine, at_leaf = f"10.{10 + s}.{leaf}.0", f"10.{10 + s}.{leaf}.1"
            builder.addresses[f"s{s}"] = [*builder.addresses.get(f"s{s}", ()), at_spine]
            builder.addresses[f"t{leaf}"] = [*builder.addresses[f"t{leaf}"], at_leaf]
    topology = builder.build()
    for number, path in enumerate(topology.candidate_paths("h3", "h7")):
        spine = routers(path, topology)[1]
        (there, back), problems = routes(topology, ("h3", "h7", number), ("h7", "h3", number))
        assert problems == ()
        assert there.hops == ((2, (f"10.{10 + int(spine[1:])}.3.0",)),)
        assert back.hops == ((2, (f"10.{10 + int(spine[1:])}.7.0",)),)
