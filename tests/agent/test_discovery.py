"""Ranks search the paths between their job's hosts, and the leader makes one fragment of them."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from control_fakes import FakeClock, profile
from torch.distributed import HashStore

from crux_torch.agent.discovery import (
    AGAIN_S,
    GATHER_S,
    LOOK_S,
    PUBLISH_S,
    HOST_RATE_per_s,
    JobDiscovery,
    RankSearches,
    agree,
    with_rates,
)
from crux_torch.agreement.job_channel import JobChannel
from crux_torch.measure.profile import HostFlow
from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.discover.tasks import Search, Searched

ADDRESSES = {0: "10.0.0.2", 1: "10.1.0.2", 2: "10.2.0.2"}
HOST_AT = {address: f"h{n}" for n, address in ADDRESSES.items()}
TOLD = profile(flows=(HostFlow("h0", "h1", 1e9), HostFlow("h1", "h2", 0.0)))


def live(src: int, dst: int, *hops: str | None) -> SeenPair:
    paths = (SeenPath(hops, connections=1),) if hops else ()
    return SeenPair(f"h{src}", ADDRESSES[src], ADDRESSES[dst], ADDRESSES[dst], paths)


class Ranks:
    """Three ranks on three hosts, and the leader among them, in a network of the test's."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = store = HashStore()
        self.hops: dict[tuple[str, str], tuple[tuple[str | None, ...], ...]] = {
            ("10.0.0.2", "10.1.0.2"): (("10.9.0.1", "10.9.1.1"), ("10.9.0.1", "10.9.2.1")),
            ("10.1.0.2", "10.0.0.2"): (("10.9.3.1", "10.9.1.2"),),
        }
        self.asked: list[Search] = []
        self.sprayed: set[tuple[str, str]] = set()
        self.may = threading.Event()
        self.may.set()
        self.ranks = [
            RankSearches(
                JobChannel(store, rank, 3), f"h{rank}",
                search=self.search, read_host=self.host, clock=self.clock,
            )
            for rank in range(3)
        ]  # fmt: skip
        self.leader = JobDiscovery(JobChannel(store, 0, 3), clock=self.clock)
        self.seen = {0: [live(0, 1), live(0, 2)], 1: [live(1, 0), live(1, 2)], 2: [live(2, 0)]}

    def host(self, name: str) -> tuple[SeenHost, tuple[str, ...]]:
        nic = SeenNic("eth0", (ADDRESSES[int(name[1:])],), 1.25e9)
        return SeenHost(name, (nic,)), ()

    def search(self, search: Search) -> Searched:
        self.may.wait(30)
        self.asked.append(search)
        ends = search.source.address, search.peer.address
        paths = tuple(SeenPath(hops) for hops in self.hops.get(ends, ()))
        pair = SeenPair(search.source.host, ends[0], search.peer.host, ends[1], paths, 0.99)
        pair = msgspec.structs.replace(pair, sprays=ends in self.sprayed)
        return Searched(search.source, search.peer, pair if paths else None)

    def run(self, seconds: float, **options: Any) -> Fragment | None:
        raw = None
        for _ in range(round(seconds / GATHER_S)):
            raw = self.leader.step(self.seen, options.get("told", TOLD), HOST_AT, **{
                name: value for name, value in options.items() if name != "told"
            })  # fmt: skip
            self.clock.advance(GATHER_S)
            for rank in self.ranks:
                rank.tick()
                if rank._thread is not None and self.may.is_set():
                    rank._thread.join(60)
        return None if raw is None else msgspec.json.decode(raw, type=Fragment)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_each_pair_that_exchanges_bytes_is_searched_by_its_first_rank_both_ways(
    ranks: Ranks,
) -> None:
    ranks.seen[2] = [*ranks.seen[2], live(0, 1)]
    fragment = ranks.run(6 * GATHER_S)
    assert fragment is not None
    assert [host.name for host in fragment.hosts] == ["h0", "h1"]
    assert [(pair.src, pair.dst, len(pair.paths)) for pair in fragment.pairs] == [
        ("h0", "h1", 2),
        ("h1", "h0", 1),
    ]
    asked = sorted((s.source.host, s.peer.host, s.rate_per_s) for s in ranks.asked)
    assert asked == [("h0", "h1", HOST_RATE_per_s), ("h1", "h0", HOST_RATE_per_s)]
    assert ranks.leader.status == {"searches": 2, "ended": 2, "failed": 0}


def test_a_fragment_says_how_fast_each_host_sent(ranks: Ranks) -> None:
    told = profile(
        flows=(HostFlow("h0", "h1", 1e9), HostFlow("h0", "h0", 5e9), HostFlow("h1", "h0", 2e9)),
        t_measured_s=0.3,
    )
    ranks.run(300, told=told)
    fragment = ranks.run(GATHER_S, told=told)
    assert fragment is not None
    reached = {host.name: host.nics[0].reached_Bps for host in fragment.hosts}
    assert reached == {"h0": pytest.approx(3.3e9), "h1": pytest.approx(6.6e9)}
    assert all(host.nics[0].speed_Bps == 1.25e9 for host in fragment.hosts)


