"""Whole decisions: Crux, its variants, and what all schedulers have in common."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch.schedule.model import Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.papers.crux import crux_paper
from crux_torch.schedule.papers.intensity import link_traffic
from crux_torch.schedule.schedulers import SCHEDULERS

LEVELS = (1, 3, 4)


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
@given(clusters(), st.randoms())
def test_every_scheduler_is_deterministic_and_complete(name, cluster, random) -> None:
    options = SchedulerOptions(levels=LEVELS, seed=5)
    decision = SCHEDULERS[name](cluster, options)
    shuffled = list(cluster.jobs)
    random.shuffle(shuffled)
    assert SCHEDULERS[name](Cluster(cluster.capacity_Bps, tuple(shuffled)), options) == decision
    assert set(decision.level) == set(decision.path) == {job.name for job in cluster.jobs}
    for job in cluster.jobs:
        assert len(decision.path[job.name]) == len(job.flows)
        for flow, chosen in zip(job.flows, decision.path[job.name], strict=True):
            assert 0 <= chosen < len(flow.candidates)
    unlimited = name in ("crux-pa", "crux-ps-pa")
    usable = range(len(cluster.jobs)) if unlimited else LEVELS
    assert set(decision.level.values()) <= set(usable)


@pytest.mark.parametrize("name", ["crux-paper", "crux-pa", "crux-ps-pa"])
@given(clusters())
def test_contending_jobs_are_never_inverted(name: str, cluster: Cluster) -> None:
    decision = SCHEDULERS[name](cluster, SchedulerOptions(levels=LEVELS))
    links = {j.name: link_traffic(j, decision.path[j.name]).keys() for j in cluster.jobs}
    for a, b in permutations(decision.level, 2):
        if links[a] & links[b] and decision.priority[a] > decision.priority[b]:
            assert decision.level[a] >= decision.level[b]


@given(clusters())
def test_priority_is_corrected_intensity(cluster: Cluster) -> None:
    decision = crux_paper(cluster, SchedulerOptions(LEVELS))
    for job in cluster.jobs:
        traffic = link_traffic(job, decision.path[job.name])
        t_s = max((moved / cluster.capacity_Bps[e] for e, moved in traffic.items()), default=0.0)
        expected = job.flops / t_s if t_s > 0 else math.inf
        assert decision.intensity[job.name] == pytest.approx(expected)
        corrected = decision.correction[job.name] * decision.intensity[job.name]
        assert decision.priority[job.name] == pytest.approx(corrected)
    assert not cluster.jobs or 1.0 in decision.correction.values()


def example_1() -> Cluster:
    def job(name: str, flops: float, seconds: float) -> Job:
        return Job(name, 10, flops, seconds, (Flow(seconds, (("link",),)),))

    # Equal bytes per second: the first by name is the reference, as in the paper.
    return Cluster({"link": 1.0}, (job("job 1", 10e9, 2.0), job("job 2", 5e9, 1.0)))


def test_example_1_puts_the_shorter_job_first() -> None:
    decision = crux_paper(example_1(), SchedulerOptions((0, 1)))
    assert decision.intensity == {"job 1": 5e9, "job 2": 5e9}
    assert decision.correction["job 1"] == 1.0
    assert decision.correction["job 2"] == pytest.approx(1.5)
    assert decision.level == {"job 1": 0, "job 2": 1}


def figure_13() -> Cluster:
    def job(name: str, flops: float, link: str) -> Job:
        return Job(name, 8, flops, 1.0, (Flow(flops, ((link,),)),))

    # Four jobs of rising transfer time: Varys and Sincronia order them 1, 2, 3, 4.
    return Cluster(
        {"x": 10.0, "y": 10.0},
        (job("1", 1.0, "x"), job("2", 2.0, "x"), job("3", 3.0, "y"), job("4", 4.0, "y")),
    )


def test_baselines_compress_as_in_figure_13() -> None:
    options = SchedulerOptions(levels=(0, 1))
    assert SCHEDULERS["sincronia"](figure_13(), options).level == {"1": 1, "2": 0, "3": 0, "4": 0}
    assert SCHEDULERS["varys"](figure_13(), options).level == {"1": 1, "2": 1, "3": 0, "4": 0}


def test_sincronia_order_by_hand() -> None:
    # The bottleneck is y: the larger of its jobs goes last. On either link, the smaller goes first.
    priority = SCHEDULERS["sincronia"](figure_13(), SchedulerOptions()).priority
    assert sorted(priority, key=priority.__getitem__, reverse=True)[-1] == "4"
    assert priority["1"] > priority["2"]
    assert priority["3"] > priority["4"]


def test_jobs_without_traffic_take_no_baseline_level() -> None:
    idle = tuple(Job(f"0{i}", 1, 1.0, 1.0) for i in range(5))
    cluster = Cluster(figure_13().capacity_Bps, figure_13().jobs + idle)
    options = SchedulerOptions(levels=(0, 1))
    for name in ("sincronia", "varys"):
        alone = SCHEDULERS[name](figure_13(), options).level
        level = SCHEDULERS[name](cluster, options).level
        assert {job: level[job] for job in alone} == alone


def over(name: str, *paths: tuple[str, ...]) -> Job:
    return Job(name, 1, 1.0, 1.0, (Flow(5.0, paths),))


def test_taccl_longer_distance_first() -> None:
    jobs = (over("near", ("a",)), over("far", ("a", "b", "c")), over("local", ()))
    options = SchedulerOptions(levels=(0, 1, 2))
    decision = SCHEDULERS["taccl"](Cluster(dict.fromkeys("abc", 10.0), jobs), options)
    assert decision.priority == {"near": 1.0, "far": 3.0, "local": 0.0}
    assert decision.level == {"near": 1, "far": 2, "local": 0}


@pytest.mark.parametrize("name", ["taccl", "crux-pa", "sincronia", "varys", "ecmp"])
def test_taccl_spreads_jobs_and_default_paths_are_kept(name: str) -> None:
    cluster = Cluster({"a": 10.0, "b": 10.0}, tuple(over(n, ("a",), ("b",)) for n in "pq"))
    default = None if name == "taccl" else {"q": (1,)}
    decision = SCHEDULERS[name](cluster, SchedulerOptions((2, 5), default_path=default))
    assert decision.path == {"p": (0,), "q": (1,)}
    if name in ("taccl", "ecmp"):
        assert decision.level["p"] == decision.level["q"]


def test_ecmp_shares_one_level() -> None:
    decision = SCHEDULERS["ecmp"](figure_13(), SchedulerOptions(levels=(2, 5)))
    assert set(decision.level.values()) == {2}
