"""``crux qos``: do marked packets reach their queues?"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import click
import msgspec

from crux_torch.cli.qos_results import remember
from crux_torch.cli.results import FILE, json_option, number, put_json
from crux_torch.errors import CruxError
from crux_torch.host.interfaces import own_addresses
from crux_torch.host.qos import interfaces, read
from crux_torch.network.host_match import hosts_at
from crux_torch.network.loaders import load_topology
from crux_torch.network.probe.live_trace import resolve
from crux_torch.network.probe.qos_listener import PORT, listen
from crux_torch.network.probe.qos_probe import Effort, QosReport, check
from crux_torch.network.qos import with_qos
from crux_torch.network.topology import NETWORK_KINDS, Topology
from crux_torch.report.cluster_status import read_status
from crux_torch.report.tables import Grid, console, json_text, say
from crux_torch.settings import Settings
from crux_torch.words import listed

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kMG]?)(?:bit)?")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
MOST_bps = 400e9
JOBS_NAMED = 4
#: Set by a launcher for its processes.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
#: Time for a process on another host to start, and between two checks with one host.
START_S, BETWEEN_S = 60.0, 15.0


def _bits_per_second(ctx: click.Context, option: click.Parameter, text: str | None) -> float:
    if text is None:
        return 0.0
    found = _RATE.fullmatch(text)
    rate_bps = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0.0 < rate_bps <= MOST_bps:
        raise click.BadParameter("expected bits per second up to 400G, such as 800M or 10G")
    return rate_bps


def _levels(
    ctx: click.Context, option: click.Parameter, text: str | None
) -> Mapping[int, int] | None:
    if text is None:
        return None
    expected = "expected LEVEL:DSCP,LEVEL:DSCP,..., both from 0 to 63, and no level twice"
    if not re.fullmatch(r"\d{1,2}:\d{1,2}(,\d{1,2}:\d{1,2}){0,63}", text):
        raise click.BadParameter(expected)
    pairs = [pair.split(":") for pair in text.split(",")]
    dscp_of = {int(level): int(dscp) for level, dscp in pairs}
    if len(dscp_of) < len(pairs) or max(*dscp_of, *dscp_of.values()) > 63:
        raise click.BadParameter(expected)
    return dscp_of


_port_option = number("--port", 1024, 65535, PORT, "Port of the listener, TCP and UDP.")


@click.group("qos", context_settings={"show_default": True})
def group() -> None:
    """See if marked packets reach their queues."""


@group.command("listen")
@_port_option
@number("--seconds", 1, 86400, 600.0, "Stop after this time.")
@click.option("--sessions", type=click.IntRange(1), help="Stop after this many checks.")
def listen_command(port: int, seconds: float, sessions: int | None) -> None:
    """Tell `crux qos check` on other hosts which of its probes arrive here.

    It needs no privilege, serves one host at a time, and sends only what that host asks for.
    """
    _listen(port, seconds, sessions)


def _listen(port: int, limit_s: float, sessions: int | None) -> None:
    try:
        served = listen(
            port, limit_s, sessions, lambda: click.echo(f"listening on port {port}: TCP and UDP")
        )
    except OSError as error:
        raise click.ClickException(f"can't listen on port {port}: {error.strerror}") from None
    click.echo(f"{served} {'check' if served == 1 else 'checks'}")


@group.command("check")
@click.argument("host", required=False)
@click.option(
    "--load",
    "load_bps",
    metavar="RATE",
    callback=_bits_per_second,
    help="Also load one level with at most RATE bits per second (800M, 10G): a little more than "
    "the narrowest link of the way carries. Without it no queue is tried.",
)
@click.option(
    "--against",
    type=click.IntRange(0, 63),
    metavar="LEVEL",
    help="The level to load, and to compare with [default: the lowest].",
)
@number("--seconds", 1, 120, 12.0, "Probe for this long, each pair of hosts.")
@number(
    "--rate", 1, 1600, 400.0, "Send at most this many probes a second, of all levels together.", "N"
)
@click.option(
    "--topology",
    "topology_path",
    type=FILE,
    help="Topology file: the levels' values, and the names of routers [default: CRUX_TOPOLOGY].",
)
@click.option(
    "--map",
    "given",
    metavar="LEVEL:DSCP,...",
    callback=_levels,
    help="The levels' values [default: those of TCP in the topology's qos, or CRUX_DSCP_MAP].",
)
@click.option("--rdma", is_flag=True, help="Take the values of queue pairs instead of TCP's.")
@click.option(
    "--on",
    metavar="COMMAND",
    help="Without HOST: check a host of each leaf with one of every other leaf. COMMAND runs its "
    "arguments on {host}: 'ssh {host}'.",
)
@_port_option
@json_option
def check_command(
    host: str | None,
    load_bps: float,
    against: int | None,
    seconds: float,
    rate: float,
    topology_path: Path | None,
    given: Mapping[int, int] | None,
    rdma: bool,
    on: str | None,
    port: int,
    json_path: Path | None,
) -> None:
    """Check that packets of each level reach HOST with their mark, and in a queue of their own.

    HOST runs `crux qos listen`. Small datagrams of every level go there, alone and then beside
    load in one level. The exit code is 1 if the mark of a level changes, or if a level is not
    served in its order.

    Under cruxrun, one process a host, in place of the script and without HOST: the others check the
    way to the host of rank 0, one after the other.
    """
    wait_s = 0.0
    rank, world, address = (os.environ.get(name, "") for name in LAUNCHED)
    if host is None and on is None and rank.isdecimal() and world.isdecimal() and address:
        wait_s = START_S + int(world) * (seconds + BETWEEN_S)
        if int(rank) == 0:
            _listen(port, wait_s, int(world) - 1)
            return
        host = address
    if (host is None) == (on is None):
        raise click.UsageError("expected either HOST or, for all pairs of leaves, --on COMMAND")
    try:
        settings = Settings.from_env(os.environ)
        topology, dscp_of, lossless = _known(settings, topology_path, given, rdma)
        reference = min(dscp_of) if against is None else against
        task = Task(topology, dscp_of, reference, Effort(seconds, rate, load_bps), port)
        _refuse(task, lossless)
        if on is not None:
            _check_all(task, on, json_path)
        elif host is not None:
            if load_bps and (jobs := _holders(settings, topology, host)):
                # As Python writes them: other users chose these names.
                named = listed(list(map(repr, jobs)), JOBS_NAMED)
                text = f"jobs here or on {host}: {named}; load delays their level"
                click.echo(f"note: {text} {reference}", err=True)
            _check_one(task, host, wait_s, json_path)
    except OSError as error:
        raise click.ClickException(error.strerror or str(error)) from None


@dataclass(frozen=True, slots=True)
class Task:
    """The levels to check, with how much effort."""

    topology: Topology | None
    dscp_of: Mapping[int, int]
    reference: int
    effort: Effort
    port: int


def _known(
    settings: Settings, topology_path: Path | None, given: Mapping[int, int] | None, rdma: bool
) -> tuple[Topology | None, Mapping[int, int], frozenset[int]]:
    """The topology, the value of each usable level, and the values that the topology has lossless.

    Raises:
        CruxError: the topology can't be used, or contradicts the settings.
        UsageError: nothing gives values.
    """
    path = topology_path or settings.topology
    topology = load_topology(path) if path else None
    qos = topology.qos if topology is not None else None
    classes = (*qos.tcp, *qos.rdma) if qos is not None else ()
    lossless = frozenset(one.dscp for one in classes if one.lossless)
    if given is not None:
        return topology, given, lossless
    marks = with_qos(settings, qos).marks
    values = marks.rdma if rdma else marks.tcp
    if not values:
        raise click.UsageError(
            f"no DSCP values for {'queue pairs' if rdma else 'TCP'}: give --map 0:0,1:10, or set "
            f"CRUX_{'RDMA_' if rdma else ''}DSCP_MAP, or qos in the topology "
            "(docs/operate/classes.md)"
        )
    return topology, {level: values[level] for level in marks.usable}, lossless


def _holders(settings: Settings, topology: Topology | None, destination: str) -> list[str]:
    """The jobs of the cluster's store on this host or ``destination``; none if it has no store."""
    if settings.store == "none":
        return []
    names = {destination, settings.host, socket.gethostname()}
    if topology is not None:
        names.update(hosts_at(topology, (*own_addresses(), resolve(destination))))
    try:
        found = read_status(settings)
    except (CruxError, ModuleNotFoundError):
        return []
    return [job.job for job in found.jobs if names.intersection(job.hosts)]


