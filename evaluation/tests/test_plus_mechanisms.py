"""crux+'s order of jobs and its compression, each tried by itself."""

from __future__ import annotations

from itertools import combinations

from crux_torch.schedule.intensity import link_traffic
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, SchedulerOptions
from evaluation.plus_mechanisms import plus_compression, plus_order

OPTIONS = SchedulerOptions(levels=(2, 5, 6))


def _job(name: str, compute_s: float, link_s: float, link: str) -> Job:
    flow = Flow(link_s, ((link,),))
    return Job(name, 8, 8 * compute_s, compute_s, (flow,), (Burst(0.5, 1.0),))


def test_plus_order_and_compression_keep_to_what_is_given() -> None:
    jobs = tuple(
        _job(f"j{i}", c, t, "x" if i < 4 else "y")
        for i, (c, t) in enumerate([(1, 0.8), (0.4, 0.3), (2, 1.1), (0.7, 0.7), (1, 1), (0.5, 0.2)])
    )
    cluster = Cluster({"x": 1.0, "y": 1.0}, jobs)
    path = {job.name: (0,) for job in jobs}
    order = plus_order(cluster, path, OPTIONS)
    assert sorted(order) == [job.name for job in jobs]
    for given_order in (order, order[::-1]):
        level = plus_compression(cluster, path, given_order, OPTIONS)
        assert set(level.values()) <= set(OPTIONS.levels)
        links = {job.name: link_traffic(job, (0,)).keys() for job in jobs}
        for above, below in combinations(given_order, 2):
            if not links[above].isdisjoint(links[below]):
                assert level[above] >= level[below]
