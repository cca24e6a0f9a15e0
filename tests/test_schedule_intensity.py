"""GPU intensity on small clusters, one value at a time and as arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from schedule_cases import clusters

from crux_torch.schedule.arrays import ClusterError, arrays_of, choice_of, traffic_matrix
from crux_torch.schedule.intensity import (
    intensities,
    intensity,
    link_traffic,
    solo_periods_s,
    transfer_time_s,
    transfer_times_s,
    unrouted_transfer_times_s,
)
from crux_torch.schedule.model import Burst, Cluster, Flow, Job

TWO_WAYS = (("a", "x"), ("b", "x"))
CAPACITY = {"a": 10.0, "b": 5.0, "x": 20.0}


def job(name: str = "j", *flows: Flow, **fields) -> Job:
    return Job(name, **{"gpus": 1, "flops": 100.0, "compute_s": 1.0, **fields}, flows=flows)


def test_traffic_time_and_intensity() -> None:
    j = job("j", Flow(10.0, TWO_WAYS), Flow(20.0, TWO_WAYS))
    traffic = link_traffic(j, (0, 1))
    assert traffic == {"a": 10.0, "b": 20.0, "x": 30.0}
    assert transfer_time_s(traffic, CAPACITY) == 4.0
    assert intensity(j, 4.0) == 25.0


def test_no_traffic_is_infinite_intensity() -> None:
    assert transfer_time_s({}, CAPACITY) == 0.0
    assert intensity(job(), 0.0) == math.inf


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
    assert transfer_times_s(arrays, choice_of(arrays, {"j": (1, 0)}))[0] == 2.0


@settings(deadline=None)
@given(clusters())
def test_arrays_agree_with_single_values(cluster: Cluster) -> None:
    arrays = arrays_of(cluster)
    last = {j.name: tuple(len(f.candidates) - 1 for f in j.flows) for j in cluster.jobs}
    t_s = transfer_times_s(arrays, choice_of(arrays, last))
    all_intensities = intensities(arrays, t_s)
    for index, j in enumerate(arrays.jobs):
        alone_s = transfer_time_s(link_traffic(j, last[j.name]), cluster.capacity_Bps)
        assert t_s[index] == pytest.approx(alone_s)
        assert all_intensities[index] == pytest.approx(intensity(j, alone_s))


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
