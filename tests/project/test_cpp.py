"""The C++ tests under the sanitizers: ``tests/cpp/run.sh`` builds and runs them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from places import TESTS

pytestmark = pytest.mark.slow

SCRIPT = TESTS / "cpp" / "run.sh"
PROGRAMS = ("recorder", "operation", "fluid", "place", "game", "handover", "links")
FUZZED = ("routes", "links", "fluid")
#: The script's exit status where this machine can't run the sanitizer.
CANNOT_RUN = 77


def lines_of(*arguments: str) -> list[str]:
    """What the script prints with these arguments."""
    for tool in ("sh", "make", "flock"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    run = subprocess.run(
        ["sh", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=1200, check=False
    )
    if run.returncode == CANNOT_RUN:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


@pytest.mark.full
@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
@pytest.mark.timeout(1300)
def test_cpp_is_clean_under(sanitizer: str) -> None:
    assert lines_of(sanitizer) == [f"{test}: ok" for test in PROGRAMS]


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_fuzzing_the_cpp_finds_nothing() -> None:
    """For 10 s each from one seed, and the corpus; `make fuzz` draws other inputs."""
    lines = lines_of("fuzz", "10", "1")
    assert [line.split(":")[0] for line in lines] == [f"{target}_fuzz" for target in FUZZED]


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
