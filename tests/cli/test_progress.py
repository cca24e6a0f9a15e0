"""Long commands say how far they are where there is no terminal, too."""

from __future__ import annotations

import sys

import pytest

from crux_torch.cli.progress import counted, tracked


def test_lines_come_every_five_seconds_with_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 2.0, 5.0, 6.0, 10.0, 15.0])
    with counted("plays", clock=lambda: next(times)) as say:
        for done in range(5):
            say(done, 8)
    assert capsys.readouterr().err == "plays: 1 of 8, 35 s left\nplays: 3 of 8, 17 s left\n" + (
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
