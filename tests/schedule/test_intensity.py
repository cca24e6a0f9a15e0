"""GPU intensity on small clusters, one value at a time and as arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch import _fluid
from crux_torch.schedule.arrays import ClusterError, arrays_of, choice_of, traffic_matrix
from crux_torch.schedule.model import Burst, Cluster, Flow, Job
from crux_torch.schedule.papers.crux import alone
from crux_torch.schedule.papers.intensity import (
    burst_times_s,
    burst_traffic,
    intensities,
    link_traffic,
    solo_periods_s,
    transfer_times_s,
    unrouted_transfer_times_s,
)

TWO_WAYS = (("a", "x"), ("b", "x"))
CAPACITY = {"a": 10.0, "b": 5.0, "x": 20.0}


def job(name: str = "j", *flows: Flow, **fields) -> Job:
    return Job(name, **{"gpus": 1, "flops": 100.0, "compute_s": 1.0, **fields}, flows=flows)


def test_traffic_time_and_intensity_of_a_job() -> None:
    j = job("j", Flow(10.0, TWO_WAYS), Flow(20.0, TWO_WAYS))
    assert link_traffic(j, (0, 1)) == {"a": 10.0, "b": 20.0, "x": 30.0}
    arrays = arrays_of(Cluster(CAPACITY, (j,)))
    t_s = transfer_times_s(arrays, traffic_matrix(arrays, choice_of(arrays, {"j": (0, 1)})))
    assert t_s.tolist() == [4.0]
    assert intensities(arrays, t_s).tolist() == [25.0]


def test_a_job_alone_takes_the_paths_on_which_it_does_not_collide_with_itself() -> None:
    # The larger flow takes a (10 B/s), the other b (5 B/s): 2 s each; computing 1 s comes before.
    j = job("j", Flow(10.0, TWO_WAYS), Flow(20.0, TWO_WAYS))
    assert alone(j, {**CAPACITY, "x": 1000.0, "unused": 1.0}) == ((1, 0), 2.0, 3.0, 50.0)
    assert alone(job("idle"), {}) == ((), 0.0, 1.0, math.inf)


def test_estimate_before_paths() -> None:
    # Spread evenly, 16 of the 32 bytes cross b at 5 B/s; a and x are done sooner.
    spread = Cluster(CAPACITY, (job("j", Flow(16.0, TWO_WAYS), Flow(16.0, TWO_WAYS)),))
    assert unrouted_transfer_times_s(arrays_of(spread))[0] == pytest.approx(3.2)
    # Alone, the flow can't do better than its best path allows: 16 / 10 s.
    single = Cluster({**CAPACITY, "b": 10.0}, (job("j", Flow(16.0, TWO_WAYS)),))
    assert unrouted_transfer_times_s(arrays_of(single))[0] == pytest.approx(1.6)


def test_solo_period_of_bursts() -> None:
    j = job("j", Flow(20.0, (("a",),)), bursts=(Burst(0.5, 0.25), Burst(1.0, 0.75)))
    assert solo_periods_s(arrays_of(Cluster(CAPACITY, (j,))), np.array([2.0]))[0] == 2.5


def test_paths_without_end_on_uncontended_links() -> None:
    j = job("j", Flow(20.0, ((), ("a",))), Flow(5.0, (("inf",),)))
    arrays = arrays_of(Cluster({**CAPACITY, "inf": math.inf}, (j,)))
    assert traffic_matrix(arrays, choice_of(arrays, None)).nnz == 0
    traffic = traffic_matrix(arrays, choice_of(arrays, {"j": (1, 0)}))
    assert transfer_times_s(arrays, traffic)[0] == 2.0


@given(clusters())
def test_t_is_the_largest_of_bytes_over_capacity(cluster: Cluster) -> None:
    arrays = arrays_of(cluster)
    last = {j.name: tuple(len(f.candidates) - 1 for f in j.flows) for j in cluster.jobs}
    t_s = transfer_times_s(arrays, traffic_matrix(arrays, choice_of(arrays, last)))
    for j, found_s, value in zip(arrays.jobs, t_s, intensities(arrays, t_s), strict=True):
        traffic = link_traffic(j, last[j.name])
        slowest_s = max((m / cluster.capacity_Bps[e] for e, m in traffic.items()), default=0.0)
        assert found_s == pytest.approx(slowest_s)
        assert value == (pytest.approx(j.flops / slowest_s) if slowest_s else math.inf)


@given(clusters())
def test_an_iteration_alone_ends_with_its_last_burst_or_its_computation(cluster: Cluster) -> None:
    arrays = arrays_of(cluster)
    t_s = unrouted_transfer_times_s(arrays)
    for j, t, period_s in zip(arrays.jobs, t_s, solo_periods_s(arrays, t_s), strict=True):
        times_s = burst_times_s(j, t)
        assert period_s == max(j.compute_s, times_s[-1][1])
        for burst, (start, end), (before, _) in zip(
            j.bursts, times_s, [(0.0, 0.0), *times_s], strict=False
        ):
            assert start >= max(burst.at * j.compute_s, before)
            assert end - start == pytest.approx(burst.share * t)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (Cluster(CAPACITY, (job("j"), job("j"))), "two jobs are named 'j'"),
        (Cluster(CAPACITY, (job("j", Flow(1.0, (("q",),))),)), "link 'q'"),
        (Cluster({"a": 0.0}, (job("j"),)), "link 'a' needs a capacity"),
        (Cluster(CAPACITY, (job("j", Flow(1.0, ())),)), "no candidate path"),
        (Cluster(CAPACITY, (job("j", Flow(math.nan, TWO_WAYS)),)), "finite number of bytes"),
    ],
)
def test_refuses_a_cluster_that_contradicts_itself(cluster: Cluster, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        arrays_of(cluster)


@pytest.mark.parametrize("path", [{"j": (2,)}, {"j": (-1,)}, {"j": (0, 0)}])
def test_refuses_a_path_that_is_not_there(path) -> None:
    arrays = arrays_of(Cluster(CAPACITY, (job("j", Flow(1.0, TWO_WAYS)),)))
    with pytest.raises(ClusterError):
        choice_of(arrays, path)


@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=4), st.floats(0.0, 3.0), st.data())
def test_an_iteration_alone_is_the_engines(least_s: list[float], t_s: float, data: Any) -> None:
    ats = sorted(data.draw(st.lists(st.floats(0, 1), min_size=len(least_s), max_size=len(least_s))))
    bursts = tuple(Burst(at, 1 / len(ats), s) for at, s in zip(ats, least_s, strict=True))
    j = job("j", Flow(t_s, (("a",),)), bursts=bursts)
    arrays = arrays_of(Cluster(CAPACITY, (j,)))
    (period_s,) = solo_periods_s(arrays, np.array([t_s]))
    engine = _fluid.Engine([("a", CAPACITY["a"], 0.0)])
    engine.add_job(
        "j", compute_s=j.compute_s, bursts=burst_traffic(j, {"a": 10.0 * t_s}), iterations=1
    )
    engine.run_until(100.0)
    assert engine.result("j")["end_s"] == pytest.approx(period_s)
