"""A program that trains in namespaces leaves none, and no process, when it is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from control_fakes import until
from places import ROOT
from training_job import BOUND_S, alive

from lab import netns

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.full, pytest.mark.skipif(not _OK, reason=_REASON)]


def test_the_contest_leaves_nothing_when_it_is_ended(tmp_path: Path) -> None:
    contest = [sys.executable, "benchmarks/contest.py", "--quick", "--logs", str(tmp_path)]
    with (tmp_path / "said").open("w") as said:
        program = subprocess.Popen(
            contest, cwd=ROOT, stdout=said, stderr=said, start_new_session=True
        )
    inside: list[int] = []

    def trains() -> bool:
        assert program.poll() is None, (tmp_path / "said").read_text()
        inside[:] = netns.processes_in(netns.named(f"crux-{program.pid}-"))
        # A launcher and two workers of a job.
        return len(inside) >= 3

    try:
        until(trains, BOUND_S)
        program.send_signal(signal.SIGTERM)
        assert program.wait(BOUND_S) == 1
    finally:
        program.kill()
        program.wait()
    assert netns.named(f"crux-{program.pid}-") == []
    # Process 1 reaps those whose parent ended before them, in its own time.
    until(lambda: not any(map(alive, inside)), 10.0, "the processes to end")
