"""A real job trains on as under the stock launcher, whoever answers in the store's place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from control_fakes import Hosts, until
from loopback import free_port
from places import SUPPORT
from training_job import BOUND_S, Job

STEPS = 120
HOSTILE = SUPPORT.joinpath("hostile.py")
#: What a rank may take of its processors and memory beyond stock's, under any of them.
MORE_CPU_S, MORE_BYTES = 3.0, 100 << 20


@contextmanager
def program(name: str, port: int, *, takes_port: bool) -> Iterator[None]:
    command = [sys.executable, str(HOSTILE), name, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        try:
            if takes_port:
                assert running.stdout is not None
                assert running.stdout.readline().strip() == b"ready"
            yield
        finally:
            running.kill()


def used(job: Job) -> tuple[float, int]:
    """CPU seconds of rank 0 without its children, and the most memory that it had."""
    about = Path(f"/proc/{job.pid(0)}")
    ticks = (about / "stat").read_text().rpartition(")")[2].split()[11:13]
    peak = next(
        line for line in (about / "status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return sum(map(int, ticks)) / 100.0, int(peak.split()[1]) << 10


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("squatter: pages made ahead", marks=pytest.mark.slow),
        pytest.param("squatter: small junk records", marks=pytest.mark.full),
        pytest.param("squatter: endless pages", marks=pytest.mark.full),
        pytest.param("squatter: single bytes", marks=pytest.mark.full),
    ],
)
def test_no_hostile_store_slows_training(tmp_path: Path, name: str) -> None:
    """By CPU time and memory: a loaded machine stretches steps, but not these."""
    port, options = free_port(), ("--steps=100000", "--sleep-s=0.03")
    with program(name, port, takes_port=True):
        store = f"tcp://127.0.0.1:{port}"
        quick = {"CRUX_PROFILE_S": "2", "CRUX_TUNING": "profile_iterations=5"}
        jobs = [
            Job("cruxrun", tmp_path / "none", *options, CRUX_STORE="none", **quick),
            Job("cruxrun", tmp_path / "squatted", *options, CRUX_STORE=store, **quick),
        ]
        try:
            until(lambda: all(j.steps() > STEPS for j in jobs), BOUND_S, "the steps")
            quiet, squatted = map(used, jobs)
            assert squatted[0] < quiet[0] + MORE_CPU_S
            assert squatted[1] < quiet[1] + MORE_BYTES
            for job in jobs:
                job.end()
            for job in jobs:
                assert job.launcher.wait(BOUND_S) == 0
            both = min(job.steps() for job in jobs)
            assert jobs[0].losses()[:both] == jobs[1].losses()[:both]
        finally:
            for job in jobs:
                job.kill_everything()


@pytest.mark.slow
def test_after_wide_keys_jobs_agree(tmp_path: Path) -> None:
    with Hosts(1) as hosts:
        hosts.wait_for_roles(1)
        with program("client: wide keys", hosts.port, takes_port=False):
            job = Job(
                "cruxrun",
                tmp_path / "job",
                "--steps=100000",
                "--status",
                CRUX_STORE=f"tcp://127.0.0.1:{hosts.port}",
                CRUX_JOB="job",
                CRUX_PROFILE_S="2",
                CRUX_TUNING="profile_iterations=5",
            )
            try:
                until(lambda: job.leader().get("epoch") is not None, BOUND_S, "a plan")
                assert job.leader()["process"] is not None
                job.end()
                assert job.launcher.wait(BOUND_S) == 0
            finally:
                job.kill_everything()
