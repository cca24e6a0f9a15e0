"""A rank whose packets to its job's leader, or the leader's to it, are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_fakes import until
from loopback import free_port
from training_job import BOUND_S, Job

from faults.link import Direction, Link
from faults.mix import CRUX, STEPS

pytestmark = pytest.mark.full


def has_plan(job: Job, rank: int) -> bool:
    status = job.status(rank)
    order, applied = status.get("order"), status.get("applied")
    if not order or not applied or order["measuring"]:
        return False
    return order["plan_epoch"] > 0 and applied["level"] is not None


@pytest.mark.parametrize("cut", [("there",), ("back",), ("there", "back")], ids="-".join)
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_rank_without_its_leader_trains_at_the_default_until_it_is_back(
    cut: tuple[Direction, ...], tmp_path: Path
) -> None:
    link = Link(0)
    job = alone = None
    try:
        options = (f"--steps={STEPS}", "--status", f"--channel-by={link.port}")
        store = {"CRUX_STORE": f"tcp://127.0.0.1:{free_port()}", "CRUX_JOB": "cut"}
        job = Job("cruxrun", tmp_path / "cut", *options, **CRUX, **store)
        until((job.folder / "store").exists, BOUND_S, "the job's store")
        link.to = int((job.folder / "store").read_text())
        until(lambda: has_plan(job, 0) and has_plan(job, 1), BOUND_S, "a plan")
        for direction in cut:
            link.cut(direction)
        until(lambda: not has_plan(job, 1), BOUND_S, "the end of the plan on rank 1")
        assert job.status(1)["applied"]["level"] is None
        before = job.steps()
        until(lambda: job.steps() > before + 20, BOUND_S, "more steps")
        assert has_plan(job, 0)
        assert not has_plan(job, 1)
        link.heal()
        until(lambda: has_plan(job, 0) and has_plan(job, 1), BOUND_S, "a plan on both ranks")
        assert job.status(1)["errors"] == {}
        job.end()
        losses = job.losses()
        alone = Job(
            "torch.distributed.run", tmp_path / "alone", f"--steps={len(losses)}", "--sleep-s=0"
        )
        alone.end(after_its_steps=True)
        assert alone.losses() == losses
    finally:
        for each in (job, alone):
            if each is not None:
                each.kill_everything()
        link.close()
