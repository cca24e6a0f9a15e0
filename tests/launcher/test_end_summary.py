"""The block that ``cruxrun`` prints when a real job ends, whichever way."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_fakes import until
from dscp_maps import MARKED_ENV
from training_job import BOUND_S, Job, less_news

pytestmark = pytest.mark.slow

STEPS = 100_000
BLOCK = re.compile(r"^\S+ \S+ \[cruxrun job\] INFO (summary of job: .*\n(?:    .*\n)+)", re.M)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    env = {
        "CRUX_STORE": f"unix://{tmp_path}/store", "CRUX_JOB": "job", **MARKED_ENV,
        "CRUX_POLICY": "crux-paper", "CRUX_PROFILE_S": "2",
    }  # fmt: skip
    job = Job("cruxrun", tmp_path / "job", f"--steps={STEPS}", "--status", **env)
    yield job
    job.kill_everything()


def block(job: Job) -> str:
    found = BLOCK.findall(job.errors.read_text())
    assert len(found) == 1, job.errors.read_text()
    return str(found[0])


def held_a_plan(job: Job) -> bool:
    status = job.status()
    # While it is measured, it has a level already.
    return status.get("plan") is not None and not status["order"]["measuring"]


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_job_that_ends_says_what_was_measured_and_held(job: Job) -> None:
    until(lambda: held_a_plan(job), BOUND_S, "a plan")
    job.end()
    text = block(job)
    steps = int(re.match(r"summary of job: (\d+) steps in ", text)[1])
    assert steps == pytest.approx(job.steps(), abs=1)
    assert "as known" not in text
    told = (
        r"measured: a step computes \S+ \w*FLOP \(W\), needs \S+ ms of its slowest link \(t\) and "
    )
    assert re.search(told + r"takes \S+ ms, \d+% of it waiting", text)
    assert re.search(r"1 plan; .*level \d for", text)
    assert re.search(r"INFO measured: a step computes .*\n", job.errors.read_text())
    assert less_news(job.errors.read_text()) == ""


@pytest.mark.flaky(reruns=1)
def test_a_job_whose_leader_is_killed_says_what_is_known(job: Job) -> None:
    until(lambda: held_a_plan(job), BOUND_S, "a plan")
    os.kill(job.pid(0), signal.SIGKILL)
    assert job.launcher.wait(BOUND_S) == 1
    assert "as known" in block(job)
