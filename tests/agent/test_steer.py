"""One rank's half of path selection against a transport, groups and a network of the test's."""

from __future__ import annotations

import errno
import logging
import random
import threading
from typing import Any

import pytest
from control_fakes import FakeClock, until
from probe_fakes import Network, Router
from steered_rank import SPINES, FakeNetwork, Rank, connection, order, route, socket_to

from crux_torch.agent import follower
from crux_torch.agent.follower import LOOK_S, MAX_LOOKED_AT
from crux_torch.agreement.records import PathCounts
from crux_torch.apply.paths import routes_from
from crux_torch.apply.transport import Connection, Route, TransportError
from crux_torch.apply.wire import READY_TO_SEND
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.discovery import Discovery
from crux_torch.network.probe.live_trace import ConnectionTrace
from crux_torch.network.probe.prober import SEARCH_S, TOTAL_S, PathMap, PortSearch
from crux_torch.network.probe.rules import Rules
from crux_torch.network.routes import HostRoute


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def rdma_rank(rank: Rank) -> Rank:
    rank.transport.sees_queue_pairs = True
    return rank


def test_routes_of_this_host_are_told_with_the_class_of_the_level(rank):
    rank.follow(order(route(1), route(0, "h1", "h0"), route(0, "h0", "h2"), level=3))
    assert rank.transport.routes == (
        Route("10.1.0.2", hops=tuple((2, a) for a in SPINES[1]), dscp=24, qp_dscp=26),
        Route("10.2.0.2", hops=tuple((2, a) for a in SPINES[0]), dscp=24, qp_dscp=26),
    )
    assert (rank.transport.ports, rank.transport.skipped) == ((20000, 20999), (29400, 29500))


def test_without_a_level_new_connections_keep_the_networks_class(rank):
    rank.follow(order(route(1), level=None))
    assert [r.dscp for r in rank.transport.routes] == [None]
    rank.follow(order(route(1), level=63, number=2))
    assert [r.dscp for r in rank.transport.routes] == [None]


def test_a_handover_is_requested_once_after_the_routes_are_set(rank):
    for turn in (1, 2, 3):
        rank.follow(order(route(1), number=turn, generation=1))
    assert rank.groups.requests == [1]
    rank.follow(order(route(1), number=4, generation=1, level=2))
    assert rank.groups.requests == [1]
    before = rank.transport.tellings
    rank.follow(order(route(1), number=4, generation=2, level=2))
    assert (rank.groups.requests, rank.transport.tellings) == ([1, 2], before + 1)
    rank.follow(order(route(0), number=5, generation=3, level=2))
    assert rank.groups.requests == [1, 2, 3]
    over = [routes[0].hops[0][1] for routes in rank.groups.routes_then]
    assert over == [SPINES[1][0], SPINES[1][0], SPINES[0][0]]


def test_a_rank_without_a_choice_of_its_own_is_handed_over_with_the_others(rank):
    rank.follow(order(route(1, "h1", "h0"), generation=1))
    assert rank.transport.routes == ()
    assert rank.groups.requests == [1]


def test_nothing_is_loaded_or_handed_over_where_no_path_is_planned(rank):
    rank.follow(order(generation=0))
    rank.steering.tick()
    rank.steering.revert()
    assert (rank.loads, rank.groups.requests) == (0, [])
    assert rank.steering.counts() is None


@pytest.mark.parametrize("missing", ["library", "preload"])
def test_without_the_transport_there_is_one_warning_and_no_handover(missing, rank, caplog):
    rank.absent = missing == "library"
    rank.transport.sees_sockets = missing != "preload"
    for turn in (1, 2, 3):
        rank.follow(order(route(turn % 2), number=turn, generation=turn))
    rank.steering.tick()
    assert (rank.groups.requests, rank.transport.tellings) == ([], 0)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    status = rank.steering.status()
    assert not status["available"]
    assert "cruxrun's transport" in status["why_not"]


def test_a_transport_that_refuses_is_asked_again_and_nothing_is_handed_over_before(rank):
    rank.transport.refuse = True
    with pytest.raises(TransportError):
        rank.follow(order(route(1), generation=1))
    assert rank.groups.requests == []
    rank.transport.refuse = False
    rank.follow(order(route(1), number=2, generation=1))
    assert rank.groups.requests == [1]


def test_the_end_of_the_order_takes_the_routes_back_and_leaves_connections(rank):
    rank.follow(order(route(1), generation=3))
    rank.steering.revert()
    assert rank.transport.routes == ()
    assert rank.steering.counts() is None
    rank.follow(order(route(1), number=2, generation=3))
    assert len(rank.transport.routes) == 1
    assert rank.groups.requests == [3]


def test_handovers_are_counted_anew_in_a_new_incarnation(rank):
    rank.follow(order(route(1), generation=4))
    rank.follow(order(route(0), incarnation="another", generation=1))
    assert rank.groups.requests == [4, 1]


