"""A job that Open MPI's ``mpirun`` starts, beside a stock one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from control_fakes import until
from dscp_maps import MARKED_ENV
from loopback import free_port
from onlooker import Cluster
from training_job import BOUND_S, SCRIPT, JobFolder, environment

from cruxrun import env

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("mpirun") is None, reason="it takes Open MPI's mpirun (`make apt-lab`)"
    ),
]
#: On loopback, as root, on a machine of any size.
MPIRUN = [
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "-H", "localhost:2"),
    *("--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"),
]
STEPS = 60


# Stock Gloo now and then loses a race for a port, or aborts at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_job_of_mpirun_has_a_plan_and_stocks_losses(tmp_path: Path) -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    told = {"CRUX_STORE": store, "CRUX_POLICY": "crux-paper", "CRUX_PROFILE_S": "1", **MARKED_ENV}
    attached = told | env.variables([], told)
    cluster = Cluster(store)
    running: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, steps: int, given: dict[str, str]) -> None:
        (tmp_path / name).mkdir()
        port = str(free_port())
        job = environment() | given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (tmp_path / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                [
                    *(*MPIRUN, sys.executable, SCRIPT, str(tmp_path / name)),
                    *("--status", f"--steps={steps}"),
                ],
                env={**job, "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def losses(name: str) -> list[str]:
        assert running[name].wait(BOUND_S) == 0, (tmp_path / f"{name}.log").read_text()
        return JobFolder(name, tmp_path / name).losses()[:STEPS]

    def follows() -> bool:
        plan = cluster.plan()
        known = [JobFolder(name, tmp_path / "crux") for name in cluster.jobs()]
        return plan is not None and any(job.follows(plan) and job.steps() >= STEPS for job in known)

    try:
        start("stock", STEPS, {})
        start("crux", 100_000, attached)
        expected = losses("stock")
        until(follows, BOUND_S, "the job to follow a plan")
        (name,) = cluster.jobs()
        assert name.startswith("kill_job-")
        (tmp_path / "crux" / "stop").touch()
        assert losses("crux") == expected
        assert len(expected) == STEPS
    finally:
        cluster.close()
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(BOUND_S)
