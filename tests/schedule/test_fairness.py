"""The certified bound against what the engine plays, and the knob that keeps to it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch import _fluid
from crux_torch.schedule.default.cap import bounds
from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job
from crux_torch.schedule.papers.intensity import burst_traffic, link_traffic
from crux_torch.sim.play import play

ITERATIONS = 12


def on_one_link(*jobs: tuple[float, float], capacity_Bps: float = 1.0) -> Cluster:
    """Jobs a, b... of (compute seconds, bytes) without overlap."""
    return Cluster(
        {"l": capacity_Bps},
        tuple(
            Job(chr(97 + i), 1, compute_s, compute_s, (Flow(size, (("l",),)),))
            for i, (compute_s, size) in enumerate(jobs)
        ),
    )


def decided(cluster: Cluster, *levels: int) -> Decision:
    return Decision(
        path={job.name: (0,) * len(job.flows) for job in cluster.jobs},
        level={job.name: level for job, level in zip(cluster.jobs, levels, strict=True)},
    )


def test_alone_nothing_is_lost() -> None:
    cluster = on_one_link((2.0, 1.0))
    assert bounds(cluster, decided(cluster, 0))["a"] == (3.0, 3.0, 3.0)


def test_below_one_job_its_utilisation_is_lost() -> None:
    # a holds the link 1 s in every 10; b may lose that much in the long run, 1 / (1 - 0.1), and
    # 1 s in one iteration, since a's next transfer is 9 s away.
    cluster = on_one_link((9.0, 1.0), (3.0, 1.0))
    below = bounds(cluster, decided(cluster, 1, 0))
    assert below["a"] == (10.0, 10.0, 10.0)
    assert below["b"].mean_s == pytest.approx(4.0 / 0.9)
    assert below["b"].longest_s == pytest.approx(5.0)


def test_jobs_of_a_level_share_a_link() -> None:
    # b sends without a pause, so that only the fair share protects a: half of the link is its.
    cluster = on_one_link((1.0, 3.0), (0.0, 1.0))
    assert bounds(cluster, decided(cluster, 0, 0))["a"].mean_s == pytest.approx(7.0)
    played = play(cluster, decided(cluster, 0, 0), 140.0)
    assert played.jobs["a"].mean_iteration_s == pytest.approx(7.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-300])
def test_a_peer_that_moves_next_to_nothing_costs_nothing(size: float) -> None:
    cluster = on_one_link((1.0, 3.0), (1.0, size))
    found = bounds(cluster, decided(cluster, 0, 0))
    assert found["a"] == pytest.approx((4.0, 4.0, 4.0))
    assert found["b"].mean_s == pytest.approx(1.0)


def test_below_a_job_that_never_pauses_nothing_is_certain() -> None:
    cluster = on_one_link((0.0, 1.0), (1.0, 1.0))
    assert bounds(cluster, decided(cluster, 1, 0))["b"].slowdown == math.inf


@pytest.mark.parametrize(
    ("sending_s", "mean_s", "longest_s"),
    [
        (1.0, 4.0, 4.0),
        # b can wait for 2 of the 3 s: a third costs it time.
        (3.0, pytest.approx(4.0 / 0.9), pytest.approx(5.0)),
    ],
)
def test_slack_is_counted(sending_s: float, mean_s: float, longest_s: float) -> None:
    # b's transfer is due at 1 s of 4: it can wait 2 s before the iteration takes longer.
    a, b = on_one_link((10.0 - sending_s, sending_s), (4.0, 1.0)).jobs
    cluster = Cluster({"l": 1.0}, (a, replace(b, bursts=(Burst(0.25, 1.0),))))
    assert bounds(cluster, decided(cluster, 1, 0))["b"] == (4.0, mean_s, longest_s)


def iteration_ends_s(
    cluster: Cluster, decision: Decision, who: str, start_s: dict[str, float]
) -> list[float]:
    """When each of the first iterations of a job ends, played once for each of them."""
    ends = []
    for n in range(1, ITERATIONS + 1):
        engine = _fluid.Engine([(e, c, 0.0) for e, c in cluster.capacity_Bps.items()])
        for job in cluster.jobs:
            engine.add_job(
                job.name,
                compute_s=job.compute_s,
                bursts=burst_traffic(job, link_traffic(job, decision.path[job.name])),
                level=decision.level[job.name],
                start_s=start_s[job.name],
                iterations=n if job.name == who else None,
            )
        engine.run_until_end_of_any(1e4)
        end_s = engine.result(who)["end_s"]
        if end_s is None:
            break
        ends.append(end_s)
    return ends


@st.composite
def plans(draw: st.DrawFn, ceilings: bool = False) -> tuple[Cluster, Decision, dict[str, float]]:
    """A cluster, levels of any kind, and phases."""
    cluster = draw(clusters(max_jobs=5))
    # The engine refuses iterations that take no time, whatever paths are chosen.
    jobs = tuple(
        job
        for job in cluster.jobs
        if job.compute_s > 0 or any(f.bytes > 0 and all(f.candidates) for f in job.flows)
    )
    if ceilings:
        times_s = st.sampled_from((0.0, 0.5, 2.0)) | st.floats(0.0, 4.0, width=16)
        jobs = tuple(
            replace(job, bursts=tuple(replace(b, least_s=draw(times_s)) for b in job.bursts))
            for job in jobs
        )
    cluster = replace(cluster, jobs=jobs)
    number = st.floats(0.0, 12.0, width=16)
    decision = Decision(
        path={job.name: (0,) * len(job.flows) for job in jobs},
        level={job.name: draw(st.integers(0, 2)) for job in jobs},
    )
    return cluster, decision, {job.name: draw(number) for job in jobs}


@given(plans() | plans(ceilings=True))
@settings(max_examples=150)
def test_no_phase_beats_the_bound(plan: tuple[Cluster, Decision, dict[str, float]]) -> None:
    cluster, decision, start_s = plan
    for name, bound in bounds(cluster, decision).items():
        if not bound.mean_s < math.inf and not bound.longest_s < math.inf:
            continue
        ends = iteration_ends_s(cluster, decision, name, start_s)
        lengths = np.diff([start_s[name], *ends])
        assert (lengths <= bound.longest_s * (1 + 1e-6)).all()
        assert (lengths >= bound.alone_s * (1 - 1e-6)).all()


def assert_means_keep(
    cluster: Cluster, decision: Decision, mean_s: dict[str, float], start_s: dict[str, float]
) -> None:
    """Plays 20,000 s; what jobs ahead move beyond their long-run rate is two iterations of each."""
    horizon_s = 20_000.0
    report = play(cluster, decision, horizon_s, start_s=start_s)
    certain = bounds(cluster, decision)
    ahead_s = 2 * sum(
        m / cluster.capacity_Bps[e]
        for job in cluster.jobs
        for e, m in link_traffic(job, decision.path[job.name]).items()
    )
    for name, bound_s in mean_s.items():
        if bound_s < math.inf:
            allowed_s = start_s[name] + ahead_s * bound_s / certain[name].alone_s
            least = (horizon_s - allowed_s) / (bound_s * (1 + 1e-6)) - 1
            assert report.jobs[name].completed >= least


@given(plans() | plans(ceilings=True))
@settings(max_examples=150)
def test_no_mean_beats_the_bound(plan: tuple[Cluster, Decision, dict[str, float]]) -> None:
    cluster, decision, start_s = plan
    mean_s = {name: bound.mean_s for name, bound in bounds(cluster, decision).items()}
    assert_means_keep(cluster, decision, mean_s, start_s)
