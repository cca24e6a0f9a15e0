"""Memory of earlier decisions: the next ones are the same with it, and ask for new jobs only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from crux_torch.schedule.arrays import ClusterError, arrays_of
from crux_torch.schedule.model import Cluster, Flow, Job, Memory, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.schedule.papers.intensity import (
    remembered_transfer_times_s,
    unrouted_transfer_times_s,
)

A, B = ("a",), ("b",)
SLOW_A = MappingProxyType({"a": 10.0, "b": 20.0})
SLOW_B = MappingProxyType({"a": 40.0, "b": 5.0})


def job(name: str, size: float) -> Job:
    return Job(name, 1, 1.0, 1.0, (Flow(size, (A, B)), Flow(1.0, (B, A))))


ONE, TWO, OTHER_ONE = job("one", 30.0), job("two", 20.0), job("one", 70.0)
#: Jobs come, go and change, and so do links.
STEPS: list[tuple[Mapping[str, float], tuple[Job, ...]]] = [
    (SLOW_A, (ONE,)),
    (SLOW_A, (TWO, ONE)),
    (SLOW_B, (TWO, ONE)),
    (SLOW_B, ()),
    (SLOW_B, (OTHER_ONE, TWO)),
    (dict(SLOW_A), (OTHER_ONE, TWO)),
]


def test_times_before_paths_are_chosen_do_not_depend_on_memory() -> None:
    memory = Memory()
    for links, jobs in STEPS:
        cluster = Cluster(links, jobs)
        found = remembered_transfer_times_s(arrays_of(cluster, memory), memory)
        assert found.tolist() == unrouted_transfer_times_s(arrays_of(cluster)).tolist()


def test_ecmp_does_not_depend_on_memory() -> None:
    memory = Memory()
    for links, jobs in STEPS:
        for default in (None, {"one": (1, 0)}, {"one": (0, 1), "two": (1, 1)}):
            options = SchedulerOptions(default_path=default, memory=memory)
            fresh = SchedulerOptions(default_path=default)
            assert ecmp(Cluster(links, jobs), options) == ecmp(Cluster(links, jobs), fresh)


def test_ecmp_looks_again_at_capacities_that_may_have_changed() -> None:
    links, options = {"a": 1.0, "b": 1.0}, SchedulerOptions()
    ecmp(Cluster(links, (ONE,)), options)
    links["b"] = 0.0
    with pytest.raises(ClusterError, match="'b'"):
        ecmp(Cluster(links, (ONE,)), options)


def test_values_are_made_for_new_jobs_only() -> None:
    memory, made = Memory(), []

    def make(fresh: list[int]) -> list[int]:
        made.append(fresh)
        return fresh

    for _, jobs in STEPS[:2]:
        memory.of_jobs("values", SLOW_A, [(each.flows, None) for each in jobs], make)
    assert made == [[0], [0]]
    assert memory.of_jobs("values", SLOW_A, [(ONE.flows, "else")], make) == [0]
    assert len(made) == 3
