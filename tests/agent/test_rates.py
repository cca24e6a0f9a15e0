"""One rank's part of mlcc: what it counts, what it books, what it limits, and how it lets go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
from control_fakes import until
from steered_rank import connection

from crux_torch.agent.flow_progress import FlowProgress
from crux_torch.agent.rates import BURST_BYTES, SILENT_S, RateScheduler
from crux_torch.agreement.load_tables import Feedback, UpdateSchedule
from crux_torch.apply.transport import Connection
from crux_torch.errors import StoreError
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.routes import HostFlowLinks, flow_links
from crux_torch.schedule.papers.mlcc import LEAST_SHARE, SLOTS
from crux_torch.settings import Settings

MB = 1_000_000
CAPACITY_Bps = 10.0 * MB
SLOT_S = 0.1


# ---------------------------------------------------------------- the links of a flow


def test_the_links_that_every_path_crosses_are_sure() -> None:
    topology = parse_yaml("""
version: 1
hosts: {a: {}, b: {}}
switches: {s: tor, t: tor, x: core, y: core}
links:
  - {between: [a, s], capacity_Bps: 10}
  - {between: [b, t], capacity_Bps: 20}
  - {between: [s, x], capacity_Bps: 5}
  - {between: [s, y], capacity_Bps: 5}
  - {between: [x, t], capacity_Bps: 5}
  - {between: [y, t], capacity_Bps: 5}
