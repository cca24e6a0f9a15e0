"""The leader's side with a clock that the test moves, on the real leader and profiling slot."""

import contextlib
import itertools
import json
import logging
import random
from functools import partial
from typing import Any

import msgspec
import pytest
from control_fakes import FakeClock, FaultyStore, MemoryStore, profile
from hypothesis import example, given
from hypothesis import strategies as st
from led_job import SETTINGS, TICK_S, Job, run, sample

from crux_torch.agent.job_controller import GRACE_S, MAX_RETRY_S, RETRY_S, WITHOUT_STORE_S
from crux_torch.agent.orders import SCHEMA_VERSION, Order, answer
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import PlanEntry
from crux_torch.agreement.registry import Registry
from crux_torch.errors import StoreForbidden
from crux_torch.measure.sample import GroupRow
from crux_torch.store import MAX_LEASE_S


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without the news of a job, which other tests of this process may have switched on."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> FaultyStore:
    return FaultyStore(MemoryStore(clock), random.Random(0))


@pytest.fixture
def job(clock: FakeClock, store: FaultyStore) -> Job:
    return Job("a", clock, store)


@pytest.fixture
def measuring(job: Job, clock: FakeClock) -> Job:
    """A job whose ranks have not answered yet."""
    job.answers_come = False
    run(clock, 1.0, job)
    assert job.controller.phase == "measuring"
    return job


def test_a_job_warms_queues_is_measured_and_runs_under_the_plan(job, clock):
    job.ready = False
    run(clock, 1.0, job)
    assert job.phases == ["warming"]
    assert job.told.level is None
    assert job.told.measurement == 0

    job.ready = True
    run(clock, 4.0, job)
    assert job.phases == ["warming", "measuring", "running"]  # nobody else was in the line
    measuring = [order for order in job.orders if order.measuring]
    assert [(o.measurement, o.level) for o in measuring] == [(1, SETTINGS.marks.measuring_level)]
    assert job.controller.profile is not None
    assert job.controller.profile.measured_alone
    assert job.controller.profile.flops == 2e9
    flows = {(f.src, f.dst): f.bytes for f in job.controller.profile.flows}
    assert flows == {("h0", "h1"): 4000.0, ("h1", "h0"): 4000.0}
    # by_name gives the first job level 0; the measured profile reaches the ranks with it.
    assert (job.told.level, job.told.plan_epoch) == (0, 1)
    assert job.told.entry is not None
    assert job.told.profile == job.controller.profile
    assert not job.told.measuring
    turns = [order.number for order in job.orders]
    assert turns == sorted(set(turns))
    assert job.leader.record.state == "running"
    assert job.leader.record.hosts == ("h0", "h1")


def test_one_job_at_a_time_is_measured(store, clock):
    jobs = [Job(name, clock, store) for name in "abc"]
    for job in jobs:
        job.answers_come = False
    holders = []
    for _ in range(round(60 / TICK_S)):
        run(clock, TICK_S, *jobs)
        measuring = [j for j in jobs if j.controller.phase == "measuring"]
        assert len(measuring) <= 1
        for job in measuring:
            assert [j.slot.held for j in jobs].count(True) == 1
            assert job.slot.held
            if job not in holders:
                holders.append(job)
            job.answers_come = True
        if all(j.controller.phase == "running" for j in jobs):
            break
    assert len(holders) == 3
    run(clock, 2.0, *jobs)
    assert [j.told.level for j in jobs] == [0, 1, 2]
    assert len({j.told.plan_epoch for j in jobs}) == 1
    assert all(j.controller.profile.measured_alone for j in jobs)


def test_a_store_that_is_away_delays_the_measurement_but_does_not_prevent_it(store, clock, caplog):
    store.fail = 1.0
    job = Job("a", clock, store)
    run(clock, WITHOUT_STORE_S - 0.5, job)
    assert job.phases == ["warming", "queueing"]
    run(clock, 2.0, job)
    assert job.phases[-1] == "running"
    assert job.controller.profile is not None
    assert not job.controller.profile.measured_alone
    # Measured without the slot, nobody was asked to give way: the class stays the default.
    assert {order.level for order in job.orders} == {None}
    assert [r.levelno for r in warnings_of(caplog)] == [logging.WARNING]

    store.fail = 0.0
    run(clock, 10.0, job)
    assert job.told.level == 0
    assert len(warnings_of(caplog)) == 1


