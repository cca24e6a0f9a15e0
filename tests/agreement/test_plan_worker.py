"""Long work is done beside the thread that asks, once, one piece at a time, in a share of it."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
from control_fakes import FakeClock, MemoryStore, by_name, profile, record, until

from crux_torch.agreement.leader import Leader
from crux_torch.agreement.planner import BURST_S, MAX_RESULTS, SHARE, PlanWorker


def test_results_are_computed_once_and_the_last_ones_are_kept() -> None:
    done: list[int] = []

    def work(n: int) -> int:
        done.append(n)
        return -n

    worker = PlanWorker(in_thread=False)
    for n in range(MAX_RESULTS + 1):
        assert worker.ask(n, lambda n=n: work(n)) == (True, -n)
        assert worker.ask(0, lambda: work(0)) == (True, 0), "what is asked for again stays"
    assert done == list(range(MAX_RESULTS + 1))
    worker.ask(1, lambda: work(1))
    assert done[-1] == 1


def test_work_takes_a_share_of_the_time_in_the_long_run(clock: FakeClock) -> None:
    worker = PlanWorker(in_thread=True, clock=clock)
    pieces: list[int] = []

    def work(n: int) -> None:
        clock.advance(4.0)
        pieces.append(n)

    def asked(n: int) -> bool:
        done, _ = worker.ask(n, lambda: work(n))
        if not done and worker._thread is not None:
            worker._thread.join()
        return worker.ask(n, lambda: work(n))[0]

    assert [asked(n) for n in range(4)] == [True, True, True, False], "10 seconds in a row"
    began_s = clock.now
    for n in range(10, 2000):
        asked(n)
        clock.advance(1.0)
    assert 4.0 * (len(pieces) - 3) <= SHARE * (clock.now - began_s) + 4.0
    assert len(pieces) > 10
    assert BURST_S > 2 * 4.0


def test_a_safe_plan_comes_at_once_and_the_better_one_when_it_is_found() -> None:
    go_on = threading.Event()

    def compute(*args: Any, policy: str, **options: Any) -> object:
        if policy == "crux":
            assert go_on.wait(300)
        level = 3 if policy == "crux" else 7
        return [msgspec.structs.replace(e, level=level) for e in by_name(*args, **options)]

    store = MemoryStore()
    leaders = [
        Leader(store, "c", record(job), compute, in_thread=True, poll_s=0.0, debounce_s=0.0)
        for job in ("a", "b")
    ]

    def plans() -> list[tuple[str, int, int]]:
        for leader in leaders:
            leader.tick()
        found = [leader.plan for leader in leaders]
        return [(p.policy, len(p.entries), p.entries[0].level) for p in found if p is not None]

    until(lambda: plans() == [("crux-first", 2, 7)] * 2, what="the first plan")
    first = leaders[0].plan
    assert first is not None
    for _ in range(50):
        assert plans() == [("crux-first", 2, 7)] * 2
    go_on.set()
    until(lambda: plans() == [("crux", 2, 3)] * 2, what="the better plan")
    better = leaders[1].plan
    assert better is not None
    assert better.epoch > first.epoch
    assert better.fingerprint == first.fingerprint
    for _ in range(50):
        assert plans() == [("crux", 2, 3)] * 2


def test_a_plan_in_force_is_left_for_the_first_one_only_when_it_nears_its_end() -> None:
    go_on, clock = threading.Event(), FakeClock()
    go_on.set()

    def compute(*args: Any, policy: str, **options: Any) -> object:
        assert policy != "crux" or go_on.wait(300)
        return by_name(*args, **options)

    leader = Leader(
        MemoryStore(clock), "c", record("a"), compute, clock=clock, in_thread=True, debounce_s=0.0
    )

    def policy() -> str | None:
        clock.advance(0.05)
        leader.tick()
        return leader.plan.policy if leader.plan is not None else None

    until(lambda: policy() == "crux", what="the plan")
    assert leader.plan is not None
    before = leader.plan
    go_on.clear()
    leader.update(profile=profile(t_s=0.2))
    changed_s = clock.now
    while clock.now < changed_s + before.valid_s / 3:
        assert policy() == "crux"
        assert leader.plan == before
    until(lambda: policy() == "crux-first", what="the first plan")
    assert leader.plan is not None
    assert clock.now < changed_s + before.valid_s
    go_on.set()
    until(lambda: policy() == "crux", what="the better plan")


def test_no_tick_waits_for_the_planner_and_its_plan_comes_when_it_is_ready() -> None:
    """Nothing but ticks gives orders to the ranks: they must go on."""
    go_on = threading.Event()

    def slow(*args: object, **options: object) -> object:
        assert go_on.wait(300)
        return by_name(*args, **options)  # type: ignore[arg-type]

    leader = Leader(
        MemoryStore(),
        "c",
        record("a"),
        slow,
        in_thread=True,
        poll_s=0.0,
        debounce_s=0.0,  # type: ignore[arg-type]
    )
    for _ in range(200):
        leader.tick()  # would never return
    assert leader.plan is None
    assert leader.state == "waiting"
    leader.update(profile=profile(t_s=0.2))
    leader.tick()
    go_on.set()

    def planned() -> bool:
        leader.tick()
        return leader.plan is not None

    until(planned, what="the plan")
