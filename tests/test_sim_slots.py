"""mlcc in the simulator: rates booked slot by slot, and the engine's limits that carry them out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch import _fluid
from crux_torch.schedule.ecmp import ecmp
from crux_torch.schedule.ideal import ideal
from crux_torch.schedule.mlcc import mlcc
from crux_torch.schedule.model import Cluster, Flow, Job, SchedulerOptions
from crux_torch.sim.play import Report, play

OPTIONS = SchedulerOptions()


def cluster(**jobs: tuple[float, float]) -> Cluster:
    """Jobs of given seconds of computation and of transfer alone, on one link."""
    each = (Job(n, 1, 1.0, c, (Flow(m, (("l",),)),)) for n, (c, m) in jobs.items())
    return Cluster({"l": 1.0}, tuple(each))


def played(jobs: Cluster, **more: object) -> dict[str, Report]:
    schedulers = {"ecmp": ecmp, "mlcc": mlcc, "ideal": ideal}
    return {n: play(jobs, s(jobs, OPTIONS), 120.0, **more) for n, s in schedulers.items()}


def mean_s(report: Report) -> float:
    """Geometric mean over the jobs."""
    times = [job.mean_iteration_s for job in report.jobs.values()]
    return math.prod(times) ** (1 / len(times))


@pytest.mark.parametrize("two_s", [1.0, 0.6])
def test_two_jobs_that_collide_are_staggered(two_s: float) -> None:
    # Under fair sharing two equal jobs that begin together collide for ever.
    found = played(cluster(a=(two_s, two_s), b=(two_s, two_s)))
    assert mean_s(found["ecmp"]) == pytest.approx(3 * two_s)
    assert mean_s(found["mlcc"]) <= 1.05 * mean_s(found["ideal"])


def test_two_shapes_that_fit_run_nearly_as_alone() -> None:
    found = played(cluster(vgg=(0.7, 0.5), gpt=(0.6, 0.55)))
    assert mean_s(found["mlcc"]) < 0.9 * mean_s(found["ecmp"])
    assert mean_s(found["mlcc"]) < 1.05 * mean_s(found["ideal"])


def test_whoever_began_first_is_served_first_so_small_bursts_wait_for_large_ones() -> None:
    shapes = {"vgg": (0.5, 0.7), "gpt": (0.8, 0.8), "resnet": (0.45, 0.12)}
    found = played(cluster(**shapes))
    step_s = {n: {j: r.mean_iteration_s for j, r in f.jobs.items()} for n, f in found.items()}
    assert step_s["mlcc"]["gpt"] < 0.9 * step_s["ecmp"]["gpt"]
    assert step_s["mlcc"]["resnet"] > step_s["ecmp"]["resnet"]
    assert found["mlcc"].link_bytes["l"] > found["ecmp"].link_bytes["l"]


def test_what_can_not_be_limited_does_not_wait() -> None:
    jobs = cluster(a=(1.0, 1.0), b=(1.0, 1.0))
    found = played(jobs, least_Bps=0.9)
    assert mean_s(found["mlcc"]) > 0.9 * mean_s(found["ecmp"])


def test_a_job_alone_pays_nothing() -> None:
    found = played(cluster(a=(0.37, 0.41)))
    assert mean_s(found["mlcc"]) == pytest.approx(mean_s(found["ideal"]), rel=1e-6)


def test_a_foreign_flow_keeps_what_fair_sharing_gives_it() -> None:
    # Figure 11: one that always sends, beside a job.
    found = played(cluster(a=(1.0, 1.0), foreign=(1e-3, 1e4)), foreign=["foreign"])
    share = {name: report.jobs["foreign"].comm_s for name, report in found.items()}
    assert share["mlcc"] >= 0.9 * share["ecmp"]
    assert (
        found["mlcc"].jobs["a"].mean_iteration_s <= 1.1 * found["ecmp"].jobs["a"].mean_iteration_s
    )


def test_two_jobs_and_a_foreign_flow() -> None:
    jobs = cluster(a=(1.0, 1.0), b=(1.0, 1.0), foreign=(1e-3, 1e4))
    found = played(jobs, foreign=["foreign"])
    share = {name: report.jobs["foreign"].comm_s for name, report in found.items()}
    assert share["mlcc"] >= 0.9 * share["ecmp"]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 1.5), st.floats(0.02, 1.0)), min_size=1, max_size=4))
def test_nobody_stands_still(shapes: list[tuple[float, float]]) -> None:
    found = played(cluster(**{f"j{n}": shape for n, shape in enumerate(shapes)}))
    alone = found["ideal"].jobs
    waited_s = sum(moved for _, moved in shapes)
    for name, job in found["mlcc"].jobs.items():
        # It waits for no more than some bursts of each of the others.
        assert job.mean_iteration_s <= alone[name].mean_iteration_s + 3 * waited_s + 0.2


# ---------------------------------------------------------------- the engine's part


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