def test_a_job_whose_role_may_not_take_the_slot_is_measured_without_it(clock):
    class Forbidding(MemoryStore):
        def put(self, key, value, lease_s=MAX_LEASE_S):
            if "/waiting/" in key:
                raise StoreForbidden("permission_denied")
            super().put(key, value, lease_s)

    job = Job("a", clock, Forbidding(clock))
    run(clock, WITHOUT_STORE_S + 2.0, job)
    assert job.phases[-1] == "running"
    assert not job.controller.profile.measured_alone
    assert job.leader.store_state == "ok"


@pytest.mark.parametrize("setting", [{"disabled": True}, {"drained": ("a",)}, {"pins": {"a": 3}}])
def test_a_job_keeps_the_level_that_the_operator_gave_it_while_it_is_measured(
    store, clock, job, setting
):
    registry = Registry(store, "c")
    view = registry.look()
    assert registry.swap_operator(view.operator_raw, view.operator.changed(**setting))
    run(clock, 4.0, job)
    assert job.phases == ["warming", "measuring", "running"]
    measured_on = {order.level for order in job.orders if order.measuring}
    assert SETTINGS.marks.measuring_level not in measured_on
    assert not job.controller.profile.measured_alone


def test_without_a_shared_store_a_job_is_measured_and_keeps_the_default_class(clock):
    job = Job("a", clock, None)
    run(clock, 2.0, job)
    assert job.phases[-1] == "running"
    assert job.controller.profile is not None
    assert not job.controller.profile.measured_alone
    assert {order.level for order in job.orders} == {None}
    job.controller.close()


def test_the_slot_is_free_again_when_the_lease_outlived_the_measurement(measuring, clock):
    # The thread stood still for longer than the slot's lease: another job may hold it by now.
    clock.advance(SETTINGS.profile_s + 2 * GRACE_S)
    order = measuring.step()
    assert order is None or order.level != SETTINGS.marks.measuring_level


def test_late_answers_end_with_the_ranks_that_came(measuring, clock, caplog):
    measuring.answers = {0: measuring.measured(0)}
    run(clock, SETTINGS.profile_s + GRACE_S - 1.0, measuring)
    assert measuring.controller.phase == "measuring"
    run(clock, 1.0, measuring)
    assert measuring.controller.phase == "running"
    assert measuring.controller.profile.flops == 2e9  # scaled to both ranks
    assert "1 of 2 ranks" in caplog.text
    assert not measuring.slot.held


def test_an_answer_to_another_measurement_or_world_does_not_count(measuring, clock):
    stale = answer(measuring.incarnation, 0, sample(0)), answer("other-world", 1, sample(1))
    measuring.answers = dict(enumerate(stale))
    run(clock, 2.0, measuring)
    assert measuring.controller.phase == "measuring"
    measuring.answers_come = True
    run(clock, 1.0, measuring)
    assert measuring.controller.phase == "running"


