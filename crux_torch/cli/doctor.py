"""``crux doctor``: what Crux can use on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from crux_torch.cli.results import json_option, put_json
from crux_torch.doctor import examine
from crux_torch.doctor.check import Check
from crux_torch.report.json_text import json_text
from crux_torch.report.tables import console, say

COLOURS = {"ok": "green", "missing": "yellow", "broken": "red"}


@click.command()
@json_option
def doctor(json_path: Path | None) -> None:
    """Check what Crux can use on this machine, and say how to get what is missing.

    "missing": Crux runs, but the named feature is off. "broken": repair it before you start a
    job; the exit code is then 1.
    """
    checks = examine(os.environ)
    if not put_json(json_path, json_text([asdict(check) for check in checks])):
        show(checks)
    if any(check.state == "broken" for check in checks):
        raise SystemExit(1)


def show(checks: Sequence[Check]) -> None:
    """Print findings as a table: state, part, finding; below it the cost and the remedy."""
    to = console()
    width = max(len(check.part) for check in checks)
    indent = width + 11
    for check in checks:
        line = f"{check.state:8} {check.part:{width}}  {check.finding}"
        say(to, line, indent=indent, start=len(check.state), style=COLOURS[check.state])
        for words, told in (("this means", check.cost), ("what to do", check.remedy)):
            if told:
                say(to, f"{'':{indent}}{words}: {told}", indent=indent)
