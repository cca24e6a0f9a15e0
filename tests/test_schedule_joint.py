"""Crux with time shifts: Crux's plan, and shifts only where a play gains."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch.schedule.crux import crux_full
from crux_torch.schedule.joint import crux_joint
from crux_torch.schedule.model import Cluster, Flow, Job
from crux_torch.schedule.options import SchedulerOptions
from crux_torch.sim.play import play


def pair(compute_s: float, moved: float) -> Cluster:
    flow = Flow(moved, (("l",),))
    return Cluster({"l": 1.0}, tuple(Job(n, 8, 1e12, compute_s, (flow,)) for n in "ab"))


def test_jobs_that_must_share_a_level_are_interleaved() -> None:
    cluster = pair(0.05, 0.05)
    one = SchedulerOptions(levels=(0,))
    decision = crux_joint(cluster, one)
    assert decision.grid_s == pytest.approx({"a": 0.1, "b": 0.1})
    shifted = play(cluster, decision, 100.0).gpu_utilization
    plain = play(cluster, crux_full(cluster, one), 100.0).gpu_utilization
    assert plain == pytest.approx(1 / 3, abs=1e-3)
    assert shifted == pytest.approx(0.5, abs=1e-3)


def test_strict_priority_that_interleaves_by_itself_is_left_alone() -> None:
    cluster = pair(0.05, 0.05)
    options = SchedulerOptions(levels=(0, 1))
    assert crux_joint(cluster, options) == crux_full(cluster, options)


@settings(max_examples=30, deadline=None)
@given(clusters(max_jobs=6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_paths_and_levels_are_cruxs_own_in_any_order_of_jobs(cluster, levels, rng) -> None:
    options = SchedulerOptions(levels=tuple(range(levels)))
    decision = crux_joint(cluster, options)
    plain = crux_full(cluster, options)
    assert (decision.path, decision.level) == (plain.path, plain.level)
    jobs = list(cluster.jobs)
    rng.shuffle(jobs)
    assert crux_joint(Cluster(cluster.capacity_Bps, tuple(jobs)), options) == decision


def test_random_small_clusters_never_lose_much_and_win_with_one_level() -> None:
    gains = []
    for seed in range(30):
        rng = random.Random(seed)
        compute_s, moved = rng.uniform(0.2, 1.0), rng.uniform(0.1, 0.5)
        jobs = tuple(
            Job(
                f"j{n}",
                rng.choice((8, 16, 32)),
                rng.uniform(1, 10),
                compute_s,
                (Flow(moved, tuple((link,) for link in rng.sample(("l0", "l1", "l2"), 2))),),
            )
            for n in range(5)
        )
        cluster = Cluster({"l0": 1.0, "l1": 1.0, "l2": 1.0}, jobs)
        options = SchedulerOptions(levels=(0,))
        plain, shifted = crux_full(cluster, options), crux_joint(cluster, options)
        start_s = {job.name: rng.uniform(0, 1) for job in jobs}
        kept_s = {name: 0.0 if name in shifted.grid_s else s for name, s in start_s.items()}
        before = play(cluster, plain, 200.0, start_s=start_s).gpu_utilization
        after = play(cluster, shifted, 200.0, start_s=kept_s).gpu_utilization
        gains.append(after / before - 1)
    assert min(gains) > -0.03
    assert sum(gains) / len(gains) > 0.01
