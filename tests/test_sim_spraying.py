"""Spraying: a flow's bytes lie evenly on its candidates, and no path is left to choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from schedule_cases import clusters

from crux_torch.schedule.intensity import link_traffic, part_traffic
from crux_torch.schedule.model import Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim.play import play
from crux_torch.sim.spraying import sprayed


@given(clusters())
def test_each_candidate_carries_its_share(cluster: Cluster) -> None:
    for before, after in zip(cluster.jobs, sprayed(cluster).jobs, strict=True):
        assert all(len(flow.candidates) == 1 for flow in after.flows)
        expected: dict[str, float] = {}
        for flow in before.flows:
            for path in flow.candidates:
                for link in path:
                    share = flow.bytes / len(flow.candidates)
                    expected[link] = expected.get(link, 0.0) + share
        found = link_traffic(after, (0,) * len(after.flows))
        assert found == pytest.approx({link: moved for link, moved in expected.items() if moved})


def test_two_flows_that_the_hash_puts_on_one_path_take_half_as_long() -> None:
    flow = Flow(1e9, (("x",), ("y",)))
    cluster = Cluster({"x": 1e9, "y": 1e9}, (Job("a", 1, 1e12, 1.0, (flow, flow)),))
    options = SchedulerOptions()
    for here, expected_s in ((cluster, 3.0), (sprayed(cluster), 2.0)):
        found = play(here, SCHEDULERS["ecmp"](here, options), 60.0)
        assert found.jobs["a"].mean_iteration_s == pytest.approx(expected_s)


def test_parts_stay_apart() -> None:
    one = Flow(6.0, (("x",), ("y",)))
    other = Flow(2.0, (("x",), ("y",)))
    cluster = Cluster({"x": 1.0, "y": 1.0}, (Job("a", 1, 1.0, 1.0, (one, other), parts=(0, 1)),))
    (job,) = sprayed(cluster).jobs
    assert part_traffic(job, (0,) * len(job.flows)) == [{"x": 3.0, "y": 3.0}, {"x": 1.0, "y": 1.0}]
