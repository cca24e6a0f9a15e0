"""The leader's half of path selection: what the ranks are told, and how often they switch."""

from __future__ import annotations

import logging

import pytest
from control_fakes import FakeClock
from test_route import LEAF_SPINE
from test_runtime_conductor import SETTINGS, Job, run
from torch.distributed import HashStore

from crux_torch.control.job_channel import JobChannel
from crux_torch.control.memory_store import MemoryStore
from crux_torch.control.planner import Planner
from crux_torch.control.records import PathCounts, PlanEntry
from crux_torch.profile.job_profile import HostFlow
from crux_torch.runtime.path_reports import GATHER_S, PathReports
from crux_torch.runtime.routing import MAX_RETRIES, SWITCH_PAUSE_S, Routing, Wanted

FLOWS = (HostFlow("h0", "h1", 1e6), HostFlow("h1", "h0", 1e6))
TOPOLOGY = LEAF_SPINE.encode()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def routing(clock: FakeClock) -> Routing:
    return Routing(Planner("crux", (0, 1)).topology_of, clock=clock)


def spines(wanted: Wanted) -> list[str]:
    return [addresses[0].split(".")[2] for route in wanted.routes for _, addresses in route.hops]


def test_the_first_paths_and_every_other_ones_make_a_switch(routing, clock):
    assert routing.wanted() == Wanted((), 0)
    routing.resolve((0, 0), FLOWS, TOPOLOGY)
    assert routing.wanted().switch == 1
    assert spines(routing.wanted()) == ["0", "0"]
    clock.advance(SWITCH_PAUSE_S)
    assert routing.wanted().switch == 1
    routing.resolve((0, 1), FLOWS, TOPOLOGY)
    assert routing.wanted().switch == 2
    assert spines(routing.wanted()) == ["0", "1"]


def test_other_bytes_over_the_same_paths_make_none(routing, clock):
    routing.resolve((1, 1), FLOWS, TOPOLOGY)
    assert routing.wanted().switch == 1
    clock.advance(SWITCH_PAUSE_S)
    routing.resolve((1, 1), tuple(HostFlow(f.src, f.dst, 5.0) for f in FLOWS), TOPOLOGY + b"\n")
    assert routing.wanted().switch == 1


def test_a_plan_that_was_lost_and_comes_back_makes_none(routing, clock):
    routing.resolve((1, 1), FLOWS, TOPOLOGY)
    before = routing.wanted()
    routing.forget()
    assert routing.wanted() == Wanted((), 1)
    clock.advance(SWITCH_PAUSE_S)
    routing.resolve((1, 1), FLOWS, TOPOLOGY)
    assert routing.wanted() == before


def test_switches_keep_their_distance_and_the_last_word_counts(routing, clock):
    routing.resolve((0, 0), FLOWS, TOPOLOGY)
    assert routing.wanted().switch == 1
    for path in ((1, 1), (0, 1), (1, 1)):
        clock.advance(SWITCH_PAUSE_S / 10)
        routing.resolve(path, FLOWS, TOPOLOGY)
        assert routing.wanted().switch == 1
    assert spines(routing.wanted()) == ["1", "1"]
    clock.advance(SWITCH_PAUSE_S)
    assert routing.wanted().switch == 2


def test_switches_are_numbered_from_where_an_earlier_world_may_have_ended(clock):
    routing = Routing(Planner("crux", (0, 1)).topology_of, first_switch=58, clock=clock)
    assert routing.wanted().switch == 0
    routing.resolve((1, 0), FLOWS, TOPOLOGY)
    assert routing.wanted().switch == 58
    clock.advance(SWITCH_PAUSE_S)
    routing.resolve((1, 1), FLOWS, TOPOLOGY)
    assert routing.wanted().switch == 59


def test_missed_paths_are_tried_again_a_few_times_ever_later(routing, clock):
    routing.resolve((1, 0), FLOWS, TOPOLOGY)
    assert routing.wanted().switch == 1
    assert routing.wanted(missed=1).switch == 1
    pauses = []
    for switch in range(2, 2 + MAX_RETRIES):
        began = clock.now
        while routing.wanted(missed=1).switch < switch:
            clock.advance(SWITCH_PAUSE_S / 10)
        pauses.append(round((clock.now - began) / SWITCH_PAUSE_S))
    assert pauses == [1, 2, 4]
    clock.advance(SWITCH_PAUSE_S * 100)
    assert routing.wanted(missed=1).switch == 1 + MAX_RETRIES
    routing.resolve((1, 1), FLOWS, TOPOLOGY)
    assert routing.wanted().switch == 2 + MAX_RETRIES
    clock.advance(SWITCH_PAUSE_S)
    assert routing.wanted().switch == 2 + MAX_RETRIES
    assert routing.wanted(missed=2).switch == 3 + MAX_RETRIES


