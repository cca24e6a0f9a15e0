"""Programs whose wall clock is wrong."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "cpp" / "wall_clock.c"


def build(folder: Path) -> Path:
    """The library that makes it wrong; skips where there is no compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no compiler {compiler[0]}")
    library = folder / "wall_clock.so"
    command = [*compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return library


def environment(library: Path, ahead_s: float, rate: float) -> dict[str, str]:
    """Variables of a program whose clock is so far ahead now, and runs so fast."""
    return {
        "LD_PRELOAD": str(library),
        "WALL_CLOCK_SINCE_S": repr(time.time()),
        "WALL_CLOCK_AHEAD_S": repr(ahead_s),
        "WALL_CLOCK_RATE": repr(rate),
    }
