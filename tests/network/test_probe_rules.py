"""The rules of probing on a played network: when it stops, how fast it asks, what it believes."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from probe_fakes import Network, Router, leaf_and_spines

from crux_torch.network.probe.discovery import Discovery
from crux_torch.network.probe.packets import Hops
from crux_torch.network.probe.prober import PathMap
from crux_torch.network.probe.rules import FLOOR_per_s, Pacer, Rules, confidence_after, draws_needed
from crux_torch.network.topology import Link, Topology, TopologyBuilder

TTLS = (1, 2, 3)


def shuffled(seed: int = 0, count: int = 5000) -> list[int]:
    ports = list(range(50000, 50000 + count))
    random.Random(seed).shuffle(ports)
    return ports


def search(
    net: Network,
    rules: Rules | None = None,
    ports: list[int] | None = None,
    ttls: tuple[int, ...] = TTLS,
    until: float = 60.0,
) -> Discovery:
    rules = rules or Rules()
    found = Discovery(net, net.clock, shuffled() if ports is None else ports, ttls, rules)
    found.run(until)
    return found


def path_of(net: Network, port: int) -> Hops:
    """What a search should say of a port."""
    return tuple((ttl, r.address) for ttl, r in enumerate(net._route(port), start=1))


@given(st.integers(1, 400), st.floats(0.01, 0.999999))
def test_the_needed_draws_are_the_fewest_that_satisfy_the_bound(k: int, confidence: float) -> None:
    n = draws_needed(k, confidence)
    assert confidence_after(k, n) >= confidence
    assert n == 1 or confidence_after(k, n - 1) < confidence


# The multipath detection algorithm's own bound is over all k + 1 paths; this one over the missing.
@pytest.mark.parametrize(
    ("paths", "confidence", "draws"),
    [(1, 0.5, 1), (1, 0.75, 2), (1, 0.99, 7), (2, 0.99, 12), (4, 0.99, 21), (8, 0.99, 40)],
)
def test_known_numbers_of_draws(paths: int, confidence: float, draws: int) -> None:
    assert draws_needed(paths, confidence) == draws
    exact = Fraction(paths, paths + 1) ** draws
    assert exact <= 1 - Fraction(str(confidence)) < exact * Fraction(paths + 1, paths)


@pytest.mark.parametrize(("paths", "confidence"), [(0, 0.5), (1, 1.0), (1, -0.1)])
def test_a_bound_that_makes_no_sense_is_refused(paths: int, confidence: float) -> None:
    with pytest.raises(ValueError):
        draws_needed(paths, confidence)


def _probability_to_stop_early(paths: int, confidence: float) -> float:
    """Exactly, for equal paths: some stage k < paths ends without the next one showing."""
    succeeds = 1.0
    for k in range(1, paths):
        succeeds *= 1 - (k / paths) ** draws_needed(k, confidence)
    return 1 - succeeds


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99, 0.999])
def test_over_all_stages_equal_paths_are_missed_hardly_more_often(confidence: float) -> None:
    for paths in range(2, 65):
        # The bound is of the last stage; the earlier ones add little, and it is computed here.
        assert _probability_to_stop_early(paths, confidence) <= 1.2 * (1 - confidence)


def test_searches_miss_as_often_as_computed() -> None:
    paths, confidence, rounds = 4, 0.9, 1500
    expected = _probability_to_stop_early(paths, confidence)
    missed = 0
    for seed in range(rounds):
        route, _ = leaf_and_spines(paths, seed)
        net = Network(route)
        found = search(net, Rules(confidence, 1e5), shuffled(seed, 300), (2,))
        missed += found.path_count < paths
    sigma = (rounds * expected * (1 - expected)) ** 0.5
    assert abs(missed - rounds * expected) < 5 * sigma
    assert missed > 0, "or this test proves nothing"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**20), st.sampled_from([0.9, 0.99, 0.999]))
@example(8, 0, 0.99)
def test_what_is_told_is_true_and_the_stopping_rule_holds(
    spines: int, seed: int, confidence: float
) -> None:
    route, _ = leaf_and_spines(spines, seed)
    net = Network(route)
    found = search(net, Rules(confidence), shuffled(seed))
    assert found.ended == "confident"
    hops = found.hops
    assert hops == {port: path_of(net, port) for port in hops}
    assert list(hops) == shuffled(seed)[: len(hops)]
    paths = list(hops.values())
    known = len(set(paths))
    new_at = max(i for i, path in enumerate(paths) if path not in paths[:i])
    run = len(paths) - 1 - new_at
    # No more ports than needed, and the confidence told is that of the run.
    assert run == draws_needed(known, confidence)
    assert found.confidence == confidence_after(known, run)
    assert found.sent == found.answered == len(net.sent) == 3 * len(hops), "every port at every TTL"
    assert found.inferred == ()


def test_more_ports_of_each_path_where_asked() -> None:
    route, _ = leaf_and_spines(4)
    net = Network(route)
    found = search(net, Rules(ports_per_path=20))
    counts = [list(found.hops.values()).count(path) for path in set(found.hops.values())]
    assert len(counts) == 4
    assert min(counts) >= 20
    assert len(found.hops) < 4 * 20 * 3


def test_a_wanted_path_ends_the_search_once_it_has_ports_enough() -> None:
    route, layer = leaf_and_spines(8)
    wanted = ((2, layer[3].address),)
    found = search(Network(route), Rules(via=wanted, via_ports=3))
    assert found.ended == "found"
    assert sum(dict(hops)[2] == layer[3].address for hops in found.hops.values()) == 3
    # The path is found but rare: go on beyond the confidence until the ports are there.
    found = search(Network(route), Rules(0.5, via=wanted, via_ports=40))
    assert found.ended == "found"
    # No port leads there: the confidence ends it.
    found = search(Network(route), Rules(via=((2, "192.0.2.1"),), via_ports=1))
    assert found.ended == "confident"


def test_it_ends_with_the_time_and_says_what_it_knows() -> None:
    route, _ = leaf_and_spines(8, limit_per_s=1.0)
    net = Network(route)
    found = search(net, until=3.0)
    assert found.ended == "time"
    assert 3.0 <= net.now < 3.01
    assert 0 < len(found.hops) < 40
    assert found.confidence < 0.99
    assert found.hops == {port: path_of(net, port) for port in found.hops}


def test_ports_in_use_are_passed_over() -> None:
    route, _ = leaf_and_spines(2)
    taken = set(shuffled()[:10:2])
    found = search(Network(route, taken))
    assert found.ended == "confident"
    assert not taken & set(found.hops)
    found = search(Network(route, set(shuffled(count=20))), ports=shuffled(count=20))
    assert (found.ended, found.hops, found.confidence) == ("ports", {}, 0)
    found = search(Network(route), ports=shuffled(count=5))
    assert (found.ended, len(found.hops)) == ("ports", 5)


def test_no_router_on_the_way_is_one_path_of_no_hops() -> None:
    found = search(Network(lambda port: []), ttls=())
    assert set(found.hops.values()) == {()}
    assert found.sent == 0


def test_a_path_that_is_shorter_ends_at_the_destination() -> None:
    near, far = Router("10.0.0.1"), Router("10.0.1.1")
    net = Network(lambda port: [near] if port % 2 else [near, far])
    found = search(net, ttls=(1, 2))
    assert {hops[1][1] for hops in found.hops.values()} == {far.address, Network.destination}


def test_the_rate_is_kept() -> None:
    route, _ = leaf_and_spines(8)
    net = Network(route)
    search(net, Rules(rate_per_s=50))
    times = [at for at, _ in net.sent]
    assert len(times) > 100
    for first, last in itertools.combinations(range(0, len(times), 10), 2):
        # A wait that ended late is made up for, by five milliseconds at most.
        assert last - first <= 50 * (times[last] - times[first] + 0.005) + 1


@pytest.mark.parametrize("spines", [2, 8])
def test_routers_with_linux_default_limits_are_asked_slowly(spines: int) -> None:
    route, _ = leaf_and_spines(spines, limit_per_s=1.0)
    net = Network(route)
    found = search(net)
    assert found.ended == "confident"
    assert found.path_count == spines
    assert found.hops == {port: path_of(net, port) for port in found.hops}
    # Each leaf is one router: most ports need not ask it.
    assert found.inferred == (1, 3)
    # Without a limit it would be 200 a second.
    assert found.sent < 60 * net.now
    per_ttl = {ttl: sum(probe.ttl == ttl for _, probe in net.sent) for ttl in TTLS}
    assert per_ttl[1] < 3 * per_ttl[2]


def test_a_slow_switch_that_answers_from_its_ingress_interface_is_inferred() -> None:
    route, layer = leaf_and_spines(4)
    far = {s.address: Router(f"10.0.1.{j}", limit_per_s=0.5, burst=1) for j, s in enumerate(layer)}
    net = Network(lambda port: [*route(port)[:2], far[route(port)[1].address]])
    found = search(net)
    assert (found.ended, found.path_count, found.inferred) == ("confident", 4, (3,))
    assert found.hops == {port: path_of(net, port) for port in found.hops}


def test_slow_spines_are_asked_about_every_port_because_the_hash_decides() -> None:
    route, layer = leaf_and_spines(4)
    for spine in layer:
        spine.limit_per_s = 2.0
    found = search(Network(route))
    assert (found.ended, found.inferred) == ("confident", ())


@settings(max_examples=25, deadline=None)
@given(st.floats(0.0, 0.4), st.integers(0, 1000), st.integers(1, 4))
def test_lost_answers_cost_time_and_not_truth(loss: float, seed: int, spines: int) -> None:
    route, _ = leaf_and_spines(spines, seed, loss=loss)
    net = Network(route, seed=seed)
    found = search(net, until=600.0)
    assert found.ended == "confident"
    for port, hops in found.hops.items():
        told = [(ttl, address) for ttl, address in hops if address is not None]
        assert set(told) <= set(path_of(net, port))


def test_a_pacer_slows_by_what_is_lost_and_recovers() -> None:
    pacer = Pacer(100.0)
    now = 0.0

    def eight(answered: int) -> None:
        nonlocal now
        for i in range(8):
            now += 1
            pacer.result(now, i < answered, now)

    eight(6)
    assert pacer.rate_per_s == 100.0, "a quarter lost is tolerated"
    eight(4)
    assert pacer.rate_per_s == 50.0
    assert pacer.slowed
    eight(0)
    assert pacer.rate_per_s == 6.25, "never by more than eight"
    eight(0)
    eight(0)
    assert pacer.rate_per_s == FLOOR_per_s
    for _ in range(13):
        eight(8)
    assert 90.0 < pacer.rate_per_s < 100.0
    eight(8)
    assert pacer.rate_per_s == 100.0
    assert not pacer.slowed


def test_losses_from_before_a_change_of_the_rate_count_once() -> None:
    pacer = Pacer(100.0)
    for _ in range(8):
        pacer.result(1.0, False, 2.0)
    assert pacer.rate_per_s == 12.5
    for _ in range(20):
        pacer.result(1.5, False, 3.0)
    assert pacer.rate_per_s == 12.5


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=300))
def test_a_pacer_stays_in_its_bounds(results: list[tuple[float, bool]]) -> None:
    pacer = Pacer(200.0)
    now = 0.0
    for sent_at, answered in results:
        now += 0.1
        pacer.result(sent_at, answered, now)
        before = pacer.next_at
        pacer.sent(now)
        assert FLOOR_per_s <= pacer.rate_per_s <= 200.0
        assert pacer.next_at >= before + 1 / 200 - 1e-9
        assert pacer.attempts >= 2


def test_a_silent_router_is_told_from_a_slow_one() -> None:
    route, layer = leaf_and_spines(2)
    layer[1].silent = True
    net = Network(route)
    found = search(net, until=60.0)
    assert found.ended == "confident"
    seen = {dict(hops)[2] for hops in found.hops.values()}
    assert seen == {layer[0].address, None}
    assert {dict(hops)[3] for hops in found.hops.values()} == {"10.0.1.1"}
    times = [at for at, probe in net.sent if probe.ttl == 3]
    assert len(times) < 40
    # Nobody slowed down for it: what answers is asked at full speed.
    assert all(not layer.pacer.slowed for layer in found._layers.values())


@pytest.mark.parametrize("limit_per_s", [None, 20.0])
def test_silent_routers_beside_others_are_paths_where_they_count(limit_per_s: float | None) -> None:
    def network() -> Network:
        spines = [Router(f"spine{j}", limit_per_s, silent=j == 1) for j in range(3)]
        leaf, last = Router("leaf0"), Router("leaf1")
        return Network(lambda port: [leaf, spines[port % 3], last])

    found = search(network(), Rules(count_silent=True))
    assert found.ended == "confident"
    assert {hops[1][1] for hops in found.hops.values()} == {"spine0", None, "spine2"}
    assert set(found.quiet) == {port for port in found.hops if port % 3 == 1}
    assert found.path_count == 3
    # Without it they are what nobody answered for.
    assert search(network()).path_count == 2


def test_a_silent_layer_costs_little() -> None:
    route, layer = leaf_and_spines(4)
    for router in layer:
        router.silent = True
    net = Network(route)
    found = search(net)
    assert found.ended == "confident"
    assert net.now < 6
    assert set(found.hops.values()) == {((1, "10.0.0.1"), (2, None), (3, "10.0.1.1"))}
    assert found.path_count == 1


@pytest.mark.parametrize("limit_per_s", [0.6, 1.0, 3.0])
def test_routers_whose_answers_are_spent_are_not_taken_for_silent(limit_per_s: float) -> None:
    for seed in range(5):
        route, _ = leaf_and_spines(4, seed, limit_per_s=limit_per_s, spent=True)
        net = Network(route)
        found = search(net, Rules(0.9), shuffled(seed), until=120.0)
        assert found.ended == "confident"
        told = {port: hops for port, hops in found.hops.items() if all(a for _, a in hops)}
        assert told == {port: path_of(net, port) for port in told}
        assert len(told) >= 0.8 * len(found.hops)


def test_nobody_answers() -> None:
    net = Network(lambda port: [Router("10.0.0.1", silent=True)] * 3)
    found = search(net, until=30.0)
    assert net.now < 10
    assert found.answered == 0
    assert not any(address for hops in found.hops.values() for _, address in hops)


def test_ports_are_probed_again_and_stay_where_they_were() -> None:
    route, _ = leaf_and_spines(4)
    net = Network(route)
    found = search(net)
    before = (found.hops, found.confidence, found.path_count, found.ended)
    assert found.recheck(net.now + 10) == (6, 0, False)
    assert (found.hops, found.confidence, found.path_count, found.ended) == before


@pytest.mark.parametrize("confidence", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("count", [0, 1, 2, 4, 7])
def test_a_search_ends_at_once_when_its_ports_are_used_up(confidence: float, count: int) -> None:
    for seed in range(5):
        route, _ = leaf_and_spines(4, seed)
        net = Network(route)
        found = search(net, Rules(confidence, repeats=count), shuffled(count=count))
        assert len(found.hops) <= count
        assert found.recheck(60.0) == (len(found.hops), 0, False)
        assert net.now < 1.0


def test_spraying_of_packets_is_noticed() -> None:
    for seed in range(20):
        spray = random.Random(seed)
        layer = [Router(f"10.1.{j}.1") for j in range(4)]
        net = Network(lambda port: [Router("10.0.0.1"), spray.choice(layer)])  # noqa: B023
        found = search(net, ttls=(1, 2))
        repeated, changed, moved = found.recheck(net.now + 10)
        assert repeated == 6
        assert changed > 0
        assert not moved


@pytest.mark.parametrize(("gone_after_s", "seen"), [(0.0, False), (0.06, True), (0.1, True)])
def test_a_network_that_changed_meanwhile_does_not_spray(gone_after_s: float, seen: bool) -> None:
    layer = [Router(f"10.1.{j}.1") for j in range(2)]
    gone_s = float("inf")
    net = Network(lambda port: [Router("10.0.0.1"), layer[0 if net.now > gone_s else port % 2]])
    found = Discovery(net, net.clock, shuffled(), (1, 2), Rules())
    gone_s = gone_after_s
    found.run(60.0)
    assert any(dict(hops)[2] == layer[1].address for hops in found.hops.values()) == seen
    repeated, changed, moved = found.recheck(net.now + 10)
    assert repeated == 6
    assert moved == (changed > 0) == seen
    # Too late to tell.
    assert not search(net, ttls=(1, 2)).recheck(net.now).moved


def test_checking_again_ends_with_the_time() -> None:
    route, layer = leaf_and_spines(2)
    net = Network(route)
    found = search(net)
    for router in layer:
        router.silent = True
    start = net.now
    changed = found.recheck(start + 0.5).changed
    assert net.now < start + 0.51
    assert changed == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"confidence": 1.0},
        {"rate_per_s": 0.0},
        {"time_limit_s": 0.0},
        {"answer_wait_s": 0.0},
        {"retries": -1},
        {"ports_per_path": 0},
        {"via_ports": -1},
        {"repeats": -1},
    ],
)
def test_rules_out_of_bounds_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is .*; expected"):
        Rules(**bad)  # type: ignore[arg-type]


def a_map(hops: dict[int, Hops], **changes: str) -> PathMap:
    ends = {"source": "10.0.0.2", "destination": "10.1.0.2"}
    return PathMap(protocol="udp", port=4791, hops=hops, **(ends | changes))


MAP = a_map(
    {
        1: ((1, "10.0.0.1"), (2, "10.100.0.2")),
        2: ((1, "10.0.0.1"), (2, "10.100.1.2")),
        3: ((1, "10.0.0.1"), (2, None)),
        4: ((1, "10.0.0.1"), (2, "10.100.1.2")),
    }
)


def test_ports_via_hops() -> None:
    assert MAP.ports_via([(2, "10.100.1.2")]) == (2, 4)
    assert MAP.ports_via([(2, ["10.100.0.2", "10.100.1.2"])]) == (1, 2, 4)
    assert MAP.ports_via([(1, "10.0.0.1"), (2, {"10.100.0.2"})]) == (1,)
    assert MAP.ports_via([(1, "10.0.0.9"), (2, "10.100.0.2")]) == ()
    assert MAP.ports_via([(3, "10.100.0.2")]) == ()
    assert MAP.ports_via([]) == (1, 2, 3, 4)
    with pytest.raises(ValueError):
        MAP.ports_via([(2, "spine0")])


def test_ipv6_hops_are_the_same_in_any_spelling() -> None:
    found = a_map({1: ((2, "2001:db8::1"),)}, source="::1", destination="::1")
    assert found.ports_via([(2, "2001:0db8:0:0::0001")]) == (1,)


def test_paths_and_what_is_only_partly_seen() -> None:
    assert list(MAP.paths.items()) == [
        (((1, "10.0.0.1"), (2, "10.100.1.2")), (2, 4)),
        (((1, "10.0.0.1"), (2, "10.100.0.2")), (1,)),
    ]
    assert list(MAP.partial.items()) == [(((1, "10.0.0.1"), (2, None)), (3,))]
    assert MAP.silent == ()
    silent = a_map({1: ((1, None), (2, "10.100.0.2")), 2: ((1, None), (2, "10.100.1.2"))})
    assert silent.silent == (1,)
    assert len(silent.paths) == 2


def test_names_come_from_the_topology() -> None:
    topology = _topology()
    [first, *_] = MAP.paths
    assert MAP.names(first, topology) == ("10.0.0.1", "spine1")
    assert MAP.names(first) == ("10.0.0.1", "10.100.1.2")
    assert MAP.names(MAP.hops[3], topology) == ("10.0.0.1", "*")


def _topology() -> Topology:
    builder = TopologyBuilder()
    builder.cable(builder.node("h0", "host"), builder.node("leaf", "tor"), Link(1e9))
    for j in range(2):
        builder.cable("leaf", builder.node(f"spine{j}", "aggregation"), Link(1e9))
        builder.addresses[f"spine{j}"] = [f"10.100.{j}.2", f"10.100.{16 + j}.2"]
    return builder.build()
