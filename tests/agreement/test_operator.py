"""The operator's commands: they have effect in the plan, stay, and are written down."""

from __future__ import annotations

import getpass
import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from control_fakes import (
    SPAWN,
    FakeClock,
    MemoryStore,
    by_name,
    hosted_store,
    profile,
    record,
    until,
)
from etcd_server import Etcd, needs_etcd, wait_ready
from hypothesis import given
from hypothesis import strategies as st
from leaders import agreed, leader_of, leaders_of, run
from places import ROOT
from store_server import ServerThread

from crux_torch.agreement import audit
from crux_torch.agreement.audit import MAX_LINES, MAX_PLANS, AuditEntry, Basis
from crux_torch.agreement.claims import ProfilingSlot
from crux_torch.agreement.inputs import Agreed, plan_inputs
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.operator import OperatorSettings, TenantCap, heeding, operated
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import JobRecord, PlanEntry
from crux_torch.agreement.registry import Registry
from crux_torch.agreement.snapshot import fingerprint
from crux_torch.cli.main import main
from crux_torch.errors import StoreError, StoreForbidden
from crux_torch.measure.profile import HostFlow
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.schedulers import LIVE
from crux_torch.store import MAX_LEASE_S
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import open_store

NAMES = ("a", "b", "c", "d")
_some = st.sets(st.sampled_from(NAMES))
SETTINGS = st.builds(
    OperatorSettings,
    disabled=st.booleans(),
    drained=_some.map(sorted).map(tuple),
    weights=st.dictionaries(st.sampled_from(NAMES), st.floats(0.001, 1000.0)),
    pins=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 63)),
    tenants=st.dictionaries(
        st.sampled_from(NAMES),
        st.builds(
            TenantCap,
            highest=st.integers(0, 63),
            above=st.integers(0, 63),
            share=st.sampled_from([0.0, 0.5, 1.0]),
        ),
    ),
)


@given(SETTINGS, st.sets(st.integers(0, 63), min_size=1))
def test_what_the_operator_sets_holds_whatever_the_planner_says(
    settings: OperatorSettings, levels: set[int]
) -> None:
    heard: list[tuple[str, ...]] = []

    def compute(
        records: Sequence[JobRecord], _: object, /, *, policy: str, weights: object
    ) -> tuple[PlanEntry, ...]:
        assert (policy, weights) == ("p", settings.weights)
        heard.append(tuple(r.job for r in records))
        return tuple(msgspec.structs.replace(e, level=max(levels)) for e in by_name(records, None))

    records = [record(name) for name in NAMES]
    entries = operated(compute, records, None, policy="p", agreed=Agreed(levels), settings=settings)
    if settings.disabled:
        assert (entries, heard) == ((), [])
        return
    assert [entry.job for entry in entries] == list(NAMES)
    assert heard == [tuple(name for name in NAMES if name not in settings.drained)]
    for entry in entries:
        assert entry.level in levels
        if entry.job in settings.pins:
            below = [k for k in levels if k <= settings.pins[entry.job]]
            assert entry.level == (max(below) if below else min(levels))
        elif entry.job in settings.drained:
            assert (entry.level, entry.priority, entry.paths) == (min(levels), 0.0, ())
        elif entry.job in settings.tenants:
            cap = settings.tenants[entry.job]
            most = cap.highest if cap.share == 1 else min(cap.highest, cap.above)
            assert entry.level == max([k for k in levels if k <= most], default=min(levels))
        else:
            assert entry.level == max(levels)
        assert settings.may_have(entry.job, entry.level, levels)


def test_a_weight_multiplies_the_intensity_beyond_what_a_job_may_claim() -> None:
    records = [record("a", peak_flops=1e15), record("b", profile=profile(flops=5e14))]
    compute = partial(compute_entries, records, None, policy="crux-paper", levels=(0, 1))
    before = {e.job: e for e in compute()}
    after = {e.job: e for e in compute(weights={"b": 8.0})}
    assert after["a"].intensity == before["a"].intensity
    assert after["b"].intensity == pytest.approx(8 * before["b"].intensity)
    assert (before["a"].level, before["b"].level) == (1, 0)
    assert (after["a"].level, after["b"].level) == (0, 1)


