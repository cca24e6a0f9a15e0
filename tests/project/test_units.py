"""The units for systemd in deploy/: systemd takes them, and ``crux`` has what they start."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

from crux_torch.cli.main import main

UNITS = sorted((ROOT / "deploy").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_crux_has_the_command(unit: Path) -> None:
    (words,) = re.findall(r"^ExecStart=/opt/crux/bin/crux (.*)$", unit.read_text(), re.MULTILINE)
    result = CliRunner().invoke(main, [*words.split(), "--help"])
    assert result.exit_code == 0, result.output


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="it takes systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    # It wants a program that exists.
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/crux/bin/crux", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
