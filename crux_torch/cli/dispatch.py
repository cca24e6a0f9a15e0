"""``crux dispatch``: GPUs for a job."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial, reduce, wraps
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from crux_torch.cli.progress import counted
from crux_torch.cli.results import FILE, NEW_FILE, STDOUT, json_option, put_json
from crux_torch.dispatch.cluster import MAX_DEVICES, MESSAGE_BYTES, DispatchCluster
from crux_torch.dispatch.dispatcher import HostOptions, dispatcher_of, labels_of, learn_links
from crux_torch.dispatch.search import Choice
from crux_torch.errors import CruxError
from crux_torch.report.tables import Grid, console, json_text, say

_COLLECTIVES = click.Choice(["all_gather", "all_reduce"])
_option = partial(click.option, show_default=True)
_Command = Callable[..., Any]


_MEASURED_OPTIONS = (
    click.option(
        "--table",
        "tables",
        multiple=True,
        type=FILE,
        help="A host's bandwidths: a file of `crux dispatch measure`, or HOST.csv. Repeat it.",
    ),
    click.option(
        "--samples",
        type=FILE,
        help="Choices measured across hosts (`crux dispatch measure-across`), which tell of the "
        "links.",
    ),
    click.option("--store", help="tcp://HOST:PORT of the store, for the jobs that run now."),
    click.option("--cluster", "cluster_name", help="Name of the cluster [default: CRUX_CLUSTER]."),
)
_HOST_OPTIONS = (
    *_MEASURED_OPTIONS,
    click.option(
        "--uplink",
        "uplinks",
        multiple=True,
        metavar="[HOST=]GB/s",
        help="A host's link to the network, or that of all hosts.",
    ),
    click.option(
        "--network", type=FILE, help="A file of `crux dispatch learn`, which predicts the links."
    ),
    click.option(
        "--topology",
        type=FILE,
        help="The cluster's network (docs/operate/topology.md): hosts' links, paths between them.",
    ),
    click.option(
        "--exclude",
        "excluded",
        multiple=True,
        metavar="HOST[:DEVICE,...]",
        help="What is taken already: a host, or some of its devices. Repeat it.",
    ),
    click.option(
        "--like",
        "model",
        metavar="JOB",
        help="The running job that the new one is like [default: the median one].",
    ),
)
_METHOD_OPTIONS = (
    _option(
        "--out",
        required=True,
        type=NEW_FILE,
        help="The file; what it holds already is not measured again.",
    ),
    _option("--devices", required=True, type=click.IntRange(1, MAX_DEVICES)),
    click.option("--host", default=socket.gethostname, help="The host's name; by default its own."),
    _option("--backend", default="gloo", type=click.Choice(["gloo", "nccl"])),
    _option("--collective", default="all_gather", type=_COLLECTIVES),
    _option("--bytes", "message_bytes", default=MESSAGE_BYTES),
    _option("--warm-up", default=2, type=click.IntRange(0)),
    _option("--rounds", default=5, type=click.IntRange(1)),
)


def _with_options(options: Sequence[_Command]) -> Callable[[_Command], _Command]:
    return lambda command: reduce(lambda done, option: option(done), reversed(options), command)


def _host_options(options: Sequence[_Command]) -> Callable[[_Command], _Command]:
    """Gives a command ``options`` as one argument ``hosts``, a :class:`HostOptions`."""

    def decorate(command: _Command) -> _Command:
        @wraps(command)
        def filled(*args: Any, **given: Any) -> Any:
            mine = {f.name: given.pop(f.name) for f in fields(HostOptions) if f.name in given}
            return command(*args, hosts=HostOptions(**mine), **given)

        return _with_options(options)(filled)

    return decorate


@click.group(invoke_without_command=True)
@click.option("--gpus", "k", type=click.IntRange(1), help="How many the job needs.")
@_host_options(_HOST_OPTIONS)
@click.option("--top", default=3, show_default=True, type=click.IntRange(1), help="Choices shown.")
@json_option
@click.option("--nodelist", is_flag=True, help="Print the hosts of the best choice, as for Slurm.")
@click.pass_context
def dispatch(
    context: click.Context,
    /,
    hosts: HostOptions,
    k: int | None,
    top: int,
    json_path: Path | None,
    nodelist: bool,
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
    asked = dispatcher_of(hosts)
    found = list(islice(asked.choices(k), top))
    if put_json(json_path, json_text([asked.plain(one) for one in found])):
        return
    if nodelist:
        click.echo(",".join(dict.fromkeys(host for host, _ in asked.ranks(found[0].devices))))
    else:
        _print(asked.cluster, found)
        if asked.running is not None and found[0].utilisation is None:
            click.echo("No measured job runs on the network: the choice is by bandwidth alone.")


def _print(cluster: DispatchCluster, found: Sequence[Choice]) -> None:
    def rate(Bps: float) -> str:
        return f"{Bps / 1e9:.1f}" if np.isfinite(Bps) else "-"

    rows = []
    for one in found:
        names = cluster.names(one.devices)
        row = {"devices": " ".join(f"{host}:{','.join(d)}" for host, d in names.items())}
        row["GB/s"] = rate(one.alone_Bps)
        if one.now_Bps is not None and one.utilisation is not None:
            row |= {"GB/s now": rate(one.now_Bps), "GPUs busy": f"{one.utilisation:.1%}"}
        rows.append({**row, "limited by": one.limit})
    to = console()
    Grid(rows, text=("devices", "limited by")).print(to)
    for host in cluster.tables:
        if host.missing:
            say(to, f"{host.host}: {host.missing} sets were not measured, and not considered")


@dispatch.command()
@_with_options(_METHOD_OPTIONS)
def measure(**method: Any) -> None:
    """Measure every set of this host's devices into a table.

    An interrupted measurement goes on where it stopped.
    """
    # torch is needed here alone.
    from crux_torch.dispatch.measure import Method, sets_to_measure
    from crux_torch.dispatch.measure import measure as measure_sets

    plan = Method(**method)
    _, lacking = sets_to_measure(plan)
    with counted(f"sets of {plan.devices} devices", len(lacking)) as say_done:
        measure_sets(plan, lambda done: say_done(done, None))
    _, lacking = sets_to_measure(plan)
    click.echo(
        f"{plan.out}: {f'{len(lacking)} sets lack a measurement' if lacking else 'complete'}"
    )


@dispatch.command("measure-across")
@_with_options(_METHOD_OPTIONS)
@click.option("--hosts", required=True, type=click.IntRange(2), help="How many take part.")
@click.option("--host-rank", required=True, type=click.IntRange(0), help="Which of them this is.")
@click.option(
    "--rendezvous",
    required=True,
    metavar="HOST:PORT",
    help="Where they meet: an address of host 0, and a port that is free there.",
)
@click.option("--number", default=200, show_default=True, type=click.IntRange(1), help="Choices.")
def measure_across(rendezvous: str, **method: Any) -> None:
    """Measure choices across hosts, for --samples. Call it on every host at once.

    Host 0 writes the file. Gloo needs GLOO_SOCKET_IFNAME where a host's name is not the address
    that the others reach it by.
    """
    from crux_torch.dispatch.measure import AcrossPlan
    from crux_torch.dispatch.measure import measure_across as measure_choices

    address, _, port = rendezvous.rpartition(":")
    if not address or not port.isdecimal():
        raise click.UsageError(f"--rendezvous {rendezvous}: expected HOST:PORT")
    plan = AcrossPlan(address=address, port=int(port), **method)
    if plan.host_rank >= plan.hosts:
        raise click.UsageError(f"--host-rank {plan.host_rank}: expected 0 to {plan.hosts - 1}")
    try:
        with counted("choices across hosts") as say_done:
            number = measure_choices(plan, say_done)
    except (CruxError, RuntimeError) as error:
        raise click.ClickException(str(error)) from None
    if plan.host_rank == 0:
        click.echo(f"{plan.out}: {number} choices measured")


@dispatch.command()
@_host_options(_MEASURED_OPTIONS)
@_option(
    "--network",
    "file",
    required=True,
    type=NEW_FILE,
    help="The file of the network; one that is there learns on.",
)
def learn(hosts: HostOptions, file: Path) -> None:
    """Teach a network the hosts' links: by measured choices, and by what running jobs measured.

    It replays what it learned before, so it can be called again and again.
    """
    with counted("epochs (it may stop early)") as trained:
        learner, cluster, found, replayed = learn_links(hosts, file, trained)
    if not len(found):
        click.echo(f"{file}: nothing new")
        return
    click.echo(
        f"{file}: {len(found)} samples learned, {replayed} replayed; "
        f"mean error {learner.error(cluster, found):.1%} on the new ones"
    )


@dispatch.command()
@_host_options(_HOST_OPTIONS)
@click.option("--listen", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8888, show_default=True, type=click.IntRange(0, 65535))
def serve(hosts: HostOptions, listen: str, port: int) -> None:
    """Serve as a scheduler extender for Kubernetes (docs/operate/dispatch.md).

    kube-scheduler posts to /filter and /prioritize. The jobs that run are read again for each.
    """
    try:
        from crux_torch.dispatch.serve import Extender, server_of
    except ImportError as error:
        raise click.ClickException(f"{error}: pip install 'crux-torch[serve]'") from None
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    try:
        dispatcher_of(hosts)
        listener = socket.create_server((listen, port), family=family)
    except (CruxError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"listening on {listen}:{listener.getsockname()[1]}")
    with listener:
        server_of(Extender(lambda: dispatcher_of(hosts))).run([listener])


@dispatch.command()
@_host_options(_HOST_OPTIONS)
@json_option
def labels(hosts: HostOptions, json_path: Path | None) -> None:
    """Print commands that label the hosts' Kubernetes nodes with their bandwidths."""
    found = labels_of(dispatcher_of(hosts).cluster)
    if put_json(json_path, json_text(found)):
        return
    for host, pairs in found.items():
        given = " ".join(f"{key}={value}" for key, value in pairs.items())
        click.echo(f"kubectl label --overwrite node {host} {given}")
