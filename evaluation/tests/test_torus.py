"""Crux on a torus: the baseline's routes, the cases, and what priorities cost rings there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crux_torch.network.builders import GpuServer, torus
from crux_torch.network.topology import Topology
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.papers.crux import crux_paper
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.play import play
from evaluation.torus import (
    SCHEDULERS_PLAYED,
    TorusCase,
    axes,
    decide,
    dimension_ordered,
    outcomes,
    torus_case,
)


@pytest.fixture(scope="module", params=[(4, 3), (3, 2, 2)], ids=["2D", "3D"])
def network(request: pytest.FixtureRequest) -> Topology:
    return torus(request.param, GpuServer(gpus=2, nics=1, pcie_switches=1))


@pytest.fixture(scope="module")
def case(network: Topology) -> TorusCase:
    return torus_case((), "scattered", 3, topology=network)


def test_dimension_order_goes_one_dimension_after_the_other(network: Topology) -> None:
    for dst in network.hosts[1:]:
        candidates = network.candidate_paths("h0", dst)
        job = Job("j", 1, 1.0, 1.0, (Flow(1.0, candidates),))
        (chosen,) = dimension_ordered(network, job)
        crossed = axes(network, candidates[chosen])
        assert list(crossed) == sorted(crossed)
        assert sorted(crossed) == sorted(axes(network, candidates[0]))


def test_axes_of_a_path_by_hand() -> None:
    network = torus((3, 3, 2), GpuServer(gpus=2, nics=1, pcie_switches=1))
    path = (
        "h0/nic0->router0_0_0",
        "router0_0_0->router1_0_0",
        "router1_0_0->router1_0_1",
        "router1_0_1->router1_1_1",
        "router1_1_1->h9/nic0",
    )
    assert axes(network, path) == (0, 2, 1)
    assert axes(network, ()) == ()


@pytest.mark.parametrize("placement", ["scattered", "packed"])
def test_cases_are_reproducible_and_full(network: Topology, placement) -> None:
    case = torus_case((), placement, 1, topology=network)
    assert case.cluster.jobs == torus_case((), placement, 1, topology=network).cluster.jobs
    assert case.cluster.jobs != torus_case((), placement, 2, topology=network).cluster.jobs
    gpus = sum(job.gpus for job in case.cluster.jobs)
    assert len(network.gpus()) - 2 <= gpus <= len(network.gpus())


def test_unknown_names_are_refused(network: Topology, case: TorusCase) -> None:
    with pytest.raises(WorkloadError, match="placement is 'heap'; expected scattered or packed"):
        torus_case((), "heap", 0, topology=network)  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="'fastest' is unknown"):
        decide(case, "fastest")


@pytest.mark.parametrize("scheduler", SCHEDULERS_PLAYED)
def test_every_scheduler_decides_alike_in_any_order_of_jobs(
    case: TorusCase, scheduler: str
) -> None:
    cluster = Cluster(case.cluster.capacity_Bps, case.cluster.jobs[::-1])
    assert decide(replace(case, cluster=cluster), scheduler) == decide(case, scheduler)


def test_outcomes_are_measured_against_ideal(case: TorusCase) -> None:
    found = outcomes(case, 5.0)
    assert list(found) == list(SCHEDULERS_PLAYED)
    assert found["ideal"].slowdown == 1.0
    for scheduler, outcome in found.items():
        assert 0 < outcome.gpu_utilization <= 1
        assert outcome.busiest <= 1 + 1e-9
        assert outcome.slowdown >= 1 - 1e-9
        assert scheduler == "ideal" or outcome.busiest > 0


def test_priority_stops_a_ring_that_meets_two_jobs_in_turn() -> None:
    # "a" sends in odd seconds and "b" in even ones, each on a link of its own; "ring" needs both.
    def job(name: str, flops: float, *links: str) -> Job:
        return Job(name, 8, flops, 1.0, (Flow(1.0, (links,)),), (Burst(1.0, 1.0),))

    jobs = (job("a", 9.0, "x"), job("b", 9.0, "y"), job("ring", 1.0, "x", "y"))
    cluster = Cluster({"x": 1.0, "y": 1.0}, jobs)
    start_s = {"b": 1.0}
    strict = crux_paper(cluster, SchedulerOptions((0, 1)))
    assert strict.level == {"a": 1, "b": 1, "ring": 0}
    fair = crux_paper(cluster, SchedulerOptions((0,)))
    stopped = play(cluster, strict, 100.0, start_s=start_s).jobs["ring"].completed
    moving = play(cluster, fair, 100.0, start_s=start_s).jobs["ring"].completed
    assert stopped == 0
    assert moving > 20
