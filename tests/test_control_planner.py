"""From records to a plan: pure, deterministic, bounded by what devices can do."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping

import pytest
from control_fakes import profile, record
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.control.planner import (
    MAX_DEVICE_FLOPS,
    MAX_HOST_DEVICES,
    UNLOCATED,
    Planner,
    claimed_devices,
    claimed_flops,
    compute_entries,
    fingerprint,
    plan_inputs,
)
from crux_torch.errors import SettingsError
from crux_torch.fabric.loaders import dump_yaml
from crux_torch.fabric.shared_core import shared_core
from crux_torch.fabric.topology import Edge, Link, Node, Topology
from crux_torch.profile.job_profile import HostFlow, ProfileBurst
from crux_torch.schedule.intensity import link_traffic, transfer_time_s
from crux_torch.schedule.live import PATH_POLICIES
from crux_torch.schedule.model import Cluster, Decision
from crux_torch.schedule.options import SchedulerOptions
from crux_torch.schedule.scheduler import LIVE, SCHEDULERS


@dataclasses.dataclass
class TwoPaths:
    """a and b, joined by two links of different speed."""

    hosts: tuple[str, ...] = ("a", "b")
    capacity_Bps: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"fast": 2e9, "slow": 1e9}
    )

    def candidate_paths(self, src: str, dst: str) -> tuple[tuple[str, ...], ...]:
        return (("fast",), ("slow",))


def t_of(cluster: Cluster, number: int = 0) -> float:
    job = cluster.jobs[number]
    return transfer_time_s(link_traffic(job, [0] * len(job.flows)), cluster.capacity_Bps)


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
    known = profile(flows=(HostFlow("a", "b", 1e9),), t_source="topology")
    unknown = profile(flows=(HostFlow("x", "a", 1e9), HostFlow("y", "y", 5.0)), t_s=0.75)
    cluster = plan_inputs([record("k", profile=known), record("u", profile=unknown)], TwoPaths())
    assert cluster.jobs[0].flows[0].candidates == (("fast",), ("slow",))
    assert cluster.jobs[1].flows[0].candidates == ((UNLOCATED,),)
    assert cluster.jobs[1].flows[1].candidates == ((),)
    assert t_of(cluster, 1) == pytest.approx(0.75)


def test_a_claim_is_clamped_to_what_the_devices_can_do() -> None:
    boast = profile(flops=1e30, period_s=2.0)
    assert claimed_flops(record("a", peak_flops=8e15, profile=boast), boast) == 16e15
    assert claimed_flops(record("a", profile=boast), boast) == 2 * 8 * MAX_DEVICE_FLOPS
    bigger = record("a", peak_flops=1e30, profile=boast)
    assert claimed_flops(bigger, boast) == 2 * 8 * MAX_DEVICE_FLOPS
    honest = profile(flops=1e15, period_s=2.0)
    assert claimed_flops(record("a", peak_flops=8e15, profile=honest), honest) == 1e15


def test_the_topology_bounds_devices_and_what_each_can_do() -> None:
    topology = Topology(
        {
            **{host: Node("host", host) for host in ("h0", "h1", "h2")},
            **{f"h0/gpu{i}": Node("gpu", "h0") for i in range(4)},
            **{f"h1/gpu{i}": Node("gpu", "h1") for i in range(2)},
            "tor": Node("tor"),
        },
        [
            Edge(f"{a}->{b}", a, b, Link(1e9))
            for host in ("h0", "h1", "h2")
            for a, b in ((host, "tor"), ("tor", host))
        ],
        device_flops=1e15,
    )
    boast = profile(flops=1e30, period_s=2.0)
    claims = record("a", hosts=("h0", "h1", "h0"), gpus=1 << 20, peak_flops=1e30, profile=boast)
    assert claimed_devices(claims, topology) == 6, "a host that is named twice counts once"
    assert claimed_flops(claims, boast, topology) == 6 * 1e15 * 2.0
    undescribed = record("b", hosts=("h0", "h2", "nobody's"), gpus=1 << 20, profile=boast)
    assert claimed_devices(undescribed, topology) == 4 + 2 * MAX_HOST_DEVICES
    assert claimed_devices(undescribed) == 3 * MAX_HOST_DEVICES
    honest = record("c", hosts=("h0",), gpus=3, profile=boast)
    assert claimed_devices(honest, topology) == 3
    (job,) = plan_inputs([claims], topology).jobs
    assert (job.gpus, job.flops) == (6, 6 * 1e15 * 2.0)


@given(
    gpus=st.integers(1, 1 << 24),
    hosts=st.lists(st.sampled_from(["h0", "h1", "x", "y"]), min_size=1, max_size=8),
    peak_flops=st.floats(0, 1e30),
    flops=st.floats(0, 1e30),
    period_s=st.floats(0, 1e6),
)
def test_no_claim_is_above_what_the_hosts_devices_can_do(
    gpus: int, hosts: list[str], peak_flops: float, flops: float, period_s: float
) -> None:
    told = profile(flops=flops, period_s=period_s)
    claims = record("a", hosts=tuple(hosts), gpus=gpus, peak_flops=peak_flops, profile=told)
    (job,) = plan_inputs([claims], None).jobs
    devices = MAX_HOST_DEVICES * len(set(hosts))
    assert job.gpus == min(gpus, devices)
    assert job.flops <= devices * MAX_DEVICE_FLOPS * period_s
    assert job.flops <= flops
    if peak_flops:
        assert job.flops <= peak_flops * period_s
    if flops <= min(peak_flops or flops, MAX_DEVICE_FLOPS) * period_s:
        assert job.flops == flops, "an honest claim stands"


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


def test_the_more_intense_job_goes_first() -> None:
    records = [
        record("light", profile=profile(flops=1e14, t_s=0.3)),
        record("heavy", profile=profile(flops=1e16, t_s=0.1)),
    ]
    entries = {e.job: e for e in compute_entries(records, None, policy="crux", levels=(2, 5))}
    assert entries["heavy"].level == 5
    assert entries["light"].level == 2
    assert entries["heavy"].intensity == pytest.approx(1e17)


@pytest.mark.parametrize("policy", sorted(LIVE))
def test_every_policy_gives_usable_levels_and_finite_numbers(policy: str) -> None:
    records = [record(f"j{n}", profile=profile(flops=1e14 * (n + 1))) for n in range(12)]
    records.append(record("silent", profile=profile(flows=(), t_s=0.0)))
    records.append(record("no time", profile=profile(t_s=0.0)))
    records.append(
        record(
            "hostile",
            hosts=("core/in",),
            profile=profile(flows=(HostFlow("core/in", "core/out", 1.0),)),
        )
    )
    entries = compute_entries(records, None, policy=policy, levels=(1, 2, 4))
    assert [e.job for e in entries] == sorted(r.job for r in records)
    assert {e.level for e in entries} <= {1, 2, 4}
    assert all(abs(e.priority) < float("inf") and abs(e.intensity) < float("inf") for e in entries)


def test_a_bound_on_slowdown_brings_the_lower_job_up() -> None:
    records = [
        record("intense", profile=profile(flops=9e12, t_s=0.6, compute_s=0.5, period_s=1.1)),
        record("other", profile=profile(flops=1e12, t_s=0.6, compute_s=0.5, period_s=1.1)),
    ]

    def levels(max_slowdown: float | None) -> dict[str, int]:
        planner = Planner("crux-fair", (1, 2, 3), max_slowdown=max_slowdown)
        return {entry.job: entry.level for entry in planner(records, None)}

    free, bound = levels(None), levels(1.2)
    assert free["intense"] > free["other"]
    assert bound["intense"] == bound["other"]


@pytest.mark.parametrize("policy", sorted(LIVE))
def test_only_policies_that_choose_paths_give_any(policy: str) -> None:
    (entry,) = compute_entries([record("a")], None, policy=policy, levels=(0,))
    assert entry.path == ((0, 0) if policy in PATH_POLICIES else ())


def test_levels_that_a_scheduler_made_up_are_squeezed_without_inversion() -> None:
    def ranks(cluster: Cluster, _options: SchedulerOptions) -> Decision:
        return Decision(
            path={j.name: (0,) * len(j.flows) for j in cluster.jobs},
            level={j.name: 100 + n for n, j in enumerate(cluster.jobs)},
        )

    records = [record(f"j{n}") for n in range(4)]
    entries = compute_entries(
        records, None, policy="ranks", levels=(3, 6), schedulers={"ranks": ranks}
    )
    assert [e.level for e in entries] == [3, 3, 3, 6]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'best': expected one of .*crux"):
        compute_entries([record("a")], None, policy="best", levels=(0,))
    for policy in sorted(set(SCHEDULERS) - set(LIVE)):
        with pytest.raises(
            SettingsError, match=rf"'{re.escape(policy)}': only the simulator .*crux, .*ecmp"
        ):
            Planner(policy, (0,))
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
    assert fingerprint([record("a", "i1"), base[1]], None) != print_of
    assert fingerprint([record("a", profile=profile(t_s=0.2)), base[1]], None) != print_of
    assert fingerprint([record("a", gpus=9), base[1]], None) != print_of
    assert len({print_of, fingerprint(base, b""), fingerprint(base, b"x")}) == 3
    assert fingerprint(base[:1], None) != print_of


def test_the_planner_reads_the_topology_and_plans_without_one_it_cannot_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = [record("a", profile=profile(t_source="topology"))]
    planner = Planner("crux", (0, 1))
    topology = dump_yaml(shared_core(["h0", "h1"], 1e9)).encode()
    (with_it,) = planner(records, topology)
    assert with_it.intensity == pytest.approx(1e15 / 2.0)
    (without,) = planner(records, None)
    assert without.intensity == pytest.approx(1e15 / 0.1)
    for bad in (b"\xff", b"version: 9", b"[" * 50, b"a: b: c"):
        assert planner(records, bad) == (without,)
    assert caplog.text.count("planning without") == 1
    with pytest.raises(SettingsError):
        Planner("best", (0, 1))
