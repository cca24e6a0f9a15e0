"""Leaders agree: on one plan, one epoch, whatever the store does to them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from control_fakes import (
    SPAWN,
    FakeClock,
    FaultyStore,
    by_name,
    free_port,
    host_until_killed,
    profile,
    record,
    until,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.control.leader import Leader
from crux_torch.control.memory_store import MemoryStore
from crux_torch.control.records import Plan
from crux_torch.control.registry import PlanState, Registry, StoredPlan
from crux_torch.control.store import Store
from crux_torch.control.tcp_store import TcpStore
from crux_torch.errors import StoreError


def leader_of(store: Store, job: str, clock: Any, seed: int = 0, **options: Any) -> Leader:
    incarnation = options.pop("incarnation", "i0")
    compute = options.pop("compute", by_name)
    return Leader(
        store,
        "c",
        record(job, incarnation),
        compute,
        clock=clock,
        rng=random.Random(seed),
        **options,
    )


def run(leaders: Sequence[Leader], clock: FakeClock, seconds: float, step_s: float = 0.1) -> None:
    for _ in range(round(seconds / step_s)):
        for leader in leaders:
            leader.tick()
        clock.advance(step_s)


def agreed(leaders: Sequence[Leader]) -> Plan:
    plans = [leader.plan for leader in leaders]
    assert plans[0] is not None
    assert all(plan == plans[0] for plan in plans)
    assert [e.job for e in plans[0].entries] == sorted(lead.record.job for lead in leaders)
    return plans[0]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_all_leaders_reach_one_plan_and_keep_it(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    leaders = [leader_of(store, f"j{n}", clock, n) for n in range(5)]
    run(leaders, clock, 5)
    plan = agreed(leaders)
    assert plan.epoch == 1
    run(leaders, clock, 60)
    assert agreed(leaders) == plan
    assert all(leader.state == "planned" for leader in leaders)
    assert leaders[0].status()["epoch"] == 1


def test_a_job_that_leaves_or_changes_is_replanned(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    leaders = [leader_of(store, f"j{n}", clock, n) for n in range(3)]
    run(leaders, clock, 5)
    before = agreed(leaders)
    leaders[2].close()
    leaders[2].close()
    assert leaders[2].state == "closed"
    assert leaders[2].plan is None
    run(leaders[:2], clock, 2)
    after = agreed(leaders[:2])
    assert after.epoch == before.epoch + 1
    leaders[0].set_profile(profile(t_s=0.9))
    run(leaders[:2], clock, 2)
    assert agreed(leaders[:2]).epoch == after.epoch + 1


def test_a_silent_job_is_replanned_when_its_lease_ends(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    leaders = [leader_of(store, f"j{n}", clock, n, lease_s=6.0) for n in range(3)]
    run(leaders, clock, 5)
    agreed(leaders)
    run(leaders[:2], clock, 8)
    agreed(leaders[:2])


def test_a_store_that_is_away_is_said_once_and_not_taken_for_back_between_two_looks(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(MemoryStore(clock), random.Random(0))
    leader = leader_of(store, "a", clock)
    run([leader], clock, 3.0)
    store.fail = 1.0
    states = []
    for _ in range(60):
        leader.tick()
        states.append(leader.store_state)
        clock.advance(0.05)
    # A store that changes its host is away for a moment, which is not worth a word.
    assert "going on without the shared store" not in caplog.text
    for _ in range(60):
        leader.tick()
        states.append(leader.store_state)
        clock.advance(0.05)
    first = next(i for i, state in enumerate(states) if state != "ok")
    assert "ok" not in states[first:]
    assert caplog.text.count("going on without the shared store") == 1


def test_without_profiles_there_is_no_plan(clock: FakeClock) -> None:
    leader = leader_of(MemoryStore(clock), "a", clock)
    leader.set_profile(None)
    run([leader], clock, 5)
    assert leader.plan is None
    assert leader.state == "waiting"
    assert leader.record.state == "starting"
    leader.set_profiling(True)
    assert leader.record.state == "profiling"
    leader.set_profile(profile())
    run([leader], clock, 3)
    assert agreed([leader]).epoch == 1


def test_a_plan_that_nobody_renews_ends(clock: FakeClock) -> None:
    store = FaultyStore(MemoryStore(clock), random.Random(0))
    leader = leader_of(store, "a", clock, plan_valid_s=15.0)
    run([leader], clock, 5)
    agreed([leader])
    store.fail = 1.0
    run([leader], clock, 9)
    assert leader.plan is not None
    assert "injected" in leader.store_state
    run([leader], clock, 7)
    assert leader.plan is None
    assert leader.state == "offline"
    store.fail = 0.0
    run([leader], clock, 10)
    agreed([leader])


def test_an_older_epoch_is_rejected_and_replaced_by_a_higher_one(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    old = leader_of(store, "a", clock)
    for n in range(4):
        run([old], clock, 3)
        old.set_profile(profile(t_s=0.2 + n / 10))
    run([old], clock, 3)
    high = agreed([old]).epoch
    assert high == 5
    store._entries.clear()
    young = leader_of(store, "b", clock, 1)
    run([young], clock, 1)  # counts anew, before the other is back
    assert young.plan is not None
    assert young.plan.epoch == 1
    seen = []
    for _ in range(200):
        run([old, young], clock, 0.1)
        if old.plan is not None:
            seen.append(old.plan.epoch)
    assert min(seen) >= high
    assert seen == sorted(seen)
    assert agreed([old, young]).epoch > high


def test_a_lost_plan_is_put_back_under_its_epoch(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    leaders = [leader_of(store, f"j{n}", clock, n) for n in range(3)]
    run(leaders, clock, 5)
    plan = agreed(leaders)
    store._entries.clear()
    run(leaders, clock, 3)
    assert agreed(leaders) == plan
    assert Registry(store, "c").plan().stored is not None


@pytest.mark.parametrize("junk", [b"", b"junk", b'{"renewal":1}', b"\xff" * 100])
def test_a_malformed_plan_is_replaced(clock: FakeClock, junk: bytes) -> None:
    store = MemoryStore(clock)
    store.put("crux/c/plan", junk)
    store.put("crux/c/jobs/evil", junk)
    leader = leader_of(store, "a", clock)
    run([leader], clock, 3)
    agreed([leader])


def test_leaders_that_see_different_jobs_do_not_swap_plans_for_ever(clock: FakeClock) -> None:
    store = MemoryStore(clock)

    class Blind(Registry):
        def jobs(self) -> Any:
            return tuple(r for r in super().jobs() if r.job != "hidden")

    leaders = [leader_of(store, name, clock, n) for n, name in enumerate(("a", "b", "hidden"))]
    leaders[0]._registry = Blind(store, "c")
    run(leaders, clock, 600)
    epoch = max(leader.status()["highest_epoch"] for leader in leaders)
    assert 2 <= epoch <= 2 * 600 / 60 + 12
    assert all(leader.plan is not None for leader in leaders)


def test_a_planner_that_fails_costs_only_its_own_plan(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_records: object, _topology: object) -> Any:
        raise ZeroDivisionError("injected")

    store = MemoryStore(clock)
    bad = leader_of(store, "a", clock, compute=broken)
    run([bad], clock, 5)
    assert bad.plan is None
    assert caplog.text.count("no plan could be computed") == 1
    good = leader_of(store, "b", clock, 1)
    run([bad, good], clock, 5)
    agreed([bad, good])


def test_the_older_of_two_jobs_of_one_name_yields(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(clock)
    old = leader_of(store, "a", clock)
    run([old], clock, 3)
    new = leader_of(store, "a", clock, 1, incarnation="i1")
    run([new, old], clock, 20)
    assert old.state == "superseded"
    assert old.plan is None
    assert "CRUX_JOB" in caplog.text
    agreed([new])
    new.close()
    run([old], clock, 10)
    agreed([old])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    fail=st.floats(0, 0.9),
    lose=st.floats(0, 0.05),
    count=st.integers(1, 4),
)
def test_leaders_never_raise_and_converge_when_the_store_heals(
    seed: int, fail: float, lose: float, count: int
) -> None:
    clock = FakeClock()
    rng = random.Random(seed)
    store = FaultyStore(MemoryStore(clock), rng)
    leaders = [leader_of(store, f"j{n}", clock, seed + n) for n in range(count)]
    store.fail, store.lose = fail, lose
    highest = [0] * count
    for _ in range(150):
        order = rng.sample(range(count), count)
        run([leaders[n] for n in order], clock, 0.1)
        for n, leader in enumerate(leaders):
            if leader.plan is not None:
                assert leader.plan.epoch >= highest[n]
                highest[n] = leader.plan.epoch
    store.fail = store.lose = 0.0
    run(leaders, clock, 60)
    assert agreed(leaders).epoch >= max(highest)


def test_a_store_that_raises_anything_is_survived(clock: FakeClock) -> None:
    class Absurd:
        pushes_changes = False

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    leader = leader_of(Absurd(), "a", clock)  # type: ignore[arg-type]
    run([leader], clock, 3)
    assert leader.plan is None
    assert leader.state == "waiting"


def test_threads_racing_on_one_store_converge() -> None:
    store = MemoryStore()
    stop = threading.Event()
    leaders = [
        leader_of(store, f"j{n}", time.monotonic, n, poll_s=0.01, debounce_s=0.05) for n in range(6)
    ]

    def drive(leader: Leader) -> None:
        while not stop.is_set():
            leader.tick()
            time.sleep(0.002)

    threads = [threading.Thread(target=drive, args=(leader,)) for leader in leaders]
    for thread in threads:
        thread.start()
    try:
        until(lambda: _all_agree([lead.plan for lead in leaders], 6), what="agreement")
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


def _all_agree(plans: list[Plan | None], jobs: int) -> bool:
    first = plans[0]
    return first is not None and len(first.entries) == jobs and all(p == first for p in plans)


def _lead(port: int, job: str, seed: int, plans: Any, stop: Any) -> None:
    store = TcpStore("127.0.0.1", port, timeout_s=2.0)
    leader = leader_of(store, job, time.monotonic, seed, poll_s=0.05, debounce_s=0.2, lease_s=6.0)
    last: Plan | None = None
    while not stop.wait(0.02):
        leader.tick()
        if leader.plan != last:
            last = leader.plan
            plans.put((job, None if last is None else msgspec.json.encode(last)))
    leader.close()
    store.close()


def test_processes_agree_and_survive_the_death_of_the_storing_process() -> None:
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    states, plans, stop = SPAWN.Queue(), SPAWN.Queue(), SPAWN.Event()
    hosts = [
        SPAWN.Process(target=host_until_killed, args=(endpoint, states), daemon=True)
        for _ in range(2)
    ]
    names = ["j0", "j1", "j2"]
    leaders = [
        SPAWN.Process(target=_lead, args=(port, name, n, plans, stop), daemon=True)
        for n, name in enumerate(names)
    ]
    state: dict[int, str] = {}
    latest: dict[str, Plan | None] = dict.fromkeys(names)
    epochs: dict[str, list[int]] = {name: [] for name in names}

    def pump() -> None:
        while not states.empty():
            pid, word = states.get()
            state[pid] = word
        while not plans.empty():
            job, raw = plans.get()
            latest[job] = None if raw is None else msgspec.json.decode(raw, type=Plan)
            if latest[job] is not None:
                epochs[job].append(latest[job].epoch)

    def roles() -> bool:
        pump()
        return sorted(state.values()) == ["hosting", "standby"]

    def settled() -> bool:
        pump()
        return _all_agree(list(latest.values()), len(names))

    def back_in_the_store() -> bool:
        try:
            found = registry.plan().stored
            return (
                [r.job for r in registry.jobs()] == names
                and found is not None
                and found.plan == latest["j0"]
                and settled()
            )
        except StoreError:
            return False

    processes = [*hosts, *leaders]
    try:
        for process in processes:
            process.start()
        until(roles, 60, "one host, one standby")
        until(settled, 60, "agreement of the processes")
        hosting = next(pid for pid, word in state.items() if word == "hosting")
        dead = next(p for p in hosts if p.pid == hosting)
        dead.kill()
        dead.join(10)
        state.pop(hosting)
        until(lambda: pump() is None and list(state.values()) == ["hosting"], 60, "re-hosting")
        store = TcpStore("127.0.0.1", port, timeout_s=2.0)
        registry = Registry(store, "c")
        until(back_in_the_store, 60, "records and plan rewritten by their owners")
        assert all(seen == sorted(seen) for seen in epochs.values())
        store.close()
        stop.set()
        for leader in leaders:
            leader.join(20)
            assert leader.exitcode == 0
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(10)


def test_a_forged_epoch_out_of_bounds_is_ignored(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    leader = leader_of(store, "a", clock)
    run([leader], clock, 3)
    plan = agreed([leader])
    forged = msgspec.structs.replace(plan, epoch=1 << 60, entries=())
    store.put("crux/c/plan", msgspec.json.encode(StoredPlan(renewal=0, plan=forged)))
    run([leader], clock, 3)
    assert agreed([leader]).epoch == plan.epoch
    assert Registry(store, "c").plan() != PlanState(None, None)
