"""``crux doctor`` checks this machine, and ``crux check`` that the hosts of a job fit each other.

If possible, a check tries the thing itself. Each takes a second or so.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from crux_torch.cli.doctor import gpu, nccl, network, process
from crux_torch.cli.doctor.finding import Check, Part
from crux_torch.cli.qos_results import recall
from crux_torch.cli.results import json_option, put_json
from crux_torch.errors import SettingsError
from crux_torch.host.interfaces import rdma_devices
from crux_torch.host.qos import interfaces, read
from crux_torch.misspelt import misspelt_text
from crux_torch.report.tables import console, json_text, say
from crux_torch.settings import Settings


def examine(env: Mapping[str, str]) -> list[Check]:
    """Returns all checks, in the order in which things depend on each other.

    Args:
        env: the environment that a job would be started in.
    """
    part = Part("settings", "cruxrun does not start a job")
    try:
        settings = Settings.from_env(env)
        first = _no_misspelt(env)
    except SettingsError as error:
        settings = Settings()
        first = part.broken(str(error), "correct the variable")
    settings, said, of_maps = network.maps(settings)
    devices = rdma_devices()
    return [
        first,
        process.torch_release(),
        process.extension(),
        *process.backends(),
        process.autoload(env),
        process.library(),
        process.preload(env, settings),
        *of_maps,
        *process.classes(settings),
        *network.of_interfaces(settings, said, [read(name) for name in interfaces()], devices),
        *network.marked_packets(recall(), time.time()),
        process.source_ports(settings),
        process.pacing(),
        process.probing(),
        process.live_paths(),
        *gpu.gpus(settings),
        *nccl.nccl_choices(env),
        network.verbs(),
        *network.shim(env),
        *network.devices(devices),
        *nccl.traffic_class(env, settings),
        *nccl.defeats(env),
        *network.forced_classes(devices),
        *network.ecn_bits(env, settings, devices),
        gpu.semaphores(settings),
        process.store(settings),
        *network.topology(settings),
        process.namespaces(),
    ]


def _no_misspelt(env: Mapping[str, str]) -> Check:
    part = Part("settings", "it changes nothing, and what it was meant to set keeps its default")
    if unknown := misspelt_text(env):
        return part.missing(unknown, "correct its name, or unset it (docs/operate/settings.md)")
    return part.ok("every CRUX_* variable is valid")


COLOURS = {"ok": "green", "missing": "yellow", "broken": "red"}


@click.command()
@json_option
def doctor(json_path: Path | None) -> None:
    """Check what Crux can use on this machine, and say how to get what is missing.

    "missing": Crux runs, but the named feature is off. "broken": repair it before you start a
    job; the exit code is then 1.
    """
    _report(examine(os.environ), json_path)


def _report(checks: Sequence[Check], json_path: Path | None) -> None:
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
        for words, text in (("this means", check.cost), ("what to do", check.remedy)):
            if text:
                say(to, f"{'':{indent}}{words}: {text}", indent=indent)


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
      --rdzv-endpoint head:29400 --crux-store tcp://head:29410 \\
      --no-python crux check

    Any launcher will do that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without one, it
    checks this host alone, against the cluster's store. The exit code is 1 if anything is broken.
    """
    # They need scipy, which `crux doctor` does without.
    from crux_torch.cli.doctor.agreement import compare, facts
    from crux_torch.cli.doctor.meeting import SALT_BYTES, Met, is_launched, meet

    if is_launched(os.environ):
        met = meet(os.environ, patience_s)
        if met is None:
            return
    else:
        met = Met(told={0: facts(os.environ, secrets.token_bytes(SALT_BYTES))})
        click.echo(
            "this host alone: start it with the job's launcher to compare all hosts", err=True
        )
    _report(compare(met.told, met.ahead_s, met.silent, patience_s), json_path)
