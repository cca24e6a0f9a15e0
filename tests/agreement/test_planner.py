"""From records to a plan: pure, deterministic, bounded by what devices can do."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from control_fakes import profile, record
from dscp_maps import MARKS
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import LEAF_SPINE
from shared_core import shared_core

from crux_torch.agreement import inputs
from crux_torch.agreement.bounds import (
    MAX_DEVICE_FLOPS,
    MAX_HOST_BPS,
    MAX_HOST_DEVICES,
    MAX_PERIOD_S,
    MIN_TRANSFER_S,
    claimed_devices,
    claimed_flops,
    holdings,
    overclaims,
)
from crux_torch.agreement.inputs import (
    MAX_CANDIDATES,
    MAX_PLANNED_FLOWS,
    UNLOCATED,
    TopologyReader,
    candidate_limit,
    paths_taken,
    plan_inputs,
)
from crux_torch.agreement.planner import compute_entries, within
from crux_torch.agreement.records import (
    Grid,
    JobRecord,
    Moved,
    PathCounts,
    PlanEntry,
    RunLabels,
    TriedPlan,
)
from crux_torch.agreement.snapshot import fingerprint
from crux_torch.errors import SettingsError
from crux_torch.measure.profile import HostFlow, ProfileBurst
from crux_torch.network.discover.fragment import SeenPair, SeenPath
from crux_torch.network.loaders import dump_yaml, parse_yaml
from crux_torch.network.routes import PlannedHop, PlannedPath
from crux_torch.network.topology import CANDIDATE_LIMIT, Link, Topology, TopologyBuilder
from crux_torch.schedule.arrays import arrays_of, choice_of, traffic_matrix
from crux_torch.schedule.default.crux import crux_first
from crux_torch.schedule.model import Cluster, Decision, Job, SchedulerOptions
from crux_torch.schedule.papers.intensity import transfer_times_s
from crux_torch.schedule.schedulers import LIVE, SCHEDULERS
from crux_torch.settings import PATH_POLICIES


def seen(spine: int, src: str = "h0", dst: str = "h1", connections: int = 1) -> SeenPair:
    """Connections between hosts of ``LEAF_SPINE`` over one of its spines."""
    hops = ("10.9.9.1", f"10.100.{spine}.2", "10.9.9.2")
    addresses = {"h0": "10.0.0.2", "h1": "10.1.0.2", "h2": "10.0.1.2"}
    path = SeenPath(hops, connections=connections)
    return SeenPair(src, addresses[src], dst, addresses[dst], (path,))


def t_of(cluster: Cluster, number: int = 0) -> float:
    arrays = arrays_of(cluster)
    return float(transfer_times_s(arrays, traffic_matrix(arrays, choice_of(arrays, None)))[number])


def test_without_a_topology_everyone_meets_and_t_is_the_measured_one() -> None:
    records = [
        record("a", profile=profile(t_s=0.25)),
        record("b", profile=profile(t_s=0.5, t_source="topology")),
    ]
    cluster = plan_inputs(records, None)
    assert [flow.candidates for flow in cluster.jobs[0].flows] == [((UNLOCATED,),)] * 2
    assert t_of(cluster, 0) == pytest.approx(0.25)
    assert t_of(cluster, 1) == pytest.approx(0.5)


def test_a_measured_t_scales_the_bytes_on_a_known_topology() -> None:
    topology = shared_core(["h0", "h1"], 1e9)
    measured = plan_inputs([record("a", profile=profile(t_s=0.25))], topology)
    assert t_of(measured) == pytest.approx(0.25)
    ratio = {f.bytes for f in measured.jobs[0].flows}
    assert len(ratio) == 1
    computed = plan_inputs([record("a", profile=profile(t_s=0.25, t_source="topology"))], topology)
    assert [f.bytes for f in computed.jobs[0].flows] == [1e9, 1e9]


def test_unknown_hosts_meet_each_other_and_nobody_else() -> None:
    topology = parse_yaml(LEAF_SPINE)
    known = profile(flows=(HostFlow("h0", "h1", 1e9),), t_source="topology")
    unknown = profile(flows=(HostFlow("x", "h0", 1e9), HostFlow("y", "y", 5.0)), t_s=0.75)
    cluster = plan_inputs([record("k", profile=known), record("u", profile=unknown)], topology)
    assert cluster.jobs[0].flows[0].candidates == topology.candidate_paths("h0", "h1")
    assert cluster.jobs[1].flows[0].candidates == ((UNLOCATED,),)
    assert cluster.jobs[1].flows[1].candidates == ((),)
    assert t_of(cluster, 1) == pytest.approx(0.75)


def test_the_topology_bounds_devices_and_what_each_can_do() -> None:
    builder = TopologyBuilder(device_flops=1e15)
    builder.node("tor", "tor")
    for host, gpus in (("h0", 4), ("h1", 2), ("h2", 0)):
        builder.cable(builder.node(host, "host"), "tor", Link(1e9))
        for n in range(gpus):
            builder.node(f"{host}/gpu{n}", "gpu", host)
    topology = builder.build()
    boast = profile(flops=1e30, period_s=2.0)
    claims = record("a", hosts=("h0", "h1", "h0"), gpus=1 << 20, peak_flops=1e30, profile=boast)
    assert claimed_devices(claims, topology) == 6, "a host that is named twice counts once"
    assert claimed_flops(claims, boast, topology) == 6 * 1e15 * 2.0
    undescribed = record("b", hosts=("h0", "h2", "nobody's"), gpus=1 << 20, profile=boast)
    assert claimed_devices(undescribed, topology) == 4 + 2 * MAX_HOST_DEVICES
    honest = record("c", hosts=("h0",), gpus=3, profile=boast)
    assert claimed_devices(honest, topology) == 3
    (job,) = plan_inputs([claims], topology).jobs
    assert (job.gpus, job.flops) == (6, 6 * 1e15 * 2.0)


def hosts_of(devices: Sequence[int]) -> Topology:
    builder = TopologyBuilder(device_flops=1e15)
    builder.node("tor", "tor")
    for h, gpus in enumerate(devices):
        builder.cable(builder.node(f"h{h}", "host"), "tor", Link(1e9))
        for n in range(gpus):
            builder.node(f"h{h}/gpu{n}", "gpu", f"h{h}")
    return builder.build()


HOSTS = hosts_of([8, 8, 8, 4])
CLAIMS = st.builds(
    lambda job, hosts, gpus: record(job, hosts=tuple(f"h{h}" for h in hosts), gpus=gpus),
    st.text("ab", min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(1, 40),
)


@given(st.lists(CLAIMS, max_size=6, unique_by=lambda r: r.job))
def test_no_host_counts_for_more_devices_than_it_has(records: list[JobRecord]) -> None:
    contested, held = holdings(records, HOSTS)
    for host in contested:
        assert sum(host.counted.values()) <= host.devices
        assert min(host.claimed.values()) >= 1
    claimed = {r.job: claimed_devices(r, HOSTS) for r in records}
    assert all(n < claimed[job] for job, n in held.items())
    count = {**claimed, **held}
    for some in ({"h0"}, {"h1", "h3"}, {"h0", "h1", "h2"}, {"h0", "h1", "h2", "h3"}):
        # All that these jobs have is on these hosts.
        within = sum(count[r.job] for r in records if some.issuperset(r.hosts))
        assert within <= sum(len(HOSTS.gpus(h)) for h in some)
    fewest = min(records, key=lambda r: r.gpus, default=None)
    if fewest is not None and sum(r.gpus == fewest.gpus for r in records) == 1:
        assert count[fewest.job] == claimed[fewest.job], "who claims the fewest has them"
    assert bool(contested) or not held
    assert holdings(records[::-1], HOSTS) == (contested, held)


def test_naming_the_hosts_of_others_gains_nothing_and_takes_little() -> None:
    def jobs(*records: JobRecord) -> dict[str, Job]:
        return {job.name: job for job in plan_inputs(records, HOSTS).jobs}

    boast = profile(flops=1e30)
    own = record("liar", hosts=("h0",), gpus=8, profile=boast)
    # The others' W is what their devices can do, so that it shows if it is cut.
    honest = [
        record(f"job{n}", hosts=(f"h{n}",), gpus=8, profile=profile(flops=8e15)) for n in (1, 2)
    ]
    alone = jobs(own, *honest)
    for gpus in (8, 9, 16, 20, 24, 1 << 24):
        liar = record("liar", hosts=("h0", "h1", "h2"), gpus=gpus, profile=boast)
        found = jobs(liar, *honest)
        if gpus > 8:
            assert (found["liar"].gpus, found["liar"].flops) == (8, alone["liar"].flops)
            assert all(found[r.job] == alone[r.job] for r in honest), "the fewest count first"
        else:
            assert found["liar"].flops <= alone["liar"].flops
            assert all(found[r.job].flops >= 7 / 8 * alone[r.job].flops for r in honest)
    # Who says the same as the other has half of it, whatever the names.
    for name in ("a", "z"):
        twin = record(name, hosts=("h1",), gpus=8, profile=boast)
        found = jobs(twin, *honest)
        assert (found[name].gpus, found["job1"].gpus, found["job2"].gpus) == (4, 4, 8)
    (contested,) = holdings([twin, *honest], HOSTS).contested
    assert str(contested) == (
        "host h1 has 8 devices, and is claimed by job1 (at least 8, counted 4), "
        "z (at least 8, counted 4)"
    )


def test_jobs_that_fit_beside_each_other_contest_nothing() -> None:
    halves = [record(f"j{n}", hosts=("h0", "h1"), gpus=8) for n in range(2)]
    three = [record(f"k{n}", hosts=("h3",), gpus=n) for n in (1, 2)]
    starting = record("s", hosts=("h0",), gpus=8, profile=None)
    assert holdings([*halves, *three, starting], HOSTS) == ((), {})
    unknown = [record(f"x{n}", hosts=("x",), gpus=64) for n in range(5)]
    assert holdings(unknown[:4], None) == ((), {})
    assert [host.host for host in holdings(unknown, None).contested] == ["x"]


def test_a_transfer_time_counts_from_what_the_hosts_nics_can_do() -> None:
    flows = (HostFlow("h0", "h1", 1e9), HostFlow("h0", "h2", 1e9), HostFlow("h1", "h1", 1e30))
    for t_s in (1e-300, 1e-9, 0.5):
        told = profile(t_s=t_s, flows=flows)
        assert t_of(plan_inputs([record("a", profile=told)], None)) == pytest.approx(
            max(t_s, 2e9 / MAX_HOST_BPS)
        )
        assert bool(overclaims(record("a", profile=told))) is (t_s < 0.5)
    little = profile(t_s=1e-300, flows=(HostFlow("h0", "h1", 1e-300),))
    assert t_of(plan_inputs([record("a", profile=little)], None)) == pytest.approx(MIN_TRANSFER_S)
    computed = profile(t_source="topology", flows=(HostFlow("h0", "h1", 1e-300),))
    fabric = parse_yaml(LEAF_SPINE)
    assert t_of(plan_inputs([record("a", profile=computed)], fabric)) == pytest.approx(
        MIN_TRANSFER_S
    )


def test_work_and_period_out_of_bounds_give_no_top_level() -> None:
    honest = [record(f"h{n}", profile=profile(flops=1e17 * (n + 1))) for n in range(3)]
    liar = record("liar", gpus=8, peak_flops=8e15, profile=profile(flops=1e30, period_s=1e30))
    assert claimed_flops(liar, liar.profile or profile()) == 8e15 * MAX_PERIOD_S
    assert "FLOPs in an iteration as" in overclaims(liar)
    assert [overclaims(r) for r in honest] == ["", "", ""]
    boast = record("liar", gpus=1 << 24, hosts=("h0",))
    assert "devices as 256" in overclaims(boast)


def test_many_records_of_many_flows_are_planned_within_bounds() -> None:
    topology = parse_yaml("version: 1\nbuilder: fat_tree\nparameters: {k: 8}\n")
    pairs = [(f"h{a}", f"h{b}") for a in range(64) for b in range(64, 128)]
    flows = tuple(HostFlow(a, b, 1e9) for a, b in pairs)
    fakes = [record(f"fake{n}", profile=profile(flows=flows)) for n in range(130)]
    honest = [record(f"job{n}", profile=profile()) for n in range(20)]
    limit = candidate_limit([*fakes, *honest])
    cluster = plan_inputs([*fakes, *honest], topology, limit)
    flows_of = {job.name: job.flows for job in cluster.jobs}
    assert all(len(flows_of[r.job]) == 2 for r in honest), "the smallest are planned in full"
    assert sum(map(len, flows_of.values())) <= MAX_PLANNED_FLOWS + len(fakes)
    assert flows_of["fake99"] == (flows_of["fake99"][0],)
    assert candidate_limit(honest) == CANDIDATE_LIMIT
    assert limit == MAX_CANDIDATES // MAX_PLANNED_FLOWS == 32


def test_a_job_beyond_the_limit_keeps_its_level_and_has_no_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "MAX_PLANNED_FLOWS", 3)
    topology = parse_yaml(LEAF_SPINE)
    flows = tuple(HostFlow(*ends, 1e9) for ends in (("h0", "h1"), ("h1", "h0")))
    records = [record(name, profile=profile(flows=flows)) for name in ("a", "b")]
    first, second = compute_entries(records, topology, policy="crux", levels=(0, 1))
    assert first.paths
    assert second.paths == ()


@given(
    gpus=st.integers(1, 1 << 24),
    hosts=st.lists(st.sampled_from(["h0", "h1", "x", "y"]), min_size=1, max_size=8),
    peak_flops=st.floats(0, 1e30),
    flops=st.floats(0, 1e30),
    period_s=st.floats(0, 1e6),
)
def test_a_claim_counts_up_to_what_the_hosts_devices_can_do(
    gpus: int, hosts: list[str], peak_flops: float, flops: float, period_s: float
) -> None:
    told = profile(flops=flops, period_s=period_s)
    claims = record("a", hosts=tuple(hosts), gpus=gpus, peak_flops=peak_flops, profile=told)
    (job,) = plan_inputs([claims], None).jobs
    assert job.gpus == min(gpus, MAX_HOST_DEVICES * len(set(hosts)))
    peak = job.gpus * MAX_DEVICE_FLOPS
    assert job.flops == min(flops, min(peak_flops or peak, peak) * min(period_s, MAX_PERIOD_S))


@given(st.lists(st.floats(0.05, 0.9), min_size=2, max_size=4))
def test_without_a_topology_the_default_gives_one_level_and_no_paths(t_s: list[float]) -> None:
    records = [record(f"j{i}", profile=profile(t_s=t)) for i, t in enumerate(t_s)]
    entries = compute_entries(records, None, policy="crux", levels=(1, 2, 4))
    assert {entry.level for entry in entries} == {4}
    assert not any(entry.paths for entry in entries)


def test_unprofiled_jobs_have_no_entry_and_shares_are_normalised() -> None:
    bursts = (ProfileBurst(0.9, 0.2), ProfileBurst(0.1, 0.2))
    records = [
        record("a", profile=None, state="starting"),
        record("b", profile=profile(bursts=bursts)),
    ]
    (job,) = plan_inputs(records, None).jobs
    assert [(b.at, b.share) for b in job.bursts] == [(0.1, 0.5), (0.9, 0.5)]
    entries = compute_entries(records, None, policy="crux", levels=(0, 1))
    assert [e.job for e in entries] == ["b"]
    assert compute_entries([records[0]], None, policy="crux", levels=(0, 1)) == ()


@pytest.mark.parametrize("policy", sorted(LIVE))
def test_every_policy_gives_usable_levels_and_finite_numbers(policy: str) -> None:
    hostile = profile(flows=(HostFlow("core/in", "core/out", 1.0),))
    records = [
        *(record(f"j{n}", profile=profile(flops=1e14 * (n + 1))) for n in range(12)),
        record("silent", profile=profile(flows=(), t_s=0.0)),
        record("no time", profile=profile(t_s=0.0)),
        record("hostile", hosts=("core/in",), profile=hostile),
    ]
    entries = compute_entries(records, None, policy=policy, levels=(1, 2, 4))
    assert [e.job for e in entries] == sorted(r.job for r in records)
    assert {e.level for e in entries} <= {1, 2, 4}
    assert all(abs(e.priority) < float("inf") and abs(e.intensity) < float("inf") for e in entries)


def test_the_more_intense_job_goes_first_under_the_papers_policy() -> None:
    shape = {"t_s": 0.6, "compute_s": 0.5, "period_s": 1.1}
    records = [
        record("intense", profile=profile(flops=9e12, **shape)),
        record("other", profile=profile(flops=1e12, **shape)),
    ]
    first, second = compute_entries(records, None, policy="crux-paper", levels=(1, 2, 3))
    assert first.intensity == pytest.approx(9e12 / 0.6)
    assert first.level > second.level


def test_the_bound_on_slowdowns_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(cluster: Cluster, options: SchedulerOptions) -> Decision:
        seen.append(options.max_slowdown)
        return crux_first(cluster, options)

    monkeypatch.setitem(LIVE, "crux", noted)
    topology = parse_yaml(LEAF_SPINE)
    compute_entries([record("a")], topology, policy="crux", levels=(1, 2), max_slowdown=1.5)
    assert seen == [1.5]


@pytest.mark.parametrize("policy", sorted(LIVE))
def test_a_plan_names_the_routers_of_chosen_paths_if_its_policy_chooses_any(policy: str) -> None:
    flows = tuple(HostFlow(*ends, 1e9) for ends in (("h0", "h1"), ("h0", "h2"), ("h0", "x")))
    (entry,) = compute_entries(
        [record("a", profile=profile(flows=flows, t_source="topology"))],
        parse_yaml(LEAF_SPINE),
        policy=policy,
        levels=(0,),
    )
    # h0 and h2 are below one leaf: there is nothing to choose. Nobody knows where x is.
    named = (PlannedPath("h0", "h1", (PlannedHop(2, 2, "spine0"),)),)
    assert entry.paths == (named if policy in PATH_POLICIES else ())
    (nowhere,) = compute_entries([record("a")], None, policy=policy, levels=(0,))
    assert nowhere.paths == ()


def test_an_entry_that_is_too_large_gives_up_its_paths() -> None:
    hops = tuple(PlannedHop(n, n, f"router{n}") for n in range(1, 9))
    paths = tuple(PlannedPath(f"h{n}", f"h{n + 1}", hops) for n in range(8))
    about = {"level": 0, "priority": 1.0, "intensity": 1.0, "correction": 1.0}
    entries = [PlanEntry(job=f"j{n}", paths=paths[: 2 * n], **about) for n in range(4)]
    sizes = [len(msgspec.json.encode(entry)) for entry in entries]
    assert within(entries, sizes[3]) == (tuple(entries), 0)
    kept, without = within(entries, sizes[2])
    assert (kept[:3], kept[3].paths, without) == (tuple(entries[:3]), (), 1)
    kept, without = within(entries, sizes[1] - 1)
    assert ([len(e.paths) for e in kept], without) == ([0, 0, 0, 0], 3)


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'best': expected one of .*crux"):
        compute_entries([record("a")], None, policy="best", levels=(0,))
    for policy in sorted(set(SCHEDULERS) - set(LIVE)):
        with pytest.raises(
            SettingsError, match=rf"'{re.escape(policy)}': only the simulator .*crux, .*ecmp"
        ):
            compute_entries([], None, policy=policy, levels=(0,))
    with pytest.raises(SettingsError, match="level"):
        compute_entries([record("a")], None, policy="crux", levels=())


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_records_changes_nothing(rng: random.Random) -> None:
    records = [
        record(f"j{n}", profile=profile(flops=rng.uniform(1e13, 1e16), t_s=rng.uniform(0.01, 1)))
        for n in range(5)
    ]
    shuffled = rng.sample(records, len(records))
    assert fingerprint(records, b"t") == fingerprint(shuffled, b"t")
    options = {"policy": "crux", "levels": (0, 1, 2)}
    assert compute_entries(records, None, **options) == compute_entries(shuffled, None, **options)


def test_the_fingerprint_sees_what_matters_and_only_that() -> None:
    base = [record("a"), record("b")]
    print_of = fingerprint(base, None)
    assert fingerprint([*base, record("c", profile=None)], None) == print_of
    assert fingerprint([record("a", state="profiling"), base[1]], None) == print_of
    other = {"incarnation": "i1", "profile": profile(t_s=0.2), "gpus": 9, "hosts": ("h0",)}
    for name, value in other.items():
        assert fingerprint([record("a", **{name: value}), base[1]], None) != print_of, name
    assert len({print_of, fingerprint(base, b""), fingerprint(base, b"x")}) == 3
    assert fingerprint(base[:1], None) != print_of


#: Another value of each field, chosen so that it may well change a plan.
OTHER_PROFILE: dict[str, object] = {
    "period_s": 1e-3,
    "period_source": "marks",
    "compute_s": 0.1,
    "flops": 1e9,
    "flops_source": "time",
    "flops_by_time": 1e20,
    "flops_note": "another",
    "t_note": "another",
    "device_flops": 1e9,
    "device_busy": 0.5,
    "tensor_busy": 0.5,
    "uncounted_ops": ("op",),
    "gpus": 1,
    "flows": (HostFlow("h0", "h2", 1e12),),
    "inside": (HostFlow("h0", "h1", 1e12),),
    "bursts": (ProfileBurst(0.1, 1.0),),
    "t_s": 100.0,
    "t_source": "topology",
    "t_measured_s": 100.0,
    "overlap": 0.0,
    "exposed_s": 50.0,
    "iterations": 1,
    "measured_alone": False,
}
OTHER_RECORD: dict[str, object] = {
    "job": "z",
    "incarnation": "i1",
    "hosts": ("h0",),
    "gpus": 1 << 20,
    "state": "profiling",
    "peak_flops": 1.0,
    "paths": PathCounts(1, 2, 3, 4),
    "corrections_per_minute": 5,
    "tried": (TriedPlan(name="x", jobs=("a", "b"), state="kept"),),
    "moved": Moved(Grid(0.1, 0.4), 0.05, 9.0),
    "marks": MARKS,
    "dry_run": True,
    "seen": (seen(1),),
    "run": RunLabels(slurm_job_id="7"),
}


@pytest.mark.parametrize("policy", sorted(LIVE))
def test_the_fingerprint_covers_all_that_a_plan_follows_from(policy: str) -> None:
    topology = parse_yaml(LEAF_SPINE)
    flows = (HostFlow("h0", "h1", 1e9), HostFlow("h0", "x", 1e9))
    told = profile(flows=flows, flops=1e30)
    first, second = record("a", gpus=1 << 20, profile=told), record("b", profile=profile())

    def of(changed: JobRecord) -> tuple[str, tuple[PlanEntry, ...]]:
        records = [changed, second]
        options = {"levels": (0, 1, 2), "guard": True}
        entries = compute_entries(records, topology, policy=policy, **options)  # type: ignore[arg-type]
        return fingerprint(records, b"t"), entries

    left_out = set(OTHER_PROFILE) ^ set(type(told).__struct_fields__)
    assert not left_out, "give every field of a profile another value here"
    assert set(OTHER_RECORD) | {"version", "profile"} == set(type(first).__struct_fields__)
    before = of(first)
    changed = [
        *(msgspec.structs.replace(first, **{name: value}) for name, value in OTHER_RECORD.items()),
        *(
            msgspec.structs.replace(first, profile=msgspec.structs.replace(told, **{name: value}))
            for name, value in OTHER_PROFILE.items()
        ),
    ]
    least = (ProfileBurst(0.5, 1.0, 0.3),)
    assert of(msgspec.structs.replace(first, profile=profile(bursts=least)))[0] != before[0]
    for one in changed:
        after = of(one)
        assert after[1] == before[1] or after[0] != before[0], one


def test_flows_that_are_left_to_the_network_are_planned_where_they_were_seen() -> None:
    topology = parse_yaml(LEAF_SPINE)
    there, back = HostFlow("h0", "h1", 1e9), HostFlow("h1", "h0", 1e9)
    own = profile(flows=(there, back, HostFlow("h0", "x", 1.0), HostFlow("h0", "h2", 1.0)))
    over = (seen(1), seen(0, "h1", "h0"), seen(1, "h1", "h0", connections=2))
    records = [
        record("a", profile=own, seen=over),
        record("b", profile=profile(flows=(there, back)), seen=(seen(1),)),
        record("c", profile=profile(flows=(there,))),
    ]
    cluster = plan_inputs(records, topology)
    assert paths_taken(cluster, records, topology) == {"a": (1, 1, 0, 0), "b": (1, 0)}
    assert paths_taken(cluster, records, topology, whole=True) == {"a": (1, 1, 0, 0)}
    assert paths_taken(plan_inputs(records, None), records, None) == {}


@pytest.mark.parametrize("policy", ["ecmp", "sincronia", "varys", "crux-pa", "cassini", "mlcc"])
def test_policies_without_paths_of_their_own_give_levels_on_the_links_in_use(policy: str) -> None:
    topology = parse_yaml(LEAF_SPINE)
    told = profile(flows=(HostFlow("h0", "h1", 1e9),), t_source="topology")
    jobs = [record("a", profile=told, seen=(seen(0),)), record("b", profile=told, seen=(seen(1),))]
    cluster = plan_inputs(jobs, topology)
    taken = paths_taken(cluster, jobs, topology)
    assert taken == {"a": (0,), "b": (1,)}
    options = SchedulerOptions((0, 1, 2), default_path=taken)
    expected = LIVE[policy](cluster, options)
    assert dict(expected.path) == taken
    entries = compute_entries(jobs, topology, policy=policy, levels=(0, 1, 2))
    assert [e.correction for e in entries] == [expected.correction.get(j, 1.0) for j in "ab"]
    assert all(entry.paths == () for entry in entries)


def test_sincronia_orders_jobs_by_the_spine_that_they_really_share() -> None:
    topology = parse_yaml(LEAF_SPINE)

    def job(name: str, size: float, *spine: int) -> JobRecord:
        told = profile(flows=(HostFlow("h0", "h1", size),), t_source="topology")
        return record(name, profile=told, seen=tuple(map(seen, spine)))

    def levels(*jobs: JobRecord) -> list[int]:
        plan = compute_entries(jobs, topology, policy="sincronia", levels=(0, 1, 2, 3))
        return [entry.level for entry in plan]

    # The bottleneck is the spine of b and c: the larger of its jobs goes last.
    assert levels(job("a", 3e9, 0), job("b", 2e9, 1), job("c", 2.5e9, 1)) == [2, 3, 1]
    assert levels(job("a", 3e9), job("b", 2e9), job("c", 2.5e9)) == [1, 3, 2], "as if on one"


def test_the_default_may_keep_the_paths_that_it_knows_of_all_jobs_of_a_component() -> None:
    topology = parse_yaml(LEAF_SPINE)
    told = profile(flows=(HostFlow("h0", "h1", 1e9),), t_source="topology")

    def plan(*seen_of_b: SeenPair) -> list[tuple[int, ...]]:
        jobs = [
            record("a", profile=told, seen=(seen(1),)),
            record("b", profile=told, **({"seen": seen_of_b} if seen_of_b else {})),
        ]
        entries = compute_entries(jobs, topology, policy="crux", levels=(0, 1, 2))
        return [tuple(hop.router == "spine1" for hop in e.paths[0].hops) for e in entries]

    # Equal jobs apart on two spines: as good either way, so the first of the safe plans stays.
    assert plan(seen(0)) == plan() == [(False,), (True,)]


def test_a_topology_is_read_once_and_one_that_cannot_be_read_counts_as_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = TopologyReader()
    raw = dump_yaml(shared_core(["h0", "h1"], 1e9)).encode()
    topology = reader.read(raw)
    assert topology is not None
    assert topology.hosts == ("h0", "h1")
    assert reader.read(bytes(bytearray(raw))) is topology
    assert reader.read(None) is None
    for bad in (b"\xff", b"version: 9", b"[" * 50, b"a: b: c"):
        assert reader.read(bad) is None
    assert caplog.text.count("planning without") == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("fabric.yaml", dump_yaml(shared_core(["h0", "h1"], 1e9))),
        ("fabric.CSV", "ip,DSW,PSW,ASW\nh0,d,p,a\nh1,d,p,b\n"),
    ],
)
def test_the_topology_in_a_jobs_file_is_not_parsed_again_when_the_store_has_it(
    name: str, content: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(content)
    reader = TopologyReader()
    topology, raw = reader.load(file)
    assert reader.read(raw) is topology
    again = TopologyReader().read(raw)
    assert again is not None
    assert (again.hosts, again.edges) == (topology.hosts, topology.edges)


def test_bursts_keep_their_least_times_within_the_iteration_that_was_measured() -> None:
    def bursts(*least_s: float, period_s: float = 1.0) -> list[float]:
        told = tuple(ProfileBurst(i / 8, 1 / len(least_s), s) for i, s in enumerate(least_s))
        (job,) = plan_inputs(
            [record("a", profile=profile(bursts=told, period_s=period_s))], None
        ).jobs
        return [burst.least_s for burst in job.bursts]

    assert bursts(0.1, 0.0, 0.3) == [0.1, 0.0, 0.3]
    assert bursts(1e30, 1e30) == pytest.approx([0.5, 0.5])
    assert bursts(1e30, period_s=1e30) == pytest.approx([MAX_PERIOD_S])
    assert bursts(5e-324, 0.0) == [5e-324, 0.0]
    assert bursts(1.0, period_s=0.0) == [0.0]


def test_records_have_least_times_only_where_they_are_known() -> None:
    known = record("a", profile=profile(bursts=(ProfileBurst(0.5, 1.0, 0.25),)))
    assert msgspec.json.decode(msgspec.json.encode(known), type=JobRecord) == known
    raw = msgspec.json.encode(record("a"))
    assert b"least_s" not in raw
    assert msgspec.json.decode(raw, type=JobRecord) == record("a")
    for bad in (-1.0, 1e31, "x"):
        data = msgspec.to_builtins(known)
        data["profile"]["bursts"][0]["least_s"] = bad
        with pytest.raises(msgspec.ValidationError, match="least_s"):
            msgspec.json.decode(msgspec.json.encode(data), type=JobRecord)


def test_two_jobs_whose_bursts_fit_beside_each_other_are_no_rivals() -> None:
    """Each needs 40% of the link for as long as it sends."""

    def job(name: str, flops: float, least_s: float) -> JobRecord:
        bursts = (ProfileBurst(0.5, 1.0, least_s),)
        return record(name, profile=profile(flops=flops, t_s=0.2, bursts=bursts))

    for least_s, differ in ((0.0, True), (0.5, False)):
        records = [job("a", 1e15, least_s), job("b", 1e12, least_s)]
        decision = LIVE["cassini"](plan_inputs(records, None), SchedulerOptions((0, 1, 2)))
        assert bool(decision.shift_s) == differ
