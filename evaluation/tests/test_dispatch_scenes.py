"""Dispatching beside running jobs: the scenes, and that the rule holds on a few of them."""

from __future__ import annotations

import numpy as np
import pytest

from crux_torch.control.inputs import plan_inputs
from crux_torch.dispatch.cluster import count
from evaluation.commands.dispatch_contention import contention_rows, text_of
from evaluation.dispatch_contention import HELD, HOSTS, RULES, compact, scene


def test_a_scene_is_drawn_by_its_seed_and_its_records_tell_of_its_jobs() -> None:
    one, again = scene(3), scene(3)
    assert (one.free == again.free).all()
    assert count(one.free) <= (1 - HELD) * 8 * HOSTS
    assert one.k <= count(one.free)
    planned = {job.name: job for job in plan_inputs(one.records, one.topology).jobs}
    for job in one.jobs:
        between = [f.bytes for f in job.flows if f.candidates[0][0] in one.topology.capacity_Bps]
        assert sum(f.bytes for f in planned[job.name].flows) == pytest.approx(sum(between))


def test_compact_takes_few_hosts() -> None:
    one = scene(0)
    everything = np.full(HOSTS, 0xFF)
    assert np.count_nonzero(compact(one.topology, everything, 16)) == 2
    assert np.count_nonzero(compact(one.topology, everything, 3)) == 1


@pytest.mark.slow
def test_beside_running_jobs_the_aware_choice_is_the_best() -> None:
    rows = contention_rows(range(1, 4))
    for row in rows:
        utilisation = row["utilisation"]
        assert utilisation["contention-aware"] >= max(utilisation[r] for r in RULES) - 1e-9
    assert "the best, or as good, in 3 of 3" in text_of(rows)
