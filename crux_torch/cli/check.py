"""``crux check``: do the hosts of a job fit each other?"""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict
from pathlib import Path

import click

from crux_torch.cli.doctor import show
from crux_torch.cli.results import json_option, put_json
from crux_torch.doctor.agreement import compare
from crux_torch.doctor.facts import facts
from crux_torch.doctor.meeting import SALT_BYTES, MeetingError, Met, is_launched, meet
from crux_torch.report.json_text import json_text


@click.command()
@click.option(
    "--wait",
    "patience_s",
    type=click.FloatRange(min=1, max=3600),
    default=30.0,
    metavar="SECONDS",
    help="The longest that ranks wait for each other [default: 30].",
)
@json_option
def check(patience_s: float, json_path: Path | None) -> None:
    """Compare the hosts of a job: names, topology, releases, settings, secret, clocks.

    Start it as the job would be started, on every host, in place of the script:

    \b
    cruxrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d \\
      --rdzv-endpoint head:29400 --crux-store tcp://head:29410 --no-python crux check

    Any launcher will do that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without one, it
    checks this host alone, against the cluster's store. The exit code is 1 if anything is broken.
    """
    if is_launched(os.environ):
        try:
            met = meet(os.environ, patience_s)
        except MeetingError as error:
            raise click.ClickException(str(error)) from None
        if met is None:
            return
    else:
        met = Met(told={0: facts(os.environ, secrets.token_bytes(SALT_BYTES))})
        click.echo(
            "this host alone: start it with the job's launcher to compare all hosts", err=True
        )
    checks = compare(met.told, met.ahead_s, met.silent, patience_s)
    if not put_json(json_path, json_text([asdict(each) for each in checks])):
        show(checks)
    if any(each.state == "broken" for each in checks):
        raise SystemExit(1)
