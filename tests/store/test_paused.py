"""A store that stands still or is cut off must not slow training down.

Two jobs train side by side, each with a store of its own; only one store is disturbed. The longest
step of its job stays under twice the other's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from control_fakes import Hosts, until
from etcd_server import Etcd, needs_etcd, wait_ready
from training_job import BOUND_S, Job

#: Steps long enough for the noise of a busy machine to be short beside them.
STEP_S = 0.25


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def launch(name: str, endpoint: str) -> Job:
        store = {"CRUX_STORE": endpoint, "CRUX_JOB": name}
        quick = {"CRUX_PROFILE_S": "3", "CRUX_LEASE_S": "4", "CRUX_TUNING": "profile_iterations=5"}
        options = ("--steps=100000", f"--sleep-s={STEP_S}", "--status")
        jobs.append(Job("cruxrun", tmp_path / name, *options, **store, **quick))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.kill_everything()


def ends_s(job: Job) -> list[float]:
    return [float(line) for line in (job.folder / "steps").read_text().splitlines()]


def longest_step_s(job: Job, since_s: float) -> float:
    """Of the steps that ended since then, the one under way included."""
    ends = [end for end in ends_s(job) if end >= since_s]
    assert len(ends) > 2, "the job trains"
    return max(after - before for before, after in pairwise([*ends, time.monotonic()]))


@pytest.mark.parametrize(
    "pause_s",
    [pytest.param(8.0, marks=pytest.mark.slow), pytest.param(60.0, marks=pytest.mark.full)],
)
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_training_goes_on_while_the_store_stands_still(
    start: Callable[..., Job], pause_s: float
) -> None:
    with Hosts(1) as paused:
        paused.wait_for_roles(1)
        trains_on(start, f"tcp://127.0.0.1:{paused.port}", paused.server(), pause_s)


@needs_etcd
@pytest.mark.full
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_training_goes_on_while_an_etcd_stands_still(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    with Etcd(tmp_path) as etcd:
        wait_ready(etcd)
        trains_on(start, f"etcd://{etcd.endpoints}/gate", etcd.processes[0].pid, 20.0)


def trains_on(start: Callable[..., Job], endpoint: str, server: int, pause_s: float) -> None:
    with Hosts(1) as running:
        running.wait_for_roles(1)
        job = start("job", endpoint)
        control = start("control", f"tcp://127.0.0.1:{running.port}")
        for each in (job, control):
            until(lambda j=each: j.leader().get("epoch") is not None, BOUND_S, "a plan")
        os.kill(server, signal.SIGSTOP)
        try:
            since_s = time.monotonic()
            time.sleep(pause_s)
            longest_s, in_control_s = longest_step_s(job, since_s), longest_step_s(control, since_s)
            assert job.leader()["store"] != "ok", "the job noticed"
        finally:
            os.kill(server, signal.SIGCONT)
        assert longest_s < 2 * in_control_s
        until(lambda: job.leader()["store"] == "ok", BOUND_S, "the store to be back")
        for each in (job, control):
            each.end()
