"""``crux dispatch``: which GPUs to give to a job."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from crux_torch.cli.sim_options import numbers_table
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Ints
from crux_torch.dispatch.dispatcher import Dispatcher, Ranked
from crux_torch.dispatch.newcomer import uplinks_Bps
from crux_torch.dispatch.predictor import Samples, fit_uplinks
from crux_torch.dispatch.running import look
from crux_torch.dispatch.table import (
    MAX_DEVICES,
    MESSAGE_BYTES,
    HostTable,
    TableError,
    from_csv,
    load,
)
from crux_torch.errors import CruxError
from crux_torch.fabric.loaders import load_topology
from crux_torch.fabric.topology import Topology
from crux_torch.settings import Settings


def _hosts_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What the hosts are, what is taken, and what runs there."""
    for option in reversed(
        (
            click.option(
                "--table",
                "files",
                multiple=True,
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="A host's bandwidths: a file of `crux dispatch measure`, or HOST.csv. "
                "Repeat it.",
            ),
            click.option(
                "--uplink",
                "uplinks",
                multiple=True,
                metavar="[HOST=]GB/s",
                help="A host's link to the network, or that of all hosts.",
            ),
            click.option(
                "--samples",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="Choices measured across hosts, from which the links are fitted "
                "(docs/dispatch.md).",
            ),
            click.option(
                "--topology",
                "topology_file",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="The cluster's network (docs/topology.md): hosts' links, and the paths "
                "between them.",
            ),
            click.option(
                "--exclude",
                "excluded",
                multiple=True,
                metavar="HOST[:DEVICE,...]",
                help="What is taken already: a host, or some of its devices. Repeat it.",
            ),
            click.option(
                "--store", help="tcp://HOST:PORT of the store, for the jobs that run now."
            ),
            click.option(
                "--cluster", "cluster_name", help="Name of the cluster [default: CRUX_CLUSTER]."
            ),
            click.option(
                "--like",
                "model",
                metavar="JOB",
                help="The running job that the new one is like [default: the median one].",
            ),
        )
    ):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@click.option("--gpus", "k", type=click.IntRange(1), help="How many the job needs.")
@_hosts_options
@click.option("--top", default=3, show_default=True, type=click.IntRange(1), help="Choices shown.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--nodelist", is_flag=True, help="Print the hosts of the best choice, as for Slurm.")
@click.pass_context
def dispatch(
    context: click.Context,
    /,
    k: int | None,
    top: int,
    as_json: bool,
    nodelist: bool,
    **hosts: Any,
) -> None:
    """Choose the GPUs with the most bandwidth between them.

    Hosts are those of the tables. Every choice is over other hosts, the best one comes first. With
    --store, the best is the one that keeps the GPUs of all jobs the busiest.
    """
    if context.invoked_subcommand is not None:
        return
    if k is None:
        raise click.UsageError("say how many GPUs with --gpus, or call `crux dispatch measure`")
    try:
        asked = _dispatcher(**hosts)
        found = list(islice(asked.choices(k), top))
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    if nodelist:
        click.echo(",".join(dict.fromkeys(host for host, _ in asked.ranks(found[0]))))
    elif as_json:
        click.echo(json.dumps([_plain(asked, one) for one in found], indent=1))
    else:
        _print(asked.cluster, found)
        if asked.running is not None and found[0].utilisation is None:
            click.echo("No measured job runs on the network: the choice is by bandwidth alone.")


def _dispatcher(
    files: Sequence[Path],
    uplinks: Sequence[str],
    samples: Path | None,
    topology_file: Path | None,
    excluded: Sequence[str],
    store: str | None,
    cluster_name: str | None,
    model: str | None,
) -> Dispatcher:
    given = {"CRUX_STORE": store, "CRUX_CLUSTER": cluster_name}
    settings = Settings.from_env({**os.environ, **{k: v for k, v in given.items() if v}})
    named = store or os.environ.get("CRUX_STORE")
    if model and not named:
        raise DispatchError("--like JOB: name the store with --store, or CRUX_STORE")
    running = None
    if named and settings.store != "none":
        running = look(settings.store, settings.store_secret, settings.cluster)
    topology = load_topology(topology_file) if topology_file else None
    known = topology or (running.topology if running else None)
    cluster = _cluster(files, uplinks, samples, known)
    return Dispatcher(cluster, _free(cluster, excluded), topology, running, model)


