"""Long commands say how far they are where there is no terminal, too."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

from crux_torch.cli import progress
from crux_torch.cli.main import main
from crux_torch.cli.progress import counted, tracked


def test_lines_come_after_two_seconds_then_every_five_with_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 1.0, 2.0, 6.0, 7.0, 15.0])
    with counted("plays", clock=lambda: next(times)) as say:
        for done in range(5):
            say(done, 8)
    assert capsys.readouterr().err == "plays: 1 of 8, 14 s left\nplays: 3 of 8, 12 s left\n" + (
        "plays: 4 of 8, 15 s left\n"
    )


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked(range(3), "rows")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert list(tracked(iter("ab"), "rows", 2)) == ["a", "b"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "rows" in err
    assert "/2" in err


def test_a_simulation_tells_its_simulated_time_and_ends_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = json.loads((ROOT / "examples" / "spines.json").read_text()) | {"horizon_s": 6000}
    scenario = tmp_path / "long.json"
    scenario.write_text(json.dumps(long))
    run = ["sim", "run", str(scenario), "--no-skip-repeats", "--json"]
    quick = CliRunner().invoke(main, run)
    assert (quick.exit_code, quick.stderr) == (0, "")
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "PERIOD_S", 0.0)
    told = CliRunner().invoke(main, run)
    assert told.stdout == quick.stdout
    done = [int(n) for n in re.findall(r"^% of 6000 s: (\d+) of 100", told.stderr, re.MULTILINE)]
    assert len(done) > 3
    assert done == sorted(done)
    assert done[-1] == 100
