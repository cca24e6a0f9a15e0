"""One burst in place of several, and what stays the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.intensity import solo_periods_s, unrouted_transfer_times_s
from crux_torch.schedule.model import Burst, Cluster, Flow, Job
from evaluation.single_bursts import single_bursts


def one_job(compute_s: float, size: float, *bursts: Burst) -> Cluster:
    return Cluster({"l": 1.0}, (Job("a", 1, 1.0, compute_s, (Flow(size, (("l",),)),), bursts),))


def test_a_burst_that_ends_with_the_last_one() -> None:
    # Bursts of 1 s at 0 s and at 4 s of 4: an iteration of 5 s, one burst of 2 s from 3 s on.
    cluster = one_job(4.0, 2.0, Burst(0.0, 0.5), Burst(1.0, 0.5))
    assert single_bursts(cluster).jobs[0].bursts == (Burst(0.75, 1.0),)


def test_hidden_bursts_stay_hidden() -> None:
    cluster = one_job(10.0, 2.0, Burst(0.2, 0.5), Burst(0.6, 0.5))
    assert single_bursts(cluster).jobs[0].bursts[0].at == pytest.approx(0.4)
    late = one_job(10.0, 8.0, Burst(0.0, 0.5), Burst(0.6, 0.5))
    assert single_bursts(late).jobs[0].bursts[0].at == pytest.approx(0.2)


def test_one_burst_and_jobs_without_computation_stay_as_they_are() -> None:
    for cluster in (
        one_job(3.0, 2.0, Burst(0.3, 1.0)),
        one_job(0.0, 2.0, Burst(0.25, 0.5), Burst(0.75, 0.5)),
    ):
        assert single_bursts(cluster) == cluster


@given(
    st.sampled_from((0.0, 0.5, 1.0, 3.0)),
    st.sampled_from((0.0, 1.0, 2.0, 3.5)),
    st.sampled_from((((1.0, 1.0),), ((0.5, 1.0),), ((0.25, 0.5), (0.75, 0.5)))),
)
def test_an_iteration_alone_takes_as_long(
    compute_s: float, size: float, bursts: tuple[tuple[float, float], ...]
) -> None:
    cluster = one_job(compute_s, size, *(Burst(*burst) for burst in bursts))
    single = single_bursts(cluster)
    arrays, before = arrays_of(single), arrays_of(cluster)
    t_s = unrouted_transfer_times_s(before)
    assert solo_periods_s(arrays, t_s) == pytest.approx(solo_periods_s(before, t_s))
    assert all(len(job.bursts) == 1 for job in single.jobs if job.compute_s > 0)
    assert single_bursts(single) == single
