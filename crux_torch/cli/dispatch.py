"""``crux dispatch``: which GPUs to give to a job."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from crux_torch.cli.sim_options import numbers_table
from crux_torch.dispatch.alternatives import Alternative, alternatives
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Ints
from crux_torch.dispatch.predictor import Samples, fit_uplinks
from crux_torch.dispatch.table import (
    MAX_DEVICES,
    MESSAGE_BYTES,
    HostTable,
    TableError,
    from_csv,
    load,
)
from crux_torch.errors import CruxError


@click.group(invoke_without_command=True)
@click.option("--gpus", "k", type=click.IntRange(1), help="How many the job needs.")
@click.option(
    "--table",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A host's bandwidths: a file of `crux dispatch measure`, or HOST.csv. Repeat it.",
)
@click.option(
    "--uplink",
    "uplinks",
    multiple=True,
    metavar="[HOST=]GB/s",
    help="A host's link to the network, or that of all hosts.",
)
@click.option(
    "--samples",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Choices measured across hosts, from which the links are fitted (docs/dispatch.md).",
)
@click.option(
    "--exclude",
    "excluded",
    multiple=True,
    metavar="HOST[:DEVICE,...]",
    help="What is taken already: a host, or some of its devices. Repeat it.",
)
@click.option("--top", default=3, show_default=True, type=click.IntRange(1), help="Choices shown.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--nodelist", is_flag=True, help="Print the hosts of the best choice, as for Slurm.")
@click.pass_context
def dispatch(
    context: click.Context,
    k: int | None,
    files: Sequence[Path],
    uplinks: Sequence[str],
    samples: Path | None,
    excluded: Sequence[str],
    top: int,
    as_json: bool,
    nodelist: bool,
) -> None:
    """Choose the GPUs with the most bandwidth between them.

    Hosts are those of the tables. Every choice is over other hosts, the best one comes first.
    """
    if context.invoked_subcommand is not None:
        return
    if k is None:
        raise click.UsageError("say how many GPUs with --gpus, or call `crux dispatch measure`")
    try:
        cluster = _cluster(files, uplinks, samples)
        found = list(islice(alternatives(cluster, _free(cluster, excluded), k), top))
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    if nodelist:
        click.echo(",".join(cluster.names(found[0].choice)))
    elif as_json:
        click.echo(json.dumps([_plain(cluster, one) for one in found], indent=1))
    else:
        _print(cluster, found)


def _cluster(
    files: Sequence[Path], uplinks: Sequence[str], samples: Path | None
) -> DispatchCluster:
    if not files:
        raise DispatchError("name a table of each host with --table")
    tables = [_table(file) for file in files]
    names = [table.host for table in tables]
    for name in names:
        if names.count(name) > 1:
            raise DispatchError(f"two tables of the host {name!r}")
    given = DispatchCluster(tables, _uplinks(uplinks, names, needed=samples is None))
    return given if samples is None else fit_uplinks(given, _samples(samples, given))


def _table(file: Path) -> HostTable:
    return from_csv(file, file.stem) if file.suffix == ".csv" else load(file)


def _uplinks(given: Iterable[str], hosts: Sequence[str], needed: bool) -> np.ndarray:
    rates = dict.fromkeys(hosts, 0.0)
    for text in sorted(given, key=lambda text: "=" in text):
        host, _, number = text.rpartition("=")
        try:
            rate = float(number) * 1e9
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1e15:
            raise DispatchError(f"--uplink {text}: expected GB/s, or HOST=GB/s")
        if host and host not in rates:
            raise DispatchError(f"--uplink {text}: no host {host!r}; there are {', '.join(hosts)}")
        rates.update({host: rate} if host else dict.fromkeys(hosts, rate))
    missing = [host for host, rate in rates.items() if not rate]
    if needed and missing and len(hosts) > 1:
        raise DispatchError(
            f"the link of {missing[0]} is not known: give --uplink GB/s, or measured --samples"
        )
    return np.array(list(rates.values()))


def _samples(file: Path, cluster: DispatchCluster) -> Samples:
    """Lines ``HOST:DEVICE,DEVICE HOST:DEVICE;GB/s``."""
    choices, rates = [], []
    try:
        with file.open(newline="") as lines:
            for number, row in enumerate(csv.reader(lines, delimiter=";"), 1):
                if not row or row[0].lstrip().startswith("#"):
                    continue
                where = f"{file}:{number}"
                try:
                    devices, rate = row
                    choice = cluster.choice(dict(_named(part) for part in devices.split()))
                    rates.append(float(rate) * 1e9)
                except ValueError as error:
                    raise DispatchError(
                        f"{where}: expected `HOST:DEVICE,... HOST:DEVICE,...;GB/s`: {error}"
                    ) from None
                if np.count_nonzero(choice) < 2 or not 0 < rates[-1] < 1e15:
                    raise DispatchError(f"{where}: expected a rate, and devices of several hosts")
                choices.append(choice)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{file}: {error}") from None
    return Samples(np.array(choices).reshape(-1, len(cluster.tables)), np.array(rates))


def _named(text: str) -> tuple[str, list[str]]:
    host, colon, devices = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} names no devices")
    return host, devices.split(",")


def _free(cluster: DispatchCluster, excluded: Iterable[str]) -> Ints:
    every = {table.host: list(table.devices) for table in cluster.tables}
    free = cluster.everything
    for text in excluded:
        host, colon, devices = text.partition(":")
        free &= ~cluster.choice({host: devices.split(",") if colon else every.get(host, [])})
    return free


def _plain(cluster: DispatchCluster, one: Alternative) -> dict[str, object]:
    known = np.isfinite(one.bandwidth_Bps)
    return {
        "devices": cluster.names(one.choice),
        "bandwidth_Bps": one.bandwidth_Bps if known else None,
        "limit": one.limit,
    }


def _print(cluster: DispatchCluster, found: Sequence[Alternative]) -> None:
    table = numbers_table("", "devices", "GB/s", "limited by")
    for one in found:
        devices = " ".join(f"{host}:{','.join(d)}" for host, d in cluster.names(one.choice).items())
        rate = f"{one.bandwidth_Bps / 1e9:.1f}" if np.isfinite(one.bandwidth_Bps) else "-"
        table.add_row(devices, rate, one.limit)
    console = Console()
    console.print(table)
    for host in cluster.tables:
        if host.missing:
            console.print(f"{host.host}: {host.missing} sets were not measured, and not considered")


@dispatch.command()
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The table's file.",
)
@click.option("--devices", required=True, type=click.IntRange(2, MAX_DEVICES), help="How many.")
@click.option("--host", help="The host's name in the table; by default its own.")
@click.option("--backend", default="gloo", show_default=True, type=click.Choice(["gloo", "nccl"]))
@click.option(
    "--collective",
    default="all_gather",
    show_default=True,
    type=click.Choice(["all_gather", "all_reduce"]),
)
@click.option("--bytes", "message_bytes", default=MESSAGE_BYTES, show_default=True)
@click.option("--warm-up", default=2, show_default=True, type=click.IntRange(0))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
def measure(out: Path, host: str | None, **how: Any) -> None:
    """Measure every set of this host's devices into a table.

    An interrupted measurement goes on where it stopped.
    """
    # torch is needed here alone.
    from crux_torch.dispatch.measure import Plan, sets_to_measure, this_host
    from crux_torch.dispatch.measure import measure as measured

    plan = Plan(out=out, host=host or this_host(), **how)
    console = Console(stderr=True)
    try:
        _, lacking = sets_to_measure(plan)
        with Progress(*Progress.get_default_columns(), console=console) as bar:
            task = bar.add_task(
                f"{len(lacking)} sets of {plan.devices} devices", total=len(lacking)
            )
            measured(plan, lambda done: bar.update(task, completed=done))
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    _, lacking = sets_to_measure(plan)
    click.echo(f"{out}: {len(lacking)} sets lack a measurement" if lacking else f"{out}: complete")
