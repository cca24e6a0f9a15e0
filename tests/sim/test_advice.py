"""A job is fitted to its measured step alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job
from crux_torch.sim.advice import FRAMED, LEAST_REACHED, advise, by_level, fitted, iteration_s

positive = st.floats(0.01, 10.0)


@given(
    compute_s=positive, t_s=st.one_of(st.just(0.0), positive), alone_s=positive, at=st.floats(0, 1)
)
def test_a_fitted_job_takes_alone_what_was_measured(
    compute_s: float, t_s: float, alone_s: float, at: float
) -> None:
    job = Job("j", 1, 0.0, compute_s, (Flow(1.0, (("l",),)),), (Burst(at, 1.0),))
    fit = fitted(job, t_s, alone_s)
    then = iteration_s(fit.applied(job), fit.factor * t_s)
    assert then == pytest.approx(alone_s, rel=3e-3)
    assert fit.factor <= 1 / LEAST_REACHED
    assert fit.factor >= 1 or t_s > alone_s
    assert fit.applied(job).flows[0].bytes == fit.factor


def test_advice_is_for_the_jobs_that_ask_about_the_jobs_that_are_left_out() -> None:
    jobs = [Job(name, 1, 0.0, 1.0, (Flow(1.0, (("l",),)),)) for name in "abc"]
    cluster = Cluster({"l": 1.0}, tuple(jobs))
    level = {"a": 0, "b": 1, "c": 2}
    now = Decision(path=dict.fromkeys("abc", (0,)), level=level)
    found = advise(cluster, now, 400.0, starts_s=[{}, {"a": 0.3}], under={}, of=["a"], without="b")
    assert set(found.jobs) == {"a"}
    assert set(found.jobs["a"].without_s) == {"b"}
    assert found.jobs["a"].alone_s == pytest.approx(2.0)
    # b and c fill the link, and a goes last.
    assert found.jobs["a"].iteration_s is None
    assert found.jobs["a"].without_s["b"] == pytest.approx(2.0, rel=0.05)
    assert 0 < found.busy < 1


def test_what_connections_do_not_reach_is_lost_to_their_level_only() -> None:
    factor = 1.25
    # 1 s of computation, and 0.8 s of the link's rate that take the connections 1 s.
    jobs = tuple(
        Job(name, 1, 0.0, 1.0, (Flow(factor * 0.8 * 100.0, (("l",),)),), (Burst(1.0, 1.0),))
        for name in "abc"
    )
    cluster = Cluster({"l": 100.0}, jobs)
    paths = dict.fromkeys("abc", (0,))
    factors = dict.fromkeys("abc", factor)

    same = Decision(path=paths, level=dict.fromkeys("abc", 3))
    assert by_level(cluster, same, factors).capacity_Bps == {"l": 100.0}
    assert by_level(cluster, same, dict.fromkeys("abc", FRAMED)) is cluster

    apart = Decision(path=paths, level={"a": 1, "b": 0, "c": 0})
    made = by_level(cluster, apart, factors)
    assert made.capacity_Bps == pytest.approx({"l": 125.0 / FRAMED, "l@1": 100.0, "l@0": 100.0})
    assert [job.flows[0].candidates for job in made.jobs] == [
        (("l", "l@1"),), (("l", "l@0"),), (("l", "l@0"),),
    ]  # fmt: skip
    advice = advise(cluster, apart, 100.0, starts_s=[{}], under={}, factors=factors)
    assert advice.jobs["a"].iteration_s == pytest.approx(2.0), "nobody is before it"
    assert advice.jobs["b"].alone_s == pytest.approx(2.0)
    rigid = advise(cluster, apart, 100.0, starts_s=[{}], under={})
    assert advice.jobs["b"].iteration_s < rigid.jobs["b"].iteration_s
