"""A real job under mlcc: its flows are paced, and losing the tables costs only the pacing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from control_fakes import until
from loopback import free_port
from places import ROOT
from training_job import BOUND_S, Job

CAPACITY_Bps = 40_000_000
TOPOLOGY = f"""
version: 1
hosts: {{host0: {{}}, host1: {{}}}}
switches: {{tor: tor}}
links:
  - {{between: [host0, tor], capacity_Bps: {CAPACITY_Bps}}}
  - {{between: [host1, tor], capacity_Bps: {CAPACITY_Bps}}}
addresses: {{host1: [127.0.0.1]}}
"""
WIDTH = "1200"


def rates(job: Job) -> dict:
    return job.status().get("rates") or {}


def tables_pids(port: int) -> list[int]:
    """The processes of the load tables whose settings name ``port``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            if b"crux_torch.agreement.load_tables" in command:
                environ = (entry / "environ").read_bytes().split(b"\0")
                if f"CRUX_TUNING=tables_port={port}".encode() in environ:
                    found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.full
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_job_is_paced_and_loses_nothing_with_its_tables(tmp_path: Path) -> None:
    topology = tmp_path / "topology.yaml"
    topology.write_text(TOPOLOGY)
    port = free_port()
    job = Job(
        "cruxrun",
        tmp_path / "job",
        "--steps=1000000",
        f"--width={WIDTH}",
        "--status",
        CRUX_POLICY="mlcc",
        # Its tables are its own.
        XDG_RUNTIME_DIR=str(tmp_path),
        CRUX_TOPOLOGY=str(topology),
        # Of the launcher; each rank calls its host by its number.
        CRUX_HOST="host0",
        CRUX_TUNING=f"tables_port={port}",
        CRUX_STORE=f"tcp://127.0.0.1:{free_port()}",
        CRUX_JOB="job",
        CRUX_PROFILE_S="3",
    )
    try:
        until(lambda: rates(job).get("rounds", 0) > 20, BOUND_S, "rounds of booking")
        (flow,) = rates(job)["flows"]
        assert flow["to"] == "host1"
        assert flow["links"] == ["host0->tor"]
        gradients = 4 * int(WIDTH) ** 2
        assert 0.8 * gradients < flow["volume_bytes"] < 1.2 * gradients
        # The status is read between iterations, where limits have ended on a fast machine.
        until(lambda: rates(job)["changes"] > 0, BOUND_S, "a limit")

        # It stands still: limits end, and steps go on.
        (pid,) = tables_pids(port)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: rates(job)["why_not"] and not rates(job)["paced"], BOUND_S, "no limit")
        before = job.steps()
        until(lambda: job.steps() > before + 5, BOUND_S, "steps without tables")

        # It dies, and another one takes its place.
        os.kill(pid, signal.SIGKILL)
        until(lambda: tables_pids(port) not in ([], [pid]), BOUND_S, "other tables")
        rounds = rates(job)["rounds"]
        until(lambda: rates(job)["rounds"] > rounds + 5, BOUND_S, "rounds with other tables")
        job.end()
    finally:
        job.kill_everything()
    losses = job.losses()
    stock = Job(
        "torch.distributed.run", tmp_path / "stock", f"--steps={len(losses)}", f"--width={WIDTH}"
    )
    try:
        stock.end(after_its_steps=True)
    finally:
        stock.kill_everything()
    assert stock.losses() == losses
    until(lambda: not tables_pids(port), BOUND_S, "the tables to end")


def test_the_bound_on_silence_is_stated() -> None:
    from crux_torch.agent.rates import SILENT_S
    from crux_torch.agreement.load_tables import TIMEOUT_S

    page = (ROOT / "docs" / "research" / "cassini-and-mlcc.md").read_text()
    assert f"{TIMEOUT_S:g} s" in page
    assert f"{SILENT_S:g} s" in page