def _cluster(
    files: Sequence[Path],
    uplinks: Sequence[str],
    samples: Path | None,
    topology: Topology | None,
) -> DispatchCluster:
    if not files:
        raise DispatchError("name a table of each host with --table")
    tables = [_table(file) for file in files]
    names = [table.host for table in tables]
    for name in names:
        if names.count(name) > 1:
            raise DispatchError(f"two tables of the host {name!r}")
    known = uplinks_Bps(topology, names) if topology is not None else dict.fromkeys(names, 0.0)
    rates = _uplinks(uplinks, known, needed=samples is None)
    given = DispatchCluster(tables, rates)
    return given if samples is None else fit_uplinks(given, _samples(samples, given))


def _table(file: Path) -> HostTable:
    return from_csv(file, file.stem) if file.suffix == ".csv" else load(file)


def _uplinks(given: Iterable[str], known: Mapping[str, float], needed: bool) -> np.ndarray:
    rates, hosts = dict(known), list(known)
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
            f"the link of {missing[0]} is not known: give --uplink GB/s, a --topology, or measured "
            "--samples"
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


def _plain(asked: Dispatcher, one: Ranked) -> dict[str, object]:
    """As JSON has it; rates that are not bounded are null."""
    found: dict[str, object] = {
        "devices": asked.cluster.names(one.choice),
        "ranks": [f"{host}:{device}" for host, device in asked.ranks(one)],
        "bandwidth_Bps": one.alone_Bps if np.isfinite(one.alone_Bps) else None,
        "limit": one.limit,
    }
    if one.now_Bps is not None:
        found["now_Bps"] = one.now_Bps if np.isfinite(one.now_Bps) else None
        found["utilisation"] = one.utilisation
    return found


def _print(cluster: DispatchCluster, found: Sequence[Ranked]) -> None:
    beside = found[0].utilisation is not None
    more = ("GB/s now", "GPUs busy") if beside else ()
    table = numbers_table("", "devices", "GB/s", *more, "limited by")
    for one in found:
        devices = " ".join(f"{host}:{','.join(d)}" for host, d in cluster.names(one.choice).items())
        rates = [one.alone_Bps] if one.now_Bps is None else [one.alone_Bps, one.now_Bps]
        cells = [f"{rate / 1e9:.1f}" if np.isfinite(rate) else "-" for rate in rates]
        busy = [] if one.utilisation is None else [f"{one.utilisation:.1%}"]
        table.add_row(devices, *cells, *busy, one.limit)
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


@dispatch.command()
@_hosts_options
@click.option("--listen", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8888, show_default=True, type=click.IntRange(0, 65535))
def serve(listen: str, port: int, **hosts: Any) -> None:
    """Serve as a scheduler extender for Kubernetes (docs/dispatch.md).

    kube-scheduler posts to /filter and /prioritize. The jobs that run are read again for each.
    """
    from crux_torch.dispatch.extender import Extender
    from crux_torch.dispatch.extender import serve as server_of

    try:
        _dispatcher(**hosts)
        server = server_of(Extender(lambda: _dispatcher(**hosts)), listen, port)
    except (CruxError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"listening on {listen}:{server.server_port}")
    with server:
        server.serve_forever()


@dispatch.command()
@_hosts_options
def labels(**hosts: Any) -> None:
    """Print commands that label the hosts' Kubernetes nodes with their bandwidths."""
    from crux_torch.dispatch.extender import labels as labels_of

    try:
        found = labels_of(_dispatcher(**hosts))
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    for host, pairs in found.items():
        told = " ".join(f"{key}={value}" for key, value in pairs.items())
        click.echo(f"kubectl label --overwrite node {host} {told}")
