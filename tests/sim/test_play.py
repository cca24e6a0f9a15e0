"""Clusters played under decisions: networks that spray, and rates booked slot by slot (mlcc)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch import _fluid
from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp, ideal
from crux_torch.schedule.papers.cassini import cassini
from crux_torch.schedule.papers.intensity import burst_traffic, link_traffic, part_traffic
from crux_torch.schedule.papers.mlcc import mlcc
from crux_torch.schedule.papers.mltcp import mltcp, weight
from crux_torch.schedule.schedulers import SCHEDULERS
from crux_torch.sim.play import Report, play, sprayed

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
    assert burst_traffic(job, {"x": 4.0}) == [(0.25, {"x": 1.0}, 0.0), (0.5, {"x": 3.0}, 0.0)]


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


@given(clusters())
def test_each_candidate_carries_its_share(cluster: Cluster) -> None:
    for before, after in zip(cluster.jobs, sprayed(cluster).jobs, strict=True):
        assert all(len(flow.candidates) == 1 for flow in after.flows)
        expected: dict[str, float] = {}
        for flow in before.flows:
            for path in flow.candidates:
                for link in path:
                    share = flow.bytes / len(flow.candidates)
                    expected[link] = expected.get(link, 0.0) + share
        found = link_traffic(after, (0,) * len(after.flows))
        assert found == pytest.approx({link: moved for link, moved in expected.items() if moved})


def test_two_flows_that_the_hash_puts_on_one_path_take_half_as_long() -> None:
    flow = Flow(1e9, (("x",), ("y",)))
    cluster = Cluster({"x": 1e9, "y": 1e9}, (Job("a", 1, 1e12, 1.0, (flow, flow)),))
    options = SchedulerOptions()
    for here, expected_s in ((cluster, 3.0), (sprayed(cluster), 2.0)):
        found = play(here, SCHEDULERS["ecmp"](here, options), 60.0)
        assert found.jobs["a"].mean_iteration_s == pytest.approx(expected_s)


def test_parts_stay_apart() -> None:
    one = Flow(6.0, (("x",), ("y",)))
    other = Flow(2.0, (("x",), ("y",)))
    cluster = Cluster({"x": 1.0, "y": 1.0}, (Job("a", 1, 1.0, 1.0, (one, other), parts=(0, 1)),))
    (job,) = sprayed(cluster).jobs
    assert part_traffic(job, (0,) * len(job.flows)) == [{"x": 3.0, "y": 3.0}, {"x": 1.0, "y": 1.0}]


def shared_link(**jobs: tuple[float, float]) -> Cluster:
    """Jobs of given seconds of computation and of transfer alone, on one link."""
    each = (Job(n, 1, 1.0, c, (Flow(m, (("l",),)),)) for n, (c, m) in jobs.items())
    return Cluster({"l": 1.0}, tuple(each))


def played(jobs: Cluster, **more: object) -> dict[str, Report]:
    schedulers = {"ecmp": ecmp, "mlcc": mlcc, "ideal": ideal}
    return {
        n: play(jobs, s(jobs, SchedulerOptions()), 120.0, **more) for n, s in schedulers.items()
    }


def mean_s(report: Report) -> float:
    """Geometric mean over the jobs."""
    times = [job.mean_iteration_s for job in report.jobs.values()]
    return math.prod(times) ** (1 / len(times))


@pytest.mark.parametrize("two_s", [1.0, 0.6])
def test_two_jobs_that_collide_are_staggered(two_s: float) -> None:
    # Under fair sharing two equal jobs that begin together collide for ever.
    found = played(shared_link(a=(two_s, two_s), b=(two_s, two_s)))
    assert mean_s(found["ecmp"]) == pytest.approx(3 * two_s)
    assert mean_s(found["mlcc"]) <= 1.05 * mean_s(found["ideal"])


def test_two_shapes_that_fit_run_nearly_as_alone() -> None:
    found = played(shared_link(vgg=(0.7, 0.5), gpt=(0.6, 0.55)))
    assert mean_s(found["mlcc"]) < 0.9 * mean_s(found["ecmp"])
    assert mean_s(found["mlcc"]) < 1.05 * mean_s(found["ideal"])


def test_whoever_began_first_is_served_first_so_small_bursts_wait_for_large_ones() -> None:
    shapes = {"vgg": (0.5, 0.7), "gpt": (0.8, 0.8), "resnet": (0.45, 0.12)}
    found = played(shared_link(**shapes))
    step_s = {n: {j: r.mean_iteration_s for j, r in f.jobs.items()} for n, f in found.items()}
    assert step_s["mlcc"]["gpt"] < 0.9 * step_s["ecmp"]["gpt"]
    assert step_s["mlcc"]["resnet"] > step_s["ecmp"]["resnet"]
    assert found["mlcc"].link_bytes["l"] > found["ecmp"].link_bytes["l"]


def test_what_can_not_be_limited_does_not_wait() -> None:
    jobs = shared_link(a=(1.0, 1.0), b=(1.0, 1.0))
    found = played(jobs, least_Bps=0.9)
    assert mean_s(found["mlcc"]) > 0.9 * mean_s(found["ecmp"])


def test_a_job_alone_pays_nothing() -> None:
    found = played(shared_link(a=(0.37, 0.41)))
    assert mean_s(found["mlcc"]) == pytest.approx(mean_s(found["ideal"]), rel=1e-6)


def test_a_foreign_flow_keeps_what_fair_sharing_gives_it() -> None:
    # Figure 11: one that always sends, beside a job.
    found = played(shared_link(a=(1.0, 1.0), foreign=(1e-3, 1e4)), foreign=["foreign"])
    share = {name: report.jobs["foreign"].comm_s for name, report in found.items()}
    assert share["mlcc"] >= 0.9 * share["ecmp"]
    assert (
        found["mlcc"].jobs["a"].mean_iteration_s <= 1.1 * found["ecmp"].jobs["a"].mean_iteration_s
    )


def test_two_jobs_and_a_foreign_flow() -> None:
    jobs = shared_link(a=(1.0, 1.0), b=(1.0, 1.0), foreign=(1e-3, 1e4))
    found = played(jobs, foreign=["foreign"])
    share = {name: report.jobs["foreign"].comm_s for name, report in found.items()}
    assert share["mlcc"] >= 0.9 * share["ecmp"]


def mean_by_sent_s(jobs: Cluster, start_s: dict[str, float]) -> dict[str, float]:
    report = play(jobs, mltcp(jobs, SchedulerOptions()), 120.0, start_s=start_s)
    return {name: job.mean_iteration_s for name, job in report.jobs.items()}


def test_flows_that_weigh_what_they_sent_drift_apart() -> None:
    jobs = shared_link(a=(1.0, 1.0), b=(1.0, 1.0))
    for found_s in mean_by_sent_s(jobs, {"b": 0.1}).values():
        assert found_s == pytest.approx(2.0, rel=0.03)
    # Nothing tells two apart that are alike in everything.
    assert mean_by_sent_s(jobs, {}) == pytest.approx({"a": 3.0, "b": 3.0})


def test_the_weight_is_that_of_the_iteration_under_way() -> None:
    # Beside a flow that has sent half of its bytes, the other begins with a weight of a quarter.
    jobs = shared_link(a=(0.5, 1.0), b=(1.0, 10.0))
    plans = [mltcp(jobs, SchedulerOptions()), ecmp(jobs, SchedulerOptions())]
    by_sent, fair = (play(jobs, plan, 7.5, start_s={"a": 6.0}) for plan in plans)
    assert fair.jobs["a"].comm_s == pytest.approx(0.5)
    assert 0.2 < by_sent.jobs["a"].comm_s < 0.3
    assert by_sent.link_bytes["l"] == pytest.approx(fair.link_bytes["l"])


@given(st.floats(-1.0, 2.0), st.floats(-1.0, 2.0))
def test_more_sent_weighs_more(one: float, other: float) -> None:
    assert 0.25 <= weight(one) <= 2.0
    assert (weight(one) <= weight(other)) or one > other


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 1.5), st.floats(0.02, 1.0)), min_size=1, max_size=4))
def test_nobody_stands_still(shapes: list[tuple[float, float]]) -> None:
    found = played(shared_link(**{f"j{n}": shape for n, shape in enumerate(shapes)}))
    alone = found["ideal"].jobs
    waited_s = sum(moved for _, moved in shapes)
    for name, job in found["mlcc"].jobs.items():
        # It waits for no more than some bursts of each of the others.
        assert job.mean_iteration_s <= alone[name].mean_iteration_s + 3 * waited_s + 0.2


def engine(**jobs: float) -> _fluid.Engine:
    made = _fluid.Engine([("l", 10.0, 0.0), ("m", 5.0, 0.0)])
    for name, compute_s in jobs.items():
        made.add_job(name, compute_s=compute_s, bursts=[(1.0, {"l": 10.0, "m": 2.0})])
    return made


def test_a_limit_is_the_most_that_a_transfer_takes() -> None:
    one = engine(a=1.0)
    assert one.bytes_left("a") is None
    one.set_rate_limit("a", 4.0)
    one.run_until(2.0)
    assert one.bytes_left("a") == pytest.approx(6.0)
    one.set_rate_limit("a", 2.0)
    one.run_until(3.0)
    assert one.bytes_left("a") == pytest.approx(4.0)
    one.set_rate_limit("a", None)
    one.run_until(3.4)
    assert one.bytes_left("a") is None
    assert one.result("a")["completed"] == 1
    assert one.link_bytes() == pytest.approx({"l": 10.0, "m": 2.0})


def test_a_limited_job_is_played_to_its_end_like_any_other() -> None:
    one = engine(a=1.0)
    one.set_rate_limit("a", 5.0)
    one.run_until(300.0)
    assert one.result("a")["completed"] == 100


def test_what_one_leaves_the_others_take() -> None:
    two = engine(a=1.0, b=1.0)
    two.run_until(1.0)
    two.set_rate_limit("a", 2.0)
    two.run_until(1.5)
    assert two.bytes_left("a") == pytest.approx(9.0)
    assert two.bytes_left("b") == pytest.approx(6.0)
    two.remove_job("a")
    two.run_until(1.9)
    assert two.bytes_left("b") == pytest.approx(2.0)


@pytest.mark.parametrize("limit_Bps", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_is_positive(limit_Bps: float) -> None:
    with pytest.raises(_fluid.SpecError, match="positive finite rate limit"):
        engine(a=1.0).set_rate_limit("a", limit_Bps)
