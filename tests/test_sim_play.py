"""Playing decisions: what is conserved, what bounds what, and what shifts and pace do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch.schedule.cassini import cassini
from crux_torch.schedule.ecmp import ecmp
from crux_torch.schedule.ideal import ideal
from crux_torch.schedule.intensity import burst_traffic, link_traffic
from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job, SchedulerOptions
from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim.play import play

OPTIONS = SchedulerOptions(levels=(0, 1, 2))


def pair(**compute_s: float) -> Cluster:
    flow = Flow(0.05, (("l",),))
    return Cluster({"l": 1.0}, tuple(Job(n, 1, 1.0, c, (flow,)) for n, c in compute_s.items()))


def one_level(cluster: Cluster, **more: object) -> Decision:
    return replace(ecmp(cluster, OPTIONS), **more)


def test_traffic_adds_up_over_flows_that_share_a_link() -> None:
    flows = (Flow(2.0, (("x",), ("y", "z"))), Flow(3.0, (("z",),)), Flow(0.0, (("w",),)))
    job = Job("a", 1, 1.0, 1.0, flows)
    assert link_traffic(job, (0, 0, 0)) == {"x": 2.0, "z": 3.0}
    assert link_traffic(job, (1, 0, 0)) == {"y": 2.0, "z": 5.0}
    job = replace(job, bursts=(Burst(0.25, 0.25), Burst(0.5, 0.75)))
    assert burst_traffic(job, {"x": 4.0}) == [(0.25, {"x": 1.0}), (0.5, {"x": 3.0})]


@settings(max_examples=60, deadline=None)
@given(clusters(), st.sampled_from(sorted(set(SCHEDULERS) - {"ideal"})))
def test_links_carry_what_iterations_moved_and_no_job_runs_faster_than_alone(cluster, name) -> None:
    jobs = tuple(j for j in cluster.jobs if j.compute_s > 0)
    assume(jobs)
    cluster = Cluster(cluster.capacity_Bps, jobs)
    decision = SCHEDULERS[name](cluster, OPTIONS)
    horizon_s = 50.0
    report = play(cluster, decision, horizon_s)
    for link, carried in report.link_bytes.items():
        least = most = 0.0
        for job in jobs:
            moved = link_traffic(job, decision.path[job.name]).get(link, 0.0)
            least += report.jobs[job.name].completed * moved
            most += (report.jobs[job.name].completed + 1) * moved
        assert least - 1e-6 <= carried <= most + 1e-6
        assert carried <= cluster.capacity_Bps[link] * horizon_s * (1 + 1e-9)
    alone = play(cluster, Decision(decision.path, decision.level, isolated=True), horizon_s)
    for job_name, result in report.jobs.items():
        assert result.completed <= alone.jobs[job_name].completed
        assert result.compute_s <= alone.jobs[job_name].compute_s + 1e-6


def test_ideal_bounds_the_others_on_the_same_paths() -> None:
    cluster = pair(a=0.05, b=0.06, c=0.02)
    best = play(cluster, ideal(cluster, OPTIONS), 60.0).gpu_utilization
    for name, scheduler in SCHEDULERS.items():
        assert play(cluster, scheduler(cluster, OPTIONS), 60.0).gpu_utilization <= best + 1e-9, name


def test_a_shift_delays_the_first_iteration() -> None:
    cluster = pair(a=0.05)
    late = one_level(cluster, shift_s={"a": 10.0})
    assert play(cluster, late, 20.0).jobs["a"].completed == 100
    assert play(cluster, late, 20.0, start_s={"a": 5.0}).jobs["a"].completed == 50


def test_a_shift_alone_keeps_equal_jobs_apart() -> None:
    cluster = pair(a=0.05, b=0.05)
    assert play(cluster, one_level(cluster), 100.0).gpu_utilization == pytest.approx(
        1 / 3, abs=1e-3
    )
    shifted = one_level(cluster, shift_s={"b": 0.05})
    assert play(cluster, shifted, 100.0).gpu_utilization == pytest.approx(0.5, abs=1e-3)


def test_jobs_that_drift_need_the_pace_to_stay_apart() -> None:
    """a's iteration is 2% shorter than b's: without a grid they slide through each other."""
    flow = Flow(0.04, (("l",),))
    jobs = tuple(Job(n, 1, 1.0, c, (flow,)) for n, c in (("a", 0.058), ("b", 0.06)))
    cluster = Cluster({"l": 1.0}, jobs)
    decision = cassini(cluster, OPTIONS)
    assert decision.grid_s.keys() == {"a", "b"}
    paced = play(cluster, decision, 200.0)
    drifting = play(cluster, replace(decision, grid_s={}), 200.0)
    for name in "ab":
        assert paced.jobs[name].mean_iteration_s == pytest.approx(0.1, rel=0.03)
    assert drifting.gpu_utilization < paced.gpu_utilization


def test_a_pace_slower_than_the_job_sets_its_rate() -> None:
    cluster = pair(a=0.05)
    report = play(cluster, one_level(cluster, shift_s={"a": 0.0}, grid_s={"a": 0.125}), 100.0)
    assert report.jobs["a"].mean_iteration_s == pytest.approx(0.125, rel=1e-2)