WRONG = {
    "garbage": lambda job: b"\xff\x00garbage",
    "no sample": lambda job: job.measured(1)[:40],
    "another rank": lambda job: answer(job.incarnation, 1, sample(0)),
    "another world": lambda job: answer(job.incarnation, 1, sample(1, world_size=7)),
    "impossible group": lambda job: answer(
        job.incarnation, 1, sample(1, groups=(GroupRow("0", 1, (0, 2**62, 1)),))
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_sample_neither_wedges_nor_floods(wrong, measuring, clock, caplog):
    measuring.answers = {0: measuring.measured(0), 1: wrong(measuring)}
    run(clock, SETTINGS.profile_s + GRACE_S + 1.0, measuring)
    assert measuring.controller.phase in ("running", "warming")
    assert not measuring.slot.held
    assert len(warnings_of(caplog)) <= 3


@pytest.mark.parametrize("error", [ValueError("no"), OverflowError("no"), RuntimeError("no")])
def test_a_failing_merge_gives_the_slot_back_and_is_tried_again(
    error, job, clock, caplog, monkeypatch
):
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("crux_torch.agent.job_controller.merge", fail)
        run(clock, 2.0, job)
        assert job.phases[-2:] == ["measuring", "warming"]
        assert not job.slot.held
        assert job.leader.record.state == "starting"
        # Orders go on: the ranks must not think that their leader is gone.
        before = len(job.orders)
        run(clock, SETTINGS.plan_valid_s, job)
        assert len(job.orders) > before
        assert job.phases.count("measuring") == 1
        assert len(warnings_of(caplog)) == 1
    run(clock, RETRY_S, job)
    assert job.controller.phase == "running"
    assert job.controller.measurement == 2


@pytest.mark.parametrize("trains", [True, False])
def test_a_job_without_iterations_does_not_hold_the_top_class_for_ever(trains, job, clock, caplog):
    job.answers_come, job.trains = False, trains
    measuring_s = 0.0
    for _ in range(round(1500 / 0.5)):
        job.answers = {r: answer(job.incarnation, job.controller.measurement, None) for r in (0, 1)}
        job.step()
        measuring_s += 0.5 * (job.controller.phase == "measuring")
        clock.advance(0.5)
    # Pauses double: 10, 20, 40 ... 600 s.
    assert 5 <= job.controller.measurement <= 9
    assert measuring_s < 20
    assert MAX_RETRY_S == 600.0
    # Nothing is wrong with an evaluation.
    assert len(warnings_of(caplog)) == trains
    assert ("2 of 2 ranks" in caplog.text) == trains


def test_orders_are_renewed_well_within_their_validity(job, clock):
    run(clock, 5.0, job)
    seen = len(job.orders)
    heard = []
    for _ in range(round(30 / TICK_S)):
        if job.step() is not None:
            heard.append(clock.now)
        clock.advance(TICK_S)
    assert len(job.orders) - seen >= 10
    assert max(b - a for a, b in itertools.pairwise(heard)) < SETTINGS.plan_valid_s / 2
    contents = {msgspec.structs.replace(o, number=1).to_json() for o in job.orders[seen:]}
    assert len(contents) == 1


def test_turns_go_on_from_those_of_an_earlier_world(clock):
    job = Job("a", clock, None, first_number=58)
    run(clock, 1.0, job)
    assert job.orders[0].number == 58


def test_another_plan_changes_the_level_at_once(store, clock):
    job, before = Job("b", clock, store), Job("a", clock, store)
    run(clock, 5.0, job)
    assert job.told.level == 0
    run(clock, 5.0, job, before)
    assert (before.told.level, job.told.level) == (0, 1)
    assert job.told.plan_epoch == before.told.plan_epoch > 1
    before.controller.close()
    run(clock, 2.0, job)
    assert job.told.level == 0


def test_an_expired_plan_takes_the_level_back(store, clock):
    job = Job("a", clock, store)
    run(clock, 5.0, job)
    assert job.told.level == 0
    store.fail = 1.0
    run(clock, SETTINGS.plan_valid_s + 1.0, job)
    assert (job.told.level, job.told.entry, job.told.plan_epoch) == (None, None, 0)


def test_a_change_is_measured_again_and_the_old_profile_counts_meanwhile(job, clock):
    run(clock, 5.0, job)
    job.changed, job.answers_come = True, False
    run(clock, 1.0, job)
    assert job.controller.phase == "measuring"
    assert job.told.measurement == 2
    assert job.told.level == SETTINGS.marks.measuring_level
    assert job.told.profile is not None
    job.changed, job.answers_come = False, True
    run(clock, 2.0, job)
    assert job.phases[-2:] == ["measuring", "running"]
    assert job.told.level == 0


@pytest.mark.parametrize("phase", ["warming", "queueing", "measuring", "running"])
def test_close_removes_every_trace_from_the_store(phase, store, clock):
    other = Job("z", clock, store)
    other.answers_come = False
    job = Job("a", clock, store)
    job.ready = phase != "warming"
    job.answers_come = phase == "running"
    if phase == "queueing":
        run(clock, 0.5, other)
    run(clock, 1.0, job)
    assert job.controller.phase == phase
    job.controller.close()
    mine = [k for k in store.list("crux/c/") if k.endswith("/a")]
    assert mine == []
    assert other.slot.held or store.list("crux/c/").get("crux/c/slot", b"{}") == b"{}"


def test_close_removes_the_record_even_if_the_slot_fails(store, clock, monkeypatch):
    job = Job("a", clock, store)
    run(clock, 1.0, job)

    def fail() -> None:
        raise RuntimeError("slot")

    monkeypatch.setattr(job.slot, "release", fail)
    with contextlib.suppress(RuntimeError):
        job.controller.close()
    assert "crux/c/jobs/a" not in store.list("crux/c/")


def test_the_topology_is_written_and_again_after_the_store_was_lost(store, clock):
    job = Job("a", clock, store, published=b"links: {}")
    store.fail = 1.0
    run(clock, 1.0, job)
    store.fail = 0.0
    run(clock, 1.0, job)
    assert store.inner.get("crux/c/topology") == b"links: {}"
    store.fail = 1.0
    run(clock, 1.0, job)
    store.inner.entries.clear()
    store.fail = 0.0
    run(clock, 1.0, job)
    assert store.inner.get("crux/c/topology") == b"links: {}"


def test_a_job_that_never_leaves_its_host_has_an_order_that_ranks_can_read(clock):
    """Without traffic between hosts the intensity is infinite, which JSON can't say."""
    compute = partial(compute_entries, policy="crux", levels=(0, 1))
    job = Job("a", clock, MemoryStore(clock), compute=compute, world_size=1)
    alone = sample(0, world_size=1, groups=(), traffic=(), comm_s=0.0)
    job.answers_come = False
    for _ in range(100):
        job.answers = {0: answer(job.incarnation, job.controller.measurement, alone)}
        run(clock, TICK_S, job)
    assert job.controller.profile is not None
    assert job.controller.profile.intensity == float("inf")
    order = job.told
    assert order.entry is not None
    again = Order.from_json(order.to_json())
    assert again == order
    assert "null" not in json.dumps(msgspec.to_builtins(again.entry))


def test_the_status_is_plain_values(job, clock):
    run(clock, 5.0, job)
    status = json.loads(json.dumps(job.controller.status()))
    assert (status["phase"], status["measurements"], status["state"]) == ("running", 1, "planned")


ENTRY = PlanEntry(job="a", level=3, priority=2.0, intensity=1.0, correction=2.0, paths=())
ORDER = Order(
    incarnation="i", number=3, level=5, measurement=2, measuring=True, valid_s=6.0, plan_epoch=4,
    entry=ENTRY, profile=profile(),
)  # fmt: skip


def test_an_order_survives_json():
    assert Order.from_json(ORDER.to_json()) == ORDER


@given(st.data())
def test_a_damaged_order_raises_value_error_or_is_an_order(data):
    raw = bytearray(ORDER.to_json())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        assert isinstance(Order.from_json(bytes(raw)), Order)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(sorted(msgspec.to_builtins(ORDER))),
)
def test_a_field_of_another_type_raises_value_error_or_is_an_order(value, field):
    raw = json.dumps({**msgspec.to_builtins(ORDER), field: value}).encode()
    with contextlib.suppress(ValueError):
        assert isinstance(Order.from_json(raw), Order)


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"entry":' * 100_000)
@example(b'{"profile":{"flows":' + b"[" * 100_000)
@example(msgspec.structs.replace(ORDER, version=SCHEMA_VERSION + 1).to_json())
def test_bytes_that_are_no_order_of_this_version_raise_value_error(raw):
    with pytest.raises(ValueError):
        Order.from_json(raw)
