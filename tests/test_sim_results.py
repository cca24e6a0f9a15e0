"""Result files: written as they are read, and clear about what is wrong in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from crux_torch.sim.results import Result, ResultError, read_result, write_result


def test_round_trip(tmp_path: Path) -> None:
    result = Result("testbed", {"draws": 2}, [{"gain": 0.1 + 0.2}])
    data, table = write_result(result, "a table\n", tmp_path / "new")
    assert read_result(data) == result
    assert table.read_text() == "a table\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"bad.json: line 1: .*; expected JSON"),
        ("[]", "expected an object with benchmark, settings and rows"),
        ('{"settings": {}, "rows": []}', "benchmark is None; expected a name"),
        ('{"benchmark": "b", "settings": 3, "rows": []}', "settings is 3; expected an object"),
        ('{"benchmark": "b", "settings": {}, "rows": {}}', "rows is {}; expected a list"),
        (
            '{"benchmark": "b", "settings": {}, "rows": [{}, 5]}',
            r"rows\[1\] is 5; expected an object",
        ),
    ],
)
def test_bad_files_are_named(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ResultError, match=words):
        read_result(file)


def test_missing_and_unwritable(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="can't be read"):
        read_result(tmp_path / "none.json")
    (tmp_path / "taken").write_text("")
    with pytest.raises(ResultError, match="can't be written"):
        write_result(Result("b", {}, []), "", tmp_path / "taken")
