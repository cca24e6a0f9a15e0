"""One burst in place of several: what stays the same, and that it is Crux's option."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.bursts import single_bursts
from crux_torch.schedule.crux import crux, crux_full
from crux_torch.schedule.intensity import solo_periods_s, unrouted_transfer_times_s
from crux_torch.schedule.model import Burst, Cluster, Flow, Job
from crux_torch.schedule.options import SchedulerOptions


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


@given(clusters())
def test_an_iteration_alone_takes_as_long(cluster: Cluster) -> None:
    single = single_bursts(cluster)
    arrays, before = arrays_of(single), arrays_of(cluster)
    t_s = unrouted_transfer_times_s(before)
    assert solo_periods_s(arrays, t_s) == pytest.approx(solo_periods_s(before, t_s))
    assert all(len(job.bursts) == 1 for job in single.jobs if job.compute_s > 0)
    assert single_bursts(single) == single


@given(clusters(), st.booleans())
def test_the_option_of_crux(cluster: Cluster, bursts: bool) -> None:
    options = SchedulerOptions(levels=(0, 1, 2), bursts=bursts)
    seen = cluster if bursts else single_bursts(cluster)
    assert crux_full(cluster, options) == crux(seen, (0, 1, 2))