def test_a_switch_waits_until_it_may(routing):
    routing.resolve((1, 0), FLOWS, TOPOLOGY)
    assert routing.wanted(may_switch=False).switch == 0
    assert routing.wanted().switch == 1


@pytest.mark.parametrize("topology", [None, b"links: [not, a, topology", b"\xff"])
def test_without_a_topology_that_can_be_read_the_network_decides(routing, topology, caplog):
    for _ in range(3):
        routing.resolve((1, 0), FLOWS, topology)
        assert routing.wanted() == Wanted((), 0)
    said = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == (topology is not None)


def test_what_can_not_be_steered_is_said_once(routing, caplog):
    silent = LEAF_SPINE.replace("  spine1: [10.100.1.2, 10.100.17.2]\n", "").encode()
    for path in ((1, 0), (1, 1), (1, 0)):
        routing.resolve(path, FLOWS, silent)
    assert spines(routing.wanted()) == ["0"]
    assert routing.problems == ("no addresses of spine1",)
    assert len(caplog.records) == 1
    assert "spine1" in caplog.text


def test_a_plan_that_does_not_fit_the_flows_is_left_alone(routing, caplog):
    routing.resolve((1,), FLOWS, TOPOLOGY)
    assert routing.wanted() == Wanted((), 0)
    assert len(caplog.records) == 1
    routing.resolve((), FLOWS, TOPOLOGY)
    assert routing.problems == ()


def job(name: str, clock: FakeClock, store: MemoryStore) -> Job:
    planner = Planner("crux", SETTINGS.plan_levels)
    routing = Routing(planner.topology_of, clock=clock)
    return Job(name, clock, store, compute=planner, published=TOPOLOGY, routing=routing)


def test_two_jobs_are_told_different_spines_and_only_the_one_that_moves_switches(clock):
    store = MemoryStore(clock)
    first = job("a", clock, store)
    run(clock, 5.0, first)
    assert spines(first.told) == ["0", "0"]
    second = job("b", clock, store)
    run(clock, 10.0, first, second)
    assert [spines(j.told) for j in (first, second)] == [["0", "0"], ["1", "1"]]
    assert [j.told.switch for j in (first, second)] == [1, 1]
    first.conductor.close()
    run(clock, SWITCH_PAUSE_S + 5.0, second)
    assert spines(second.told) == ["0", "0"]
    assert second.told.switch == 2


def test_no_switch_while_the_job_is_measured(clock):
    one = job("a", clock, MemoryStore(clock))
    one.answers_come = False
    run(clock, 2.0, one)
    assert one.told.measuring
    one.conductor._routing.resolve((1, 1), FLOWS, TOPOLOGY)
    entry = PlanEntry(job="a", level=0, priority=1.0, intensity=1.0, correction=1.0, path=(1, 1))
    assert spines(one.conductor._routes(entry, measuring=True)) == ["1", "1"]
    assert one.conductor._routes(entry, measuring=True).switch == 0
    assert one.conductor._routes(entry, measuring=False).switch == 1


def test_orders_carry_routes_through_json(clock):
    one = job("a", clock, MemoryStore(clock))
    run(clock, 5.0, one)
    assert one.told.routes
    assert type(one.told).from_json(one.told.to_json()) == one.told


def test_what_the_ranks_see_of_their_paths_is_added_up(clock):
    store = HashStore()
    channels = [JobChannel(store, rank, 4) for rank in range(4)]
    reports = [PathReports(channel, clock=clock) for channel in channels]
    leader = reports[0]
    assert leader.gather(planned=False) is None
    reports[1].send(None)
    assert leader.gather(planned=True) == PathCounts()
    reports[0].send(PathCounts(2, 0, 1))
    reports[1].send(PathCounts(1, 3, 0, 2))
    channels[2].put_paths(b"{")
    clock.advance(GATHER_S)
    assert leader.gather(planned=True) == PathCounts(3, 3, 1, 2)
    reports[1].send(None)
    assert leader.gather(planned=True) == PathCounts(3, 3, 1, 2)
    clock.advance(GATHER_S)
    assert leader.gather(planned=True) == PathCounts(2, 0, 1)
