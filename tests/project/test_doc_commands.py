"""Every command in README, CONTRIBUTING and docs/ exists, and has the options shown."""

from __future__ import annotations

import importlib
import importlib.util
import re

import click
import pytest
from doc_commands import Shown, shown
from places import ROOT

from crux_torch.cli.main import main as crux

SHOWN = list(shown())
#: What stands for something in a command: JOB, FILES..., `...`.
PLACEHOLDER = re.compile(r"[A-Z]+\d?(\.\.\.)?|\.\.\.")
#: Types whose values don't depend on the machine.
CHECKED = (click.Choice, click.IntRange, click.FloatRange)
pytestmark = pytest.mark.slow


def by(*words: str) -> list[Shown]:
    return [one for one in SHOWN if one.words[: len(words)] == list(words)]


def parse(command: click.Command, given: list[str], parent: click.Context | None = None) -> None:
    """Parse ``given`` as click does.

    Raises:
        click.UsageError: there is no such command, option, choice or argument.
    """
    context = click.Context(
        command, info_name=command.name, parent=parent, **command.context_settings
    )
    options, rest, _ = command.make_parser(context).parse_args(list(given))
    if isinstance(command, click.Group):
        if rest and not PLACEHOLDER.fullmatch(rest[0]):
            _, sub, rest = command.resolve_command(context, rest)
            assert sub is not None
            parse(sub, rest, context)
    elif not (context.ignore_unknown_options or all(map(PLACEHOLDER.fullmatch, rest))):
        raise click.UsageError(f"unexpected among {rest}")
    for param in command.params:
        values = options.get(param.name or "")
        for value in values if isinstance(values, list) else [values]:
            given_value = isinstance(value, str) and not PLACEHOLDER.fullmatch(value)
            if given_value and isinstance(param.type, CHECKED):
                param.type.convert(value, param, context)


def refused(command: click.Command, cases: list[tuple[Shown, list[str]]]) -> list[str]:
    found = []
    for one, given in cases:
        try:
            try:
                parse(command, given)
            except click.BadOptionUsage:
                # A sentence names the option without a value.
                parse(command, [*given, "X"])
        except click.UsageError as error:
            found.append(f"{one}: {error.format_message()}")
    return found


def test_the_commands_of_crux_exist() -> None:
    cases = [(one, one.words[1:]) for one in by("crux")]
    assert len(cases) > 100
    assert refused(crux, cases) == []


def test_a_wrong_option_or_command_is_found() -> None:
    wrong = [["status", "--wider"], ["stats"], ["topology", "draw", "a", "b"]]
    assert len(refused(crux, [(Shown("x.md", words), words) for words in wrong])) == 3


def test_the_flags_of_cruxrun_exist(capsys: pytest.CaptureFixture[str]) -> None:
    launch = pytest.importorskip("cruxrun.main")
    parser = launch.get_args_parser()
    cases = by("cruxrun")
    assert len(cases) > 30
    for one in cases:
        # A policy is checked as it is parsed. A sentence may name a flag without a value.
        words = ["crux" if word == "NAME" else word for word in one.words[1:] if word != "..."]
        if {"--version", "--help"}.isdisjoint(words):
            try:
                parser.parse_args([*words, "VALUE", "train.py"])
            except SystemExit:
                pytest.fail(f"{one}: {capsys.readouterr().err}")


def test_the_targets_and_variables_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    read = makefile + (ROOT / "lab/rdma/kernel.py").read_text()
    targets = set(re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.M)[1].split())  # type: ignore[index]
    cases = by("make")
    assert len(cases) > 20
    for one in cases:
        for word in one.words[1:]:
            name, equals, _ = word.partition("=")
            assert re.search(rf"\b{name}\b", read) if equals else name in targets, str(one)


@pytest.mark.parametrize(
    ("module", "file", "name"),
    [("evaluation", "evaluation.__main__", "evaluation"), ("lab", "lab.demo", "main")],
)
def test_the_commands_of_our_modules_exist(module: str, file: str, name: str) -> None:
    pytest.importorskip("torch")
    command = getattr(importlib.import_module(file), name)
    cases = [(one, one.words[3:]) for one in by("python", "-m", module)]
    assert cases
    assert refused(command, cases) == []


def test_the_files_that_python_runs_exist() -> None:
    for one in by("python"):
        file = one.words[1]
        if file == "-m":
            assert importlib.util.find_spec(one.words[2]), str(one)
        elif file.endswith(".py") and "TARGET" not in file and not PLACEHOLDER.fullmatch(file):
            assert (ROOT / file).is_file() or file == "train.py", str(one)
