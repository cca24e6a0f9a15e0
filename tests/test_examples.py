"""The example scripts: ordinary DDP jobs, repeatable bit for bit, that learn."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "train_gpt.py": ["--layers", "2", "--width", "32", "--context", "32"],
    "train_mlp.py": ["--width", "64", "--embedding", "8"],
}


def _train(script: str, folder: Path, *flags: str, ranks: int = 2) -> list[dict[str, Any]]:
    log = folder / "log.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / script), *SMALL[script], *flags]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    running = [
        subprocess.Popen(
            [*command, "--log-file", str(log)],
            env={**os.environ, **job, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=120) for process in running] == [0] * ranks
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("script", SMALL)
def test_losses_repeat_bit_for_bit(script: str, tmp_path: Path) -> None:
    first = _train(script, tmp_path, "--steps", "12")
    # Waiting as an accelerator would changes when things happen, not what is computed.
    again = _train(script, tmp_path, "--steps", "12", "--accelerator-ms", "50")
    assert [s["step"] for s in first] == list(range(12))
    assert [s["loss"] for s in first] == [s["loss"] for s in again]
    assert all(s["start"] <= s["computed"] <= s["end"] for s in first)
    assert min(s["computed"] - s["start"] for s in again) >= 0.05


@pytest.mark.parametrize("script", SMALL)
def test_learns(script: str, tmp_path: Path) -> None:
    steps = _train(script, tmp_path, "--steps", "150", "--batch", "32", ranks=1)
    losses = [float.fromhex(s["loss"]) for s in steps]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_no_example_names_crux() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert "crux" not in path.read_text().lower(), path.name
