"""``--json [FILE|-]`` means one thing in every command, and files are replaced whole or not."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from control_fakes import hosted_store, until
from places import ROOT

from crux_torch.agreement.audit import AuditEntry
from crux_torch.cli import main as cli
from crux_torch.cli import results
from crux_torch.network.probe.qos_probe import QosReport
from crux_torch.report.explanation import Explanation
from crux_torch.report.tables import json_text

SCENARIO = ROOT / "examples" / "spines.json"
PAGE = ROOT / "docs/operate/exit-codes.md"
FEW = ("--schedulers", "ecmp,crux")


def commands(command: click.Command, name: tuple[str, ...] = ()) -> dict[tuple[str, ...], set[str]]:
    """The options of every command that is not only a group, by its name."""
    found = {}
    if not isinstance(command, click.Group) or command.invoke_without_command:
        found[name] = {flag for option in command.params for flag in option.opts}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            assert inner is not None
            found |= commands(inner, (*name, each))
    return found


def test_every_command_that_prints_a_table_takes_json() -> None:
    without = {name for name, flags in commands(cli.main).items() if "--json" not in flags}
    # These write a file of their own, serve, or print commands.
    assert without == {
        ("store", "serve"),
        ("env",),  # --format json
        ("exec",),  # it becomes another program
        ("exporter",),
        *(("topology", each) for each in ("import", "export", "draw")),
        ("qos", "listen"),
        *(("dispatch", each) for each in ("measure", "measure-across", "learn", "serve")),
    }


def fields(value: object) -> set[str]:
    """The keys of an object, or of the objects of a list."""
    if isinstance(value, list):
        return set().union(*map(fields, value))
    return set(value) if isinstance(value, dict) else set()


def documented(command: str) -> set[str]:
    """The fields that the page lists for ``command``, or for the longest beginning of it."""
    found: dict[str, set[str]] = {}
    names: list[str] = []
    for cells in re.findall(r"^\|(.*)\|(.*)\|(.*)\|$", PAGE.read_text("utf-8"), re.M):
        here, _, listed = (re.findall("`([^`]+)`", cell) for cell in cells)
        names = here or names
        for name in names:
            found.setdefault(name, set()).update(listed)
    return next(found[name] for name in sorted(found, reverse=True) if command.startswith(name))


def test_the_page_lists_the_fields_of_what_has_a_type() -> None:
    assert documented("explain") == {field.name for field in dataclasses.fields(Explanation)}
    assert documented("cluster audit") == set(AuditEntry.__struct_fields__)
    assert documented("qos check") == set(QosReport.__struct_fields__)


def test_every_help_fits_80_columns_and_has_no_colour() -> None:
    for name in commands(cli.main):
        env = {"COLUMNS": "80", "NO_COLOR": "1"}
        text = CliRunner(env=env).invoke(cli.main, [*name, "--help"]).stdout
        assert text.startswith("Usage: "), name
        assert "\x1b" not in text
        assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("typed", "completed"), [("st", "status"), ("sim co", "compare"), ("sim run --js", "--json")]
)
def test_the_shell_completes_commands_and_options(typed: str, completed: str) -> None:
    words = ["crux", *typed.split(" ")]
    env = {
        "_CRUX_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    shown = CliRunner(env=env).invoke(cli.main, prog_name="crux").stdout.splitlines()
    assert f"plain,{completed}" in shown


CODES = {
    0: ["sim", "run", str(SCENARIO), "--json", "-"],
    1: ["sim", "advise", str(ROOT / "README.md")],
    2: ["sim", "run", "--no-such-option"],
}


@pytest.mark.parametrize("code", CODES)
def test_exit_codes_are_those_of_the_page(code: int) -> None:
    result = CliRunner().invoke(cli.main, CODES[code])
    assert result.exit_code == code
    assert bool(result.stderr) == (code > 0)
    assert "Traceback" not in result.stderr
    assert re.search(rf"^\| {code} \|", PAGE.read_text("utf-8"), re.M)


def test_the_page_has_every_code_that_the_source_ends_with() -> None:
    listed = set(map(int, re.findall(r"^\| (\d+) \|", PAGE.read_text("utf-8"), re.M)))
    ends = re.compile(r"SystemExit\((?:0 if \w[\w.]* else )?(\d+)\)|^INTERRUPTED = (\d+)", re.M)
    sources = [*(ROOT / "crux_torch/cli").rglob("*.py"), *(ROOT / "launcher").rglob("*.py")]
    found = {int(a or b) for file in sources for a, b in ends.findall(file.read_text("utf-8"))}
    assert found
    assert found | {128 + signal.SIGINT, 128 + signal.SIGTERM} <= listed


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with hosted_store() as endpoint:
        yield endpoint


ARGV = {
    "status": ("status",),
    "jobs": ("cluster", "jobs"),
    "plan": ("cluster", "plan"),
    "audit": ("cluster", "audit"),
    "drain": ("cluster", "drain", "gpt"),
    "doctor": ("doctor",),
    "check": ("check",),
    "host": ("host",),
    "probe": ("probe", "127.0.0.1", "--time", "1"),
    "run": ("sim", "run", str(SCENARIO)),
    "compare": ("sim", "compare", str(SCENARIO), *FEW),
    "advise": ("sim", "advise", str(SCENARIO), *FEW),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "doctor" else []) for n in ARGV]
)
def test_json_goes_to_standard_output_alone_or_to_a_file(
    name: str, store: str, tmp_path: Path
) -> None:
    def run(*more: str) -> str:
        env = {"CRUX_STORE": store, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "xterm"}
        result = CliRunner(env=env).invoke(cli.main, [*ARGV[name], *more], color=True)
        assert result.exit_code in ((0, 1) if name == "doctor" else (0,)), result.output
        return result.stdout

    file = tmp_path / "out.json"
    shown = run("--json", str(file))
    with pytest.raises(ValueError, match=r"."):
        json.loads(shown)
    assert "\x1b" not in shown
    assert [line for line in shown.splitlines() if line[:1] in "┏┃┡│└" and len(line) > 80] == []
    in_file = json.loads(file.read_text())
    assert fields(in_file) <= documented(" ".join(word for word in ARGV[name] if "/" not in word))
    for flags in (("--json",), ("--json", "-"), ("--json=-",)):
        assert type(json.loads(run(*flags))) is type(in_file)
    assert os.listdir(tmp_path) == ["out.json"]
    assert not Path("-").exists()


def test_what_has_no_bound_is_null() -> None:
    told = {"a": [sys.float_info.max, -sys.float_info.max, 1e300], "b": (math.inf, math.nan, 1)}
    assert json.loads(json_text(told)) == {"a": [None, None, 1e300], "b": [None, None, 1]}
    row = results.Result("name", {"most": math.inf}, [{"x": math.nan}]).to_json()
    assert json.loads(row) == {
        "benchmark": "name",
        "settings": {"most": None},
        "rows": [{"x": None}],
    }


def test_a_file_that_cannot_be_written_keeps_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    results.write_text(file, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(click.ClickException, match=r"out.json: No space left on device"):
            results.write_text(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]
    results.write_text(file, "new")
    assert file.read_text() == "new"


LONG: list[tuple[str, ...]] = [
    ("status",),
    ("cluster", "audit"),
    ("probe", "127.0.0.1"),
    ("doctor",),
    ("host",),
    ("qos", "check", "127.0.0.1", "--map", "0:0"),
    ("qos", "listen"),
    ("sim", "compare", str(SCENARIO)),
    ("sim", "trace", "--jobs", "500"),
    ("dispatch", "serve", "--table", "{table}", "--uplink", "1", "--port", "0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "number"),
    [*((argv, signal.SIGINT) for argv in LONG), (LONG[7], signal.SIGTERM)],
    ids=lambda given: "-".join(given[:2]) if isinstance(given, tuple) else given.name,
)
def test_a_signal_ends_every_command_with_its_code_and_no_traceback(
    argv: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    # The command stands still in the first thing that it asks of the system: for good, so that
    # the interrupt meets it there however busy the machine is.
    stuck = (
        "import pathlib, sys, time, importlib\n"
        "from crux_torch.cli import main as cli\n"
        "def stand_still(*_, **__):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        "    time.sleep(600)\n"
        "at, name = sys.argv.pop(1).split(':')\n"
        "setattr(importlib.import_module(at), name, stand_still)\n"
        "cli.main(prog_name='crux')\n"
    )
    at = {
        "status": "crux_torch.cli.status:read_status",
        "cluster": "crux_torch.store.endpoint:open_store",
        "probe": "crux_torch.cli.probe:probe",
        "doctor": "crux_torch.cli.doctor:examine",
        "host": "crux_torch.host.nvml:bounded_report",
        "sim": "crux_torch.cli.sim:play",
        "dispatch": "crux_torch.cli.dispatch:dispatcher_of",
    }
    at["qos"] = f"crux_torch.cli.qos:{argv[-1] if argv[-1] == 'listen' else 'check'}"
    where = "crux_torch.cli.sim_trace:run_rows" if argv[1:2] == ("trace",) else at[argv[0]]
    table = tmp_path / "h0.csv"
    table.touch()
    given = [each.format(table=table) for each in argv]
    process = subprocess.Popen(
        [sys.executable, "-c", stuck, where, *given], stderr=subprocess.PIPE, text=True
    )
    try:
        until(ready.exists, what=f"{argv} to begin")
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert "Aborted" not in said
