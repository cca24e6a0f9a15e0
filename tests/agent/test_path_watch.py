"""Paths that one rank sees its connections take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from control_fakes import FakeClock
from steered_rank import FakeOwnership, FakeTransport, connection, socket_to

from crux_torch.agent.path_watch import LIST_S, LOOK_S, MAX_TOLD, MAX_TRACED, SETTLE_S, PathWatch
from crux_torch.apply.transport import TransportError
from crux_torch.network.discover.fragment import SeenPair, SeenPath
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.live_trace import ConnectionTrace


class Network:
    """Answers by the local port; counts what it was asked."""

    def __init__(self) -> None:
        self.hops: dict[int, tuple[str | None, ...]] = {}
        self.reason = ""
        self.asked: list[tuple[int, Sequence[int] | None]] = []

    def __call__(self, local, peer, protocol, *, ttls=None) -> ConnectionTrace:
        self.asked.append((local[1], ttls))
        if self.reason:
            return ConnectionTrace(local, peer, protocol, reason=self.reason)
        answers = enumerate(self.hops[local[1]], 1)
        hops = tuple((ttl, a) for ttl, a in answers if ttls is None or ttl in ttls)
        return ConnectionTrace(local, peer, protocol, hops, "raw")


class Rank:
    def __init__(self) -> None:
        self.clock, self.network = FakeClock(), Network()
        self.ownership, self.transport = FakeOwnership(), FakeTransport()
        self.absent = True
        self.watch = PathWatch(
            "h0",
            self.ownership,  # type: ignore[arg-type]
            load=self.load,
            trace=self.network,
            clock=self.clock,
        )

    def load(self) -> FakeTransport:
        if self.absent:
            raise TransportError("it is not there: build it")
        return self.transport

    def connect(self, inode: int, port: int, *hops: str | None, peer: str = "10.1.0.2") -> None:
        self.ownership.sockets.append(socket_to(peer, inode, port))
        self.network.hops[port] = hops

    def look(self, *steered: str, after_s: float = LOOK_S) -> tuple[SeenPair, ...]:
        self.clock.advance(LIST_S)
        self.watch.tick(steered)
        self.clock.advance(after_s)
        self.watch.tick(steered)
        if self.watch._looking is not None:
            self.watch._looking.join(60)
        return self.watch.seen


@pytest.fixture
def rank() -> Rank:
    return Rank()


def pair(*paths: SeenPath, peer: str = "10.1.0.2") -> SeenPair:
    return SeenPair("h0", "10.0.0.2", peer, peer, paths)


def test_connections_are_counted_by_path_soon_after_they_were_made(rank: Rank) -> None:
    assert rank.look() == ()
    rank.connect(1, 20001, "10.0.1.1", "10.100.1.2")
    rank.connect(2, 20002, "10.0.1.1", "10.100.2.2")
    rank.connect(3, 20003, "10.0.1.1", "10.100.2.2")
    rank.connect(4, 20004, "10.0.1.1", peer="10.2.0.2")
    assert rank.look(after_s=SETTLE_S) == (
        pair(
            SeenPath(("10.0.1.1", "10.100.2.2"), connections=2),
            SeenPath(("10.0.1.1", "10.100.1.2"), connections=1),
        ),
        pair(SeenPath(("10.0.1.1",), connections=1), peer="10.2.0.2"),
    )
    # Routers are counted once for each pair, the rest asks about these hops; one of each first.
    assert rank.network.asked == [(20001, None), (20004, None), (20002, (1, 2)), (20003, (1, 2))]
    rank.look(after_s=LOOK_S / 2)
    assert len(rank.network.asked) == 4, "nothing has changed"
    rank.look()
    assert len(rank.network.asked) == 8


def test_what_stays_on_the_host_is_not_asked_about(rank: Rank) -> None:
    rank.connect(1, 20001, "10.0.1.1", peer="127.0.0.1")
    rank.connect(2, 20002, "10.0.1.1", peer="10.0.0.2")
    rank.ownership.sockets.append(replace(socket_to("", 3), peer=None))
    assert (rank.look(), rank.network.asked) == ((), [])


def test_an_answer_that_is_lost_is_the_one_before_unless_the_path_has_changed(rank: Rank) -> None:
    rank.connect(1, 20001, "10.0.1.1", "10.100.1.2", "10.200.1.2")
    rank.look()
    rank.network.hops[20001] = ("10.0.1.1", None)
    assert rank.look() == (pair(SeenPath(("10.0.1.1", "10.100.1.2", "10.200.1.2"), connections=1)),)
    rank.network.reason = "no router answered"
    assert rank.look() == (pair(SeenPath(("10.0.1.1", "10.100.1.2", "10.200.1.2"), connections=1)),)
    rank.network.reason = ""
    rank.network.hops[20001] = ("10.0.1.1", "10.100.2.2", None)
    assert rank.look() == (pair(SeenPath(("10.0.1.1", "10.100.2.2", None), connections=1)),)
    rank.network.hops[20001] = ("10.0.2.1", "10.100.2.2", "10.200.2.2", "10.201.2.2")
    assert rank.look() == (
        pair(SeenPath(("10.0.2.1", "10.100.2.2", "10.200.2.2", "10.201.2.2"), connections=1)),
    )


def test_a_pair_that_a_plan_steers_keeps_what_the_network_had_chosen(rank: Rank) -> None:
    rank.connect(1, 20001, "10.0.1.1")
    rank.connect(2, 20002, "10.0.1.1", peer="10.2.0.2")
    rank.look()
    rank.network.hops = dict.fromkeys(rank.network.hops, ("10.0.2.1",))
    before = len(rank.network.asked)
    assert rank.look("10.1.0.2") == (
        pair(SeenPath(("10.0.1.1",), connections=1)),
        pair(SeenPath(("10.0.2.1",), connections=1), peer="10.2.0.2"),
    )
    assert len(rank.network.asked) == before + 1
    # The plan has ended: the network decides again.
    assert rank.look()[0] == pair(SeenPath(("10.0.2.1",), connections=1))


def test_without_the_right_to_look_nobody_is_asked_again(rank: Rank) -> None:
    rank.connect(1, 20001, "10.0.1.1")
    rank.network.reason = "it needs CAP_NET_RAW"
    assert rank.look() == (pair(),)
    rank.network.reason = ""
    assert rank.look() == (pair(),)
    assert (len(rank.network.asked), rank.watch.why_not) == (1, "it needs CAP_NET_RAW")


def test_queue_pairs_whose_port_is_known_count_too(rank: Rank) -> None:
    rank.absent, rank.transport.sees_queue_pairs = False, True
    rank.network.hops = {49999: ("10.0.1.1",)}
    known = {"kind": "qp", "local": "10.0.0.2", "peer": "10.1.0.2"}
    rank.transport.known = [
        connection(7, **known, local_port=49999),
        connection(8, **known, local_port=0),
        connection(9, local="10.0.0.2", peer="10.1.0.2", local_port=5),
    ]
    assert rank.look() == (pair(SeenPath(("10.0.1.1",), connections=1)),)
    assert rank.watch._connections()[0].peer == ("10.1.0.2", ROCE_V2_PORT)


def test_looks_and_what_they_tell_are_bounded(rank: Rank) -> None:
    for n in range(MAX_TRACED + 10):
        rank.connect(n, 20001 + n, f"10.0.{n // 2}.1")
    (found,) = rank.look()
    assert len(rank.network.asked) == MAX_TRACED
    assert len(found.paths) == MAX_TOLD
    assert msgspec.json.decode(msgspec.json.encode(found), type=SeenPair) == found
