"""The examples are ordinary scripts that train and learn; the lab's job repeats bit for bit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port
from training_job import ROOT, environment

EXAMPLES = ROOT / "examples"
SMALL = {
    "gpt": ("--layers", "2", "--width", "32", "--context", "32"),
    "mlp": ("--width", "64", "--embedding", "8"),
}


def run_ranks(arguments: Sequence[str], ranks: int = 2, **variables: str) -> list[str]:
    """What each rank of a job prints."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    env = {**environment(), **job, **variables}
    running = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in running]
        assert [process.returncode for process in running] == [0] * ranks
        return said
    finally:
        for process in running:
            process.kill()
            process.wait()


def lab_steps(model: str, folder: Path, *flags: str, ranks: int = 2) -> list[dict[str, Any]]:
    log = folder / "log.jsonl"
    run_ranks(["-m", "lab.train", model, *SMALL[model], "--log-file", str(log), *flags], ranks)
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("model", SMALL)
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_losses_repeat_bit_for_bit(model: str, tmp_path: Path) -> None:
    first = lab_steps(model, tmp_path, "--steps", "12")
    # Waiting as an accelerator would changes when things happen, not what is computed.
    again = lab_steps(model, tmp_path, "--steps", "12", "--accelerator-ms", "50")
    assert [s["step"] for s in first] == list(range(12))
    assert [s["loss"] for s in first] == [s["loss"] for s in again]
    assert all(s["start"] <= s["computed"] <= s["end"] for s in first)
    assert min(s["computed"] - s["start"] for s in again) >= 0.05


@pytest.mark.full
@pytest.mark.parametrize("servers", [1, 2])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_parameter_servers_compute_what_an_all_reduce_does(servers: int, tmp_path: Path) -> None:
    flags = ("--width", "600", "--steps", "8")
    reduced = lab_steps("mlp", tmp_path, *flags)
    served = lab_steps("mlp", tmp_path, *flags, "--servers", str(servers), ranks=2 + servers)
    assert [s["loss"] for s in served] == [s["loss"] for s in reduced]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "steps"), [("train_gpt.py", "101"), ("train_mlp.py", "201")])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_an_example_learns_and_does_not_name_crux_in_its_code(script: str, steps: str) -> None:
    said = run_ranks([str(EXAMPLES / script), "--steps", steps])
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", said[0])]
    assert len(losses) == 2
    assert losses[-1] < 0.8 * losses[0]
    assert said[1] == ""
    code = (EXAMPLES / script).read_text().split('"""', 2)[2]
    assert "crux" not in code.lower()


@pytest.mark.full
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_loop_of_ones_own_is_measured() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    quick = {"CRUX_STORE": store, "CRUX_PROFILE_S": "2", "CRUX_LOG_LEVEL": "ERROR"}
    first, second = run_ranks([str(EXAMPLES / "own_loop.py")], **quick)
    assert re.search(r"an iteration takes [\d.]+ ms, [\d.e+]+ FLOPs", first), first
    assert second == ""
