"""Leaders agree: on one plan, one epoch, whatever the store does to them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from control_fakes import SPAWN, FakeClock, FaultyStore, Hosts, MemoryStore, by_name, profile, until
from leaders import agreed, leader_of, leaders_of, run
from shared_core import shared_core

from crux_torch.agreement.inputs import TopologyReader
from crux_torch.agreement.outcome import Routed
from crux_torch.agreement.records import JobRecord, Plan, PlanEntry
from crux_torch.agreement.registry import Registry
from crux_torch.errors import StoreError
from crux_torch.network.loaders import dump_yaml
from crux_torch.network.routes import PlannedPath
from crux_torch.network.topology import Topology
from crux_torch.store import MAX_LEASE_S
from crux_torch.store.endpoint import open_store


def test_all_leaders_reach_one_plan_and_keep_it(store: MemoryStore, clock: FakeClock) -> None:
    leaders = leaders_of(store, 5, clock)
    run(leaders, clock, 5)
    plan = agreed(leaders)
    assert plan.epoch == 1
    run(leaders, clock, 60)
    assert agreed(leaders) == plan
    assert all(leader.state == "planned" for leader in leaders)
    assert leaders[0].status()["epoch"] == 1


def test_a_leader_looks_once_a_period_and_says_whose_plan_it_has(clock: FakeClock) -> None:
    class Counted(FaultyStore):
        asked = 0

        def __getattr__(self, name: str) -> Any:
            self.asked += 1
            return super().__getattr__(name)

    store = Counted(MemoryStore(clock), random.Random(0))
    leader = leader_of(store, "j0", clock)  # type: ignore[arg-type]
    assert leader.status()["author"] is None
    run([leader], clock, 5)
    assert leader.plan is not None
    assert leader.status()["author"] == leader.plan.author
    store.asked = 0
    run([leader], clock, 10, step_s=0.05)
    in_coarse_steps, store.asked = store.asked, 0
    run([leader], clock, 10, step_s=0.01)
    assert 0 < store.asked <= 1.5 * in_coarse_steps


def test_a_job_that_leaves_or_changes_is_replanned(store: MemoryStore, clock: FakeClock) -> None:
    leaders = leaders_of(store, 3, clock)
    run(leaders, clock, 5)
    before = agreed(leaders)
    leaders[2].close()
    leaders[2].close()
    assert leaders[2].state == "closed"
    assert leaders[2].plan is None
    run(leaders[:2], clock, 2)
    after = agreed(leaders[:2])
    assert after.epoch == before.epoch + 1
    leaders[0].update(profile=profile(t_s=0.9))
    run(leaders[:2], clock, 2)
    assert agreed(leaders[:2]).epoch == after.epoch + 1


def test_a_store_that_is_away_is_said_once_and_not_taken_for_back_between_two_looks(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(MemoryStore(clock), random.Random(0))
    leader = leader_of(store, "a", clock)
    run([leader], clock, 3.0)
    store.fail = 1.0
    states, said = [], []
    for _ in range(120):
        run([leader], clock, 0.05, step_s=0.05)
        states.append(leader.store_state)
        said.append(caplog.text.count("going on without the shared store"))
    # A store that changes its host is away for a moment, which is not worth a word.
    assert (said[59], said[119]) == (0, 1)
    first = next(i for i, state in enumerate(states) if state != "ok")
    assert "ok" not in states[first:]


def test_without_profiles_there_is_no_plan(clock: FakeClock) -> None:
    leader = leader_of(MemoryStore(clock), "a", clock)
    leader.update(profile=None)
    run([leader], clock, 5)
    assert leader.plan is None
    assert leader.state == "waiting"
    leader.update(profile=profile())
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


def test_an_older_epoch_is_rejected_and_replaced_by_a_higher_one(
    store: MemoryStore, clock: FakeClock
) -> None:
    old = leader_of(store, "a", clock)
    for n in range(4):
        run([old], clock, 3)
        old.update(profile=profile(t_s=0.2 + n / 10))
    run([old], clock, 3)
    high = agreed([old]).epoch
    assert high == 5
    store.entries.clear()
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


def test_a_lost_plan_is_put_back_under_its_epoch(store: MemoryStore, clock: FakeClock) -> None:
    leaders = leaders_of(store, 3, clock)
    run(leaders, clock, 5)
    plan = agreed(leaders)
    store.entries.clear()
    run(leaders, clock, 3)
    assert agreed(leaders) == plan
    registry = Registry(store, "c")
    assert registry.look().plan.stored is not None
    assert registry.follows(plan.head).keys() == {"j0", "j1", "j2"}


def test_the_topology_is_renewed_unless_another_replaced_it(
    store: MemoryStore, clock: FakeClock
) -> None:
    leader = leader_of(store, "a", clock, published=b"mine")
    for _ in range(3):
        run([leader], clock, MAX_LEASE_S, step_s=2.0)
        assert store.get("crux/c/topology") == b"mine"
    store.put("crux/c/topology", b"newer")
    run([leader], clock, MAX_LEASE_S - 10, step_s=2.0)
    assert store.get("crux/c/topology") == b"newer"
    run([leader], clock, 20, step_s=2.0)
    assert store.get("crux/c/topology") == b"mine", "its owner has left"


def test_a_topology_that_is_still_parsed_is_not_taken_for_none() -> None:
    go_on = threading.Event()

    class Slow(TopologyReader):
        def read(self, raw: bytes | None) -> Topology | None:
            assert go_on.wait(300)
            return super().read(raw)

    raw = dump_yaml(shared_core(["h0", "h1"], 1e9)).encode()
    leader = leader_of(
        MemoryStore(), "a", time.monotonic,
        published=raw, topologies=Slow(), in_thread=True, poll_s=0.0, debounce_s=0.0,
    )  # fmt: skip
    leader.tick()
    assert not leader.topology_is_known
    assert leader.outcome.routed is None

    def is_known() -> bool:
        leader.tick()
        return leader.topology_is_known

    go_on.set()
    until(is_known, what="the topology")
    assert leader.topology is not None
    assert leader.outcome.routed == Routed()


@pytest.mark.parametrize("junk", [b"", b"junk", b'{"renewal":1}', b"\xff" * 100])
def test_a_malformed_plan_is_replaced(store: MemoryStore, clock: FakeClock, junk: bytes) -> None:
    store.put("crux/c/head", junk)
    store.put("crux/c/jobs/evil", junk)
    leader = leader_of(store, "a", clock)
    run([leader], clock, 3)
    agreed([leader])


def test_leaders_that_see_different_jobs_do_not_swap_plans_for_ever(
    store: MemoryStore, clock: FakeClock
) -> None:

    class Blind(FaultyStore):
        def __getattr__(self, name: str) -> Any:
            operation = super().__getattr__(name)
            if name != "list":
                return operation
            return lambda key: {k: v for k, v in operation(key).items() if "hidden" not in k}

    stores = Blind(store, random.Random(0)), store, store
    names = "a", "b", "hidden"
    leaders = [leader_of(stores[n], name, clock, n) for n, name in enumerate(names)]
    run(leaders, clock, 80)  # they have seen snapshots without the last job, too
    for _ in range(600):
        run(leaders, clock, 1)
        # Each acts on what it computes itself, or on nothing.
        for leader, entries in zip(leaders, (2, 3, 3), strict=True):
            assert leader.plan is None or len(leader.plan.entries) == entries
    epoch = max(leader.status()["highest_epoch"] for leader in leaders)
    assert 2 <= epoch <= 2 * 600 / 60 + 13


def test_a_planner_that_fails_costs_only_its_own_plan(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("injected")

    store = MemoryStore(clock)
    bad = leader_of(store, "a", clock, compute=broken)
    run([bad], clock, 5)
    assert bad.plan is None
    assert caplog.text.count("no plan could be computed") == 1
    good = leader_of(store, "b", clock, 1)
    run([bad, good], clock, 5)
    assert good.plan is not None
    assert bad.plan is None, "it can't tell whether that plan is right"


def test_a_plan_over_the_limit_goes_without_paths_and_says_so_once(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    paths = tuple(PlannedPath("s" * 250, "d" * 250, ()) for _ in range(4096))

    def large(
        records: Sequence[JobRecord], topology: Topology | None, **_: object
    ) -> tuple[PlanEntry, ...]:
        return tuple(msgspec.structs.replace(e, paths=paths) for e in by_name(records, topology))

    leader = leader_of(MemoryStore(clock), "a", clock, compute=large)
    run([leader], clock, 5)
    assert agreed([leader]).entries[0].paths == ()
    assert caplog.text.count("the network chooses the paths of these 1 jobs") == 1


def test_the_older_of_two_jobs_of_one_name_yields(
    store: MemoryStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_store_that_raises_anything_is_survived(clock: FakeClock) -> None:
    class Absurd:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    leader = leader_of(Absurd(), "a", clock)  # type: ignore[arg-type]
    run([leader], clock, 3)
    assert leader.plan is None
    assert leader.state == "waiting"


def _all_agree(plans: list[Plan | None], jobs: int) -> bool:
    first = plans[0]
    return first is not None and len(first.entries) == jobs and all(p == first for p in plans)


def _lead(port: int, job: str, seed: int, plans: Any, stop: Any) -> None:
    store = open_store(f"tcp://127.0.0.1:{port}", timeout_s=2.0)
    leader = leader_of(store, job, time.monotonic, seed, poll_s=0.05, debounce_s=0.2, lease_s=6.0)
    last: Plan | None = None
    while not stop.wait(0.02):
        leader.tick()
        if leader.plan != last:
            last = leader.plan
            plans.put((job, None if last is None else msgspec.json.encode(last)))
    leader.close()
    store.close()


@pytest.mark.slow
def test_processes_agree_and_survive_the_death_of_the_storing_process() -> None:
    names = ["j0", "j1", "j2"]
    plans, stop = SPAWN.Queue(), SPAWN.Event()
    latest: dict[str, Plan | None] = dict.fromkeys(names)
    epochs: dict[str, list[int]] = {name: [] for name in names}

    def settled() -> bool:
        while not plans.empty():
            job, raw = plans.get()
            latest[job] = None if raw is None else msgspec.json.decode(raw, type=Plan)
            epochs[job] += [] if latest[job] is None else [latest[job].epoch]
        return _all_agree(list(latest.values()), len(names))

    def back_in_the_store() -> bool:
        try:
            view = registry.look()
            jobs, found = view.jobs, view.plan.stored
        except StoreError:
            return False
        plan = latest["j0"]
        in_place = found is not None and plan is not None and found.plan == plan.head
        return settled() and in_place and [r.job for r in jobs] == names

    with Hosts(2) as hosts:
        leaders = [
            SPAWN.Process(target=_lead, args=(hosts.port, name, n, plans, stop), daemon=True)
            for n, name in enumerate(names)
        ]
        try:
            for leader in leaders:
                leader.start()
            hosts.wait_for_roles(2)
            until(settled, what="agreement of the processes")
            hosts.kill_hosting()
            hosts.wait_for_roles(1)
            store = open_store(f"tcp://127.0.0.1:{hosts.port}", timeout_s=2.0)
            registry = Registry(store, "c")
            until(back_in_the_store, what="records and plan rewritten by their owners")
            assert all(seen == sorted(seen) for seen in epochs.values())
            store.close()
            stop.set()
            for leader in leaders:
                leader.join(60)
                assert leader.exitcode == 0
        finally:
            for leader in leaders:
                leader.kill()
