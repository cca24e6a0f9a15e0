"""Bursts below their links' rate: the default policy plays them as they were measured."""

from __future__ import annotations

import numpy as np
import pytest

from crux_torch.schedule.default.rehearsal import Length, Rehearsal
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.schedulers import SCHEDULERS


def rivals(*least_s: float) -> Cluster:
    """Jobs of unlike sizes that send for 0.4 s at full rate, after 0.5 s of computation."""
    flows = (Flow(0.4, (("l",),)),)
    jobs = tuple(
        Job(f"j{i}", 8**i, 8.0**i, 0.5, flows, (Burst(1.0, 1.0, seconds),))
        for i, seconds in enumerate(least_s)
    )
    return Cluster({"l": 1.0}, jobs)


@pytest.mark.parametrize(
    ("least_s", "levels"), [((0.0, 0.0, 0.0), 2), ((0.3, 0.3, 0.3), 2), ((1.3, 1.3, 1.3), 1)]
)
def test_levels_are_given_only_where_bursts_are_in_each_others_way(
    least_s: tuple[float, ...], levels: int
) -> None:
    decision = SCHEDULERS["crux"](rivals(*least_s), SchedulerOptions())
    assert len(set(decision.level.values())) == levels


def test_the_rehearsal_plays_ceilings() -> None:
    busy, levels = {}, np.array([[0, 0], [0, 1]])
    for least_s in (0.4, 1.2, 2.5):
        cluster = rivals(least_s, least_s)
        rehearsal = Rehearsal(cluster, Length(2, 40, 10))
        routes = [rehearsal.route(j, (0,)) for j in range(2)]
        assert [route.period_s for route in routes] == pytest.approx([0.5 + least_s] * 2)
        busy[least_s] = rehearsal.busy_gpus([(routes, levels)])[0]
    # At 0.33 and 0.16 of the link nobody waits, on one level or two.
    for least_s in (1.2, 2.5):
        assert busy[least_s] == pytest.approx([9 * 0.5 / (0.5 + least_s)] * 2)
    assert busy[0.4][0] < 0.95 * busy[0.4][1]
