"""Training in real processes, with connections switched all the while: the same to the last bit."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

WORKLOAD = Path(__file__).with_name("switch_workload.py")
#: Seconds that one run may take on a loaded machine.
LIMIT_S = 240.0


def start(
    size: int, folder: Path, kind: str, switches: int, steps: int, name: str
) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "CRUX_STORE": "none", "OMP_NUM_THREADS": "1"}
    common = [str(size), str(port), kind, str(switches), str(steps)]
    processes = []
    for rank in range(size):
        out = folder / f"{name}.{rank}"
        with out.with_suffix(f".{rank}.err").open("wb") as errors:
            command = [sys.executable, str(WORKLOAD), str(rank), *common, str(out)]
            processes.append(subprocess.Popen(command, stderr=errors, env=env))
    return processes


def run(
    size: int, folder: Path, kind: str, switches: int = 0, steps: int = 0
) -> list[dict[str, Any]]:
    name = f"{kind}.{switches}"
    processes = start(size, folder, kind, switches, steps, name)
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [(folder / f"{name}.{rank}.err").read_text()[-2000:] for rank in range(size)]
    assert not any(codes), "\n".join(said)
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "switches"), [("ddp", 2, 200), ("ddp", 4, 40), ("fsdp2", 2, 60)]
)
def test_training_is_the_same_with_and_without_switches(
    kind: str, size: int, switches: int, tmp_path: Path
) -> None:
    switched = run(size, tmp_path, kind, switches=switches)
    steps = switched[0]["steps"]
    assert {rank["steps"] for rank in switched} == {steps}
    reference = run(size, tmp_path, kind, steps=steps)
    for with_switches, without in zip(switched, reference, strict=True):
        assert with_switches["losses"] == without["losses"]
        assert with_switches["sum"] == without["sum"]
        assert with_switches["weights"] == without["weights"]
        assert with_switches["errors"] == []
        # The world's group and the pair's, one of which may have been made after the first request.
        counts = sorted(with_switches["switched"].values())
        assert len(counts) == 3
        assert all(switches - 1 <= count <= switches for count in counts)
        leaks_nothing(with_switches["resources"])


def leaks_nothing(seen: list[dict[str, int]]) -> None:
    """Compares the second half with the first: what grows goes on growing."""
    half = len(seen) // 2
    early, late = seen[half // 2 : half], seen[-(half - half // 2) :]
    for what in ("fds", "threads"):
        # Connections of one switch may be open while the next is counted.
        at_first = statistics.median(s[what] for s in early)
        assert statistics.median(s[what] for s in late) <= at_first + 4, what
    grown = statistics.median(s["rss_bytes"] for s in late) - statistics.median(
        s["rss_bytes"] for s in early
    )
    # Sampled switches apart; the allocator's noise is below this, an inner backend's leak is not.
    assert grown / len(late) < 256 << 10, f"{grown / len(late):.0f} bytes a switch"


def test_a_rank_that_dies_in_a_switch_ends_the_others_as_without(tmp_path: Path) -> None:
    processes = start(2, tmp_path, "ddp", 100_000, 0, "killed")
    try:
        deadline = time.monotonic() + 120.0
        # Rank 0 has bound the port, trained and switched by then.
        time.sleep(15.0)
        assert all(process.poll() is None for process in processes)
        processes[1].send_signal(signal.SIGKILL)
        assert processes[1].wait(10.0) == -signal.SIGKILL
        assert processes[0].wait(deadline - time.monotonic()) != 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = (tmp_path / "killed.0.err").read_text()
    assert "RuntimeError" in said or "DistBackendError" in said or "DistNetworkError" in said
