"""``crux exec``: traffic class and path for a program that is no training job."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import select
import signal
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import click
import msgspec

from crux_torch.agreement.programs import ProgramRecord, programs_prefix
from crux_torch.apply import preload, verbs_shim
from crux_torch.apply.program import Unreachable, find_program
from crux_torch.errors import CruxError, SettingsError, StoreError
from crux_torch.host.interfaces import read_devices
from crux_torch.host.machine import host_in
from crux_torch.network.loaders import load_topology
from crux_torch.network.qos import Qos, program_level, with_qos
from crux_torch.network.routes import HostRoute, planned_paths, routers, routes_of
from crux_torch.network.topology import Topology, TopologyError
from crux_torch.settings import ATTACH_VARIABLE, Settings
from crux_torch.store import SharedStore
from crux_torch.store.endpoint import open_store

#: ssh and DNS: connections that carry no data of the program.
LEFT_PORTS = (22, 53)
#: What one environment variable may hold: MAX_ARG_STRLEN of the kernel, less the name.
MAX_LINES_BYTES = 130_000
#: Exit codes of shells and env(1): CMD can't be run, CMD was not found.
CANNOT_RUN, NOT_FOUND = 126, 127


def route_lines(
    dscp: int | None, qp_dscp: int | None, overrides: bool, routes: Iterable[HostRoute] = ()
) -> str:
    """Returns routes as text (csrc/transport/route_file.h): to any address, then to those given.

    Args:
        dscp, qp_dscp: of TCP connections and of queue pairs; None: they are left as they are.
        overrides: ``qp_dscp`` is also for queue pairs whose program chose a class.
    """
    marks = "" if dscp is None else f" dscp {dscp}"
    marks += "" if qp_dscp is None else f" qp_dscp {qp_dscp} overrides {int(overrides)}"
    lines = [f"*{marks}"]
    for route in routes:
        hops = "".join(f" via {ttl}:{','.join(addresses)}" for ttl, addresses in route.hops)
        lines += [f"{destination}{hops}{marks}" for destination in route.destinations]
    return "\n".join(lines) + "\n"


def routes_through(topology: Topology, host: str, switch: str) -> tuple[HostRoute, ...]:
    """Returns the routes from ``host`` that cross ``switch``, to each host that has one.

    Raises:
        TopologyError: no path crosses it, or no router that answers tells it from the others.
    """
    if switch not in topology.nodes or topology.host_of(switch) is not None:
        raise TopologyError(f"--through {switch}: the topology has no such switch")
    chosen = {}
    for other in topology.hosts:
        if other == host:
            continue
        paths = topology.candidate_paths(host, other)
        crossing = [path for path in paths if switch in routers(path, topology)]
        if 0 < len(crossing) < len(paths):
            chosen[host, other] = crossing[0]
    found = routes_of(planned_paths(chosen, topology), topology.hosts, topology)
    routes = tuple(route for route in found.routes if route.src == host)
    if not routes:
        why = "; ".join(found.problems) or f"no host has a choice of paths from {host} through it"
        raise TopologyError(f"--through {switch}: {why}")
    return routes


def _routes(settings: Settings, topology: Topology | None, switch: str) -> tuple[HostRoute, ...]:
    if topology is None:
        raise SettingsError("--through needs a topology: give --topology")
    if not settings.paths:
        raise SettingsError("--through has no effect: CRUX_PATHS=0 switches paths off")
    return routes_through(topology, host_in(topology, settings.host), switch)


class Start(NamedTuple):
    """The start of a program.

    Attributes:
        variables: that it starts with, beside its own; empty if nothing is marked.
        said: one line about them.
        settings: of the store that the program is listed in.
        row: of `crux status`; None if nothing is marked.
    """

    variables: dict[str, str]
    said: str
    settings: Settings
    row: ProgramRecord | None


def start_of(
    env: Mapping[str, str],
    name: str,
    level: int | None,
    through: str | None,
    left_ports: Iterable[int],
) -> Start:
    """Returns how the program starts.

    Raises:
        CruxError: the operator's settings don't allow it, or the library can't be loaded.
    """
    settings = Settings.from_env(env)
    topology = load_topology(settings.topology) if settings.topology else None
    qos: Qos | None = topology.qos if topology is not None else None
    settings = with_qos(settings, qos)
    level = program_level(settings, qos, name, level)
    tcp, rdma = settings.marks.tcp, settings.marks.rdma
    dscp, qp_dscp = tcp[level] if tcp else None, rdma[level] if rdma else None
    routes = _routes(settings, topology, through) if through else ()
    if settings.dry_run or settings.disable:
        switch = "CRUX_DISABLE" if settings.disable else "CRUX_DRY_RUN"
        return Start({}, f"{name}: nothing is marked: {switch} is set", settings, None)
    if not settings.transport:
        raise SettingsError("CRUX_TRANSPORT=0 switches the library off that marks connections")
    if obstacle := preload.obstacle():
        raise SettingsError(obstacle)
    lines = route_lines(dscp, qp_dscp, settings.override_ib_tc, routes)
    if len(lines) > MAX_LINES_BYTES:
        raise SettingsError(f"--through: {len(routes)} routes are more than a variable can hold")
    left = ",".join(map(str, sorted(set(left_ports))))
    added = preload.environment(settings, env) | {
        "CRUX_TRANSPORT_STEER_ALL": "1",
        "CRUX_TRANSPORT_ROUTE_LINES": lines,
        "CRUX_TRANSPORT_SKIP_PORTS": left,
        # A program with torch in it is no job here.
        ATTACH_VARIABLE: "0",
    }
    gets = [f"TCP DSCP {dscp}"] if dscp is not None else []
    # The shim for libibverbs is preloaded only where there are devices.
    shimmed = qp_dscp is not None and read_devices() and verbs_shim.NCCL_VARIABLE in added
    if qp_dscp is not None and read_devices():
        gets.append(f"queue pairs DSCP {qp_dscp}" if shimmed else "queue pairs keep their class")
    path = f", through {through} to {len(routes)} hosts" if through else ""
    said = f"{name} at level {level}: {', '.join(gets) or 'no class'}{path}"
    row = ProgramRecord(
        name=name,
        host=settings.host or socket.gethostname(),
        pid=os.getpid(),
        user=user_name(),
        level=level,
        dscp=dscp,
        qp_dscp=qp_dscp if shimmed else None,
        through=through or "",
    )
    said = f"{said}; left alone: loopback, UDP, ports {left or 'none'}"
    return Start(added, said, settings, row)


def _ports(ctx: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        ports = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        ports = (0,)
    if any(not 0 < port < 65536 for port in ports):
        raise click.BadParameter("expected ports from 1 to 65535, separated by commas")
    return ports


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("--name", required=True, help="Name of the program in the operator's settings.")
@click.option(
    "--level",
    type=click.IntRange(0, 63),
    help="Priority level [default: the highest that the operator allows that name].",
)
@click.option(
    "--topology",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Topology file [default: CRUX_TOPOLOGY].",
)
@click.option("--through", metavar="SWITCH", help="Let TCP connections cross this switch.")
@click.option(
    "--leave-ports",
    "left_ports",
    default=",".join(map(str, LEFT_PORTS)),
    show_default=True,
    metavar="PORT,...",
    callback=_ports,
    help="Ports of services whose connections stay as they are, on either end.",
)
@click.option("--quiet", is_flag=True, help="Say nothing unless it fails.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD ...")
def exec_command(
    name: str,
    level: int | None,
    topology: Path | None,
    through: str | None,
    left_ports: tuple[int, ...],
    quiet: bool,
    command: tuple[str, ...],
) -> None:
    """Run CMD, and give its TCP connections and queue pairs a traffic class.

    \b
    export CRUX_DSCP_MAP=0,10,18 CRUX_LEVELS=3 CRUX_PROGRAMS=kv-cache:1
    crux exec --name kv-cache -- python -m http.server

    CMD takes the place of this process: signals and the exit code are its own. The programs that
    it starts are marked, too. `crux status` lists it while it runs. Out of reach are statically
    linked programs, Go programs, programs with privileges of their own (setuid), io_uring, and
    sockets of the kernel (NFS, NVMe over TCP).
    """
    env = dict(os.environ)
    if topology is not None:
        env["CRUX_TOPOLOGY"] = str(topology)
    try:
        start = start_of(env, name, level, through, left_ports)
        program = find_program(command[0], env) if start.variables else command[0]
    except Unreachable as error:
        click.echo(f"crux exec: {error}", err=True)
        raise SystemExit(NOT_FOUND if error.is_absent else CANNOT_RUN) from None
    if not quiet:
        click.echo(f"crux exec: {start.said}", err=True)
    if start.row is not None:
        try:
            keep_listed(start.settings, start.row)
        except (CruxError, OSError) as error:
            click.echo(f"crux exec: `crux status` does not list {name}: {error}", err=True)
    # Python ignores them, and an ignored signal stays so in the next program.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(program, command, env | start.variables)
    except OSError as error:
        click.echo(f"crux exec: {command[0]}: {error.strerror}", err=True)
        found = not isinstance(error, FileNotFoundError)
        raise SystemExit(CANNOT_RUN if found else NOT_FOUND) from None


def user_name() -> str:
    """Returns the name of this process's user; without one, its number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def keep_listed(settings: Settings, row: ProgramRecord) -> None:
    """Keep ``row`` in the cluster's store until this process ends, whatever program it becomes.

    A process of its own does it. It is no child of this one, so the program never waits for it.
    Without a store it waits for one.

    Raises:
        SettingsError: the settings name no store that can be used.
        OSError: the kernel can't tell when a process ends (pidfd), or makes no new one.
    """
    if settings.store == "none":
        return
    store = open_store(settings.store, settings.store_secret, settings.store_group)
    alive = os.pidfd_open(os.getpid())
    between = os.fork()
    if between == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _leave_files(alive)
                _keep(store, settings, row, alive)
        finally:
            os._exit(0)
    os.close(alive)
    os.waitpid(between, 0)


def _leave_files(kept: int) -> None:
    """Close what the program has open, so that its pipes end with it."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != kept:
            with contextlib.suppress(OSError):
                os.close(number)


def _keep(store: SharedStore, settings: Settings, row: ProgramRecord, alive: int) -> None:
    key = f"{programs_prefix(settings.cluster)}{quote(row.host, safe='')}.{secrets.token_hex(8)}"
    value = msgspec.json.encode(row)
    try:
        ended = False
        while not ended:
            with contextlib.suppress(StoreError):
                store.put(key, value, settings.lease_s)
            ended = bool(select.select([alive], [], [], settings.lease_s / 3)[0])
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)
        store.close()
