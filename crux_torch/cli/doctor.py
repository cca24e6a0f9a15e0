"""``crux doctor``: what Crux can use on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import click

from crux_torch.doctor import examine

COLOURS = {"ok": "green", "missing": "yellow", "broken": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Check what Crux can use on this machine, and say how to get what is missing.

    "missing": Crux runs, but the named feature is off. "broken": repair it before you start a
    job; the exit code is then 1.
    """
    checks = examine(os.environ)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.part) for check in checks)
        for check in checks:
            state = click.style(f"{check.state:8}", fg=COLOURS[check.state])
            click.echo(f"{state} {check.part:{width}}  {check.finding}")
            indent = " " * (width + 11)
            if check.cost:
                click.echo(f"{indent}this means: {check.cost}")
            if check.remedy:
                click.echo(f"{indent}what to do: {check.remedy}")
    if any(check.state == "broken" for check in checks):
        raise SystemExit(1)