def test_interfaces_that_the_job_uses_share_its_bytes() -> None:
    nics = tuple(SeenNic(f"eth{n}", (f"10.{n}.0.2",)) for n in range(3))
    told = profile(flows=(HostFlow("h0", "h1", 1e9),), t_measured_s=0.1)
    host = with_rates(SeenHost("h0", nics), {"10.0.0.2", "10.2.0.2"}, told)
    assert [nic.reached_Bps for nic in host.nics] == [pytest.approx(5e9), 0.0, pytest.approx(5e9)]
    silent = profile(flows=(HostFlow("h0", "h1", 1e9),), t_measured_s=0.0)
    assert with_rates(SeenHost("h0", nics), {"10.0.0.2"}, silent) == SeenHost("h0", nics)


def test_nothing_is_searched_before_the_job_was_measured(ranks: Ranks) -> None:
    assert ranks.run(4 * GATHER_S, told=None) is None
    assert ranks.asked == []


def test_hosts_of_a_large_job_probe_slowly_together(ranks: Ranks) -> None:
    flows = tuple(HostFlow(f"h{n}", f"h{n + 1}", 1.0) for n in range(1000))
    ranks.run(LOOK_S + GATHER_S, told=profile(flows=flows))
    assert {search.rate_per_s for search in ranks.asked} == {0.5}


def test_a_fragment_grows_with_pauses_until_every_search_has_ended(ranks: Ranks) -> None:
    ranks.hops["10.1.0.2", "10.0.0.2"] = ()
    fragment = ranks.run(4 * GATHER_S)
    assert fragment is not None
    assert [pair.src for pair in fragment.pairs] == ["h0"]
    assert ranks.leader.status["failed"] == 1
    ranks.hops["10.1.0.2", "10.0.0.2"] = (("10.9.3.1",),)
    fragment = ranks.run(PUBLISH_S)
    assert fragment is not None
    assert [pair.src for pair in fragment.pairs] == ["h0", "h1"], "a failed search is repeated"


def test_a_path_that_vanished_is_out_of_the_fragment_within_a_minute(ranks: Ranks) -> None:
    ranks.run(6 * GATHER_S)
    ends = ADDRESSES[0], ADDRESSES[1]
    ranks.seen[0] = [live(0, 1, "10.9.0.1", "10.9.2.1")]
    ranks.run(60.0)
    assert len(ranks.asked) == 2, "connections are where the search said"
    ranks.hops[ends] = (("10.9.0.1", "10.9.7.1"),)
    ranks.seen[0] = [live(0, 1, "10.9.0.1", "10.9.7.1")]
    fragment = ranks.run(AGAIN_S + 3 * GATHER_S)
    assert AGAIN_S + 3 * GATHER_S < 60.0
    assert fragment is not None
    (pair,) = (pair for pair in fragment.pairs if pair.src == "h0")
    assert [path.hops for path in pair.paths] == [("10.9.0.1", "10.9.7.1")]
    ranks.run(600.0)
    assert len(ranks.asked) == 3


def test_a_steered_connection_does_not_keep_a_path_that_later_searches_miss(ranks: Ranks) -> None:
    vanished, other = ranks.hops[ADDRESSES[0], ADDRESSES[1]]
    ranks.seen[0] = [live(0, 1, *vanished)]
    ranks.run(6 * GATHER_S)
    steered = {("h0", ADDRESSES[1]), ("h1", ADDRESSES[0])}
    ranks.run(60.0, steered=steered)
    ranks.hops[ADDRESSES[0], ADDRESSES[1]] = (other,)
    # Nobody looks at steered connections again, so that the report stays as it was.
    fragment = ranks.run(AGAIN_S + 3 * GATHER_S, steered=steered, astray=True)
    assert fragment is not None
    (pair,) = (pair for pair in fragment.pairs if pair.src == "h0")
    assert [path.hops for path in pair.paths] == [other]
    asked = len(ranks.asked)
    ranks.run(600.0, steered=steered)
    assert len(ranks.asked) == asked


def test_a_link_that_another_job_lost_is_searched_once_more(ranks: Ranks) -> None:
    vanished, other = ranks.hops[ADDRESSES[0], ADDRESSES[1]]
    ranks.seen[0] = [live(0, 1, *other)]
    ranks.run(6 * GATHER_S)
    ranks.run(60.0, lost={("10.9.77.1",)})
    assert len(ranks.asked) == 2, "a link of others"
    ranks.hops[ADDRESSES[0], ADDRESSES[1]] = (other,)
    lost = {(vanished[1],), vanished}
    fragment = ranks.run(AGAIN_S + 3 * GATHER_S, lost=lost)
    assert fragment is not None
    (pair,) = (pair for pair in fragment.pairs if pair.src == "h0")
    assert [path.hops for path in pair.paths] == [other]
    assert len(ranks.asked) == 3
    # This job still sees one: it is asked once, and again when it was there and is lost again.
    still = {(other[1],)}
    for _ in range(2):
        ranks.run(600.0, lost=still)
        ranks.run(GATHER_S)
    assert len(ranks.asked) == 5


