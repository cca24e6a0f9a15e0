"""The leader's half of path selection: what the ranks are told, and how often they switch."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from control_fakes import FakeClock, MemoryStore
from test_route import LEAF_SPINE
from test_runtime_lead import SETTINGS, Job, run
from torch.distributed import HashStore

from crux_torch.control.job_channel import JobChannel
from crux_torch.control.outcome import Outcome, routed
from crux_torch.control.planner import compute_entries
from crux_torch.control.records import PathCounts, PlanEntry
from crux_torch.fabric.loaders import parse_yaml
from crux_torch.fabric.route import PlannedPath, planned_paths
from crux_torch.runtime.lead import (
    MAX_RETRIES,
    SWITCH_PAUSE_S,
    Routing,
    Wanted,
)
from crux_torch.runtime.order import GATHER_S, PathReports

TOPOLOGY = parse_yaml(LEAF_SPINE)
HOSTS = ("h0", "h1")


def over(there: int, back: int) -> tuple[PlannedPath, ...]:
    """Paths from h0 to h1 and back over the spines of these numbers."""
    spines = {HOSTS: there, HOSTS[::-1]: back}
    chosen = {pair: TOPOLOGY.candidate_paths(*pair)[spine] for pair, spine in spines.items()}
    return planned_paths(chosen, TOPOLOGY)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def follow(routing, paths, hosts=HOSTS, topology=TOPOLOGY):
    routing.follow(paths, routed(paths, hosts, topology))


class Told:
    """A routing that follows one plan after the other."""

    def __init__(self, clock: FakeClock, first_generation: int = 1) -> None:
        self.routing = Routing(first_generation=first_generation, clock=clock)

    def follow(self, there: int, back: int) -> Wanted:
        follow(self.routing, over(there, back))
        return self.routing.wanted()


@pytest.fixture
def told(clock: FakeClock) -> Told:
    return Told(clock)


def spines(wanted: Wanted) -> list[str]:
    return [addresses[0].split(".")[2] for route in wanted.routes for _, addresses in route.hops]


@pytest.mark.parametrize("first", [1, 58])
def test_other_paths_make_a_switch_and_the_same_ones_none(clock, first):
    told = Told(clock, first)
    assert told.routing.wanted() == Wanted((), 0)
    assert told.follow(0, 0).generation == first
    clock.advance(SWITCH_PAUSE_S)
    assert told.follow(0, 0).generation == first
    assert spines(told.follow(0, 1)) == ["0", "1"]
    assert told.routing.wanted().generation == first + 1


def test_a_plan_that_was_lost_and_comes_back_makes_none(told, clock):
    before = told.follow(1, 1)
    told.routing.forget()
    assert told.routing.wanted() == Wanted((), 1)
    clock.advance(SWITCH_PAUSE_S)
    assert told.follow(1, 1) == before


def test_switches_keep_their_distance_and_the_last_word_counts(told, clock):
    assert told.follow(0, 0).generation == 1
    for there, back in ((1, 1), (0, 1), (1, 1)):
        clock.advance(SWITCH_PAUSE_S / 10)
        assert told.follow(there, back).generation == 1
    assert spines(told.routing.wanted()) == ["1", "1"]
    clock.advance(SWITCH_PAUSE_S)
    assert told.routing.wanted().generation == 2


def test_missed_paths_are_tried_again_a_few_times_ever_later(told, clock):
    assert told.follow(1, 0).generation == 1
    wanted = told.routing.wanted
    pauses = []
    for switch in range(2, 2 + MAX_RETRIES):
        began = clock.now
        while wanted(missed=1).generation < switch:
            clock.advance(SWITCH_PAUSE_S / 10)
        pauses.append(round((clock.now - began) / SWITCH_PAUSE_S))
    assert pauses == [1, 2, 4]
    clock.advance(SWITCH_PAUSE_S * 100)
    assert wanted(missed=1).generation == 1 + MAX_RETRIES
    assert told.follow(1, 1).generation == 2 + MAX_RETRIES
    clock.advance(SWITCH_PAUSE_S)
    assert wanted().generation == 2 + MAX_RETRIES
    assert wanted(missed=2).generation == 3 + MAX_RETRIES


def test_without_a_topology_or_a_path_the_network_decides(told):
    for paths, topology in ((over(1, 0), None), ((), TOPOLOGY)):
        follow(told.routing, paths, topology=topology)
        assert told.routing.wanted() == Wanted((), 0)
        assert told.routing.problems == ()


def test_what_can_not_be_steered_is_said_once(told, caplog):
    silent = parse_yaml(LEAF_SPINE.replace("  spine1: [10.100.1.2, 10.100.17.2]\n", ""))
    for there, back in ((1, 0), (1, 1), (1, 0)):
        follow(told.routing, over(there, back), topology=silent)
    assert spines(told.routing.wanted()) == ["0"]
    assert told.routing.problems == ("no addresses of spine1",)
    assert len(caplog.records) == 1
    assert "spine1" in caplog.text


def test_the_paths_of_another_job_are_left_alone(told, caplog):
    for _ in range(2):
        follow(told.routing, over(1, 0), ("h0", "h2"))
        assert told.routing.wanted() == Wanted((), 0)
    assert "not join hosts of the job" in told.routing.problems[0]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def job(name: str, clock: FakeClock, store: MemoryStore) -> Job:
    compute = partial(compute_entries, policy="crux", levels=SETTINGS.marks.plan_levels)
    published, routing = LEAF_SPINE.encode(), Routing(clock=clock)
    return Job(name, clock, store, compute=compute, published=published, routing=routing)


def test_two_jobs_are_told_different_spines_and_only_the_one_that_moves_switches(clock):
    store = MemoryStore(clock)
    first = job("a", clock, store)
    run(clock, 5.0, first)
    assert spines(first.told) == ["0", "0"]
    assert type(first.told).from_json(first.told.to_json()) == first.told
    second = job("b", clock, store)
    run(clock, 10.0, first, second)
    assert [spines(j.told) for j in (first, second)] == [["0", "0"], ["1", "1"]]
    assert [j.told.generation for j in (first, second)] == [1, 1]
    first.conductor.close()
    run(clock, SWITCH_PAUSE_S + 5.0, second)
    assert spines(second.told) == ["0", "0"]
    assert second.told.generation == 2


def test_no_switch_while_the_job_is_measured(clock):
    one = job("a", clock, MemoryStore(clock))
    one.answers_come = False
    run(clock, 2.0, one)
    assert one.told.measuring
    one.leader.update(hosts=HOSTS)
    paths = over(1, 1)
    entry = PlanEntry(job="a", level=0, priority=1.0, intensity=1.0, correction=1.0, paths=paths)
    outcome = Outcome(1, entry, routed=routed(paths, HOSTS, TOPOLOGY))
    assert spines(one.conductor._routes(outcome, measuring=True)) == ["1", "1"]
    assert one.conductor._routes(outcome, measuring=True).generation == 0
    assert one.conductor._routes(outcome, measuring=False).generation == 1


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
