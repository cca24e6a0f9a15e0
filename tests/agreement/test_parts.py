"""A large cluster: a planner and its stand-bys read all records; the others follow their parts."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from control_fakes import FakeClock, FaultyStore, MemoryStore, by_name, profile, until
from etcd_server import Etcd, needs_etcd, wait_ready
from hypothesis import given, settings
from hypothesis import strategies as st
from leaders import leader_of, run

from crux_torch.agreement import planner_role
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.plan_author import PLANS_AT_ONCE, PLANS_PER_MINUTE
from crux_torch.agreement.planner_role import FREE, SEATS
from crux_torch.agreement.records import (
    GROUP_DIGITS,
    GROUPS,
    JobRecord,
    Plan,
    PlanEntry,
    digest_of,
    parts_of,
)
from crux_torch.agreement.registry import Registry, StoredEntry, StoredPlan
from crux_torch.errors import StoreForbidden
from crux_torch.network.topology import Topology
from crux_torch.store import MAX_LEASE_S
from crux_torch.store.endpoint import open_store

RECORDS = "crux/c/"
SEATS_AT = "crux/c/seats/"
PARTS_AT = "crux-plan/c/parts/"
LEASE_S, VALID_S = 6.0, 15.0


class Seen(FaultyStore):
    """Counts what one leader asks of the store; may hinder its writes.

    Attributes:
        forbidden: beginnings of keys that the leader's role may not write.
        lost: beginning of keys whose writes are lost.
        stuck, meanwhile: what is called once, just before a key is written that begins so.
    """

    forbidden: tuple[str, ...] = ()
    lost = stuck = "nothing"
    meanwhile: Callable[[], None]

    def __init__(self, inner: MemoryStore, rng: random.Random | None = None) -> None:
        super().__init__(inner, rng or random.Random(0))
        self.asked: Counter[tuple[str, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        operation = super().__getattr__(name)

        def counted(key: str, *args: Any, **kwargs: Any) -> Any:
            self.asked[name, key] += 1
            if name in ("put", "compare_and_swap"):
                if key.startswith(self.forbidden):
                    raise StoreForbidden("injected")
                if key.startswith(self.lost):
                    return None
                if key.startswith(self.stuck):
                    self.stuck = "nothing"
                    self.meanwhile()
            return operation(key, *args, **kwargs)

        return counted


def by_period(
    records: Sequence[JobRecord], _topology: Topology | None, /, **_: object
) -> tuple[PlanEntry, ...]:
    """A planner that plans each job by its own record, so that others change no entry."""
    named = sorted((r for r in records if r.profile is not None), key=lambda r: r.job)
    return tuple(
        PlanEntry(
            job=r.job, level=round(10 * r.profile.t_s) % 8,
            priority=r.profile.t_s, intensity=1.0, correction=1.0,
        )
        for r in named if r.profile is not None
    )  # fmt: skip


def large(
    store: MemoryStore, count: int, clock: FakeClock, **options: Any
) -> tuple[list[Leader], list[Seen]]:
    """Leaders of a cluster that is too large for all of them to plan.

    Args:
        options: of the leaders; ``compute`` may be a list of theirs.
    """
    stores = [Seen(store, random.Random(n)) for n in range(count)]
    options = {"max_verified": 5, "lease_s": LEASE_S, "plan_valid_s": VALID_S, **options}
    compute = options.pop("compute", by_name)
    leaders = [
        leader_of(
            one, f"j{n:02}", clock, n,
            compute=compute[n] if isinstance(compute, list) else compute, **options,
        )
        for n, one in enumerate(stores)
    ]  # fmt: skip
    return leaders, stores


def roles(leaders: Sequence[Leader]) -> dict[str, list[Leader]]:
    found: dict[str, list[Leader]] = defaultdict(list)
    for leader in leaders:
        found[leader.status()["role"]].append(leader)
    return found


def planner(leaders: Sequence[Leader]) -> Leader:
    (one,) = roles(leaders)["planner"]
    return one


def follow(leaders: Sequence[Leader], compute: Callable[..., Sequence[PlanEntry]] = by_name) -> int:
    """The epoch of the plan that all follow, each as ``compute`` has it for all their records."""
    wanted = {e.job: e for e in compute([leader.record for leader in leaders], None)}
    plans = [leader.plan for leader in leaders]
    for leader, plan in zip(leaders, plans, strict=True):
        assert plan is not None, leader.status()
        assert plan.entry(leader.record.job) == wanted[leader.record.job]
        assert plan.head == plans[0].head  # type: ignore[union-attr]
    assert plans[0] is not None
    return plans[0].epoch


def settled(
    store: MemoryStore, count: int, clock: FakeClock, **options: Any
) -> tuple[list[Leader], list[Seen], int]:
    """:func:`large`, once all follow one plan; and its epoch."""
    leaders, stores = large(store, count, clock, **options)
    run(leaders, clock, 20)
    compute = options.get("compute", by_name)
    return leaders, stores, follow(leaders, by_name if isinstance(compute, list) else compute)


def test_only_the_planner_and_its_stand_bys_read_and_compute_everything(
    store: MemoryStore, clock: FakeClock
) -> None:
    computed: Counter[int] = Counter()

    def counted(n: int) -> Callable[..., Sequence[PlanEntry]]:
        def compute(*args: Any, **options: Any) -> Sequence[PlanEntry]:
            computed[n] += 1
            return by_name(*args, **options)

        return compute

    leaders, stores, epoch = settled(store, 12, clock, compute=[counted(n) for n in range(12)])
    assert {role: len(those) for role, those in roles(leaders).items()} == {
        "planner": 1, "standby": SEATS - 1, "follower": 12 - SEATS
    }  # fmt: skip
    for one in stores:
        one.asked.clear()
    computed.clear()
    leaders[5].update(profile=profile(t_s=0.9))
    run(leaders, clock, 20)
    assert follow(leaders) == epoch + 1
    for n, (leader, one) in enumerate(zip(leaders, stores, strict=True)):
        follows = leader.status()["role"] == "follower"
        assert (one.asked["list", RECORDS] == 0) is follows
        assert (computed[n] == 0) is follows
        if follows:
            read = {key for what, key in one.asked if what in ("get", "list")}
            own = f"{RECORDS}jobs/{leader.record.job}", PARTS_AT + leader.record.job
            own = *own, f"{RECORDS}fragments/{leader.record.job}"
            around = RECORDS + "head", RECORDS + "topology", RECORDS + "operator/settings"
            assert read <= {*own, *around, SEATS_AT}
            assert leader.status()["jobs"] == [leader.record.job]


@pytest.mark.parametrize("limit", [{"max_verified": 15}, {"max_verified": 99, "max_readers": 5}])
def test_a_cluster_may_grow_over_the_limit_and_shrink_again(
    store: MemoryStore, clock: FakeClock, limit: dict[str, int]
) -> None:
    leaders, _ = large(store, 8, clock, **limit)  # each counts 3
    run(leaders[:5], clock, 10)
    assert roles(leaders[:5]).keys() == {"everyone"}
    assert not any(key.startswith((SEATS_AT, PARTS_AT)) for key in store.entries)
    first = follow(leaders[:5])
    run(leaders, clock, 30)
    assert len(roles(leaders)["follower"]) == 8 - SEATS
    assert follow(leaders) > first
    for leader in leaders[5:]:
        leader.close()
    run(leaders[:5], clock, 30)
    follow(leaders[:5])
    assert roles(leaders[:5]).keys() == {"everyone"}
    assert all(len(leader.plan.entries) == 5 for leader in leaders[:5] if leader.plan)


@pytest.mark.parametrize("every_s", [1, 7])
def test_nobody_is_without_a_plan_while_the_cluster_crosses_the_limit(
    store: MemoryStore, clock: FakeClock, every_s: int
) -> None:
    leaders, _ = large(store, 8, clock, max_verified=22)  # each counts 3
    run(leaders, clock, 30)
    before = follow(leaders)
    for n in range(60 // every_s):
        leaders[7].update(profile=None if n % 2 else profile(t_s=0.2 + n / 1000))
        for _ in range(10 * every_s):
            run(leaders, clock, 0.1)
            assert all(leader.plan is not None for leader in leaders[:7])
    leaders[7].update(profile=profile())
    run(leaders, clock, 20)
    assert 2 <= follow(leaders) - before <= PLANS_AT_ONCE + 2 * PLANS_PER_MINUTE
    assert len(roles(leaders)["follower"]) == 8 - SEATS


@pytest.mark.parametrize("dead", [1, 2, SEATS])
def test_the_next_one_takes_over_within_the_lease_and_nobody_is_without_a_plan(
    store: MemoryStore, clock: FakeClock, dead: int
) -> None:
    leaders, _, epoch = settled(store, 10, clock)
    by_role = roles(leaders)
    gone = (by_role["planner"] + by_role["standby"])[:dead]
    rest = [leader for leader in leaders if leader not in gone]
    until_s = clock() + LEASE_S + (LEASE_S if dead == SEATS else 2.0)
    while clock() < until_s:
        run(rest, clock, 0.1)
        assert all(leader.plan is not None for leader in rest)
    # Without a stand-by, several may notice that the plan is not renewed.
    assert len(roles(rest)["planner"]) == 1 or dead == SEATS
    assert roles(rest)["planner"]
    while clock() < until_s + VALID_S:
        run(rest, clock, 0.1)
        assert all(leader.plan is not None for leader in rest)
    # Their leases have ended: they are planned without.
    assert follow(rest) > epoch
    run(rest, clock, VALID_S)
    assert planner(rest)
    assert len(roles(rest)["standby"]) == SEATS - 1


def test_a_planner_that_stood_still_past_its_lease_comes_back_to_follow(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders, _, _ = settled(store, 10, clock, compute=by_period)
    stopped = planner(leaders)
    rest = [leader for leader in leaders if leader is not stopped]
    rest[0].update(profile=profile(t_s=0.3))
    for _ in range(6):  # it stops in the middle of its work
        run(leaders, clock, 0.1)
    run(rest, clock, 3 * LEASE_S)
    rest[1].update(profile=profile(t_s=0.7))
    run(rest, clock, 5)
    epoch = follow(rest, by_period)
    seen = [stopped.status()["highest_epoch"]]
    for _ in range(200):
        run([stopped, *rest], clock, 0.1)
        planned = [leader.plan for leader in rest]
        assert all(plan is not None and plan.epoch >= epoch for plan in planned)
        seen.append(stopped.status()["highest_epoch"])
    assert seen == sorted(seen)
    assert follow(leaders, by_period) >= epoch
    assert planner(leaders) is not stopped
    assert len(roles(leaders)["standby"]) == SEATS - 1


@pytest.mark.parametrize("stuck", [RECORDS + "head", PARTS_AT, SEATS_AT])
def test_a_planner_that_stands_still_in_a_write_and_ends_it_late_does_no_harm(
    store: MemoryStore, clock: FakeClock, stuck: str
) -> None:
    leaders, stores, _ = settled(store, 9, clock, compute=by_period)
    stopped = planner(leaders)
    rest = [leader for leader in leaders if leader is not stopped]
    late = stores[leaders.index(stopped)]
    epochs: list[int] = []

    def meanwhile() -> None:
        run(rest, clock, 3 * LEASE_S)
        rest[1].update(profile=profile(t_s=0.7))
        run(rest, clock, 5)
        epochs.append(follow(rest, by_period))

    late.meanwhile, late.stuck = meanwhile, stuck
    rest[0].update(profile=profile(t_s=0.3))
    for _ in range(300):
        run(leaders, clock, 0.1)
        if epochs:
            for leader in rest:
                assert leader.plan is not None
                assert leader.plan.epoch >= epochs[0]
    assert epochs, "it did not write there"
    assert follow(leaders, by_period) >= epochs[0]
    newcomer = leader_of(store, "j00", clock, 99, compute=by_period, max_verified=5)
    run([*leaders[1:], newcomer], clock, 10)
    assert newcomer.plan is not None, "all parts are those of the plan"


def test_many_planners_at_once_agree(
    store: MemoryStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_role, "SEATS", 4)
    monkeypatch.setattr(
        planner_role.PlannerRole,
        "name",
        property(lambda self: "follower" if self._large and self._seat is None else "planner"),
    )
    leaders, _, _ = settled(store, 10, clock)
    assert len(roles(leaders)["planner"]) == 4
    epoch = follow(leaders)
    for n in range(3):
        leaders[n].update(profile=profile(t_s=0.5 + n / 10))
        run(leaders, clock, 6)
        follow(leaders)
    assert follow(leaders) <= epoch + 6


def test_without_any_planner_followers_notice_before_their_plan_ends(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders, _, _ = settled(store, 10, clock)
    dead = roles(leaders)["planner"] + roles(leaders)["standby"]
    rest = [leader for leader in leaders if leader not in dead]
    for _ in range(1200):  # and somebody keeps all seats who does not plan
        for n in range(SEATS):
            store.put(f"{SEATS_AT}{n}", b'{"job":"evil"}')
        run(rest, clock, 0.1)
        assert all(leader.plan is not None for leader in rest)
    follow(rest)
    assert not any(leader.status()["role"] == "standby" for leader in rest)
    rest[0].update(profile=profile(t_s=0.9))
    for _ in range(300):
        for n in range(SEATS):
            store.put(f"{SEATS_AT}{n}", b'{"job":"evil"}')
        run(rest, clock, 0.1)
    follow(rest)


def test_a_planner_that_cannot_plan_is_passed_by(store: MemoryStore, clock: FakeClock) -> None:
    broken: list[int] = []

    def computed_by(n: int) -> Callable[..., Sequence[PlanEntry]]:
        def compute(*args: Any, **options: Any) -> Sequence[PlanEntry]:
            if n in broken:
                raise ZeroDivisionError("injected")
            return by_name(*args, **options)

        return compute

    leaders, _, epoch = settled(store, 8, clock, compute=[computed_by(n) for n in range(8)])
    standing_by = {leader.record.job for leader in roles(leaders)["standby"]}
    broken.append(leaders.index(planner(leaders)))
    leaders[0].update(profile=profile(t_s=0.9))
    run(leaders, clock, LEASE_S + 3)
    others = [leader for n, leader in enumerate(leaders) if n not in broken]
    heads = {leader.plan.head if leader.plan is not None else None for leader in others}
    (head,) = heads
    assert head is not None
    assert head.epoch > epoch
    assert head.author in standing_by


def test_a_leader_whose_role_may_not_plan_follows(store: MemoryStore, clock: FakeClock) -> None:
    leaders, stores = large(store, 8, clock)
    tenants = leaders[:4]
    for one in stores[:4]:
        one.forbidden = (RECORDS + "head",)
    for one in stores[:2]:
        one.forbidden += (SEATS_AT,)
    run(leaders, clock, 40)
    follow(leaders)
    leaders[7].update(profile=profile(t_s=0.9))
    run(leaders, clock, 20)
    follow(leaders)
    assert planner(leaders) not in tenants


def test_parts_that_are_lost_or_overwritten_are_written_again(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders, _, _ = settled(store, 8, clock)
    keys = sorted(key for key in store.entries if key.startswith(PARTS_AT))
    assert len(keys) == 8
    held = {key: store.get(key) for key in keys}
    store.delete(keys[0])
    store.put(keys[1], b"junk")
    store.put(keys[2], held[keys[3]] or b"")
    run(leaders, clock, LEASE_S + 1)
    assert {key: store.get(key) for key in keys} == held
    run(leaders, clock, 2 * MAX_LEASE_S, step_s=0.5)
    assert {key: store.get(key) for key in keys} == held, "their leases are renewed"


def test_a_change_of_one_entry_writes_one_group(store: MemoryStore, clock: FakeClock) -> None:
    leaders, stores, _ = settled(store, 40, clock, compute=by_period)
    plan = planner(leaders).plan
    assert plan is not None
    for one in stores:
        one.asked.clear()
    leaders[7].update(profile=profile(t_s=0.9))
    run(leaders, clock, 5)
    follow(leaders, by_period)
    of = leaders[7].record.job
    group = {e.job for e in plan.entries if plan.digest_for(e.job) == plan.digest_for(of)}
    asked = sum((one.asked for one in stores), Counter())
    written = {
        key.removeprefix(PARTS_AT)
        for what, key in asked
        if what == "put" and key.startswith(PARTS_AT)
    }
    assert written == group
    assert len(group) < 10
    read = {key.removeprefix(PARTS_AT) for what, key in asked if what == "get" and PARTS_AT in key}
    assert read <= group, "who is not concerned does not read its entry again"


def test_entries_that_one_look_does_not_write_do_not_wait_for_the_next_look(
    store: MemoryStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_role, "PARTS_A_TICK", 1)
    leaders, _ = large(store, 40, clock, poll_s=0.25)
    until_s = clock() + 60
    while not any(key.startswith(PARTS_AT) for key in store.entries):
        run(leaders, clock, 0.05, step_s=0.05)
        assert clock() < until_s
    began_s = clock()
    while sum(key.startswith(PARTS_AT) for key in store.entries) < len(leaders):
        run(leaders, clock, 0.05, step_s=0.05)
        assert clock() - began_s < len(leaders) * 0.25 / 2
    run(leaders, clock, 2)
    follow(leaders)


@given(st.lists(st.tuples(st.text(max_size=3), st.integers(0, 7)), unique_by=lambda e: e[0]))
def test_the_digests_of_groups_tell_each_entry(told: list[tuple[str, int]]) -> None:
    entries = tuple(
        PlanEntry(job=f"j{job}", level=level, priority=1.0, intensity=1.0, correction=1.0)
        for job, level in told
    )
    of: dict[str, Any] = {"valid_s": 1.0, "author": "a", "policy": "p", "fingerprint": "f"}
    plan = Plan(epoch=1, digest=digest_of(entries), entries=entries, parts=parts_of(entries), **of)
    assert isinstance(plan.parts, str)
    assert len(plan.parts) == GROUPS * GROUP_DIGITS
    raw = msgspec.json.encode(StoredPlan(renewal=0, plan=plan.head))
    assert msgspec.json.decode(raw, type=StoredPlan).plan == plan.head
    for n, entry in enumerate(entries):
        other = msgspec.structs.replace(entry, level=entry.level ^ 1)
        changed = parts_of((*entries[:n], other, *entries[n + 1 :]))
        differ = [
            at
            for at in range(0, len(changed), GROUP_DIGITS)
            if changed[at : at + GROUP_DIGITS] != plan.parts[at : at + GROUP_DIGITS]
        ]
        assert len(differ) == 1
        assert plan.digest_for(entry.job) == plan.parts[differ[0] : differ[0] + GROUP_DIGITS]


def test_a_disabled_cluster_has_no_plan_for_followers_either(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders, _, epoch = settled(store, 8, clock)
    registry = Registry(store, "c")
    assert registry.swap_operator(None, OperatorSettings().changed(disabled=True))
    run(leaders, clock, 5)
    for leader in leaders:
        assert leader.plan is not None
        assert leader.plan.epoch > epoch
        assert leader.plan.entries == ()
    raw = registry.look().operator_raw
    assert registry.swap_operator(raw, OperatorSettings(revision=1).changed())
    run(leaders, clock, 5)
    follow(leaders)


def test_a_forged_head_is_replaced_by_those_who_plan(store: MemoryStore, clock: FakeClock) -> None:
    leaders, _, _ = settled(store, 8, clock)
    plan = planner(leaders).plan
    assert plan is not None
    registry = Registry(store, "c")
    worse = tuple(msgspec.structs.replace(e, level=0) for e in plan.entries)
    for ahead, digest in enumerate((digest_of(worse), plan.digest), 1):
        stored = registry.look().plan.stored
        assert stored is not None
        forged = msgspec.structs.replace(
            plan.head, epoch=stored.plan.epoch + ahead, digest=digest, parts=parts_of(worse)
        )
        store.put(registry.plan_key, msgspec.json.encode(StoredPlan(renewal=ahead, plan=forged)))
        run(leaders, clock, VALID_S / 3 + 2)
        follow(leaders)
        assert planner(leaders).plan.head != forged  # type: ignore[union-attr]


def test_who_followed_a_forged_head_replaces_it_once_it_plans(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders, _, _ = settled(store, 8, clock)
    registry = Registry(store, "c")
    dead = roles(leaders)["planner"] + roles(leaders)["standby"]
    rest = [leader for leader in leaders if leader not in dead]
    plan = dead[0].plan
    assert plan is not None
    for leader in dead:  # their records stay, so the plan goes on to fit
        registry.publish_job(leader.record, MAX_LEASE_S)
    worse = tuple(msgspec.structs.replace(e, level=e.level ^ 1) for e in plan.entries)
    forged = msgspec.structs.replace(
        plan.head, epoch=plan.epoch + 1, digest=digest_of(worse), parts=parts_of(worse)
    )
    store.put(registry.plan_key, msgspec.json.encode(StoredPlan(renewal=0, plan=forged)))
    for entry in worse:
        part = StoredEntry(digest=forged.digest_for(entry.job), entry=entry)
        registry.put_part(entry.job, msgspec.json.encode(part))
    run(rest, clock, 1)
    assert all(leader.plan is not None and leader.plan.head == forged for leader in rest)
    run(rest, clock, 3 * LEASE_S)
    wanted = {e.job: e for e in plan.entries}
    for leader in rest:
        assert leader.plan is not None
        assert leader.plan.entry(leader.record.job) == wanted[leader.record.job]


def test_followers_plan_if_the_planner_writes_no_parts(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders, stores, _ = settled(store, 8, clock, compute=by_period)
    for leader, one in zip(leaders, stores, strict=True):
        if leader.status()["role"] != "follower":
            one.lost = PARTS_AT
    roles(leaders)["follower"][0].update(profile=profile(t_s=0.9))
    run(leaders, clock, 2 * VALID_S)
    follow(leaders, by_period)


def test_a_store_that_forgets_everything_is_filled_again(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders, _, _ = settled(store, 10, clock)
    plan = planner(leaders).plan
    assert plan is not None
    store.entries.clear()
    run(leaders, clock, 12)
    assert follow(leaders) == plan.epoch
    for leader in leaders:
        assert leader.plan is not None
        assert leader.plan.head == plan.head
    assert len([key for key in store.entries if key.startswith(PARTS_AT)]) == 10


def test_a_seat_that_was_left_is_taken(store: MemoryStore, clock: FakeClock) -> None:
    leaders, _, _ = settled(store, 9, clock)
    first = planner(leaders)
    first.close()
    assert FREE in [store.get(f"{SEATS_AT}{n}") for n in range(SEATS)]
    rest = [leader for leader in leaders if leader is not first]
    run(rest, clock, 2)
    assert planner(rest)
    run(rest, clock, LEASE_S)
    follow(rest)
    assert len(roles(rest)["standby"]) == SEATS - 1


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    fail=st.floats(0, 0.6),
    lose=st.sampled_from([0.0, 0.0, 0.002]),
    asleep=st.floats(0, 0.3),
)
def test_whatever_the_store_does_a_large_cluster_agrees_afterwards(
    seed: int, fail: float, lose: float, asleep: float
) -> None:
    clock, rng = FakeClock(), random.Random(seed)
    leaders, stores = large(MemoryStore(clock), 7, clock)
    digests: dict[int, set[str]] = defaultdict(set)
    highest = [0] * len(leaders)
    wakes_s = [0.0] * len(leaders)
    for one in stores:
        one.fail, one.lose = fail, lose
    for step in range(300):
        if step % 40 == 39:
            rng.choice(leaders).update(profile=profile(t_s=rng.uniform(0.1, 1)))
        for n in rng.sample(range(len(leaders)), len(leaders)):
            if clock() < wakes_s[n]:
                continue
            leaders[n].tick()
            if rng.random() < asleep / 20:  # it stands still, maybe past its leases
                wakes_s[n] = clock() + rng.uniform(0, 12)
            plan = leaders[n].plan
            if plan is not None:
                assert plan.epoch >= highest[n]
                highest[n] = plan.epoch
                digests[plan.epoch].add(plan.digest)
        clock.advance(0.1)
    if not lose:
        assert all(len(of_epoch) == 1 for of_epoch in digests.values())
    for one in stores:
        one.fail = one.lose = 0.0
    run(leaders, clock, 60)
    assert follow(leaders) >= max(highest)
    assert len(roles(leaders)["planner"]) == 1


@needs_etcd
@pytest.mark.slow
def test_a_large_cluster_on_an_etcd_outlives_its_planner(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        wait_ready(etcd)
        stores = [open_store(f"etcd://{etcd.endpoints}/lab") for _ in range(7)]
        options: dict[str, Any] = {"compute": by_period, "max_verified": 5}
        leaders = [
            leader_of(one, f"j{n}", time.monotonic, n, **options) for n, one in enumerate(stores)
        ]

        def settled(those: Sequence[Leader]) -> bool:
            for leader in those:
                leader.tick()
            try:
                follow(those, by_period)
            except AssertionError:
                return False
            return {role: len(of) for role, of in roles(those).items()} == {
                "planner": 1, "standby": SEATS - 1, "follower": len(those) - SEATS
            }  # fmt: skip

        try:
            until(lambda: settled(leaders), what="a plan in parts")
            gone = planner(leaders)
            rest = [leader for leader in leaders if leader is not gone]
            changed = roles(rest)["follower"][0]
            changed.update(profile=profile(t_s=0.9))
            until(lambda: settled(rest), what="the next planner's plan")
            changed.update(profile=profile(t_s=0.4))
            until(lambda: settled(leaders), what="the old planner to follow")
            assert planner(leaders) is not gone
        finally:
            for one in stores:
                one.close()