def test_live_connections_are_looked_at_from_both_ends(rank):
    rank.ownership.listeners = [("10.0.0.2", 6000)]
    rank.ownership.sockets = [
        socket_to("10.1.0.2", 1, 20001),
        socket_to("10.1.0.2", 2, 6000),
        socket_to("10.1.0.2", 3, 20003),
        socket_to("10.9.0.2", 4, 20004),
    ]
    rank.network.spine = {20001: 1, 6000: 1, 20003: 0}
    rank.transport.known = [connection(1, how="at_connect", probes=3, via="10.100.1.2", via_ttl=2)]
    rank.follow(order(route(1), generation=1))
    status = rank.look()
    assert (status["as_planned"], status["elsewhere"], status["unknown"]) == (2, 1, 0)
    first, accepted, third = status["connections"]
    assert (first["side"], first["steered"], first["probes"]) == ("connected", True, 3)
    assert (accepted["side"], accepted["steered"]) == ("accepted", False)
    assert [c["as_planned"] for c in (first, accepted, third)] == [True, True, False]
    assert third["taken"] == [[2, "10.100.0.2"]]
    assert {c["verified"] for c in status["connections"]} == {"live"}
    assert rank.network.asked == [("tcp", (2,))] * 3


def test_without_the_right_to_ask_the_probe_before_connect_counts(rank):
    rank.network.reason = "it needs CAP_NET_RAW"
    rank.ownership.sockets = [socket_to("10.1.0.2", inode, 20000 + inode) for inode in (1, 2, 3)]
    rank.transport.known = [
        connection(1, how="at_connect", probes=2, via_ttl=2, via="10.100.17.2"),
        connection(2, how="refused", probes=40, via_ttl=2, via="10.100.0.2"),
    ]
    rank.follow(order(route(1)))
    status = rank.look()
    probed, refused, unseen = status["connections"]
    assert (probed["verified"], probed["as_planned"]) == ("connect", True)
    assert (refused["verified"], refused["as_planned"]) == ("no", None)
    assert (refused["steered"], refused["probes"]) == (False, 40)
    assert (unseen["verified"], unseen["error"]) == ("no", "it needs CAP_NET_RAW")
    assert rank.steering.counts() == PathCounts(1, 0, 2, 2)


def test_where_one_tcp_port_leads_over_several_paths_paths_are_left_to_the_network(rank, caplog):
    rank.ownership.sockets = [socket_to("10.1.0.2", inode, 20000 + inode) for inode in (1, 2)]
    rank.network.spine = {20001: 0, 20002: 1}
    rank.follow(order(route(1), level=3))
    assert rank.look()["sprayed"] is False
    assert rank.steering.counts() == PathCounts(1, 1, 0, 1)
    rank.transport.known = [
        connection(1, how="at_connect", probes=4, via_ttl=2, via=SPINES[1][0]),
        connection(2, how="refused", error=errno.ENOTUNIQ, probes=9, via_ttl=2, via=SPINES[0][0]),
    ]
    status = rank.look()
    assert status["sprayed"] is True
    # Nothing is missed, so no handover is tried again; the class stays.
    assert rank.steering.counts() is None
    assert rank.transport.routes == (Route("10.1.0.2", hops=(), dscp=24, qp_dscp=26),)
    rank.look()
    assert [("sprays packets" in r.getMessage()) for r in caplog.records] == [True]
    # The network may have changed while the port was chosen: a handover tries again.
    rank.follow(order(route(1), number=2, generation=1))
    assert rank.transport.routes[0].hops
    assert rank.look()["sprayed"] is False
    rank.transport.known.append(connection(3, how="refused", error=errno.ENOTUNIQ))
    assert rank.look()["sprayed"] is True
    rank.steering.revert()
    rank.transport.known = []
    rank.follow(order(route(1), number=3))
    assert rank.transport.routes[0].hops


def test_what_a_handover_is_about_to_replace_is_not_tried_again(rank):
    rank.ownership.sockets = [socket_to("10.1.0.2", 1, 20001)]
    rank.network.spine = {20001: 0}
    rank.follow(order(route(1), generation=1))
    rank.look()
    rank.groups.state = "closing"
    assert rank.steering.counts() == PathCounts(0, 1, 0, 0)
    rank.groups.state = "idle"
    assert rank.steering.counts() == PathCounts(0, 1, 0, 1)


