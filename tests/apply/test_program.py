"""Programs that ``LD_PRELOAD`` can't reach are told by their files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from crux_torch.apply.program import Unreachable, find_program

PYTHON = Path(sys.executable).resolve()


def made(folder: Path, content: bytes, mode: int = 0o755) -> str:
    file = folder / "program"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


Change = Callable[[bytes], bytes]


def changed(at: int, to: bytes) -> Change:
    return lambda image: image[:at] + to + image[at + len(to) :]


def only(content: bytes) -> Change:
    return lambda image: content


def test_programs_and_scripts_that_load_libraries(tmp_path: Path) -> None:
    assert find_program(str(PYTHON), {}) == str(PYTHON)
    assert find_program("sh", {"PATH": os.defpath}) == shutil.which("sh", path=os.defpath)
    script = made(tmp_path, f"#! {PYTHON} -u\n".encode())
    assert find_program(script, {}) == script
    assert find_program("program", {"PATH": str(tmp_path)}) == script


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(4, b"\x01"), "another machine"),
        (changed(18, b"\x16\x00"), "another machine"),
        (changed(56, b"\x00\x00"), "statically linked"),
        (lambda image: image + b"\xff Go buildinf:", "Go program"),
        (lambda image: image.replace(b"ld-linux", b"ld-musl-"), "runs on musl"),
        (lambda image: image[:60], "damaged"),
        (only(b"hello"), "neither an ELF program nor a script"),
        (only(b"#!\n"), "names no interpreter"),
        (only(b"#!/no/such/interpreter\n"), "No such file"),
    ],
    ids=["class", "machine", "static", "Go", "musl", "cut", "text", "empty", "interpreter"],
)
def test_others_are_refused_with_the_reason(change: Change, reason: str, tmp_path: Path) -> None:
    program = made(tmp_path, change(PYTHON.read_bytes()))
    with pytest.raises(Unreachable, match=reason) as refused:
        find_program(program, {})
    assert not refused.value.is_absent


def test_scripts_that_name_one_another_end(tmp_path: Path) -> None:
    file = tmp_path / "program"
    with pytest.raises(Unreachable, match="too many scripts"):
        find_program(made(tmp_path, f"#!{file}\n".encode()), {})


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    made(tmp_path, b"#!/bin/sh\n", mode=0o644)
    for name in ("program", "absent"):
        with pytest.raises(Unreachable, match="not found, or not executable") as refused:
            find_program(name, {"PATH": str(tmp_path)})
        assert refused.value.is_absent


def test_privileges_of_another_user_are_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("giving a file away takes root")
    file = made(tmp_path, PYTHON.read_bytes())
    os.chown(file, 65534, 65534)
    os.chmod(file, 0o4755)
    with pytest.raises(Unreachable, match="setuid"):
        find_program(file, {})
    os.chown(file, 0, 0)
    os.chmod(file, 0o4755)
    assert find_program(file, {}) == file, "it gains nothing"
