"""A study that is ended leaves none of its processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

#: Seconds until workers compute, and until they have ended, on a busy machine.
BOUND_S = 300.0
#: CPU seconds after which a worker has imported what it needs, and computes.
COMPUTES_S = 3.0


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [each for child in map(int, found) for each in (child, *below(child))]


def cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "study",
    [("trace", "--jobs", "2000", "--schedulers", "crux-paper,ecmp"), ("saturated", "--seeds", "2")],
    ids=lambda study: study[0],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
def test_a_study_that_is_ended_leaves_no_worker(
    study: tuple[str, ...], number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "evaluation", *study, "--workers", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as program:
        try:
            until(lambda: sum(cpu_s(pid) > COMPUTES_S for pid in below(program.pid)) >= 2)
            started = below(program.pid)
            if number == signal.SIGINT:
                # As a terminal does: the workers get it, too.
                os.killpg(program.pid, number)
            else:
                program.send_signal(number)
            assert program.wait(BOUND_S) == 128 + number
        finally:
            program.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
