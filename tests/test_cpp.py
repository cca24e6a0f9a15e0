"""The C++ tests under the sanitizers: ``tests/cpp/run.sh`` builds and runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "cpp" / "run.sh"
TESTS = ("recorder", "operation", "fluid", "place", "game", "switch", "links")
#: The script's exit status where this machine can't run the sanitizer.
CANNOT_RUN = 77


@pytest.mark.full
@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
@pytest.mark.timeout(1300)
def test_cpp_is_clean_under(sanitizer: str) -> None:
    for tool in ("sh", "make", "flock"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    run = subprocess.run(
        ["sh", str(SCRIPT), sanitizer], capture_output=True, text=True, timeout=1200, check=False
    )
    if run.returncode == CANNOT_RUN:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split("\n") == [*(f"{test}: ok" for test in TESTS), ""]


def test_a_missing_compiler_is_said() -> None:
    run = subprocess.run(
        ["sh", str(SCRIPT), "asan"],
        env={"PATH": "/usr/bin:/bin", "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == CANNOT_RUN
    assert "no compiler no-such-compiler" in run.stderr
