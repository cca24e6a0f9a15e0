"""The table of torch's symbols that the extension needs, against the stable ABI."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from places import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nm"), reason="binutils is not installed")
def test_the_table_adds_up_and_the_backends_class_has_no_stable_counterpart() -> None:
    script = [sys.executable, ROOT / "tools/stable_abi.py"]
    table = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    total, stable, other = map(int, re.findall(r"\d+", table.splitlines()[-1]))
    rows = re.findall(r"^ +(\d+)  .*?(\S+)$", table, re.M)
    assert sum(int(count) for count, _ in rows) == total == stable + other
    assert sum(int(count) for count, counterpart in rows if counterpart == "none") == other
    assert re.search(r"c10d::Backend .* none$", table, re.M)
    assert re.search(r"TORCH_CHECK +STD_TORCH_CHECK$", table, re.M)
