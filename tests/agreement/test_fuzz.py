"""Whatever somebody writes to the store: it is refused by name, or planned within bounds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from control_fakes import FakeClock, MemoryStore, by_name, profile, record
from hypothesis import given, settings
from hypothesis import strategies as st
from leaders import leader_of, run
from networks import LEAF_SPINE
from seen_fabric import Host, seen

from crux_torch.agreement.audit import AuditEntry, of_act
from crux_torch.agreement.claims import DeviceClaim
from crux_torch.agreement.inputs import plan_inputs
from crux_torch.agreement.operator import OperatorSettings, TenantCap
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import (
    JobRecord,
    Measured,
    OnTrial,
    PathCounts,
    Plan,
    PlanEntry,
    RecordError,
    TriedPlan,
)
from crux_torch.agreement.registry import Registry, StoredEntry, StoredPlan, decode
from crux_torch.agreement.snapshot import fingerprint
from crux_torch.measure.profile import MAX_PARTS, HostFlow, ProfileBurst
from crux_torch.network.loaders import parse_yaml
from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.default.guard import Sample

TOPOLOGY = parse_yaml(LEAF_SPINE)
TRIED = TriedPlan(name="t", jobs=("a", "b"), state="worse", change=-0.1)
ENTRY = PlanEntry(
    job="a", level=1, priority=1.0, intensity=2.0, correction=1.0,
    trial=OnTrial(name="t", judge="a", jobs=2, on=True),
)  # fmt: skip
PLAN = Plan(
    epoch=3, fingerprint="f", valid_s=15.0, author="a", policy="crux", digest="d", entries=()
)
#: One of each kind that lies in a store.
VALUES: tuple[msgspec.Struct, ...] = (
    record(
        "a", tried=(TRIED,), paths=PathCounts(as_planned=3), corrections_per_minute=2,
        seen=(seen(Host(0, 0), Host(1, 0), (0, 1), connections=2),),
    ),
    StoredPlan(renewal=7, plan=PLAN.head),
    StoredEntry(digest="d", entry=ENTRY),
    Measured(name="t", before=Sample(), after=Sample()),
    OperatorSettings(
        revision=2, drained=("a",), weights={"b": 2.0}, pins={"c": 1},
        tenants={"t-": TenantCap(highest=3, share=0.5, above=1)},
    ),
    of_act("me@here", "drain a", OperatorSettings(revision=2)),
    DeviceClaim(job="a", incarnation="i", index=0),
)  # fmt: skip
KINDS = (JobRecord, StoredPlan, StoredEntry, Measured, OperatorSettings, AuditEntry, DeviceClaim)

EDITS = st.tuples(
    st.sampled_from(["drop", "flip", "repeat", "insert", "swap"]),
    st.integers(0, 4096),
    st.integers(1, 24),
    st.sampled_from(
        [b"-", b"9" * 30, b"1e999", b"null", b'"\\ud800"', b"\xff", b"[]", b"{}", b"0"]
    ),
)


def edited(raw: bytes, edits: Sequence[tuple[str, int, int, bytes]]) -> bytes:
    for what, place, length, piece in edits:
        at = place % (len(raw) + 1)
        before, cut, after = raw[:at], raw[at : at + length], raw[at + length :]
        raw = {
            "drop": before + after,
            "flip": before + bytes(b ^ (1 << place % 8) for b in cut) + after,
            "repeat": before + cut * 3 + after,
            "insert": before + piece + cut + after,
            "swap": before + piece + after,
        }[what]
    return raw


def test_each_kind_comes_back_as_it_was_written() -> None:
    for value, kind in zip(VALUES, KINDS, strict=True):
        assert decode(kind, msgspec.json.encode(value), "key") == value


@given(st.sampled_from(range(len(VALUES))), st.lists(EDITS, min_size=1, max_size=3))
def test_a_damaged_value_is_refused_by_name_or_is_one_that_can_be_written(
    which: int, edits: list[tuple[str, int, int, bytes]]
) -> None:
    raw = edited(msgspec.json.encode(VALUES[which]), edits)
    for kind in (KINDS[which], *KINDS):
        with contextlib.suppress(RecordError):
            found = decode(kind, raw, "key")
            assert decode(kind, msgspec.json.encode(found), "key") == found


EXTREMES = st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 0.1, 1.0, 1e9, 1e30]) | st.floats(0, 1e30)
HOSTS = st.sampled_from(["h0", "h1", "h2", "h3", "nobody's", "\x1b[2J", "\u202e"])
PARTS = st.integers(0, MAX_PARTS - 1)
FLOWS = st.lists(st.builds(HostFlow, HOSTS, HOSTS, EXTREMES, PARTS), max_size=6).map(tuple)
BURSTS = st.lists(
    st.builds(
        ProfileBurst, st.sampled_from([0.0, 5e-324, 0.3, 1.0]), st.sampled_from([0.0, 1e-300, 1.0])
    ),
    max_size=4,
).map(tuple)
PROFILES = st.builds(
    lambda **told: msgspec.structs.replace(profile(), **told),
    period_s=EXTREMES, compute_s=EXTREMES, flops=EXTREMES, t_s=EXTREMES, t_measured_s=EXTREMES,
    flows=FLOWS, inside=FLOWS, bursts=BURSTS, t_source=st.sampled_from(["measured", "topology"]),
)  # fmt: skip
RECORDS = st.lists(
    st.builds(
        lambda job, **told: record(job, **told),
        st.text(min_size=1, max_size=3),
        hosts=st.lists(HOSTS, min_size=1, max_size=4).map(tuple),
        gpus=st.sampled_from([1, 8, 1 << 24]),
        peak_flops=EXTREMES,
        profile=PROFILES,
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda r: r.job,
)


def accepted(records: Sequence[JobRecord]) -> list[JobRecord]:
    """Those that a reader takes: what the schema forbids does not reach a planner."""
    found = []
    for one in records:
        with contextlib.suppress(RecordError):
            found.append(decode(JobRecord, msgspec.json.encode(one), "key"))
    return found


@given(RECORDS)
def test_what_a_planner_is_given_is_finite_whatever_the_schema_allows(
    records: list[JobRecord],
) -> None:
    jobs = accepted(records)
    for topology in (None, TOPOLOGY):
        cluster = plan_inputs(jobs, topology)
        # Raises for a number that is none, or for a cluster that contradicts itself.
        arrays_of(cluster)
        for job in cluster.jobs:
            assert math.isfinite(job.flops)
            assert 0 <= math.fsum(flow.bytes for flow in job.flows) < 1e90
    assert fingerprint(jobs, None) == fingerprint(jobs[::-1], None)


def test_one_record_of_extremes_does_not_keep_others_from_a_plan() -> None:
    flows = (HostFlow("h0", "h1", 5e-324),)
    evil = record("evil", profile=profile(flows=flows, t_s=1e30))
    for topology in (None, TOPOLOGY):
        entries = compute_entries([evil, record("a")], topology, policy="crux-paper", levels=(1, 3))
        assert [e.job for e in entries] == ["a", "evil"]
        level = {e.job: e.level for e in entries}
        assert level["evil"] <= level["a"]
        assert all(math.isfinite(e.intensity) for e in entries)


@given(RECORDS, st.sampled_from(["crux", "crux-paper"]))
@settings(max_examples=60)
def test_whole_policies_plan_whatever_the_schema_allows(
    records: list[JobRecord], policy: str
) -> None:
    jobs = accepted(records)
    planned = sorted(one.job for one in jobs)
    for topology in (None, TOPOLOGY):
        entries = compute_entries(jobs, topology, policy=policy, levels=(1, 3, 4))
        assert [entry.job for entry in entries] == planned
        assert all(entry.level in (1, 3, 4) for entry in entries)
        assert all(math.isfinite(entry.priority) for entry in entries)


KEYS = st.sampled_from(
    ["head", "jobs/a", "jobs/b", "jobs/%1b", "slot", "waiting/b", "topology", "operator/settings"]
)


@given(st.lists(st.tuples(KEYS, st.integers(0, 6), st.lists(EDITS, max_size=2)), max_size=8))
@settings(max_examples=60)
def test_a_leader_survives_whatever_lies_in_the_store_and_plans_when_it_is_gone(
    writes: list[tuple[str, int, Any]],
) -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    leader = leader_of(store, "a", clock)
    run([leader], clock, 2)
    for key, which, edits in writes:
        store.write(f"crux/c/{key}", edited(msgspec.json.encode(VALUES[which]), edits), 30.0)
        run([leader], clock, 0.5)
        assert leader.store_state == "ok"
        plan = leader.plan
        known = Registry(store, "c").look().jobs
        assert plan is None or {e.job for e in plan.entries} <= {r.job for r in known} | {"a"}
    run([leader], clock, 100)
    assert leader.plan is not None
    # What the operator set, leaders keep.
    if not Registry(store, "c").look().operator.effect:
        assert leader.plan.entries == by_name([leader.record], None)
