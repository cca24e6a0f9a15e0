"""Paths that connections were seen to take, as candidates of a topology."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from networks import LEAF_SPINE, networks

from crux_torch.network.discover.fragment import SeenPair, SeenPath
from crux_torch.network.discover.seen_paths import contradictions, taken_candidate
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.routes import routers
from crux_torch.network.topology import Link, Topology, TopologyBuilder

TOPOLOGY = parse_yaml(LEAF_SPINE)
SPINES = ("10.100.0.2", "10.100.17.2")


def pair(*paths: SeenPath, src: str = "h0", dst: str = "h1") -> SeenPair:
    return SeenPair(src, "10.0.0.2", dst, "10.1.0.2", paths)


def over(*hops: str | None, connections: int = 1) -> SeenPath:
    return SeenPath(hops, connections=connections)


def test_the_router_that_answered_tells_the_candidate() -> None:
    assert taken_candidate([pair(over(None, SPINES[0], None))], TOPOLOGY) == 0
    assert taken_candidate([pair(over("10.0.0.1", SPINES[1]))], TOPOLOGY) == 1
    by_ipv6 = SeenPair("h0", "fd00::1", "h1", "fd00::2", (over(None, SPINES[1]),))
    assert taken_candidate([by_ipv6], TOPOLOGY) == 1


def test_most_connections_count_and_of_as_many_the_first_candidate() -> None:
    less, more = over(None, SPINES[0], connections=2), over(None, SPINES[1], connections=3)
    assert taken_candidate([pair(less, more)], TOPOLOGY) == 1
    assert taken_candidate([pair(less), pair(more), pair(less)], TOPOLOGY) == 0
    even = over(None, SPINES[1], connections=2)
    assert taken_candidate([pair(even, less)], TOPOLOGY) == 0


def test_what_tells_nothing_or_fits_no_candidate_is_not_known() -> None:
    for hops in (
        (),
        (None, None, None),
        ("10.9.9.9", None, "10.9.9.8"),
        (SPINES[0],),
        (None, SPINES[0], None, SPINES[1]),
        ("10.0.1.2", SPINES[0]),
    ):
        assert taken_candidate([pair(over(*hops))], TOPOLOGY) is None
    assert taken_candidate([], TOPOLOGY) is None
    # An answer of the destination itself is no router.
    assert taken_candidate([pair(over(None, SPINES[1], None, "10.1.0.2"))], TOPOLOGY) == 1


def test_one_candidate_is_taken_whatever_answered() -> None:
    single = SeenPair("h0", "10.0.0.2", "h2", "10.0.1.2", (over("10.7.7.7", SPINES[0]),))
    assert taken_candidate([single], TOPOLOGY) == 0


def rails() -> Topology:
    """Two hosts of two NICs, each pair of NICs below a switch of its own."""
    builder = TopologyBuilder()
    for n in range(2):
        builder.node(f"rail{n}", "tor")
        builder.addresses[f"rail{n}"] = (f"10.{n}.9.1",)
    for h in range(2):
        host = builder.node(f"h{h}", "host")
        for n in range(2):
            nic = builder.node(f"h{h}/nic{n}", "nic", host)
            builder.cable(nic, f"rail{n}", Link(1e9))
            builder.cable(nic, host, Link(1e9))
            builder.addresses[nic] = (f"10.{n}.{h}.2",)
    return builder.build()


def test_addresses_of_nics_tell_rails_apart_even_where_no_switch_answers() -> None:
    topology = rails()
    for n in range(2):
        ends = ("h0", f"10.{n}.0.2", "h1", f"10.{n}.1.2")
        seen = SeenPair(*ends, (over(f"10.{n}.9.1"),))
        assert taken_candidate([seen], topology) == n
        other = SeenPair(*ends, (over(f"10.{1 - n}.9.1"),))
        assert taken_candidate([other], topology) is None
        assert contradictions([seen], topology) == ()
        (said,) = contradictions([other], topology)
        assert said == (
            f"hop 1 from h0 to h1 is rail{1 - n} (10.{1 - n}.9.1), where the topology has rail{n}"
        )


def test_a_contradiction_names_the_first_router_that_no_candidate_has_there() -> None:
    good = pair(over("10.9.9.9", SPINES[0], "10.9.9.8"), over(None, SPINES[1]))
    assert contradictions([good], TOPOLOGY) == (), "the leaves' addresses are not given"
    assert contradictions([pair(over(SPINES[0]))], TOPOLOGY) == (
        "hop 1 from h0 to h1 is spine0 (10.100.0.2), where the topology has leaf0",
    )
    assert contradictions([pair(over(None, "10.9.9.9"))], TOPOLOGY) == (
        "hop 2 from h0 to h1 is 10.9.9.9, where the topology has spine0, spine1",
    )
    assert contradictions([pair(over(None, SPINES[0], None, SPINES[1]))], TOPOLOGY) == (
        "hop 4 from h0 to h1 is spine1 (10.100.17.2), where no path has a hop",
    )
    strangers = pair(over(SPINES[0]), dst="h9"), pair(over(SPINES[0]), dst="h0")
    assert contradictions(strangers, TOPOLOGY) == ()


def addressed(topology: Topology) -> Topology:
    """The same network whose switches have an address each."""
    switches = [name for name, node in topology.nodes.items() if node.host is None]
    given = {name: (f"10.{n}.0.1",) for n, name in enumerate(switches)}
    return Topology(topology.nodes, topology.edges, given)


@given(networks().map(addressed), st.data())
def test_a_candidates_own_routers_give_that_candidate_and_contradict_nothing(
    topology: Topology, data: st.DataObject
) -> None:
    src, dst = (data.draw(st.sampled_from(topology.hosts)) for _ in range(2))
    if src == dst:
        return
    candidates = [routers(path, topology) for path in topology.candidate_paths(src, dst)]
    nodes = data.draw(st.sampled_from(candidates))
    silent = data.draw(st.sets(st.integers(0, len(nodes) - 1)))
    hops = tuple(
        None if n in silent else topology.addresses[name][0] for n, name in enumerate(nodes)
    )
    seen = SeenPair(src, "10.255.0.1", dst, "10.255.0.2", (over(*hops),))
    taken = taken_candidate([seen], topology)
    assert contradictions([seen], topology) == ()
    if taken is None:
        assert len(candidates) > 1
        assert not any(hops)
    else:
        found = candidates[taken]
        assert all(n in silent or found[n] == name for n, name in enumerate(nodes))
        assert silent or found == nodes