def test_settings_that_say_nothing_do_not_part_two_releases() -> None:
    jobs = [record("a")]
    plain = fingerprint(jobs, b"t")
    assert fingerprint(jobs, b"t", OperatorSettings(revision=9).effect) == plain
    said = [
        OperatorSettings(disabled=True),
        OperatorSettings(drained=("a",)),
        OperatorSettings(weights={"a": 2.0}),
        OperatorSettings(pins={"a": 1}),
        OperatorSettings(pins={"b": 1}),
        OperatorSettings(tenants={"a": TenantCap(highest=1)}),
        OperatorSettings(tenants={"a": TenantCap(share=0.5, above=1)}),
        OperatorSettings(tenants={"b": TenantCap(highest=1)}),
    ]
    assert len({fingerprint(jobs, b"t", s.effect) for s in said} | {plain}) == 9
    one, other = {"a": 2.0, "b": 3.0}, {"b": 3.0, "a": 2.0}
    assert OperatorSettings(weights=one).effect == OperatorSettings(weights=other).effect


def test_leaders_plan_within_the_settings_and_write_down_why(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders = leaders_of(store, 3, clock)
    registry = Registry(store, "c")
    run(leaders, clock, 5)
    first = agreed(leaders)
    assert [e.level for e in first.entries] == [0, 1, 2]
    assert registry.swap_operator(None, OperatorSettings().changed(pins={"j0": 7}))
    run(leaders, clock, 2)
    assert [e.level for e in agreed(leaders).entries] == [7, 1, 2]
    leaders[2].close()
    leaders[1].update(profile=profile(t_s=0.9))
    run(leaders[:2], clock, 3)
    view = registry.look()
    assert registry.swap_operator(view.operator_raw, view.operator.changed(disabled=True))
    run(leaders[:2], clock, 3)
    assert [leader.plan.entries for leader in leaders[:2] if leader.plan] == [(), ()]
    entries = registry.audit()
    assert [(e.kind, e.before, e.after) for e in entries] == [
        ("plan", n, n + 1) for n in range(len(entries))
    ]
    assert all(e.who in ("j0", "j1", "j2") for e in entries)
    why = [line for e in entries for line in e.why]
    assert why[:3] == [
        "its author has not followed a plan before",
        "the operator's settings 1, nobody says by whom, written from a test",
        "set: j0: pin None -> 7",
    ]
    assert {"j2 ended", "j1 has a new profile", "set: disabled"} <= set(why)
    assert entries[1].changes == ("j0: level 0 -> 7",)
    assert set(entries[-1].changes) == {"j0: level 7 -> default", "j1: level 1 -> default"}


def test_the_leaders_keep_the_settings_in_a_store_that_forgets(
    store: MemoryStore, clock: FakeClock
) -> None:
    leaders = leaders_of(store, 2, clock)
    registry = Registry(store, "c")
    settings = OperatorSettings().changed(drained=("j1",), stays=True)
    assert registry.swap_operator(None, settings)
    run(leaders, clock, 5)
    assert agreed(leaders).entries[1].priority == 0.0
    run(leaders, clock, 1300, step_s=1.0)
    assert registry.look().operator == settings
    before = agreed(leaders)
    store.entries.clear()
    run(leaders, clock, 20)
    assert registry.look().operator == settings
    assert agreed(leaders).entries == before.entries


def test_settings_end_when_they_say_and_those_that_say_nothing_with_their_writer(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    monkeypatch.setattr(time, "time", clock)
    for ends_after_s, gone_after_s in ((0.0, MAX_LEASE_S), (1500.0, 1500.0)):
        store = MemoryStore(clock)
        leaders = leaders_of(store, 2, clock)
        registry, began_s = Registry(store, "c"), clock()
        ends_at_s = began_s + ends_after_s if ends_after_s else 0.0
        settings = OperatorSettings().changed(drained=("j1",), ends_at_s=ends_at_s)
        assert registry.swap_operator(None, settings)
        while registry.look().operator_raw is not None:
            run(leaders, clock, 5, step_s=1.0)
            assert clock() - began_s < 3 * MAX_LEASE_S
        assert 0 <= clock() - began_s - gone_after_s <= 10
        run(leaders, clock, 20, step_s=1.0)
        assert agreed(leaders).entries[1].priority == 1.0
        assert registry.look().operator_raw is None
        assert any("settings have ended" in line for e in registry.audit() for line in e.why)


def test_settings_that_somebody_writes_by_hand_are_written_down_in_full(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    with ServerThread(clock=clock) as running:
        store, stranger = running.client(), running.client()
        leaders = leaders_of(store, 2, clock)
        run(leaders, clock, 5)
        registry = Registry(store, "c")
        stranger.put(registry.operator_key, b'{"disabled":true,"pins":{"j0":3}}')
        run(leaders, clock, 5)
        why = registry.audit()[-1].why
        assert "settings 0, nobody says by whom, written from 127.0.0.1 port" in why[0]
        assert set(why[1:]) == {"set: disabled", "set: j0: pin None -> 3"}
        stranger.close()
        # They end with the lease of whoever wrote them.
        monkeypatch.setattr(time, "time", clock)
        run(leaders, clock, round(MAX_LEASE_S) + 10, step_s=1.0)
        assert registry.look().operator_raw is None
        store.close()


def test_settings_that_cannot_be_used_are_ignored_and_not_kept(
    caplog: pytest.LogCaptureFixture, clock: FakeClock, store: MemoryStore
) -> None:
    leaders = leaders_of(store, 2, clock)
    registry = Registry(store, "c")
    for junk in (b"junk", b'{"revision":1,"pins":{"a":99}}', b'{"version":9,"disabled":true}'):
        store.put(registry.operator_key, junk, 60.0)
        run(leaders, clock, 3)
        assert agreed(leaders)
        assert "ignoring the operator's settings" in caplog.text
    run(leaders, clock, 700, step_s=1.0)
    assert registry.look().operator_raw is None


def test_a_leader_that_may_not_write_the_settings_goes_on(clock: FakeClock) -> None:

    class Tenant(MemoryStore):
        def put(self, key: str, value: bytes, lease_s: float = 60.0) -> None:
            if "operator" in key or "audit" in key:
                raise StoreError("permission denied")
            super().put(key, value, lease_s)

    store = Tenant(clock)
    leader = leader_of(store, "j0", clock)
    registry = Registry(store, "c")
    raw = msgspec.json.encode(OperatorSettings().changed(pins={"j0": 5}))
    store.write(registry.operator_key, raw, 10.0)
    run([leader], clock, 5)
    assert agreed([leader]).entries[0].level == 5
    run([leader], clock, 300, step_s=1.0)
    assert leader.store_state == "ok"
    assert agreed([leader]).entries[0].level == 0


def test_the_audit_log_is_bounded() -> None:
    registry = Registry(MemoryStore(), "c")
    jobs = tuple(record(f"{n}-" + "\x1b\n" * 100) for n in range(100))
    named = {"fingerprint": "f", "author": "a", "policy": "p", "digest": "d"}
    plan = audit.Plan(epoch=1, valid_s=1.0, entries=(), **named)
    now, known = Basis(jobs, None, OperatorSettings()), Basis((), None, OperatorSettings())
    for epoch in range(1, 200):
        after = msgspec.structs.replace(plan, epoch=epoch, entries=by_name(jobs, None))
        registry.append_audit(audit.of_plan(1, plan, after, known, now))
        registry.append_audit(audit.of_act("me", "drain " + "x" * 1000, OperatorSettings()))
    found = registry.audit()
    assert len(found) == MAX_PLANS + 1
    assert max(e.after for e in found) == 199
    for entry in found:
        assert len(msgspec.json.encode(entry)) < 16384
        assert all(line.isprintable() for line in (*entry.why, *entry.changes))
        assert max(len(entry.why), len(entry.changes)) <= MAX_LINES + 1
        # Both hosts of the jobs, which claim more than they have, come first.
        assert entry.kind == "operator" or "and 86 more" in entry.why


def test_the_audit_log_names_hosts_that_come_to_be_contested(
    store: MemoryStore, clock: FakeClock
) -> None:
    honest, twin = (
        Leader(
            store, "c", record(job, hosts=("h",), gpus=200), by_name, clock=clock,
            rng=random.Random(0),
        )
        for job in ("honest", "twin")
    )  # fmt: skip
    run([honest], clock, 5)
    run([honest, twin], clock, 10)
    agreed([honest, twin])
    twin.close()
    run([honest], clock, 30)
    agreed([honest])
    first, second, third = (entry.why for entry in Registry(store, "c").audit())
    assert first == ("its author has not followed a plan before",)
    assert second[0] == (
        "host h has 256 devices, and is claimed by honest (at least 200, counted 128), "
        "twin (at least 200, counted 128)"
    )
    assert third == ("host h is contested no more", "twin ended")


def _lead(endpoint: str, job: str, seed: int, stop: Any) -> None:
    store = open_store(endpoint, timeout_s=2.0)
    compute = partial(compute_entries, levels=(0, 1, 2, 3))
    leader = Leader(
        store, "c", record(job, profile=profile(flops=1e15 * (1 + seed))), compute,
        policy="crux-paper", agree=lambda *_: Agreed((0, 1, 2, 3)), poll_s=0.05, debounce_s=0.2,
    )  # fmt: skip
    while not stop.wait(0.02):
        leader.tick()
    leader.close()
    store.close()


@pytest.fixture(params=["embedded", pytest.param("etcd", marks=needs_etcd)])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "etcd":
        with Etcd(tmp_path) as etcd:
            wait_ready(etcd)
            yield f"etcd://{etcd.endpoints}/lab"
        return
    with hosted_store() as endpoint:
        yield endpoint


def crux(endpoint: str, *words: str) -> Result:
    return CliRunner().invoke(main, ["cluster", *words, "--store", endpoint, "--cluster", "c"])


def told(endpoint: str, *words: str) -> Any:
    done = crux(endpoint, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_commands_have_effect_on_running_leaders(endpoint: str) -> None:
    def levels() -> dict[str, int]:
        plan = told(endpoint, "plan")
        return {} if plan is None else {e["job"]: e["level"] for e in plan["entries"]}

    stop = SPAWN.Event()
    leaders = [
        SPAWN.Process(target=_lead, args=(endpoint, name, n, stop), daemon=True)
        for n, name in enumerate(NAMES)
    ]
    for leader in leaders:
        leader.start()
    try:
        plain = {"a": 0, "b": 1, "c": 2, "d": 3}
        until(lambda: levels() == plain, what="the plan of all")
        assert [job["job"] for job in told(endpoint, "jobs")] == list(NAMES)
        told(endpoint, "drain", "d")
        until(lambda: levels() == {"a": 1, "b": 2, "c": 3, "d": 0}, what="d drained")
        assert "drained" in crux(endpoint, "status").stdout
        told(endpoint, "undrain", "d")
        told(endpoint, "weight", "a", "100")
        until(lambda: levels() == {"a": 3, "b": 0, "c": 1, "d": 2}, what="a before all")
        told(endpoint, "weight", "a", "1")
        told(endpoint, "pin", "b", "63")
        until(lambda: levels() == {**plain, "b": 3}, what="b on the highest level there is")
        told(endpoint, "pin", "b", "none")
        told(endpoint, "tenant", "d", "--highest", "1")
        told(endpoint, "tenant", "c", "--share", "0.5", "--above", "0")
        until(lambda: levels() == {**plain, "c": 0, "d": 1}, what="two tenants within their caps")
        assert "tenant d: level 1 at most" in crux(endpoint, "status").stdout
        assert crux(endpoint, "tenant", "c", "--share", "0.5").exit_code == 2
        told(endpoint, "tenant", "d")
        told(endpoint, "tenant", "c")
        told(endpoint, "disable")
        until(lambda: levels() == {}, what="no entry for anybody")
        assert "disabled by the operator" in crux(endpoint, "status").stdout
        told(endpoint, "enable")
        until(lambda: levels() == plain, what="the first plan again")
        told(endpoint, "observe")
        assert "dry run by the operator" in crux(endpoint, "status").stdout
        assert levels() == plain, "it shows what would be"
        told(endpoint, "act")
        assert "dry run" not in crux(endpoint, "status").stdout
        held = told(endpoint, "status")["operator"]
        found = msgspec.convert(held, OperatorSettings)
        keeps = endpoint.startswith("etcd://")
        assert (found.revision, found.effect, found.stays) == (14, b"", keeps)
        assert keeps or 23 * 3600 < found.ends_at_s - time.time() <= 24 * 3600
        refused = ("--for", "2") if keeps else ("--for", "2", "--stay")
        assert crux(endpoint, "enable", *refused).exit_code == 2
        log = [msgspec.convert(entry, AuditEntry) for entry in told(endpoint, "audit")]
        acts = [entry for entry in log if entry.kind == "operator"]
        assert [e.why[0] for e in acts] == [
            *("drain d", "undrain d", "weight a 100.0", "weight a 1.0"),
            *("pin b 63", "pin b none"),
            *("tenant d --highest 1", "tenant c --share 0.5 --above 0", "tenant d", "tenant c"),
            *("disable", "enable", "observe", "act"),
        ]
        assert all(e.who.startswith(getpass.getuser() + "@") for e in acts)
        assert all(bool(e.origin) is not keeps for e in acts)
        assert acts[0].changes == ("d: drained",)
        plans = [entry for entry in log if entry.kind == "plan"]
        # Two leaders that plan at once may log in another order; no plan is logged twice.
        assert len({e.after for e in plans}) == len(plans)
        assert any("the operator's settings" in e.why[0] for e in plans)
    finally:
        stop.set()
        for leader in leaders:
            leader.join(60)
            leader.kill()


def recipe() -> list[str]:
    """The roles of docs/operate/cluster.md, for the cluster c."""
    page = (ROOT / "docs" / "operate" / "cluster.md").read_text()
    lines = (line.partition("#")[0] for line in page.splitlines() if line.startswith("etcdctl "))
    return [line.removeprefix("etcdctl ").replace("/default/", "/c/") for line in lines]


@needs_etcd
@pytest.mark.slow
def test_roles_part_operator_planner_and_tenant(tmp_path: Path) -> None:
    def url_of(user: str) -> str:
        auth = tmp_path / user
        auth.write_text(f"{user}:secret\n")
        return f"etcd://{etcd.endpoints}/lab?auth={auth}"

    def store_of(user: str) -> StoreClient:
        client = open_store(url_of(user), timeout_s=10.0)
        until(lambda: _reads(client), what="an answer")
        return client

    with Etcd(tmp_path) as etcd:
        wait_ready(etcd)
        roles = ("root", "operator", "planner", "tenant")
        users = [
            f"user {what}" for r in roles for what in (f"add {r}:secret", f"grant-role {r} {r}")
        ]
        for words in ("role add root", *recipe(), *users, "auth enable"):
            etcd.ctl(*words.split())
        denied = crux(url_of("tenant"), "disable")
        assert denied.exit_code == 1
        assert "permission" in denied.stderr
        assert "only the operator's role" in denied.stderr
        assert told(url_of("operator"), "drain", "gone")["drained"] == ["gone"]
        assert [e["why"] for e in told(url_of("operator"), "audit")] == [["drain gone"]]

        tenant, planner = store_of("tenant"), store_of("planner")
        registry = Registry(tenant, "c")
        view = registry.look()
        assert view.operator_raw is not None
        forbidden = {
            "settings": lambda: registry.swap_operator(view.operator_raw, OperatorSettings()),
            "audit log": lambda: registry.append_audit(audit.of_act("x", "y", view.operator)),
            "another's record": lambda: registry.publish_job(record("planner-1"), 60.0),
            "another's end": lambda: registry.remove_job("planner-1"),
            "topology": lambda: registry.publish_topology(b"t"),
            "plan": lambda: tenant.compare_and_swap(registry.plan_key, None, b"p"),
            "another's turn": lambda: tenant.put("crux/c/waiting/planner-1", b"{}", 60.0),
        }
        for what, write in forbidden.items():
            with pytest.raises(StoreForbidden):
                print(what, write())
        # To write what is there already is no write: a tenant's leader may keep the settings.
        registry.keep_operator(view.operator_raw, MAX_LEASE_S)
        root = ("--user", "root:secret")
        held = json.loads(etcd.ctl(*root, "get", "lab/crux/c/operator/settings", "-w", "json"))
        assert "lease" not in held["kvs"][0]

        alone = Leader(tenant, "c", record("tenant-1"), by_name, poll_s=0.05, debounce_s=0.2)
        slot = ProfilingSlot(tenant, "c", "tenant-1", "i0", lease_s=5.0)
        until(lambda: _ticked(alone) and registry.look().jobs != (), what="its record")
        assert slot.acquire_step()
        slot.release()
        until(
            lambda: _ticked(alone) and not alone._author.may_write(time.monotonic()),
            what="the refused plan",
        )
        assert (alone.state, alone.store_state) == ("waiting", "ok")
        writing = Leader(planner, "c", record("planner-1"), by_name, poll_s=0.05, debounce_s=0.2)
        until(
            lambda: (
                _ticked(alone, writing) and alone.plan is not None and alone.plan == writing.plan
            ),
            what="the planner's plan",
        )
        assert alone.store_state == "ok"
        assert [e.who for e in registry.audit() if e.kind == "plan"][-1] == "planner-1"

        # Any other key without a lease would stay for good: it counts for nobody.
        etcd.ctl(*root, "put", "lab/crux/c/slot", "{}")
        etcd.ctl(*root, "put", "lab/crux/c/jobs/tenant-1", "{}")
        gone = "crux/c/jobs/tenant-1"
        until(lambda: gone not in tenant.list("crux/c/jobs/"), what="the record to vanish")
        assert tenant.get("crux/c/slot") is None
        tenant.close()
        planner.close()


def _ticked(*leaders: Leader) -> bool:
    for leader in leaders:
        leader.tick()
    return True


def _reads(store: StoreClient) -> bool:
    try:
        store.list("crux/c/")
    except StoreError:
        return False
    return True


@given(SETTINGS, st.sets(st.integers(0, 63), min_size=1))
def test_a_schedule_that_heeds_the_operator_has_the_levels_of_the_plan(
    settings: OperatorSettings, levels: set[int]
) -> None:
    flows = (HostFlow("h0", "h1", 1e9),)
    records = [record(name, hosts=("h0", "h1"), profile=profile(flows=flows)) for name in NAMES]
    plan = operated(
        partial(compute_entries, levels=sorted(levels)),
        records,
        None,
        policy="crux-paper",
        agreed=Agreed(levels),
        settings=settings,
    )
    cluster = plan_inputs(records, None, weights=settings.weights)
    options = SchedulerOptions(tuple(sorted(levels)))
    found = heeding(LIVE["crux-paper"], settings)(cluster, options)
    expected = {entry.job: entry.level for entry in plan}
    assert found.level == (expected or dict.fromkeys(NAMES, min(levels)))
    assert found.path.keys() == set(NAMES)