def _named(report: QosReport, topology: Topology | None) -> QosReport:
    """The report with routers' names instead of their addresses, as far as they are known."""
    if topology is None:
        return report
    levels = []
    for one in report.levels:
        if one.between is not None:
            before, after = (topology.node_at.get(node, node) for node in one.between)
            one = msgspec.structs.replace(one, between=(before, after))
        levels.append(one)
    return msgspec.structs.replace(report, levels=tuple(levels))


def _refuse(task: Task, lossless: frozenset[int]) -> None:
    """Raise a UsageError if the level to load is unknown, or must not be loaded."""
    if task.reference not in task.dscp_of:
        raise click.UsageError(f"--against: expected one of {sorted(task.dscp_of)}")
    dscp = task.dscp_of[task.reference]
    # By the topology, or by the PFC of an interface of this host.
    lossless_here = (read(name).is_lossless(dscp) for name in interfaces())
    if task.effort.load_bps and (dscp in lossless or any(lossless_here)):
        raise click.UsageError(
            f"DSCP {dscp} is lossless (PFC): load in it would make switches pause other traffic; "
            "choose a lossy level with --against, or leave --load out"
        )


def _check_one(task: Task, host: str, wait_s: float, json_path: Path | None) -> None:
    found = check(host, task.dscp_of, task.reference, task.effort, port=task.port, wait_s=wait_s)
    report = _named(found, task.topology)
    if not put_json(json_path, json_text(msgspec.to_builtins(report, str_keys=True))):
        render(report)
    try:
        remember(report)
    except OSError as error:
        click.echo(f"note: crux doctor will not show this: {error}", err=True)
    raise SystemExit(0 if report.is_right else 1)


