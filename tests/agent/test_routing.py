"""The leader's half of path selection: routes, and how often they make a handover."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest
from control_fakes import FakeClock, MemoryStore
from led_job import SETTINGS, Job, run
from networks import LEAF_SPINE
from torch.distributed import HashStore

from crux_torch.agent.job_controller import HANDOVER_PAUSE_S, MAX_RETRIES, Routing
from crux_torch.agent.orders import GATHER_S, PathReport, PathReports, joined
from crux_torch.agreement.job_channel import JobChannel
from crux_torch.agreement.outcome import Outcome, routed
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import MAX_SEEN_BYTES, PathCounts, PlanEntry
from crux_torch.network.discover.fragment import SeenPair, SeenPath
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.routes import HostRoute, PlannedPath, planned_paths

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


class Followed:
    """A routing that follows one plan after the other."""

    def __init__(self, clock: FakeClock, first_generation: int = 1) -> None:
        self.routing = Routing(first_generation=first_generation, clock=clock)

    def follow(self, there: int, back: int) -> tuple[Sequence[HostRoute], int]:
        follow(self.routing, over(there, back))
        return self.routing.routes()


@pytest.fixture
def told(clock: FakeClock) -> Followed:
    return Followed(clock)


def spines(routes: Sequence[HostRoute]) -> list[str]:
    return [addresses[0].split(".")[2] for route in routes for _, addresses in route.hops]


@pytest.mark.parametrize("first", [1, 58])
def test_other_paths_make_a_handover_and_the_same_ones_none(clock, first):
    told = Followed(clock, first)
    assert told.routing.routes() == ((), 0)
    assert told.follow(0, 0)[1] == first
    clock.advance(HANDOVER_PAUSE_S)
    assert told.follow(0, 0)[1] == first
    assert spines(told.follow(0, 1)[0]) == ["0", "1"]
    assert told.routing.routes()[1] == first + 1


def test_a_plan_that_was_lost_and_comes_back_makes_none(told, clock):
    before = told.follow(1, 1)
    told.routing.forget()
    assert told.routing.routes() == ((), 1)
    clock.advance(HANDOVER_PAUSE_S)
    assert told.follow(1, 1) == before


def test_handovers_keep_their_distance_and_the_last_word_counts(told, clock):
    assert told.follow(0, 0)[1] == 1
    for there, back in ((1, 1), (0, 1), (1, 1)):
        clock.advance(HANDOVER_PAUSE_S / 10)
        assert told.follow(there, back)[1] == 1
    assert spines(told.routing.routes()[0]) == ["1", "1"]
    clock.advance(HANDOVER_PAUSE_S)
    assert told.routing.routes()[1] == 2


def test_missed_paths_are_tried_again_a_few_times_ever_later(told, clock):
    assert told.follow(1, 0)[1] == 1
    routes = told.routing.routes
    pauses = []
    for handover in range(2, 2 + MAX_RETRIES):
        began = clock.now
        while routes(missed=1)[1] < handover:
            clock.advance(HANDOVER_PAUSE_S / 10)
        pauses.append(round((clock.now - began) / HANDOVER_PAUSE_S))
    assert pauses == [1, 2, 4]
    clock.advance(HANDOVER_PAUSE_S * 100)
    assert routes(missed=1)[1] == 1 + MAX_RETRIES
    assert told.follow(1, 1)[1] == 2 + MAX_RETRIES
    clock.advance(HANDOVER_PAUSE_S)
    assert routes()[1] == 2 + MAX_RETRIES
    assert routes(missed=2)[1] == 3 + MAX_RETRIES


def test_without_a_topology_or_a_path_the_network_decides(told):
    for paths, topology in ((over(1, 0), None), ((), TOPOLOGY)):
        follow(told.routing, paths, topology=topology)
        assert told.routing.routes() == ((), 0)
        assert told.routing.problems == ()


def test_what_can_not_be_steered_is_said_once(told, caplog):
    silent = parse_yaml(LEAF_SPINE.replace("  spine1: [10.100.1.2, 10.100.17.2]\n", ""))
    for there, back in ((1, 0), (1, 1), (1, 0)):
        follow(told.routing, over(there, back), topology=silent)
    assert spines(told.routing.routes()[0]) == ["0"]
    assert told.routing.problems == ("no addresses of spine1",)
    assert len(caplog.records) == 1
    assert "spine1" in caplog.text


def test_the_paths_of_another_job_are_left_alone(told, caplog):
    for _ in range(2):
        follow(told.routing, over(1, 0), ("h0", "h2"))
        assert told.routing.routes() == ((), 0)
    assert "not join hosts of the job" in told.routing.problems[0]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def job(name: str, clock: FakeClock, store: MemoryStore) -> Job:
    compute = partial(compute_entries, policy="crux", levels=SETTINGS.marks.plan_levels)
    published, routing = LEAF_SPINE.encode(), Routing(clock=clock)
    return Job(name, clock, store, compute=compute, published=published, routing=routing)


def test_two_jobs_are_told_different_spines_and_only_the_one_that_moves_is_handed_over(clock):
    store = MemoryStore(clock)
    first = job("a", clock, store)
    run(clock, 5.0, first)
    assert spines(first.told.routes) == ["0", "0"]
    assert type(first.told).from_json(first.told.to_json()) == first.told
    second = job("b", clock, store)
    run(clock, 10.0, first, second)
    assert [spines(j.told.routes) for j in (first, second)] == [["0", "0"], ["1", "1"]]
    assert [j.told.generation for j in (first, second)] == [1, 1]
    first.controller.close()
    run(clock, HANDOVER_PAUSE_S + 5.0, second)
    assert spines(second.told.routes) == ["0", "0"]
    assert second.told.generation == 2


def test_no_handover_while_the_job_is_measured(clock):
    one = job("a", clock, MemoryStore(clock))
    one.answers_come = False
    run(clock, 2.0, one)
    assert one.told.measuring
    one.leader.update(hosts=HOSTS)
    paths = over(1, 1)
    entry = PlanEntry(job="a", level=0, priority=1.0, intensity=1.0, correction=1.0, paths=paths)
    outcome = Outcome(1, entry, routed=routed(paths, HOSTS, TOPOLOGY))
    routes, generation = one.controller._routes(outcome, measuring=True)
    assert (spines(routes), generation) == (["1", "1"], 0)
    assert one.controller._routes(outcome, measuring=False)[1] == 1


def test_what_the_ranks_see_of_their_paths_is_added_up(clock):
    store = HashStore()
    channels = [JobChannel(store, rank, 4) for rank in range(4)]
    reports = [PathReports(channel, clock=clock) for channel in channels]
    leader = reports[0]
    assert leader.gather(planned=False, host_at={}).counts is None
    reports[1].send(PathReport())
    assert leader.gather(planned=True, host_at={}) == PathReport(PathCounts())
    reports[0].send(PathReport(PathCounts(2, 0, 1)))
    reports[1].send(PathReport(PathCounts(1, 3, 0, 2)))
    channels[2].put_paths(b"{")
    clock.advance(GATHER_S)
    assert leader.gather(planned=True, host_at={}).counts == PathCounts(3, 3, 1, 2)
    reports[1].send(PathReport())
    assert leader.gather(planned=True, host_at={}).counts == PathCounts(3, 3, 1, 2)
    clock.advance(GATHER_S)
    assert leader.gather(planned=True, host_at={}).counts == PathCounts(2, 0, 1)


def test_what_the_ranks_of_a_host_see_becomes_one_entry_for_each_two_addresses(clock):
    store = HashStore()
    channels = [JobChannel(store, rank, 3) for rank in range(3)]
    reports = [PathReports(channel, clock=clock) for channel in channels]
    host_at = {"10.0.0.2": "h0", "10.1.0.2": "h1", "10.1.0.3": "h1"}

    def pair(src: str, here: str, there: str, *paths: SeenPath) -> SeenPair:
        return SeenPair(src, here, there, there, paths)

    direct, around = (None, "10.100.0.2"), (None, "10.100.1.2", "10.9.9.9")
    mine = pair("h0", "10.0.0.2", "10.1.0.2", SeenPath(direct, connections=2))
    same = pair(
        "h0",
        "10.0.0.2",
        "10.1.0.2",
        SeenPath(direct, connections=1),
        SeenPath(around, connections=4),
    )
    nobody, forged, inside = (
        pair("h0", "10.0.0.2", "10.7.7.7", SeenPath(direct, connections=1)),
        pair("h1", "10.0.0.2", "10.1.0.2", SeenPath(direct, connections=1)),
        pair("h1", "10.1.0.2", "10.1.0.3", SeenPath(direct, connections=1)),
    )
    reports[0].send(PathReport(None, (mine, nobody)))
    reports[1].send(PathReport(None, (same,)))
    reports[2].send(PathReport(None, (forged, inside)))
    found = reports[0].gather(planned=False, host_at=host_at)
    paths = (SeenPath(direct, connections=3), SeenPath(around, connections=4))
    expected = SeenPair("h0", "10.0.0.2", "h1", "10.1.0.2", paths)
    assert found == PathReport(
        None, (msgspec.structs.replace(expected, paths=found.seen[0].paths),)
    )
    assert set(found.seen[0].paths) == set(paths)


def test_a_report_that_is_too_long_keeps_its_counts(clock):
    channel = JobChannel(HashStore(), 0, 1)
    reports = PathReports(channel, clock=clock)
    hops = ("10.0.0.1",) * 16
    pairs = tuple(
        SeenPair("h0", "10.0.0.2", "h1", f"10.1.{n}.2", (SeenPath(hops, connections=1),))
        for n in range(200)
    )
    reports.send(PathReport(PathCounts(1), pairs))
    assert reports.gather(True, {p.dst_address: "h1" for p in pairs}).counts == PathCounts(1)


def test_a_record_holds_no_more_of_what_was_seen_than_fits():
    hops = tuple(f"10.{n}.0.1" for n in range(16))
    pairs = [
        SeenPair("h0", "10.0.0.2", "h1", f"10.1.{n // 250}.{n % 250}", (SeenPath(hops),))
        for n in range(4000)
    ]
    host_at = {"10.0.0.2": "h0"} | {p.dst_address: "h1" for p in pairs}
    found = joined(pairs, host_at)
    assert 0 < len(found) < len(pairs)
    assert len(msgspec.json.encode(found)) <= MAX_SEEN_BYTES
    assert joined(reversed(pairs), host_at) == found, "the same ones in any order"
