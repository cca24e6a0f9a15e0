"""Path selection against its own criterion, and its two ways of computing against each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch.schedule import paths
from crux_torch.schedule.arrays import ClusterError, arrays_of
from crux_torch.schedule.intensity import solo_periods_s, unrouted_transfer_times_s
from crux_torch.schedule.model import Cluster, Flow, Job
from crux_torch.schedule.paths import select_paths

WAYS = (("a",), ("b",))


def job(name: str, flops: float, *flows: Flow) -> Job:
    return Job(name, gpus=1, flops=flops, compute_s=1.0, flows=flows)


def test_intense_jobs_get_paths_of_their_own() -> None:
    # All move alike; the two most intense ones must not meet, the third goes where less is.
    cluster = Cluster(
        {"a": 10.0, "b": 10.0},
        (
            job("weak", 1.0, Flow(4.0, WAYS)),
            job("strong", 9.0, Flow(4.0, WAYS)),
            job("middle", 5.0, Flow(4.0, WAYS)),
        ),
    )
    assert select_paths(cluster) == {"strong": (0,), "middle": (1,), "weak": (0,)}
    assert select_paths(cluster, ["weak", "middle", "strong"])["weak"] == (0,)


def test_sum_breaks_ties_of_the_busiest_link() -> None:
    capacity = {"x": 1.0, "a": 10.0, "b": 20.0}
    cluster = Cluster(capacity, (job("j", 1.0, Flow(1.0, (("x", "a"), ("x", "b")))),))
    assert select_paths(cluster) == {"j": (1,)}


def test_largest_flow_first() -> None:
    cluster = Cluster({"a": 10.0, "b": 10.0}, (job("j", 1.0, Flow(1.0, WAYS), Flow(5.0, WAYS)),))
    assert select_paths(cluster) == {"j": (1, 0)}


def test_utilisation_is_per_second() -> None:
    # The slow job moves more an iteration but a hundredth a second: it is the one to join.
    slow = Job("slow", 1, 900.0, 1000.0, (Flow(20.0, (("a",),)),))
    fast = Job("fast", 1, 100.0, 1.0, (Flow(2.0, (("b",),)),))
    late = Job("late", 1, 0.1, 1.0, (Flow(1.0, (("b",), ("a",))),))
    cluster = Cluster({"a": 10.0, "b": 10.0}, (slow, fast, late))
    assert select_paths(cluster)["late"] == (1,)


def test_order_must_name_every_job() -> None:
    cluster = Cluster({"a": 1.0}, (job("j", 1.0),))
    with pytest.raises(ClusterError, match="name every job once"):
        select_paths(cluster, [])


@settings(deadline=None)
@given(clusters(), st.randoms())
def test_no_candidate_is_better_when_chosen(cluster: Cluster, random) -> None:
    order = [j.name for j in cluster.jobs]
    random.shuffle(order)
    chosen = select_paths(cluster, order)
    arrays = arrays_of(cluster)
    period_s = solo_periods_s(arrays, unrouted_transfer_times_s(arrays))
    period_of = {j.name: period_s[i] for i, j in enumerate(arrays.jobs)}
    jobs = {j.name: j for j in cluster.jobs}
    load_Bps = dict.fromkeys(cluster.capacity_Bps, 0.0)
    for name in order:
        flows = sorted(enumerate(jobs[name].flows), key=lambda item: -item[1].bytes)
        for f, flow in flows:
            rate = flow.bytes / period_of[name] if period_of[name] > 0 else 0.0

            def congestion(path, rate=rate) -> tuple[float, float]:
                used = [(load_Bps[e] + rate) * (1.0 / cluster.capacity_Bps[e]) for e in path]
                return max(used, default=0.0), sum(used)

            costs = [congestion(path) for path in flow.candidates]
            assert chosen[name][f] == costs.index(min(costs))
            for link in flow.candidates[chosen[name][f]]:
                load_Bps[link] += rate


@example(
    Cluster(
        {"l0": 1.0, "l1": 1.0, "l2": 2.0},
        (
            Job("a", 1, 1.0, 0.0),
            Job("b", 1, 1.0, 0.0, (Flow(1.0, (("l0", "l2"),)),)),
            Job("c", 1, 1.0, 0.5, (Flow(1.0, (("l0", "l2", "l1"), ("l0", "l1", "l2"))),)),
        ),
    ),
    1,
)
@settings(deadline=None)
@given(clusters(), st.integers(1, 40))
def test_waves_equal_one_by_one(cluster: Cluster, chunk: int) -> None:
    arrays = arrays_of(cluster)
    t_s = unrouted_transfer_times_s(arrays)
    order = np.arange(len(arrays.jobs))
    results = []
    small_wave, chunk_entries = paths._SMALL_WAVE, paths._CHUNK_ENTRIES
    try:
        paths._CHUNK_ENTRIES = chunk
        for paths._SMALL_WAVE in (0, 10**9):
            results.append(paths.place(arrays, order, t_s).tolist())
    finally:
        paths._SMALL_WAVE, paths._CHUNK_ENTRIES = small_wave, chunk_entries
    assert results[0] == results[1]


@settings(deadline=None)
@given(clusters(), st.randoms())
def test_independent_of_the_order_of_jobs(cluster: Cluster, random) -> None:
    shuffled = list(cluster.jobs)
    random.shuffle(shuffled)
    assert select_paths(cluster) == select_paths(Cluster(cluster.capacity_Bps, tuple(shuffled)))
