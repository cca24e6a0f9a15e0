"""What a job's leader orders without marks, in a dry run, and with the topology's qos."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from control_fakes import FakeClock, MemoryStore
from led_job import SETTINGS, Job, run
from networks import LEAF_SPINE, OF_QOS, QOS

from crux_torch.agent.job_controller import Routing
from crux_torch.agreement.inputs import agreed
from crux_torch.agreement.planner import entries_of_agreed_levels
from crux_torch.agreement.registry import Registry
from crux_torch.network.loaders import parse_yaml
from crux_torch.settings import Marks, Settings

UNMARKED = {"dscp_map": ()}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


def job(name: str, clock: FakeClock, store: Any, qos: str = "", **changes: Any) -> Job:
    """A job of the default policy on two hosts of a fabric, which it publishes."""
    options = {"routing": Routing(clock=clock), "published": (LEAF_SPINE + qos).encode()}
    compute = partial(entries_of_agreed_levels, policy="crux-paper")
    made = Job(name, clock, store, compute=compute, changes=changes, **options)
    if made.leader is not None:
        made.leader._computer._agree = agreed
    return made


def test_a_job_without_marks_is_measured_planned_and_routed_but_gets_no_top_level(
    clock: FakeClock, store: MemoryStore
) -> None:
    one = job("a", clock, store, **UNMARKED)
    run(clock, 8.0, one)
    assert one.phases == ["warming", "measuring", "running"]
    assert {order.level for order in one.orders if order.measuring} == {None}
    assert {order.marks for order in one.orders} == {None}
    told = one.told
    assert (told.level, told.dscp, told.qp_dscp) == (0, None, None)
    assert told.routes
    assert told.generation == 1
    assert one.controller.profile is not None
    assert one.controller.profile.measured_alone, "no other job was there"
    assert one.controller.profile.t_note


def test_jobs_without_marks_are_measured_one_at_a_time(
    clock: FakeClock, store: MemoryStore
) -> None:
    jobs = [job(name, clock, store, **UNMARKED) for name in "ab"]
    for one in jobs:
        one.answers_come = False
    run(clock, 2.0, *jobs)
    assert [one.controller.phase for one in jobs].count("measuring") == 1
    for one in jobs:
        one.answers_come = True
    run(clock, 10.0, *jobs)
    profiles = [one.controller.profile for one in jobs]
    assert all(profile and not profile.measured_alone and profile.t_note for profile in profiles)
    assert [one.told.level for one in jobs] == [0, 0]


def test_a_dry_run_is_planned_and_follows_nothing(clock: FakeClock, store: MemoryStore) -> None:
    dry, live = job("a", clock, store, dry_run=True), job("b", clock, store)
    run(clock, 15.0, dry, live)
    assert dry.phases == ["warming", "measuring", "running"]
    assert dry.told.entry is not None
    assert dry.told.entry.paths
    for order in dry.orders:
        assert (order.level, order.marks, order.pace, order.tables) == (None, None, None, "")
        assert (order.routes, order.flows, order.generation) == ((), (), 0)
    assert live.told.marks == SETTINGS.marks, "the other job is no dry run"
    assert live.told.routes


def test_an_operator_who_observes_makes_it_a_dry_run_of_all_and_acts_again(
    clock: FakeClock, store: MemoryStore
) -> None:
    def set_to(observe: bool) -> None:
        view = registry.look()
        after = view.operator.changed(observe=observe)
        assert registry.swap_operator(view.operator_raw, after)

    registry = Registry(store, "c")
    set_to(True)
    one = job("a", clock, store)
    run(clock, 8.0, one)
    assert one.told.entry is not None
    assert {order.level for order in one.orders} == {None}
    assert {order.routes for order in one.orders} == {()}
    epoch = one.told.plan_epoch
    set_to(False)
    run(clock, 2.0, one)
    assert one.told.level == one.told.entry.level
    assert one.told.routes
    assert (one.told.plan_epoch, one.told.marks) == (epoch, SETTINGS.marks), "the plan stands"


def test_a_job_takes_the_map_of_the_published_topology(
    clock: FakeClock, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_yaml(LEAF_SPINE + QOS).qos is not None
    bare, own = job("a", clock, store, QOS, **UNMARKED), job("b", clock, store, QOS)
    run(clock, 15.0, bare, own)
    assert [one.told.marks for one in (bare, own)] == [OF_QOS, OF_QOS]
    assert {order.level for order in bare.orders if order.measuring} == {2}
    assert caplog.text.count("differs from the qos of the topology") == 1
    told = bare.told
    assert told.level is not None
    assert (told.dscp, told.qp_dscp) == (OF_QOS.tcp[told.level], OF_QOS.rdma[told.level])
    assert {one.leader.record.marks for one in (bare, own)} == {OF_QOS}


def test_jobs_whose_maps_differ_do_not_use_a_level_that_is_reserved(
    clock: FakeClock, store: MemoryStore
) -> None:
    ours = job("a", clock, store, reserved_levels=(0,))
    theirs = job("b", clock, store, dscp_map=tuple(range(20, 28)))
    run(clock, 15.0, ours, theirs)
    assert [one.told.level for one in (ours, theirs)] == [0, 0]
    assert (ours.told.marks, ours.told.dscp) == (None, None), "level 0 is not its own to use"
    assert theirs.told.dscp == 20


def test_settings_and_records_say_the_same() -> None:
    assert SETTINGS.marks == Marks(SETTINGS.dscp_map, (), tuple(range(8)))
    assert Settings().marks == Marks()
