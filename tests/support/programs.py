"""Short programs, each run in a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import cuda_rig
from places import SUPPORT, TESTS

PYTHONPATH = os.pathsep.join(filter(None, [str(SUPPORT), str(TESTS), os.environ.get("PYTHONPATH")]))


def python(code: str, *arguments: str, limit_s: float = 300.0, **env: str) -> str:
    """What ``code`` prints; it may import the tests' modules, and joins no cluster.

    Raises:
        AssertionError: it failed; the message is its error output.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=SUPPORT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "CRUX_STORE": "none", **env},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def on_the_rig(code: str, devices: int = 1, **env: str) -> str:
    """The same for a program that finds CUDA devices; see :mod:`cuda_rig`."""
    return python(
        code, **{"OMP_NUM_THREADS": "1"} | cuda_rig.environment(os.environ, devices) | env
    )
