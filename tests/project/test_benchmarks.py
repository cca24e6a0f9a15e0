"""Every benchmark says what it does, and has the options that pages name; CI runs none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import shown
from places import ROOT

pytestmark = pytest.mark.slow

BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_a_benchmark_says_what_it_does(script: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    named = {
        word
        for one in shown()
        if one.words[:2] == ["python", f"benchmarks/{script.name}"]
        or one.words[:3] == ["python", "-m", f"benchmarks.{script.stem}"]
        for word in one.words
        if word.startswith("--")
    }
    assert {word for word in {"--json", *named} if word not in ran.stdout} == set()
