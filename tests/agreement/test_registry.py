"""What others wrote is read as foreign bytes: used if valid, ignored with one warning if not."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from control_fakes import MemoryStore, profile, record
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import MAX_EPOCH, MAX_RECORD_BYTES, PlanEntry, PlanHead
from crux_torch.agreement.registry import PlanState, Registry, StoredEntry, StoredPlan, decode
from crux_torch.agreement.snapshot import Snapshot, fingerprint


def plan(epoch: int = 1) -> PlanHead:
    named = {"fingerprint": "f", "author": "a", "policy": "crux", "digest": "d"}
    return PlanHead(epoch=epoch, valid_s=15.0, **named)


def test_names_with_any_character_stay_apart() -> None:
    store = MemoryStore()
    registry = Registry(store, "team/one")
    names = ["a", "a/b", "a b", "ä/..", "%2F"]
    for name in names:
        registry.publish_job(record(name), 6.0)
    assert [r.job for r in registry.look().jobs] == sorted(names)
    assert Registry(store, "team").look().jobs == ()
    registry.remove_job("a/b")
    assert [r.job for r in registry.look().jobs] == sorted(set(names) - {"a/b"})


CHANGES = st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "i0", "i1", "not a record"]))


@given(st.lists(st.lists(CHANGES, max_size=3), max_size=6))
def test_who_has_looked_before_sees_what_a_newcomer_sees(
    looks: list[list[tuple[str, str]]],
) -> None:
    store = MemoryStore()
    registry, snapshot = Registry(store, "c"), Snapshot()
    for changes in looks:
        for job, now in changes:
            key = registry.job_key(job)
            if now == "not a record":
                store.put(key, b"{")
            elif now:
                registry.publish_job(record(job, now), 60.0)
            else:
                store.delete(key)
        view = registry.look()
        assert view == Registry(store, "c").look()
        assert view is registry.look()
        snapshot.update(view.jobs, None, OperatorSettings(), 0.0)
        assert snapshot.fingerprint == fingerprint(view.jobs, None, OperatorSettings().effect)


def test_fingerprints_are_those_of_other_releases() -> None:
    records = [
        record("b"),
        record("starting", profile=None),
        record("a", profile=profile(flops=2e15)),
    ]
    assert fingerprint(records, b"t", b"o") == (
        "523c30d197b22ec61b65c07f8c9d15cc22683189bad0a2079f9b57a63c8d5328"
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"job": 3}', "Expected `str`"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 100_000, "depth|Expected|truncated"),
        (b" " * (MAX_RECORD_BYTES + 1), "limit"),
        (msgspec.json.encode(record("bad", version=9)), "version 9, expected 2"),
        (msgspec.json.encode(record("other")), "is of job 'other'"),
        (b'{"version": 9, "job": 3, "jobs": []}', "version 9, expected 2: run all jobs"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_record_that_cannot_be_used_is_named_once(
    raw: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    registry = Registry(store, "c")
    registry.publish_job(record("good"), 6.0)
    store.write(registry.job_key("bad"), raw)
    for _ in range(3):
        assert [r.job for r in registry.look().jobs] == ["good"]
    assert len(caplog.records) == 1
    assert "crux/c/jobs/bad" in caplog.text
    assert re.search(reason, caplog.text)


def test_the_plan_is_read_swapped_and_refused() -> None:
    store = MemoryStore()
    registry = Registry(store, "c")
    empty = registry.look().plan
    assert empty == PlanState(None, None)
    raw = registry.swap_plan(empty, StoredPlan(renewal=0, plan=plan(1)))
    assert raw is not None
    assert registry.swap_plan(empty, StoredPlan(renewal=0, plan=plan(2))) is None
    state = registry.look().plan
    assert state.stored is not None
    assert state.stored.plan == plan(1)
    for bad in (b"junk", msgspec.json.encode(StoredPlan(renewal=0, plan=plan(MAX_EPOCH + 1)))):
        store.put(registry.plan_key, bad)
        assert registry.look().plan == PlanState(bad, None)
    assert registry.swap_plan(registry.look().plan, StoredPlan(renewal=0, plan=plan(3))) is not None


def test_what_has_not_changed_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    registry = Registry(store, "c")
    decoded: list[str] = []

    def counting(kind: Any, raw: bytes, where: str) -> Any:
        decoded.append(where.rpartition("/")[2])
        return decode(kind, raw, where)

    monkeypatch.setattr("crux_torch.agreement.registry.decode", counting)
    for name in ("a", "b"):
        registry.publish_job(record(name), 6.0)
    first = registry.look()
    assert registry.look() is first
    assert decoded == ["a", "b"]
    registry.swap_plan(first.plan, StoredPlan(renewal=0, plan=plan(1)))
    second = registry.look()
    assert second.jobs is first.jobs
    registry.publish_job(record("b", "i1"), 6.0)
    registry.publish_topology(b"t")
    third = registry.look()
    assert decoded == ["a", "b", "head", "b"]
    assert third.jobs[0] is first.jobs[0]
    assert (third.jobs[1].incarnation, third.topology, third.plan) == ("i1", b"t", second.plan)


def test_entries_are_of_one_plan_and_one_job(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    registry = Registry(store, "c")
    entry = PlanEntry(job="a/b", level=3, priority=1.0, intensity=1.0, correction=1.0)
    assert registry.part("a/b", "f") is None
    registry.put_part("a/b", msgspec.json.encode(StoredEntry(digest="f", entry=entry)))
    assert registry.parts().keys() == {"a/b"}
    assert registry.part("a/b", "f") == entry
    assert registry.part("a/b", "g") is None
    store.put(registry.parts_prefix + "c", store.get(registry.parts_prefix + "a%2Fb") or b"")
    assert registry.part("c", "f") is None, "it is another job's"
    store.put(registry.parts_prefix + "c", b"junk")
    assert registry.part("c", "f") is None
    assert "ignoring an entry of the plan" in caplog.text
    registry.publish_follows("a/b", StoredEntry(digest="f", entry=entry))
    head, other = (msgspec.structs.replace(plan(), digest=digest) for digest in ("f", "g"))
    assert registry.follows(head) == {"a/b": entry}
    assert registry.follows(other) == {}, "of another plan"
    registry.publish_follows("a/b", None)
    assert registry.follows(head) == {}
    assert registry.look().jobs == ()