def test_a_look_is_bounded_and_holds_nobody_up(rank):
    rank.network.let_go.clear()
    count = MAX_LOOKED_AT + 10
    rank.ownership.sockets = [socket_to("10.1.0.2", n, 20000 + n) for n in range(1, count)]
    rank.network.spine = {20000 + n: 0 for n in range(1, count)}
    rank.follow(order(route(0)))
    for _ in range(5):
        rank.steering.tick()
        rank.clock.advance(LOOK_S)
    looking = [t for t in threading.enumerate() if t.name == "crux-paths"]
    assert len(looking) == 1
    rank.network.let_go.set()
    looking[0].join(60)
    assert rank.steering.counts() == PathCounts(MAX_LOOKED_AT, 0, 0)


def test_a_look_that_takes_too_long_asks_no_more(rank, monkeypatch):
    monkeypatch.setattr(follower, "LOOK_LIMIT_S", 0.0)
    rank.ownership.sockets = [socket_to("10.1.0.2", 1)]
    rank.follow(order(route(0)))
    rank.soon()
    until(lambda: rank.steering.counts() == PathCounts(0, 0, 1, 1), what="the look")
    assert rank.network.asked == []
    assert "no time" in rank.steering.status()["connections"][0]["error"]


def test_new_connections_are_looked_at_soon_and_old_ones_now_and_then(rank):
    rank.ownership.sockets = [socket_to("10.1.0.2", 1)]
    rank.network.spine = {20001: 0, 20002: 1}
    rank.follow(order(route(0)))
    assert rank.look()["as_planned"] == 1
    rank.ownership.sockets = [socket_to("10.1.0.2", 2, 20002)]
    rank.soon()
    until(lambda: rank.steering.counts() == PathCounts(0, 1, 0, 1), what="a look at the new one")


def test_a_failing_look_is_said_once(rank, caplog):
    def fail(*_: object, **__: object) -> ConnectionTrace:
        raise RuntimeError("no")

    rank.ownership.sockets = [socket_to("10.1.0.2", 1)]
    rank.steering._trace = fail
    rank.follow(order(route(0)))
    for _ in range(4):
        rank.steering.tick()
        rank.clock.advance(LOOK_S)
        if rank.steering._looking is not None:
            rank.steering._looking.join(60)
    assert len(caplog.records) == 1


def test_queue_pairs_get_ports_that_were_searched_for_before_the_handover(rdma_rank):
    rank = rdma_rank
    rank.network.let_go.clear()
    rank.follow(order(route(1), route(0, dst="h2"), generation=1))
    rank.follow(order(route(1), route(0, dst="h2"), generation=1, number=2))
    # Connections over TCP are steered meanwhile.
    assert [r.udp_ports for r in rank.transport.routes] == [(), ()]
    assert rank.groups.requests == []
    rank.network.let_go.set()
    rank.has_requested(1)
    odd, even = tuple(range(49153, 49160, 2)), tuple(range(49152, 49160, 2))
    assert [r.udp_ports for r in rank.groups.routes_then[0]] == [odd, even]
    rank.follow(order(route(1), route(0, dst="h2"), generation=1, level=2, number=3))
    assert [r.udp_ports for r in rank.transport.routes] == [odd, even]
    assert sorted(rank.network.searched) == ["10.1.0.2", "10.2.0.2"]


def test_other_routes_are_searched_for_anew_and_handed_over_to(rdma_rank):
    rdma_rank.follow(order(route(1), generation=1))
    rdma_rank.has_requested(1)
    rdma_rank.follow(order(route(0), generation=2, number=2))
    rdma_rank.has_requested(1, 2)
    assert rdma_rank.network.searched == ["10.1.0.2"] * 2


def pair(id: int, **changes: Any) -> Connection:
    ends = {"local": "10.0.0.2", "peer": "10.1.0.2", "local_port": 49152}
    return connection(id, **{"kind": "qp", "state": READY_TO_SEND, **ends, **changes})


STUBBORN = 2
#: The third leads over the path already, nothing is planned for the fourth, the fifth is broken.
OTHERS = [pair(3, local_port=49157), pair(4, peer="10.9.0.2"), pair(5, state=6)]


@pytest.mark.parametrize(
    ("known", "changes", "moved"),
    [
        ([pair(1), pair(6), *OTHERS], [(1, 49153), (6, 49155)], True),
        ([], [], False),
        ([pair(1), pair(STUBBORN)], [(1, 49153)], False),
        ([pair(4, peer="10.9.0.2")], [], False),
    ],
)
def test_live_queue_pairs_are_moved_and_the_groups_are_told(rdma_rank, known, changes, moved):
    rdma_rank.transport.known = known
    rdma_rank.pairs.stubborn = {STUBBORN}
    rdma_rank.follow(order(route(1), generation=1))
    rdma_rank.has_requested(1)
    assert (rdma_rank.pairs.changes, rdma_rank.groups.moved) == (changes, [moved])


