"""``crux dispatch``: which GPUs to give to a job."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from crux_torch.cli.results import STDOUT, json_option, put_json
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Ints
from crux_torch.dispatch.dispatcher import Dispatcher, Ranked
from crux_torch.dispatch.newcomer import uplinks_Bps
from crux_torch.dispatch.predictor import Network, Samples, fit_uplinks, predicted_links
from crux_torch.dispatch.running import Running, look, measured_by_jobs
from crux_torch.dispatch.samples_file import read_samples
from crux_torch.dispatch.table import (
    MAX_DEVICES,
    MESSAGE_BYTES,
    HostTable,
    from_csv,
    load,
)
from crux_torch.errors import CruxError
from crux_torch.fabric.loaders import load_topology
from crux_torch.fabric.topology import Topology
from crux_torch.report.json_text import json_text
from crux_torch.report.tables import Grid, console, say
from crux_torch.settings import Settings

_table_option = click.option(
    "--table",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A host's bandwidths: a file of `crux dispatch measure`, or HOST.csv. Repeat it.",
)
_samples_option = click.option(
    "--samples",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Choices measured across hosts (`crux dispatch measure-across`), which tell of the links.",
)
_store_option = click.option(
    "--store", help="tcp://HOST:PORT of the store, for the jobs that run now."
)
_cluster_option = click.option(
    "--cluster", "cluster_name", help="Name of the cluster [default: CRUX_CLUSTER]."
)


def _hosts_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What the hosts are, what is taken, and what runs there."""
    for option in reversed(
        (
            _table_option,
            click.option(
                "--uplink",
                "uplinks",
                multiple=True,
                metavar="[HOST=]GB/s",
                help="A host's link to the network, or that of all hosts.",
            ),
            _samples_option,
            click.option(
                "--network",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="A file of `crux dispatch learn`, which predicts the links.",
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
            _store_option,
            _cluster_option,
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
@json_option
@click.option("--nodelist", is_flag=True, help="Print the hosts of the best choice, as for Slurm.")
@click.pass_context
def dispatch(
    context: click.Context,
    /,
    k: int | None,
    top: int,
    json_path: Path | None,
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
    if nodelist and json_path == STDOUT:
        raise click.UsageError("--nodelist and --json exclude each other, unless --json has a FILE")
    try:
        asked = _dispatcher(**hosts)
        found = list(islice(asked.choices(k), top))
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    if put_json(json_path, json_text([_plain(asked, one) for one in found])):
        return
    if nodelist:
        click.echo(",".join(dict.fromkeys(host for host, _ in asked.ranks(found[0]))))
    else:
        _print(asked.cluster, found)
        if asked.running is not None and found[0].utilisation is None:
            click.echo("No measured job runs on the network: the choice is by bandwidth alone.")


def _dispatcher(
    files: Sequence[Path],
    uplinks: Sequence[str],
    samples: Path | None,
    network: Path | None,
    topology_file: Path | None,
    excluded: Sequence[str],
    store: str | None,
    cluster_name: str | None,
    model: str | None,
) -> Dispatcher:
    settings = _settings(store, cluster_name)
    running = _running(settings)
    if model and running is None:
        raise DispatchError("--like JOB: name the store with --store, or CRUX_STORE")
    topology = load_topology(topology_file) if topology_file else None
    known = topology or (running.topology if running else None)
    cluster = _cluster(_tables(files), uplinks, samples, network, known, running)
    return Dispatcher(cluster, _free(cluster, excluded), topology, running, model, settings.policy)


def _settings(store: str | None, cluster: str | None) -> Settings:
    """Those of the environment; without a name the store is ``none``."""
    given = {"CRUX_STORE": store or os.environ.get("CRUX_STORE") or "none"}
    if cluster:
        given["CRUX_CLUSTER"] = cluster
    return Settings.from_env({**os.environ, **given})


def _running(settings: Settings) -> Running | None:
    if settings.store == "none":
        return None
    return look(settings.store, settings.store_secret, settings.cluster, settings.store_group)


def _tables(files: Sequence[Path]) -> list[HostTable]:
    """A table of each host.

    Raises:
        DispatchError: there is none, or two are of one host.
    """
    if not files:
        raise DispatchError("name a table of each host with --table")
    tables = [from_csv(file, file.stem) if file.suffix == ".csv" else load(file) for file in files]
    names = [table.host for table in tables]
    for name in names:
        if names.count(name) > 1:
            raise DispatchError(f"two tables of the host {name!r}")
    return tables


def _cluster(
    tables: Sequence[HostTable],
    uplinks: Sequence[str],
    samples: Path | None,
    network: Path | None,
    topology: Topology | None,
    running: Running | None,
) -> DispatchCluster:
    """The hosts. With samples, their links are fitted from these and from what jobs measured; with
    a network, they are what it predicts.
    """
    if network is not None:
        if samples is not None:
            raise DispatchError("--samples or --network: one of them tells of the links")
        from crux_torch.dispatch.network_file import load_network

        learned, cluster = load_network(network, tables)
        return predicted_links(cluster, learned.predictor(cluster))
    names = [table.host for table in tables]
    known = uplinks_Bps(topology, names) if topology is not None else dict.fromkeys(names, 0.0)
    given = DispatchCluster(tables, _uplinks(uplinks, known, needed=samples is None))
    if samples is None:
        return given
    found = read_samples(samples, given)
    return fit_uplinks(given, found.joined(measured_by_jobs(given, running)) if running else found)


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
            f"the link of {missing[0]} is not known: give --uplink GB/s, a --topology, measured "
            "--samples, or a --network"
        )
    return np.array(list(rates.values()))


def _free(cluster: DispatchCluster, excluded: Iterable[str]) -> Ints:
    every = {table.host: list(table.devices) for table in cluster.tables}
    free = cluster.everything
    for text in excluded:
        host, colon, devices = text.partition(":")
        free &= ~cluster.choice({host: devices.split(",") if colon else every.get(host, [])})
    return free


def _plain(asked: Dispatcher, one: Ranked) -> dict[str, object]:
    """As JSON has it, where rates that are not bounded are null."""
    found: dict[str, object] = {
        "devices": asked.cluster.names(one.choice),
        "ranks": [f"{host}:{device}" for host, device in asked.ranks(one)],
        "bandwidth_Bps": one.alone_Bps,
        "limit": one.limit,
    }
    if one.now_Bps is not None:
        found["now_Bps"] = one.now_Bps
        found["utilisation"] = one.utilisation
    return found


def _print(cluster: DispatchCluster, found: Sequence[Ranked]) -> None:
    beside = found[0].utilisation is not None
    more = ("GB/s now", "GPUs busy") if beside else ()
    headings = ("devices", "GB/s", *more, "limited by")
    rows = []
    for one in found:
        devices = " ".join(f"{host}:{','.join(d)}" for host, d in cluster.names(one.choice).items())
        rates = [one.alone_Bps] if one.now_Bps is None else [one.alone_Bps, one.now_Bps]
        cells = [f"{rate / 1e9:.1f}" if np.isfinite(rate) else "-" for rate in rates]
        busy = [] if one.utilisation is None else [f"{one.utilisation:.1%}"]
        rows.append(dict(zip(headings, (devices, *cells, *busy, one.limit), strict=True)))
    to = console()
    Grid(rows, text=("devices", "limited by")).print(to)
    for host in cluster.tables:
        if host.missing:
            say(to, f"{host.host}: {host.missing} sets were not measured, and not considered")


def _how_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How sets are measured."""
    collectives = click.Choice(["all_gather", "all_reduce"])
    for option in reversed(
        (
            click.option("--devices", required=True, type=click.IntRange(1, MAX_DEVICES)),
            click.option("--host", help="The host's name; by default its own."),
            click.option(
                "--backend",
                default="gloo",
                show_default=True,
                type=click.Choice(["gloo", "nccl"]),
            ),
            click.option("--collective", default="all_gather", show_default=True, type=collectives),
            click.option("--bytes", "message_bytes", default=MESSAGE_BYTES, show_default=True),
            click.option("--warm-up", default=2, show_default=True, type=click.IntRange(0)),
            click.option("--rounds", default=5, show_default=True, type=click.IntRange(1)),
        )
    ):
        command = option(command)
    return command


_out_option = click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file; what it holds already is not measured again.",
)


@dispatch.command()
@_out_option
@_how_options
def measure(out: Path, host: str | None, **how: Any) -> None:
    """Measure every set of this host's devices into a table.

    An interrupted measurement goes on where it stopped.
    """
    # torch is needed here alone.
    from crux_torch.dispatch.measure import Plan, sets_to_measure, this_host
    from crux_torch.dispatch.measure import measure as measured

    plan = Plan(out=out, host=host or this_host(), **how)
    try:
        _, lacking = sets_to_measure(plan)
        with Progress(*Progress.get_default_columns(), console=Console(stderr=True)) as bar:
            task = bar.add_task(
                f"{len(lacking)} sets of {plan.devices} devices", total=len(lacking)
            )
            measured(plan, lambda done: bar.update(task, completed=done))
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    _, lacking = sets_to_measure(plan)
    click.echo(f"{out}: {len(lacking)} sets lack a measurement" if lacking else f"{out}: complete")


@dispatch.command("measure-across")
@_out_option
@_how_options
@click.option("--hosts", required=True, type=click.IntRange(2), help="How many take part.")
@click.option("--host-rank", required=True, type=click.IntRange(0), help="Which of them this is.")
@click.option(
    "--rendezvous",
    required=True,
    metavar="HOST:PORT",
    help="Where they meet: an address of host 0, and a port that is free there.",
)
@click.option("--number", default=200, show_default=True, type=click.IntRange(1), help="Choices.")
def measure_across(out: Path, host: str | None, rendezvous: str, **how: Any) -> None:
    """Measure choices across hosts, for --samples. Call it on every host at once.

    Host 0 writes the file. Gloo needs GLOO_SOCKET_IFNAME where a host's name is not the address
    that the others reach it by.
    """
    from crux_torch.dispatch.measure import this_host
    from crux_torch.dispatch.measure_across import AcrossPlan
    from crux_torch.dispatch.measure_across import measure_across as measured

    address, _, port = rendezvous.rpartition(":")
    if not address or not port.isdecimal():
        raise click.UsageError(f"--rendezvous {rendezvous}: expected HOST:PORT")
    if how["host_rank"] >= how["hosts"]:
        raise click.UsageError(f"--host-rank {how['host_rank']}: expected 0 to {how['hosts'] - 1}")
    plan = AcrossPlan(out=out, host=host or this_host(), address=address, port=int(port), **how)
    try:
        with Progress(*Progress.get_default_columns(), console=Console(stderr=True)) as bar:
            task = bar.add_task("choices across hosts", total=None)
            number = measured(plan, lambda done, all_: bar.update(task, completed=done, total=all_))
    except (CruxError, RuntimeError) as error:
        raise click.ClickException(str(error)) from None
    if plan.host_rank == 0:
        click.echo(f"{out}: {number} choices measured")


@dispatch.command()
@_table_option
@_samples_option
@_store_option
@_cluster_option
@click.option(
    "--network",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file of the network; one that is there learns on.",
)
def learn(
    files: Sequence[Path],
    samples: Path | None,
    store: str | None,
    cluster_name: str | None,
    network: Path,
) -> None:
    """Teach a network the hosts' links: by measured choices, and by what running jobs measured.

    It replays what it learned before, so it can be called again and again.
    """
    import torch

    from crux_torch.dispatch.network_file import load_network, news, save_network

    # The network is too small to gain by more.
    torch.set_num_threads(1)
    try:
        tables = _tables(files)
        running = _running(_settings(store, cluster_name))
        learner, cluster = Network(), DispatchCluster(tables, np.zeros(len(tables)))
        if network.exists():
            learner, cluster = load_network(network, tables)
        found = Samples(np.zeros((0, len(tables)), np.int64), np.zeros(0))
        if samples is not None:
            found = read_samples(samples, cluster)
        if running is not None:
            found = found.joined(measured_by_jobs(cluster, running, claimed=True))
        found = news(learner, found)
        if learner.memory is not None and not len(found):
            click.echo(f"{network}: nothing new")
            return
        replayed = learner.train(cluster, found)
        save_network(network, learner, [table.host for table in cluster.tables])
    except CruxError as error:
        raise click.ClickException(str(error)) from None
    told = f"{network}: {len(found)} samples learned, {replayed} replayed"
    click.echo(f"{told}; mean error {learner.error(cluster, found):.1%} on the new ones")


@dispatch.command()
@_hosts_options
@click.option("--listen", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8888, show_default=True, type=click.IntRange(0, 65535))
def serve(listen: str, port: int, **hosts: Any) -> None:
    """Serve as a scheduler extender for Kubernetes (docs/dispatch.md).

    kube-scheduler posts to /filter and /prioritize. The jobs that run are read again for each.
    """
    from crux_torch.dispatch.extender import Extender

    try:
        from crux_torch.dispatch.serve import server_of
    except ImportError as error:
        raise click.ClickException(f"{error}: pip install 'crux-torch[serve]'") from None
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    try:
        _dispatcher(**hosts)
        listener = socket.create_server((listen, port), family=family)
    except (CruxError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"listening on {listen}:{listener.getsockname()[1]}")
    with listener:
        server_of(Extender(lambda: _dispatcher(**hosts))).run([listener])


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
