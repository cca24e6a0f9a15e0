"""Ray Train's workers attach with the variables of ``crux env``: real Ray, two workers, Gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import free_port
from places import ROOT
from training_job import environment

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: make recipes"
    ),
]


def test_workers_attach_with_the_transport_library_and_the_job_of_ray(tmp_path: Path) -> None:
    # Ray writes a token to the home folder, and attaches nothing here itself.
    env = {**environment(), "HOME": str(tmp_path), "RAY_DEDUP_LOGS": "0"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    store = f"tcp://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/ray_train.py"), "--crux-store", store],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    # Ray may show a worker's line twice.
    told = {one["rank"]: one for one in map(json.loads, re.findall(r'\{"rank".*\}', done.stdout))}
    assert told.keys() == {0, 1}
    for one in told.values():
        assert one["attached"]
        assert one["preloaded"]
        assert one["recorded"] >= 200
        assert one["job"].startswith("ray-")
    assert told[0]["job"] == told[1]["job"]