def _check_all(task: Task, on: str, json_path: Path | None) -> None:
    """Check all pairs, one after the other; say of each what was found."""
    if task.topology is None:
        raise click.UsageError("--on needs --topology, which knows hosts and leaves")
    effort, topology = task.effort, task.topology
    options = ["--port", str(task.port), "--against", str(task.reference)]
    options += ["--rate", f"{effort.rate:g}", "--seconds", f"{effort.seconds:g}"]
    options += ["--map", ",".join(f"{level}:{dscp}" for level, dscp in task.dscp_of.items())]
    options += ["--load", f"{effort.load_bps:.0f}"] if effort.load_bps else []
    pairs = pairs_of_leaves(topology)
    about_s = len(pairs) * (effort.seconds + 3)
    click.echo(f"{len(pairs)} pairs, one after the other: about {about_s:.0f} s", err=True)
    rows, all_right = [], True
    for source, destination in pairs:
        row: dict[str, object] = {"from": source, "to": destination}
        try:
            found = check_pair(topology, (source, destination), on, options, effort.seconds)
        except PairError as error:
            said, right, row["error"] = str(error), False, str(error)
        else:
            report = _named(found, topology)
            said, right = report.summary, report.is_right
            row["report"] = msgspec.to_builtins(report, str_keys=True)
        all_right &= right
        rows.append(row)
        click.echo(f"{source} to {destination}: {said}", err=json_path is not None)
    put_json(json_path, json_text(rows))
    raise SystemExit(0 if all_right else 1)


