"""Crux's Theorem 1: computation done over intensity carried tends to 1 on one link (§3.2)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job
from crux_torch.sim.play import play

CAPACITY_BPS = 2.0

jobs = st.builds(
    lambda compute_s, t_s, flops, at, level: (compute_s, t_s, flops, at, level),
    st.floats(0.2, 2.0),
    st.floats(0.1, 2.0),
    st.floats(0.5, 8.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=5))
def test_computation_over_intensity_carried_tends_to_1(drawn: list) -> None:
    cluster = Cluster(
        {"l": CAPACITY_BPS},
        tuple(
            Job(
                f"j{i}",
                1,
                flops,
                compute_s,
                (Flow(t_s * CAPACITY_BPS, (("l",),)),),
                (Burst(at, 1.0),),
            )
            for i, (compute_s, t_s, flops, at, _) in enumerate(drawn)
        ),
    )
    decision = Decision(
        path={job.name: (0,) for job in cluster.jobs},
        level={job.name: level for job, (*_, level) in zip(cluster.jobs, drawn, strict=True)},
    )
    bounds = []
    for horizon_s in (10.0, 100.0, 1000.0):
        report = play(cluster, decision, horizon_s)
        computed = carried = 0.0
        for job, (_, t_s, *_) in zip(cluster.jobs, drawn, strict=True):
            done = report.jobs[job.name]
            computed += job.flops * done.compute_s / job.compute_s
            carried += job.flops / t_s * done.comm_s
        # Each job may have computed, or sent, for one iteration that it has not ended.
        bounds.append(sum(job.flops for job in cluster.jobs) / computed)
        assert carried / computed == pytest.approx(1.0, abs=bounds[-1] * (1 + 1e-6))
    assert bounds[2] < bounds[1] < bounds[0]