def test_a_path_that_only_a_connection_showed_is_in_the_fragment(ranks: Ranks) -> None:
    ranks.run(6 * GATHER_S)
    missed = ("10.9.0.1", "10.9.8.1")
    ranks.seen[0] = [live(0, 1, *missed)]
    fragment = ranks.run(4 * GATHER_S)
    assert fragment is not None
    (pair,) = (pair for pair in fragment.pairs if pair.src == "h0")
    assert [path.hops for path in pair.paths] == [*ranks.hops[ADDRESSES[0], ADDRESSES[1]], missed]
    # The same ports would tell the same: the next search has to try more of them.
    ranks.run(600.0)
    assert [round(1 - search.confidence, 6) for search in ranks.asked[2:]] == [1e-5]
    # Where a hop is not known it may be one of those that were found.
    ranks.seen[0] = [live(0, 1, "10.9.0.1", None)]
    fragment = ranks.run(2 * GATHER_S)
    assert fragment is not None
    (pair,) = (pair for pair in fragment.pairs if pair.src == "h0")
    assert len(pair.paths) == 2


def test_a_pair_that_seems_to_spray_is_searched_again_with_growing_pauses(ranks: Ranks) -> None:
    ends = ADDRESSES[0], ADDRESSES[1]
    ranks.sprayed.add(ends)
    ranks.run(6 * GATHER_S)
    ranks.run(20 * AGAIN_S)
    assert 5 <= len(ranks.asked) <= 7
    ranks.sprayed.clear()
    fragment = ranks.run(64 * AGAIN_S)
    assert fragment is not None
    assert not any(pair.sprays for pair in fragment.pairs)


def test_what_a_search_does_not_explain_is_not_searched_forever(ranks: Ranks) -> None:
    ranks.run(6 * GATHER_S)
    ranks.seen[0] = [live(0, 1, "10.9.0.1", "10.9.8.1")]
    ranks.run(600.0)
    assert len(ranks.asked) == 3
    ranks.seen[0] = [live(0, 1, "10.9.0.1", "10.9.9.1")]
    ranks.run(600.0)
    assert len(ranks.asked) == 4


def test_connections_astray_have_all_searched_again_with_growing_pauses(ranks: Ranks) -> None:
    ranks.run(6 * GATHER_S)
    ranks.run(300.0, astray=True)
    # After 20, 40, 80 and 160 s.
    assert 2 * 4 <= len(ranks.asked) <= 2 * 5


def test_the_thread_of_a_rank_does_not_keep_the_others_waiting(ranks: Ranks) -> None:
    ranks.may.clear()
    ranks.run(4 * GATHER_S)
    assert ranks.leader.status == {"searches": 2, "ended": 0, "failed": 0}
    assert sum(rank._thread is not None for rank in ranks.ranks) == 2
    ranks.may.set()
    assert ranks.run(4 * GATHER_S) is not None


def test_what_an_earlier_life_of_the_job_has_found_is_not_believed(ranks: Ranks) -> None:
    assert ranks.run(4 * GATHER_S) is not None
    ranks.leader = JobDiscovery(JobChannel(ranks.store, 0, 3), clock=ranks.clock)
    ranks.may.clear()
    assert ranks.run(2 * GATHER_S) is None
    ranks.may.set()
    assert ranks.run(4 * GATHER_S) is not None
    assert len(ranks.asked) == 4


@pytest.mark.parametrize("raw", [b"", b"{", b"[[1,2]]", b"[" * 5000, b'{"host":1}', b"null"])
def test_what_cannot_be_read_is_nothing(raw: bytes) -> None:
    clock, store = FakeClock(), HashStore()
    channel = JobChannel(store, 0, 1)
    channel.put_searches(0, raw)
    channel.put_found(raw)
    rank = RankSearches(channel, "h0", search=pytest.fail, clock=clock)
    clock.advance(LOOK_S)
    rank.tick()
    leader = JobDiscovery(channel, clock=clock)
    assert leader.step({0: [live(0, 1)]}, TOLD, HOST_AT) is None


def test_paths_agree_where_no_hop_that_answered_both_times_differs() -> None:
    found = SeenPair("h0", "a1", "h1", "b1", (SeenPath(("x1", None, "z1")), SeenPath(("y1",))))
    for hops in (("x1", "w1", "z1"), (None, None), ("y1", "w1"), ("x1",)):
        assert agree(live(0, 1, *hops), found), hops
    for hops in (("x1", None, "z2"), ("w1",)):
        assert not agree(live(0, 1, *hops), found), hops
    assert agree(live(0, 1), found)
