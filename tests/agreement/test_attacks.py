"""What somebody gains who can write to the shared store: nothing that lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from control_fakes import FakeClock, MemoryStore, by_name, profile, record
from dscp_maps import MARKS
from leaders import agreed, leader_of, leaders_of, run
from msgspec import UNSET

from crux_torch.agreement.claims import MAX_TICKET, WAIT_LEASE_S, ProfilingSlot
from crux_torch.agreement.inputs import Agreed
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.operator import OperatorSettings, TenantCap
from crux_torch.agreement.planner_role import SEATS
from crux_torch.agreement.records import (
    MAX_EPOCH,
    JobRecord,
    Plan,
    PlanEntry,
    PlanHead,
    digest_of,
    parts_of,
)
from crux_torch.agreement.registry import Registry, StoredEntry, StoredPlan
from crux_torch.measure.profile import JobProfile
from crux_torch.network.routes import PlannedHop, PlannedPath
from crux_torch.store import MAX_LEASE_S

PLAN = "crux/c/head"
#: Far above what honest leaders reach.
LEAP = 1 << 52


def put(store: MemoryStore, plan: Plan, renewal: int = 0) -> None:
    """Write a plan of these entries, as an attacker may that wants leaders to follow it."""
    parts = parts_of(plan.entries) if plan.parts else UNSET
    head = msgspec.structs.replace(plan.head, digest=digest_of(plan.entries), parts=parts)
    store.put(PLAN, msgspec.json.encode(StoredPlan(renewal=renewal, plan=head)))
    for entry in plan.entries:
        part = StoredEntry(digest=head.digest_for(entry.job), entry=entry)
        Registry(store, "c").put_part(entry.job, msgspec.json.encode(part))


def in_store(store: MemoryStore) -> PlanHead:
    stored = Registry(store, "c").look().plan.stored
    assert stored is not None
    return stored.plan


def never_misled(
    leaders: Sequence[Leader], clock: FakeClock, honest: tuple[PlanEntry, ...], seconds: float
) -> None:
    """Run, and see that at each time every leader has a plan, with the honest entries."""
    for _ in range(round(seconds * 10)):
        run(leaders, clock, 0.1)
        for leader in leaders:
            assert leader.plan is not None
            assert leader.plan.entries == honest
            assert leader.plan.valid_s == 15.0


def with_levels(*levels: int) -> Callable[[Plan], Plan]:
    def forge(plan: Plan) -> Plan:
        entries = zip(plan.entries, levels, strict=True)
        changed = tuple(msgspec.structs.replace(e, level=level) for e, level in entries)
        return msgspec.structs.replace(plan, entries=changed)

    return forge


def with_paths(plan: Plan) -> Plan:
    path = PlannedPath("h0", "h1", (PlannedHop(2, 2, "spine0"),))
    first = msgspec.structs.replace(plan.entries[0], paths=(path,))
    return msgspec.structs.replace(plan, entries=(first, *plan.entries[1:]))


def without_others(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, entries=plan.entries[:1])


@pytest.mark.parametrize(
    "forge",
    [with_levels(63, 1), with_levels(7, 1), with_levels(1, 0), with_paths, without_others],
    ids=["level 63", "reserved level", "swapped", "paths", "left out"],
)
@pytest.mark.parametrize("ahead", [0, 1, 1000, LEAP])
def test_a_forged_plan_with_the_right_fingerprint_is_not_followed_and_replaced(
    store: MemoryStore, clock: FakeClock, forge: Callable[[Plan], Plan], ahead: int
) -> None:
    leaders = leaders_of(store, 2, clock)
    run(leaders, clock, 5)
    plan = agreed(leaders)
    for round_ in range(3):
        forged = forge(plan)
        put(store, msgspec.structs.replace(forged, epoch=in_store(store).epoch + ahead), round_)
        never_misled(leaders, clock, plan.entries, 20)
        assert in_store(store).digest == plan.digest
    newcomer = leader_of(store, "j0", clock, 9, incarnation="i0")
    put(store, forge(plan), 9)
    run([newcomer], clock, 0.5)
    assert newcomer.plan is None


def test_a_validity_that_somebody_else_chose_does_not_count(
    store: MemoryStore, clock: FakeClock
) -> None:
    leader = leader_of(store, "a", clock)
    run([leader], clock, 5)
    plan = agreed([leader])
    put(store, msgspec.structs.replace(plan, epoch=2, valid_s=86400.0))
    run([leader], clock, 1)
    assert leader.plan is not None
    clock.advance(15.1)
    assert leader.plan is None


@pytest.mark.parametrize("epoch", [LEAP, MAX_EPOCH - 1, MAX_EPOCH])
def test_after_a_leap_of_the_epoch_the_next_honest_one_is_accepted(
    store: MemoryStore, clock: FakeClock, epoch: int
) -> None:
    leaders = leaders_of(store, 2, clock)
    run(leaders, clock, 5)
    plan = agreed(leaders)
    put(store, msgspec.structs.replace(plan, epoch=epoch))
    never_misled(leaders, clock, plan.entries, 2)
    assert agreed(leaders).epoch < 10
    for n in range(3):
        leaders[0].update(profile=profile(t_s=0.2 + n / 10))
        run(leaders, clock, 3)
        assert agreed(leaders).fingerprint == leaders[0].status()["snapshot"]


@pytest.mark.parametrize("epoch", [LEAP, MAX_EPOCH])
def test_a_newcomer_that_follows_a_leap_finds_back_to_the_others(
    store: MemoryStore, clock: FakeClock, epoch: int
) -> None:
    old = leader_of(store, "a", clock)
    new = leader_of(store, "b", clock, 1)
    run([old, new], clock, 5)
    plan = agreed([old, new])
    restarted = leader_of(store, "b", clock, 2)
    put(store, msgspec.structs.replace(plan, epoch=epoch))
    run([restarted], clock, 0.3)
    assert restarted.plan is not None
    assert restarted.plan.epoch == epoch
    run([old, restarted], clock, 30)
    settled = agreed([old, restarted])
    run([old, restarted], clock, 60)
    assert agreed([old, restarted]) == settled, "nobody replaces it any more"


def test_a_lone_leader_at_the_last_epoch_goes_on(store: MemoryStore, clock: FakeClock) -> None:
    first = leader_of(store, "a", clock)
    run([first], clock, 3)
    put(store, msgspec.structs.replace(agreed([first]), epoch=MAX_EPOCH))
    leader = leader_of(store, "a", clock)
    run([leader], clock, 1)
    assert agreed([leader]).epoch == MAX_EPOCH
    leader.update(profile=profile(t_s=0.9))
    run([leader], clock, 3)
    assert agreed([leader]).epoch == 1


def test_an_older_epoch_that_is_replayed_is_not_followed(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders = leaders_of(store, 2, clock)
    run(leaders, clock, 5)
    replayed = store.get(PLAN)
    assert replayed is not None
    leaders[0].update(profile=profile(t_s=0.9))
    run(leaders, clock, 5)
    plan = agreed(leaders)
    store.put(PLAN, replayed)
    never_misled(leaders, clock, plan.entries, 20)
    assert agreed(leaders).epoch == plan.epoch + 1


def test_a_plan_of_another_known_policy_stands_with_a_warning(
    store: MemoryStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    leaders = [
        leader_of(store, "a", clock, policy="crux"),
        leader_of(store, "b", clock, 1, policy="taccl"),
    ]
    run(leaders, clock, 30)
    assert agreed(leaders).epoch == 1
    assert caplog.text.count("give all jobs of a cluster the same") == 1


def test_in_a_cluster_too_large_to_compute_each_takes_its_own_entry_if_its_level_may_be(
    store: MemoryStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    leaders = leaders_of(store, 6, clock, agree=lambda *_: Agreed(range(7)), max_verified=1)
    for leader in leaders:
        leader.update(marks=MARKS)
    run(leaders, clock, 20)
    followers = [leader for leader in leaders if leader.status()["role"] == "follower"]
    assert len(followers) == 6 - SEATS
    plan = next(leader.plan for leader in leaders if leader not in followers)
    assert plan is not None
    for leader in followers:
        assert leader.plan is not None
        assert leader.plan.head == plan.head
        assert leader.plan.entries == (plan.entry(leader.record.job),)
    assert "too many jobs to compute" in caplog.text
    for level in (7, 63):
        forged = with_levels(*[level] * 6)(plan)
        put(store, msgspec.structs.replace(forged, epoch=in_store(store).epoch + 1))
        for _ in range(100):
            run(leaders, clock, 0.1)
            for leader in leaders:
                assert leader.plan is not None
                entry = leader.plan.entry(leader.record.job)
                assert entry == plan.entry(leader.record.job)


def test_a_plan_beyond_a_tenants_cap_is_not_followed(store: MemoryStore, clock: FakeClock) -> None:
    leaders = leaders_of(store, 4, clock)
    half = TenantCap(highest=2, share=0.5, above=1)
    assert Registry(store, "c").swap_operator(None, OperatorSettings().changed(tenants={"j": half}))
    run(leaders, clock, 5)
    plan = agreed(leaders)
    assert [e.level for e in plan.entries] == [0, 1, 2, 2]
    for round_, levels in enumerate([(0, 1, 2, 3), (0, 2, 2, 2), (2, 2, 0, 1)]):
        forged = with_levels(*levels)(plan)
        put(store, msgspec.structs.replace(forged, epoch=in_store(store).epoch + 1), round_)
        never_misled(leaders, clock, plan.entries, 20)
    # More jobs are more that may be above; a name that only looks like the tenant's is not.
    others = [leader_of(store, name, clock, n) for n, name in enumerate(["j4", "J9"], 10)]
    run([*leaders, *others], clock, 5)
    level = {e.job: e.level for e in agreed([*leaders, *others]).entries}
    assert level == {"J9": 0, "j0": 1, "j1": 1, "j2": 1, "j3": 2, "j4": 2}


def test_in_a_cluster_too_large_to_compute_a_level_beyond_the_cap_is_not_taken(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders = leaders_of(store, 6, clock, agree=lambda *_: Agreed(range(7)), max_verified=1)
    for leader in leaders:
        leader.update(marks=MARKS)
    caps = {"j": TenantCap(highest=0)}
    assert Registry(store, "c").swap_operator(None, OperatorSettings().changed(tenants=caps))
    run(leaders, clock, 20)
    followers = [leader for leader in leaders if leader.status()["role"] == "follower"]
    assert len(followers) == 6 - SEATS
    plan = next(leader.plan for leader in leaders if leader not in followers)
    assert plan is not None
    for level in (1, 6):
        forged = with_levels(*[level] * 6)(plan)
        put(store, msgspec.structs.replace(forged, epoch=in_store(store).epoch + 1))
        for _ in range(50):
            run(leaders, clock, 0.1)
            for leader in followers:
                assert leader.plan is not None
                assert [e.level for e in leader.plan.entries] == [0]


def test_a_job_on_hosts_that_others_claim_is_told(
    store: MemoryStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    leader = leader_of(store, "a", clock)
    liar = record("li\nar", gpus=1 << 20, hosts=leader.record.hosts)
    run([leader], clock, 3)
    assert "is claimed by" not in caplog.text
    Registry(store, "c").publish_job(liar, 60.0)
    run([leader], clock, 3)
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith(f"host {leader.record.hosts[0]} has 256 devices, and is claimed by a (")
    assert "\n" not in said


def test_records_that_are_deleted_again_and_again_come_back_and_nobody_is_misled(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders = leaders_of(store, 3, clock)
    run(leaders, clock, 5)
    honest = agreed(leaders).entries
    for step in range(200):
        if step % 4 == 0:
            store.delete(f"crux/c/jobs/j{step // 4 % 3}")
            store.delete(PLAN)
        run(leaders, clock, 0.1)
        for leader in leaders:
            plan = leader.plan
            assert plan is None or set(plan.entries) <= {*honest, *relevelled(honest)}
    run(leaders, clock, 10)
    assert agreed(leaders).entries == honest
    assert [r.job for r in Registry(store, "c").look().jobs] == ["j0", "j1", "j2"]


def relevelled(honest: Sequence[PlanEntry]) -> list[PlanEntry]:
    """What an honest planner may say while some records are missing: levels by place."""
    return [msgspec.structs.replace(e, level=level) for e in honest for level in range(3)]


def test_a_plan_of_ten_thousand_jobs_is_written(store: MemoryStore, clock: FakeClock) -> None:
    registry = Registry(store, "c")
    for n in range(10_000):
        registry.publish_job(record(f"job-{n:05}-{'x' * 40}"), MAX_LEASE_S)
    leader = leader_of(store, "a", clock, poll_s=2.0)
    run([leader], clock, 6, step_s=1.0)
    assert leader.plan is not None
    assert len(leader.plan.entries) == 10_001
    assert len(store.get(PLAN) or b"") < 1024
    job = f"job-00007-{'x' * 40}"
    run([leader], clock, 300, step_s=1.0)
    assert registry.part(job, leader.plan.digest_for(job)) == leader.plan.entry(job)


@pytest.mark.parametrize("ticket", [0, MAX_TICKET, MAX_TICKET + 1, (1 << 53) - 1])
@pytest.mark.parametrize("key", ["crux/c/slot", "crux/c/waiting/evil"])
def test_no_ticket_holds_the_measuring_slot_for_good(
    store: MemoryStore, clock: FakeClock, key: str, ticket: int
) -> None:
    store.put(key, b'{"job":"evil","incarnation":"i","ticket":%d}' % ticket)
    slots = [ProfilingSlot(store, "c", job, "i0", lease_s=10.0, clock=clock) for job in "abc"]
    took: list[int] = []
    for _ in range(int((MAX_LEASE_S + 60) / 2)):
        for n, slot in enumerate(slots):
            if n not in took and slot.acquire_step():
                took.append(n)
                slot.release()
            assert sum(one.held for one in slots) <= 1
        clock.advance(2.0)
    assert sorted(took) == [0, 1, 2]
    assert WAIT_LEASE_S > 2.0


def test_a_record_in_another_jobs_name_supersedes_it_until_its_lease_ends(
    store: MemoryStore, clock: FakeClock
) -> None:
    leader = leader_of(store, "a", clock)
    run([leader], clock, 3)
    Registry(store, "c").publish_job(record("a", incarnation="evil"), MAX_LEASE_S)
    run([leader], clock, 0.5)
    assert leader.state == "superseded"
    run([leader], clock, MAX_LEASE_S - 2, step_s=1.0)
    assert leader.state == "superseded"
    run([leader], clock, 5, step_s=0.5)
    assert leader.record.incarnation == "i0"
    assert agreed([leader])


class NewerProfile(JobProfile, frozen=True, kw_only=True):
    energy_J: float = 0.0


class NewerRecord(JobRecord, frozen=True, kw_only=True):
    profile: NewerProfile | None = None
    tenant: str = ""


def test_two_minor_versions_of_the_schema_run_side_by_side(
    store: MemoryStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    told = NewerProfile(**msgspec.structs.asdict(profile()), energy_J=5.0)
    about = msgspec.structs.asdict(record("new"))
    newer = NewerRecord(**{**about, "profile": told}, tenant="t")
    new = Leader(store, "c", newer, by_name, clock=clock)
    old = leader_of(store, "old", clock)
    for first, second in ((new, old), (old, new)):
        store.entries.clear()
        run([first, second], clock, 10)
        plan = agreed([new, old])
    run([old, new], clock, 60)
    assert agreed([new, old]) == plan, "they do not fight over it"
    assert "energy_J" in (store.get("crux/c/jobs/new") or b"").decode()
    assert caplog.text.count("WARNING") == 0


def test_a_renewal_keeps_what_only_a_newer_release_knows(
    store: MemoryStore, clock: FakeClock
) -> None:
    leader = leader_of(store, "a", clock)
    run([leader], clock, 3)
    raw = msgspec.json.decode(store.get(PLAN) or b"")
    raw["plan"]["signature"] = "s"
    raw["plan"]["rates_Bps"] = [1e9]
    store.put(PLAN, msgspec.json.encode(raw))
    run([leader], clock, 20)
    renewed = msgspec.json.decode(store.get(PLAN) or b"")
    assert renewed["renewal"] > raw["renewal"]
    assert renewed["plan"] == raw["plan"]


def test_a_release_whose_plan_is_one_value_plans_apart_and_is_told_of(
    store: MemoryStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    older = b'{"renewal":0,"plan":{"version":2,"epoch":7,"fingerprint":"f","entries":[]}}'
    store.put("crux/c/plan", older)
    leader = leader_of(store, "a", clock)
    run([leader], clock, 10)
    assert agreed([leader]).epoch == 1
    assert store.get("crux/c/plan") == older, "it is theirs"
    assert caplog.text.count("jobs of an older release of Crux plan apart") == 1


def test_another_major_version_is_refused_with_a_message(
    store: MemoryStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    later = {**msgspec.to_builtins(record("later")), "version": 3, "hosts": {"h0": 8}}
    store.put("crux/c/jobs/later", msgspec.json.encode(later))
    leader = leader_of(store, "a", clock)
    run([leader], clock, 5)
    assert [e.job for e in agreed([leader]).entries] == ["a"]
    assert "crux/c/jobs/later: schema version 3, expected 2" in caplog.text
    assert caplog.text.count("schema version 3") == 1
