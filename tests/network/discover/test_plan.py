"""Plans of discovery: who probes whom and when, played over simulated networks."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from survey_world import SurveyWorld, address_of, host_name

from crux_torch.network.discover.fragment import SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.discover.plan import Plan, PlanRules, busiest_share, planes
from crux_torch.network.discover.room import Load
from crux_torch.network.discover.tasks import DiscoverError, Peer, Search, Searched, Sounded

_LEAVES = st.lists(st.integers(0, 4), min_size=2, max_size=14)


def played(world: SurveyWorld, rules: PlanRules | None = None) -> tuple[Plan, SurveyWorld]:
    plan = Plan(world.hosts, rules or PlanRules(), world.clock)
    return plan, world.play(plan)


@given(_LEAVES, st.booleans())
def test_every_leaf_is_found_and_every_two_are_searched(leaf_of: list[int], own: bool) -> None:
    plan, world = played(SurveyWorld(leaf_of, own_gateway=own))
    assert plan.placed == (len(leaf_of), len(leaf_of))
    assert plan.leaves == len(set(leaf_of))
    searched = {
        (leaf_of[world.index(s.source)], leaf_of[world.index(s.peer)]) for s in world.searches()
    }
    assert searched == set(itertools.permutations(set(leaf_of), 2))
    assert plan.problems() == []


@given(_LEAVES)
def test_no_probe_is_sent_twice_and_each_host_shows_its_leaf(leaf_of: list[int]) -> None:
    plan, world = played(SurveyWorld(leaf_of))
    asked = [(type(o), o.source, o.peer) for o in world.outcomes]
    assert len(asked) == len(set(asked))
    # Each host told its first hop, or is told of by all that are below its leaf.
    sources = {o.source for o in world.outcomes}
    if len(set(leaf_of)) > 1 or len(leaf_of) > 1:
        assert len(sources) == len(leaf_of)
    assert {pair.src for pair in plan.fragment().pairs} == {host.name for host in world.hosts}


@pytest.mark.parametrize(("leaves", "below"), [(6, 6), (8, 16), (16, 8)])
def test_probes_grow_with_hosts_times_leaves(leaves: int, below: int) -> None:
    hosts = leaves * below
    leaf_of = [i % leaves for i in range(hosts)]
    _, world = played(SurveyWorld(leaf_of))
    assert len(world.soundings()) <= hosts * (leaves + 1)
    assert len(world.searches()) == 2 * leaves * (leaves - 1)
    _, told = played(SurveyWorld(leaf_of, own_gateway=False))
    # Gateways that several hosts have tell their leaves apart.
    assert len(told.soundings()) <= 3 * hosts + leaves * leaves
    assert len(told.searches()) == len(world.searches())


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=40),
    st.integers(1, 6),
    st.floats(1.0, 200.0),
    st.floats(1.0, 200.0),
)
def test_no_router_gets_more_probes_than_the_bound_in_any_second(
    leaf_of: list[int], spines: int, rate_per_s: float, router_rate_per_s: float
) -> None:
    """A second may begin at any time, and chance may send all probes of a host over one spine."""
    rules = PlanRules(rate_per_s=rate_per_s, router_rate_per_s=router_rate_per_s)
    plan, world = played(SurveyWorld(leaf_of, spines), rules)
    assert world.most_in_a_second() <= router_rate_per_s
    assert all(task.rate_per_s <= rate_per_s for _, task in world.started)
    assert plan.phase == "done"


@pytest.mark.parametrize("most", [1, 3])
def test_chance_counts_as_the_worst_where_few_hosts_probe(most: int) -> None:
    """One host may send all to one spine of four; of a hundred, not all do."""
    load = Load()
    for count in range(1, 101):
        load = load.plus(most, 0.25)
        assert load.mean <= load.bound <= load.most == most * count
        if count < 10:
            assert load.bound == load.most
    assert load.bound < 0.8 * load.most
    # A sum of 100 draws of one in four passes it in fewer than one of 10^9 cases.
    passed = sum(
        math.comb(100, n) * 0.25**n * 0.75 ** (100 - n)
        for n in range(math.floor(load.bound / most) + 1, 101)
    )
    assert passed < 1e-9


@given(_LEAVES, st.integers(1, 40))
def test_a_discovery_goes_on_where_it_ended(leaf_of: list[int], steps: int) -> None:
    whole = SurveyWorld(leaf_of)
    whole.play(Plan(whole.hosts, PlanRules(), whole.clock))
    first = SurveyWorld(leaf_of)
    first.play(
        Plan(first.hosts, PlanRules(), first.clock), lambda world: len(world.outcomes) >= steps
    )
    rest = SurveyWorld(leaf_of)
    plan = Plan(rest.hosts, PlanRules(), rest.clock)
    for outcome in first.outcomes:
        plan.take(outcome)
    rest.play(plan)
    asked = [(type(o), o.source, o.peer) for o in [*first.outcomes, *rest.outcomes]]
    assert len(asked) == len(set(asked))
    assert plan.leaves == len(set(leaf_of))
    searched = {(s.source, s.peer) for s in [*first.searches(), *rest.searches()]}
    assert len(searched) == plan.searches[1]


@given(_LEAVES.filter(lambda leaves: len(leaves) > 2), st.data())
def test_hosts_may_leave_at_any_time(leaf_of: list[int], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, len(leaf_of) - 1), max_size=len(leaf_of) - 1))
    at = data.draw(st.integers(1, 30))
    world = SurveyWorld(leaf_of)
    plan = Plan(world.hosts, PlanRules(), world.clock)

    def leave(world: SurveyWorld) -> bool:
        if len(world.outcomes) >= at:
            for i in gone:
                plan.lose(host_name(i))
        return False

    world.play(plan, leave)
    assert plan.phase == "done"
    assert len([p for p in plan.problems() if "left before the end" in p]) in (0, len(gone))


def test_a_task_that_finds_nothing_ends_its_host() -> None:
    world = SurveyWorld([0, 1, 2])
    plan = Plan(world.hosts, PlanRules(), world.clock)
    (began,) = [host for host, _ in plan.start()][:1]
    plan.finish(began)
    assert plan.problems()[0] == (
        f"host {began} left before the end: paths from and to it may be missing"
    )
    assert began not in [host for host, _ in plan.start()]


def test_searches_of_the_unreachable_are_left_out_and_named() -> None:
    plan = Plan(SurveyWorld([0, 1]).hosts, PlanRules())
    ((host, task),) = plan.start()
    assert host == "h1"
    plan.take(Sounded(task.source, Peer("h0", address_of(0)), problem="nobody answered"))
    plan.finish(host)
    assert plan.start() == []
    assert plan.phase == "done"
    assert plan.problems() == [
        f"{address_of(i)} of host h{i} reaches no other host" for i in (0, 1)
    ]


def test_a_failed_search_and_a_short_one_are_named() -> None:
    world = SurveyWorld([0, 1])
    plan = Plan(world.hosts, PlanRules(), itertools.count(0, 2).__next__)

    def spoilt(outcome: Searched) -> Searched:
        if outcome.source.host == "h0":
            return Searched(outcome.source, outcome.peer, problem="no route")
        assert outcome.pair is not None
        ends = (outcome.pair.src, outcome.pair.src_address, outcome.pair.dst)
        pair = SeenPair(*ends, outcome.pair.dst_address, outcome.pair.paths, 0.5)
        return Searched(outcome.source, outcome.peer, pair)

    while plan.phase != "done":
        for host, task in plan.start():
            for outcome in world.results(task)[0]:
                plan.take(spoilt(outcome) if isinstance(outcome, Searched) else outcome)
            plan.finish(host)
    assert set(plan.problems()) == {
        "no path is known from h0 to h1: no route",
        "the search from h1 to h0 ended with confidence 0.500",
    }


def test_strangers_in_a_state_file_are_left_out() -> None:
    plan = Plan(SurveyWorld([0, 1]).hosts, PlanRules())
    plan.take(Sounded(Peer("h7", "10.0.0.7"), Peer("h0", address_of(0)), 1, sent=9))
    plan.take(Searched(Peer("h0", address_of(0)), Peer("h7", "10.0.0.7"), sent=9))
    assert plan.sent == 0
    assert plan.fragment().pairs == ()


def test_planes_are_kept_apart() -> None:
    plan, world = played(SurveyWorld([0, 0, 1, 1], planes=2))
    for outcome in world.outcomes:
        assert outcome.source.address.split(".")[1] == outcome.peer.address.split(".")[1]
    assert plan.leaves == 4
    assert plan.placed == (8, 8)


def nics(name: str, **addresses: str) -> SeenHost:
    return SeenHost(
        name, tuple(SeenNic(nic, tuple(given.split())) for nic, given in addresses.items())
    )


def test_nics_of_one_name_are_a_plane_else_those_at_one_place() -> None:
    same = [nics("a", eth2="10.0.0.1", eth10="10.1.0.1"), nics("b", eth10="10.1.0.2")]
    assert planes(same) == [[Peer("a", "10.1.0.1"), Peer("b", "10.1.0.2")]]
    other = [
        nics("a", eth2="10.0.0.1", eth10="10.1.0.1"),
        nics("b", ens1="10.0.0.2", ens2="10.1.0.2"),
    ]
    assert planes(other) == [
        [Peer("a", "10.0.0.1"), Peer("b", "10.0.0.2")],
        [Peer("a", "10.1.0.1"), Peer("b", "10.1.0.2")],
    ]


def test_addresses_of_no_use_are_left_out() -> None:
    hosts = [
        nics("a", docker0="172.17.0.1", eth0="fe80::1 10.0.0.1 fd00::1", lo="127.0.0.1"),
        nics("b", docker0="172.17.0.1", eth0="10.0.0.2 fd00::2"),
    ]
    assert planes(hosts) == [[Peer("a", "10.0.0.1"), Peer("b", "10.0.0.2")]]
    assert planes(hosts, ipv6=True) == [[Peer("a", "fd00::1"), Peer("b", "fd00::2")]]
    with pytest.raises(DiscoverError, match="2 hosts, and no two of them"):
        Plan([nics("a", eth0="10.0.0.1"), nics("b", eth0="fd00::2")], PlanRules())


def test_the_busiest_router_between_the_leaves() -> None:
    def pair(*paths: tuple[tuple[str | None, ...], int]) -> SeenPair:
        seen = tuple(SeenPath(hops, tuple(range(1, ports + 1))) for hops, ports in paths)
        return SeenPair("a", "10.0.0.1", "b", "10.0.0.2", seen)

    assert busiest_share(pair((("l", "s0", "m"), 3), (("l", "s1", "m"), 1))) == 0.75
    assert busiest_share(pair((("l", None, "m"), 3))) == 1
    assert busiest_share(pair((("l", "m"), 3))) == 0
    assert busiest_share(pair()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_thousand_hosts(own: bool) -> None:
    world = SurveyWorld([i // 32 for i in range(1024)], spines=8, own_gateway=own)
    began = time.process_time()
    plan, _ = played(world)
    cpu_s = time.process_time() - began
    assert plan.leaves == 32
    assert plan.searches == (2 * 32 * 31, 2 * 32 * 31)
    assert world.most_in_a_second() <= 200
    assert len(world.soundings()) <= 1024 * 33
    searches = [task for _, task in world.started if isinstance(task, Search)]
    print(
        f"1,024 hosts, 32 leaves: {plan.sent} probes, {world.now:.0f} s of discovery, "
        f"{cpu_s:.1f} s of planning, {len(searches)} searches"
    )