def test_queue_pairs_are_moved_by_a_new_handover_over_paths_that_are_known(rdma_rank):
    rdma_rank.follow(order(route(1), generation=1))
    rdma_rank.has_requested(1)
    rdma_rank.transport.known = [pair(1)]
    rdma_rank.follow(order(route(1), generation=2, number=2))
    rdma_rank.has_requested(1, 2)
    assert rdma_rank.groups.moved == [False, True]
    assert rdma_rank.network.searched == ["10.1.0.2"]


def test_a_search_over_many_destinations_ends_in_time(caplog):
    network, clock = FakeNetwork(), FakeClock()

    def slow(destination: str, wanted: HostRoute) -> PathMap:
        clock.advance(SEARCH_S)
        return network.search(destination, wanted)

    routes = [route(0, dst=f"h{n}") for n in range(1, 9)]
    searching = PortSearch(slow, clock=clock)
    searching.run(routes)
    in_time = round(TOTAL_S / SEARCH_S)
    assert network.searched == [r.destinations[0] for r in routes[:in_time]]
    found = searching.found(routes)
    assert [bool(found[r.destinations[0]]) for r in routes] == [True] * in_time + [False] * 5
    assert searching.is_done(routes)
    assert len(caplog.records) == 5


def test_where_no_port_is_found_there_is_one_warning_and_the_handover_comes(rdma_rank, caplog):
    rdma_rank.network.reason = "no router answered"
    for turn in (1, 2, 3):
        rdma_rank.follow(order(route(1), generation=1, number=turn))
        rdma_rank.has_requested(1)
    assert [r.udp_ports for r in rdma_rank.transport.routes] == [()]
    assert (rdma_rank.network.searched, len(caplog.records)) == (["10.1.0.2"], 1)


@pytest.mark.parametrize("sprays", [False, True])
def test_where_the_network_sprays_queue_pairs_keep_its_paths(sprays, caplog) -> None:
    """The probe's fake network: one port gets different answers where packets are sprayed."""
    draw = random.Random(5)
    wanted = HostRoute("h0", "h1", ("10.1.0.2",), ((2, ("10.1.0.1",)),))

    def way(port: int) -> list[Router]:
        spine = draw.randrange(4) if sprays else port % 4
        return [Router("10.0.0.1"), Router(f"10.1.{spine}.1")]

    def search(destination: str, route: HostRoute) -> PathMap:
        network = Network(way)
        found = Discovery(network, network.clock, range(49152, 50152), (1, 2), Rules())
        found.run(60.0)
        repeated, changed, _ = found.recheck(network.now + 10)
        ends = {"source": "10.0.0.2", "destination": destination}
        more = {"hops": found.hops, "repeated": repeated, "changed": changed}
        return PathMap(**ends, protocol="udp", port=4791, **more)

    searching = PortSearch(search)
    searching.run([wanted])
    assert searching.is_done([wanted])
    ports = searching.found([wanted])["10.1.0.2"]
    assert bool(ports) == (not sprays)
    assert all(port % 4 == 0 for port in ports)
    assert [("sprays packets" in r.getMessage()) for r in caplog.records] == [True] * sprays


def test_connections_of_other_libraries_that_were_steered_are_looked_at_too(rank):
    ends = {"local": "10.0.0.2", "peer": "10.1.0.2", "peer_port": 6000}
    rank.transport.known = [
        connection(1, **ends, local_port=20001, probes=2, via_ttl=2, via=SPINES[1][0]),
        connection(2, **ends, local_port=40000),
    ]
    rank.network.spine = {20001: 1}
    rank.follow(order(route(1)))
    (told,) = rank.look()["connections"]
    assert (told["local"], told["steered"], told["as_planned"]) == (["10.0.0.2", 20001], True, True)


def test_queue_pairs_are_looked_at_where_their_port_is_known(rank):
    rank.transport.known = [
        connection(1, kind="qp", local="10.0.0.2", local_port=49153, peer="10.1.0.2"),
        connection(2, kind="qp", local="10.0.0.2", local_port=0, peer="10.1.0.2"),
        connection(3, kind="qp", local="10.0.0.2", local_port=49152, peer="10.9.0.2"),
    ]
    rank.network.spine = {49153: 1}
    rank.follow(order(route(1)))
    (told,) = rank.look()["connections"]
    assert (told["local"], told["peer"]) == (["10.0.0.2", 49153], ["10.1.0.2", ROCE_V2_PORT])
    assert (told["as_planned"], rank.network.asked) == (True, [("udp", (2,))])


def test_a_route_is_told_for_each_address_of_the_other_host():
    both = HostRoute("h0", "h1", ("10.1.0.2", "fd00::2"), ((1, ("10.0.0.1",)), (2, SPINES[0])))
    told = routes_from([both], None)
    assert [r.destination for r in told] == ["10.1.0.2", "fd00::2"]
    assert told[0].hops == ((1, "10.0.0.1"), (2, SPINES[0][0]), (2, SPINES[0][1]))