def render(report: QosReport) -> None:
    """Print a report as a table."""
    to = console()
    about = f"{report.source} to {report.destination}"
    if report.load_bps:
        sent, asked = report.sent_bps / 1e6, report.load_bps / 1e6
        about += f", {sent:.4g} of {asked:.4g} Mbit/s of load in level {report.reference}"
    rows = [
        {
            "level": str(one.level),
            "DSCP": str(one.dscp),
            "seen": ",".join(map(str, one.seen)) or "none",
            "lost": _both(one.loss, one.loss_loaded, 100, "%"),
            "wait ms": _both(one.wait_s, one.wait_loaded_s, 1000, ""),
            "verdict": one.text(report.reference),
        }
        for one in report.levels
    ]
    say(to, about)
    Grid(rows, text=["verdict"]).print(to)
    if report.load_bps:
        say(to, "lost, wait: without load, then with it; wait: beyond the median without load")
    for note in report.notes:
        say(to, f"note: {note}")


def _both(idle: float | None, busy: float | None, times: float, unit: str) -> str:
    def text(value: float) -> str:
        if value == inf:
            return "lost"
        return f"{value * times:.{0 if unit else 1}f}{unit}".replace("-0.0", "0.0")

    return ", ".join(text(value) for value in (idle, busy) if value is not None)


_LONGEST_REPLY = 1 << 20


class PairError(CruxError):
    """A pair of hosts could not be checked. Says why."""


def pairs_of_leaves(topology: Topology) -> tuple[tuple[str, str], ...]:
    """Returns one host below each leaf, paired with that of every other leaf, in both directions.

    Raises:
        PairError: fewer than two leaves have a host with an address.
    """
    below: dict[str, str] = {}
    for edge in topology.edges:
        host = topology.host_of(edge.src)
        is_leaf = topology.nodes[edge.dst].kind in NETWORK_KINDS
        # A host with several leaves stands for one of them only.
        if host in below.values() or not is_leaf:
            continue
        if host is not None and topology.addresses_of(host):
            below.setdefault(edge.dst, host)
    if len(below) < 2:
        raise PairError(
            "the topology has no two leaves with hosts that have addresses: add `addresses` "
            "(docs/operate/topology.md)"
        )
    return tuple(itertools.permutations(below.values(), 2))


def check_pair(
    topology: Topology, pair: tuple[str, str], on: str, options: Sequence[str], seconds: float
) -> QosReport:
    """Returns the result for the way from the first host of ``pair`` to the second.

    Args:
        on: command that runs its further arguments on ``{host}``.
        options: of ``crux qos check`` and, those about the port, of ``crux qos listen``.

    Raises:
        PairError: a command failed on one of them.
    """
    source, destination = pair
    port = ["--port", options[options.index("--port") + 1]]
    limit = ["--sessions", "1", "--seconds", f"{seconds + START_S:.0f}"]
    with _started(_remote(on, destination, ["listen", *port, *limit]), destination):
        address = topology.addresses_of(destination)[0]
        command = _remote(on, source, ["check", address, *options, "--json"])
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds + START_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PairError(f"{source}: {error}") from None
    try:
        return msgspec.json.decode(done.stdout[:_LONGEST_REPLY], type=QosReport)
    except msgspec.MsgspecError:
        raise PairError(f"{source}: {_last_line(done.stderr) or 'no result'}") from None


def _remote(on: str, host: str, arguments: Sequence[str]) -> list[str]:
    if host.startswith("-"):
        raise PairError(f"host {host!r}: its name would be an option of {on!r}")
    return [*(word.replace("{host}", host) for word in shlex.split(on)), "crux", "qos", *arguments]


@contextlib.contextmanager
def _started(command: Sequence[str], host: str) -> Iterator[None]:
    """A listener on a host, from when it is ready to the end of the block."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise PairError(f"{host}: {error}") from None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        if not ready or not process.stdout.readline():
            process.kill()
            said = process.stderr.read(4096).decode(errors="replace")
            raise PairError(f"{host}: no listener: {_last_line(said) or 'it says nothing'}")
        yield
    finally:
        process.kill()
        process.communicate()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
