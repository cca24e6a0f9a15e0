"""NCCL's variables are read as NCCL reads them: compared with the libnccl that torch brought."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crux_torch.apply.nccl import ENVIRONMENT, NcclVariables, Value, Version
from lab.nccl import library
from lab.nccl.library import NcclUnavailableError

START_S = 120.0
#: NCCL puts the variables of its files into the environment when it is first called.
READ = """
import ctypes, json, sys
from lab.nccl import communicator, library
communicator.identity(library.Library(library.installed()))
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(json.dumps({name: (getenv(name.encode()) or b"").decode() for name in sys.argv[1:]}))
"""
CONF = """\
#NCCL_IB_TC=1
NCCL_IB_TC=106
NCCL_IB_TC=107
NCCL_IB_SL = 3
 NCCL_IB_FIFO_TC=4
NCCL_IB_FIFO_TC=8 # tail
NCCL_EMPTY=
NCCL_SET=file
NCCL_KEPT_OUT=file
NCCL_EQUALS=a=b
no value
=no name
NCCL_LAST=5"""
#: NCCL 2.30.3 takes a carriage return off the end of a line; before, it is part of the value.
RETURN = "\nNCCL_RETURN=7\r\n"
NAMES = (
    "NCCL_RETURN",
    "#NCCL_IB_TC",
    "NCCL_IB_TC",
    "NCCL_IB_SL",
    "NCCL_IB_SL ",
    "NCCL_IB_FIFO_TC",
    " NCCL_IB_FIFO_TC",
    "NCCL_EMPTY",
    "NCCL_SET",
    "NCCL_KEPT_OUT",
    "NCCL_EQUALS",
    "NCCL_LAST",
    "NCCL_ABSENT",
)


def nccls(**more: str) -> dict[str, str]:
    """Returns the variables that the real NCCL finds in its files and the environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
    env |= more
    done = subprocess.run(
        [sys.executable, "-c", READ, *NAMES],
        env={**env, "NCCL_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture
def version() -> Version:
    """Release of the NCCL that is compared with."""
    try:
        told = library.Library(library.installed()).version
    except NcclUnavailableError as error:
        pytest.skip(str(error))
    return tuple(map(int, told.split(".")))


@pytest.mark.parametrize("end", ["", "\n", RETURN])
def test_a_file_is_read_as_nccl_reads_it(end: str, tmp_path: Path, version: Version) -> None:
    file = tmp_path / "conf"
    file.write_text(CONF + end)
    env = {"NCCL_CONF_FILE": str(file), "NCCL_SET": "environment", "NCCL_KEPT_OUT": ""}
    ours = NcclVariables(env, system_file=Path("/etc/nccl.conf"), version=version)
    found = {name: ours.get(name) for name in NAMES}
    # NCCL puts an empty value into its environment, and then takes the default.
    told = {name: text or None for name, text in nccls(**env).items()}
    assert {name: value and value.text for name, value in found.items()} == told
    assert found["NCCL_IB_TC"] == Value("106", str(file))
    assert found["NCCL_SET"] == Value("environment", ENVIRONMENT)


def test_the_users_file_is_where_that_nccl_looks(tmp_path: Path, version: Version) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_LAST=home\n")
    env = {"HOME": str(tmp_path)}
    ours = NcclVariables(env, version=version).get("NCCL_LAST")
    assert (ours.text if ours else "") == nccls(**env)["NCCL_LAST"]
    assert NcclVariables({}, version=(2, 30, 7)).get("NCCL_LAST") is None
    newer = NcclVariables(env, version=(2, 30, 3)).get("NCCL_LAST")
    assert newer == Value("home", str(tmp_path / ".nccl.conf"))
    assert NcclVariables(env, version=(2, 29, 7)).get("NCCL_LAST") != newer


def test_the_environment_wins_over_the_users_file_and_that_over_the_systems(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    user, system, named = home / ".nccl.conf", tmp_path / "etc", tmp_path / "named"
    user.write_text("A=user\nB=user\n")
    system.write_text("A=system\nB=system\nC=system\n")
    named.write_text("B=named\n")

    def found(env: dict[str, str]) -> list[str | None]:
        variables = NcclVariables(env, home, system)
        return [value and value.text for value in map(variables.get, "ABC")]

    assert found({"A": "env"}) == ["env", "user", "system"]
    assert found({"NCCL_CONF_FILE": ""}) == ["user", "user", "system"]
    # Named, a file takes the place of the one at home.
    assert found({"NCCL_CONF_FILE": str(named)}) == ["system", "named", "system"]
    assert found({"NCCL_CONF_FILE": str(tmp_path / "absent")}) == ["system"] * 3


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("106", 106),
        ("0x6a", 106),
        ("0152", 106),
        (" 106 # why", 106),
        ("+3", 3),
        ("-1", None),
        ("", None),
        ("none", 0),
        ("0xz", 0),
    ],
)
def test_numbers_are_strtolls(text: str, number: int | None) -> None:
    assert NcclVariables({"N": text}, Path("/none"), Path("/none")).integer("N") == number
