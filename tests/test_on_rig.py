"""The tests of ``on_rig``, which need torch's CUDA build on the rig in their own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import cuda_rig
import pytest
from places import TESTS

HERE = TESTS
FILES = sorted(path.name for path in (HERE / "on_rig").glob("test_*.py"))
DEVICES = 2
#: Seconds for a test of a file, and for the file: less than what this test may take, so that a
#: test that hangs is named.
TEST_LIMIT_S, LIMIT_S = 400, 850.0

_ok, _why_not = cuda_rig.available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _ok, reason=_why_not)]


@pytest.mark.parametrize("file", FILES)
def test_passes(file: str) -> None:
    env = {**os.environ, "CRUX_STORE": "none", "OMP_NUM_THREADS": "1"}
    env |= cuda_rig.environment(env, DEVICES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"]
    command += ["--timeout", str(TEST_LIMIT_S), f"{HERE}/on_rig/{file}"]
    done = subprocess.run(
        command, cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[:4000]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_legacy_class_does_the_same_as_stock() -> None:
    """The identity tests with ``ProcessGroupNCCL``, where torch's default is nccl2."""
    env = {**os.environ, "TORCH_DIST_USE_NCCL2": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"{HERE}/gpu/test_gpu_identity.py"],
        cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[:4000]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 80, done.stdout[-2000:]