addresses: {b: [10.0.0.2]}
""")
    found = flow_links(topology, "a", "b")
    assert found == HostFlowLinks(
        "a", "b", ("10.0.0.2",), {"a->s": 10.0, "t->b": 20.0}, "a->s", "t->b"
    )
    # Nobody could tell which connections lead to a host without addresses.
    assert flow_links(topology, "b", "a") is None


# ---------------------------------------------------------------- progress


def test_an_iteration_has_as_many_bytes_as_the_last_ones() -> None:
    flow = FlowProgress(hosts=2)
    flow.read(0, 0, 0, 0.0)
    flow.read(0, 5 * MB, 5 * MB, 0.1)
    assert (flow.volume_bytes, flow.begun) == (0, False)
    flow.read(1, 5 * MB, 5 * MB, 0.2)
    assert (flow.volume_bytes, flow.left_bytes, flow.begun) == (5 * MB, 5 * MB, False)
    flow.read(1, 6 * MB, 5 * MB, 0.3)
    assert (flow.left_bytes, flow.begun) == (4 * MB, True)
    assert not flow.is_idle(0.4, 0.2)
    assert flow.is_idle(0.6, 0.2)
    flow.read(1, 10 * MB, 10 * MB, 0.5)
    assert (flow.left_bytes, flow.begun) == (0, False)
    flow.read(2, 10 * MB, 10 * MB, 0.6)
    # Its connections were made anew.
    flow.read(2, 1 * MB, 0, 0.7)
    assert flow.left_bytes == 5 * MB


def test_a_ring_follows_what_it_receives() -> None:
    flow = FlowProgress(hosts=2)
    flow.read(0, 0, 0, 0.0)
    flow.read(1, 10 * MB, 10 * MB, 0.1)
    flow.read(1, 10 * MB + 1, 14 * MB, 0.2)
    # It has received 4 MB, and is about to have sent 1 MB; then 9 MB + its own half; then 3 more.
    assert flow.change_bytes(MB - 1, 0.1) == pytest.approx(3 * MB)
    assert flow.change_bytes(9 * MB - 1, 0.1) == 0.0
    assert flow.change_bytes(12 * MB - 1, 0.1) == pytest.approx(-3 * MB)
    other = FlowProgress(hosts=2)
    other.read(0, 0, 0, 0.0)
    other.read(1, 10 * MB, 2 * MB, 0.1)
    assert other.change_bytes(9 * MB, 0.1) == 0.0


def test_a_servers_iteration_ends_with_the_last_byte_that_the_network_carries() -> None:
    flow = FlowProgress(hosts=3, role="server")
    flow.read(0, 0, 0, 0.0)
    flow.read(0, 10 * MB, 10 * MB, 0.1)
    flow.read(1, 10 * MB, 10 * MB, 0.2)
    flow.read(1, 17 * MB, 20 * MB, 0.3)
    # Its step has ended, and 3 MB are still in a socket.
    flow.read(2, 17 * MB, 20 * MB, 0.4)
    assert (flow.left_bytes, flow.begun) == (3 * MB, True)
    flow.read(2, 20 * MB, 20 * MB, 0.5)
    assert (flow.left_bytes, flow.moved_bytes, flow.begun) == (10 * MB, 0, False)
    assert flow.volume_bytes == 10 * MB
    # If less was to come than before, the workers' next bytes end the iteration.
    flow.read(2, 25 * MB, 26 * MB, 0.6)
    flow.read(3, 25 * MB, 26 * MB, 0.7)
    assert flow.moved_bytes == 5 * MB
    flow.read(3, 25 * MB, 27 * MB, 0.8)
    assert flow.moved_bytes == 0
    assert flow.received_bytes(0.0) == MB


# ---------------------------------------------------------------- booking and limits

CONNECTION = connection(7, peer="10.0.0.2")
FLOW = HostFlowLinks("a", "b", ("10.0.0.2",), {"l": CAPACITY_Bps}, "l")


class FakeWire:
    def __init__(self) -> None:
        self.sent = self.received = 0
        self.limits: list[Mapping[object, int]] = []
        self.refuses = ""

    def connections(self) -> list[Connection]:
        moved = {"bytes_sent": self.sent, "bytes_received": self.received}
        return [replace(CONNECTION, **moved), replace(CONNECTION, id=8, peer="10.0.0.9")]

    def limit(self, rates_Bps: Mapping[object, int]) -> str:
        self.limits.append(dict(rates_Bps))
        return self.refuses


class FakeTables:
    def __init__(self) -> None:
        self.load = (0.0,) * SLOTS
        self.booked: list[tuple[float, ...]] = []
        self.schedules: list[UpdateSchedule] = []
        self.silent = False
        self.into: dict[str, float] = {}
        self.out: dict[str, float] = {}
        self.asked: tuple[str, ...] = ()

    def fetch_feedback(self, flow: str, links: Mapping[str, float], *ends: str) -> Feedback:
        if self.silent:
            raise StoreError("no answer")
        self.asked = ends
        return Feedback(1, 0.0, SLOT_S, (self.load,), self.into, self.out)

    def update_schedule(self, schedule: UpdateSchedule) -> bool:
        self.booked.append(schedule.rates_Bps)
        self.schedules.append(schedule)
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def rig(request: pytest.FixtureRequest):
    wire, tables, marks = FakeWire(), FakeTables(), SimpleNamespace(total=0)
    now = SimpleNamespace(s=0.0)
    more = {"slot_s": SLOT_S, "role": getattr(request, "param", "ring"), "clock": lambda: now.s}
    scheduler = RateScheduler("job", 0, "a", marks, wire, lambda endpoint: tables, **more)
    yield SimpleNamespace(wire=wire, tables=tables, marks=marks, now=now, scheduler=scheduler)
    scheduler.revert()


def looks(rig) -> None:
    """Wait until the thread has looked once more."""
    rig.now.s += SLOT_S
    at = rig.now.s
    until(lambda: rig.scheduler._looked_s >= at or rig.scheduler.status()["why_not"], 30)


def begin(rig, *more: HostFlowLinks) -> None:
    """Two iterations of 5 MB, and a third under way; ``more`` flows carry nothing."""
    rig.scheduler.follow((FLOW, replace_ends(FLOW), *more), "")
    looks(rig)
    for mark in (1, 2):
        rig.wire.sent += 5 * MB
        rig.wire.received += 5 * MB
        looks(rig)
        rig.marks.total = mark
        looks(rig)
    assert not rig.wire.limits
    rig.wire.sent += MB // 10
    rig.wire.received += MB // 10
    looks(rig)


def replace_ends(flow: HostFlowLinks) -> HostFlowLinks:
    return HostFlowLinks(flow.dst, flow.src, ("10.0.0.1",), {"m": CAPACITY_Bps})


def test_a_flow_under_way_is_limited_and_let_go(rig) -> None:
    begin(rig)
    until(lambda: rig.wire.limits, 30, "a limit")
    assert rig.wire.limits[-1].keys() == {("tcp", 7)}
    assert sum(rig.tables.booked[-1]) * SLOT_S == pytest.approx(4.9 * MB, rel=0.02)
    rig.marks.total = 3
    looks(rig)
    until(lambda: rig.wire.limits[-1] == {}, 30, "no limit")
    assert rig.tables.booked[-1] == ()


def test_a_flow_whose_slots_are_taken_waits_at_a_little_rate(rig) -> None:
    rig.tables.load = (CAPACITY_Bps,) * 5 + (0.0,) * 5
    begin(rig)
    until(lambda: rig.wire.limits, 30, "a limit")
    looks(rig)
    least = LEAST_SHARE * CAPACITY_Bps
    assert rig.tables.booked[-1][:5] == (0.0,) * 5
    assert rig.wire.limits[-1][("tcp", 7)] >= least
    assert rig.wire.limits[-1][("tcp", 7)] < CAPACITY_Bps / 2


def test_a_waiting_socket_never_sleeps_for_longer_than_a_slot(rig) -> None:
    # The kernel sends bursts of up to 64 kB, and at 1% of this path one would take 6 slots.
    rig.tables.load = (CAPACITY_Bps,) * SLOTS
    begin(rig)
    until(lambda: rig.wire.limits, 30, "a limit")
    looks(rig)
    assert BURST_BYTES / rig.wire.limits[-1][("tcp", 7)] <= SLOT_S / 2
    assert BURST_BYTES / (LEAST_SHARE * CAPACITY_Bps) > SLOT_S


def test_connections_that_cannot_be_limited_are_told(rig) -> None:
    assert rig.scheduler.status()["unlimited"] is None
    rig.wire.refuses = "1 of 1 queue pairs: its device can't limit the rate"
    begin(rig)
    until(lambda: rig.scheduler.status()["unlimited"], 30, "why there is no limit")
    assert rig.scheduler.status()["unlimited"] == rig.wire.refuses


def test_silent_tables_end_all_limits(rig) -> None:
    begin(rig)
    until(lambda: rig.wire.limits and rig.wire.limits[-1], 30, "a limit")
    rig.tables.silent = True
    rig.wire.sent += MB // 10
    looks(rig)
    until(lambda: rig.wire.limits[-1] == {}, 30, "no limit")
    assert rig.scheduler.status()["why_not"] == "no answer"


def test_a_thread_that_stands_still_ends_all_limits(rig) -> None:
    begin(rig)
    until(lambda: rig.wire.limits and rig.wire.limits[-1], 30, "a limit")
    rig.scheduler._stop.set()
    rig.scheduler.check()
    assert rig.wire.limits[-1]
    rig.now.s += SILENT_S + SLOT_S
    rig.scheduler.check()
    assert rig.wire.limits[-1] == {}


def test_an_order_without_flows_ends_all_limits(rig) -> None:
    begin(rig)
    until(lambda: rig.wire.limits and rig.wire.limits[-1], 30, "a limit")
    rig.scheduler.follow((), "")
    assert rig.wire.limits[-1] == {}
    assert rig.scheduler.status()["flows"] == []


# ---------------------------------------------------------------- parameter servers


@pytest.mark.parametrize("rig", ["server"], indirect=True)
def test_a_server_gives_back_what_the_slowest_worker_has_not_brought(rig) -> None:
    # Algorithm 2, lines 13 to 16: 0.1 MB are sent, and 0.5 MB will have come by the slot's end.
    rig.tables.into = {"b": 0.5 * MB}
    begin(rig)
    until(lambda: rig.wire.limits, 30, "a limit")
    assert rig.tables.asked == ("job", "a", "b")
    (booked,) = {s.rates_Bps for s in rig.tables.schedules if any(s.rates_Bps)}
    assert booked[0] == pytest.approx(4 * MB)
    assert booked[1] == CAPACITY_Bps
    assert sum(booked) * SLOT_S == pytest.approx(4.9 * MB)
    last = rig.tables.schedules[-1]
    assert (last.src, last.dst) == ("a", "b")
    assert last.by_end == pytest.approx(0.5 * MB)
    assert rig.wire.limits[-1] == {("tcp", 7): 4 * MB}


@pytest.mark.parametrize("rig", ["server"], indirect=True)
def test_a_worker_that_tells_nothing_counts_as_far_as_its_bytes(rig) -> None:
    # The other host has another server: that it sends nothing holds nobody up.
    begin(rig, HostFlowLinks("a", "c", ("10.0.0.3",), {"n": CAPACITY_Bps}))
    until(lambda: rig.wire.limits, 30, "a limit")
    # As much has come as was sent, so nothing is booked in this slot.
    assert rig.scheduler.status()["depended"] > 0
    assert rig.tables.schedules[-1].by_end == pytest.approx(0.1 * MB)


@pytest.mark.parametrize("rig", ["worker"], indirect=True)
def test_a_worker_follows_the_servers_fastest_broadcast(rig) -> None:
    # Others leave 2 MB/s of each slot, and the server's fastest broadcast is far ahead.
    rig.tables.load = (CAPACITY_Bps - 2 * MB,) * SLOTS
    rig.tables.out = {"b": 0.2 * MB, "c": 2.5 * MB}
    begin(rig)
    until(lambda: rig.wire.limits, 30, "a limit")
    # It had no rate before, so no raise goes beyond the room.
    assert rig.wire.limits[-1] == {("tcp", 7): 2 * MB}
    rig.wire.sent += 4 * MB // 10
    looks(rig)
    # Now it goes up to what it has just reached.
    until(lambda: rig.wire.limits[-1] == {("tcp", 7): 4 * MB}, 30, "a raise")
    assert rig.scheduler.status()["depended"] > 0
    # What goes beyond the room is not booked.
    assert all(s.rates_Bps[0] <= 2 * MB for s in rig.tables.schedules if s.rates_Bps)


@pytest.mark.parametrize(
    ("servers", "rank", "role"), [("", 0, "ring"), ("1,2", 0, "worker"), ("1,2", 2, "server")]
)
def test_the_jobs_owner_says_who_serves(servers: str, rank: int, role: str) -> None:
    settings = Settings.from_env({"CRUX_SERVERS": servers})
    marks = SimpleNamespace(total=0)
    scheduler = RateScheduler.from_settings(settings, rank, "a", marks, FakeWire())
    assert scheduler.status()["role"] == role
