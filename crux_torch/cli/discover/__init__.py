"""``crux topology discover``: finds the network between hosts, and writes its topology file."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import click
import msgspec

from crux_torch._version import __version__
from crux_torch.cli.discover.channel import Channel, Superior
from crux_torch.cli.discover.launch import (
    SSH,
    host_all,
    join_all,
    launched,
    remote_command,
    spawn_over_ssh,
)
from crux_torch.cli.discover.session import Met, State, meet, progress, run
from crux_torch.cli.results import FILE, NEW_FILE, json_option, number
from crux_torch.errors import CruxError
from crux_torch.files import read_file
from crux_torch.host import nvml
from crux_torch.host.interfaces import read_nics
from crux_torch.host.machine import Host, inside_of, machine_id, network_id, read_cpu
from crux_torch.host.pcie import PcieTree
from crux_torch.host.seen import read_seen_host
from crux_torch.network.discover.fragment import SeenHost
from crux_torch.network.discover.hashes import HASH_PORTS
from crux_torch.network.discover.plan import Plan, PlanRules
from crux_torch.network.discover.survey import survey
from crux_torch.network.discover.tasks import DiscoverError, Done, Hello, Leave, Outcome, Task

MAX_HOSTS_FILE_BYTES = 1 << 22
STATE_SUFFIX = ".partial"


def hello(rank: int, name: str, token: str = "", *, inside: bool = True) -> Hello:
    """Returns what this host tells about itself.

    Args:
        name: of this host in the topology.
        inside: tell its inside, too.
    """
    host, notes = read_seen_host(name)
    told = None
    if inside:
        hardware = Host(name, nvml.bounded_report().gpus, read_cpu(), read_nics())
        told = inside_of(hardware, PcieTree.read())
        notes += tuple(told.notes)
    return Hello(
        rank=rank,
        host=host,
        machine=f"{machine_id()} {network_id()}",
        release=__version__,
        token=token,
        inside=msgspec.Raw(msgspec.json.encode(told)),
        notes=tuple(note[:1024] for note in notes[:64]),
    )


def work(
    superior: Superior, first: Hello, survey: Callable[[Task], Iterator[Outcome]] = survey
) -> str:
    """Does the tasks that come until there are no more; returns the problem that ended them."""
    try:
        superior.report(first)
        while True:
            order = superior.next_order()
            if order is None:
                return "the process that plans is gone"
            if isinstance(order, Leave):
                return order.problem
            for outcome in survey(order):
                superior.report(outcome)
            superior.report(Done())
    except OSError as error:
        return f"the process that plans is gone: {error}"


@click.command("discover", context_settings={"show_default": True})
@click.option("--hosts", metavar="H0,H1,...", help="Hosts to run on, over ssh.")
@click.option("--hosts-file", type=FILE, help="File with a host a line, in place of --hosts.")
@click.option(
    "--ssh", default=SSH, metavar="COMMAND", help="Runs a command on a host; {} is the host."
)
@click.option("--remote", metavar="COMMAND", help="crux on the hosts  [default: its path here]")
@click.option(
    "--meet",
    default="",
    metavar="HOST[:PORT]",
    help="Where rank 0 is, if the launcher does not say it.",
)
@click.option("--out", type=NEW_FILE, default=Path("cluster.yaml"), help="Topology file to write.")
@click.option(
    "--confidence",
    type=click.FloatRange(0.0, 0.999999),
    default=0.99,
    help="Search each pair until, with this confidence, no path is missing.",
)
@number("--rate rate_per_s", 1, 1e5, 100.0, "Probes a second from one host at most.", "N")
@click.option(
    "--router-rate",
    "router_rate_per_s",
    type=click.FloatRange(1, 1e5),
    default=200.0,
    metavar="N",
    help="Probes a second at one router at most, of all hosts together.",
)
@number(
    "--time time_limit_s", 0.1, 3600, 60.0, "Of the search between two hosts at most.", "SECONDS"
)
@number("--wait patience_s", 1, 3600, 60.0, "Longest wait for all hosts to come.", "SECONDS")
@click.option(
    "--interfaces", default="*", metavar="PATTERNS", help="NICs to probe from, such as eth*,ib0."
)
@click.option("--ipv6", is_flag=True, help="Take IPv6 where a NIC has both.")
@click.option("--inside/--no-inside", default=True, help="Add GPUs and PCIe of each host.")
@click.option(
    "--hash",
    "find_hashes",
    is_flag=True,
    help="Search each pair for more ports, and find the hash by which each switch chooses.",
)
@click.option("--resume", is_flag=True, help="Go on with a discovery that was interrupted.")
@click.option("--worker", type=click.IntRange(0), hidden=True)
@click.option("--name", hidden=True)
@json_option
def discover(
    hosts: str | None,
    hosts_file: Path | None,
    ssh: str,
    remote: str | None,
    meet: str,
    out: Path,
    confidence: float,
    rate_per_s: float,
    router_rate_per_s: float,
    time_limit_s: float,
    patience_s: float,
    interfaces: str,
    ipv6: bool,
    inside: bool,
    find_hashes: bool,
    resume: bool,
    worker: int | None,
    name: str | None,
    json_path: Path | None,
) -> None:
    """Find the network between hosts, and write it as a topology file.

    Give it the hosts, or start it on all of them as a job would be started:

    \b
    crux topology discover --hosts node1,node2,node3
    srun --ntasks-per-node 1 crux topology discover
    cruxrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d \\
      --rdzv-endpoint head:29400 --no-python crux topology discover

    Hosts send packets whose TTL expires on the way, and routers tell who they are. It needs no
    privilege, and no service sees the packets.
    """
    ports = HASH_PORTS if find_hashes else 1
    rules = PlanRules(confidence, rate_per_s, router_rate_per_s, time_limit_s, ipv6, ports)
    mine = name or os.environ.get("CRUX_HOST") or os.uname().nodename
    if worker is not None:
        pipes = Superior(sys.stdin.fileno(), sys.stdout.fileno())
        problem = work(pipes, hello(worker, mine, inside=inside))
        raise SystemExit(1 if problem else 0)
    given = _hosts(hosts, hosts_file)
    job = None if given else launched(os.environ, meet)
    if job is not None and job.rank:
        connected, token = join_all(job, patience_s)
        with connected:
            ends = Superior(connected.fileno(), connected.fileno())
            problem = work(ends, hello(job.rank, mine, token, inside=inside))
        raise SystemExit(1 if problem else 0)
    if not given and job is None:
        raise click.UsageError(
            "say which hosts: --hosts H0,H1,... or --hosts-file, or start it on all of them "
            "with cruxrun, srun or mpirun"
        )
    worker_options = [] if inside else ["--no-inside"]

    def start(channel: Channel) -> object:
        if job is not None:
            return host_all(channel, job, worker_options, patience_s)
        spawn_over_ssh(channel, given, ssh, remote or remote_command(), worker_options)
        return None

    size = len(given) if job is None else job.size
    _discover(start, size, patience_s, interfaces, rules, out, resume, json_path)


def _hosts(given: str | None, file: Path | None) -> list[str]:
    if given is not None and file is not None:
        raise click.UsageError("only one of --hosts and --hosts-file can be given")
    text = given or ""
    if file is not None:
        try:
            lines = read_file(file, MAX_HOSTS_FILE_BYTES).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DiscoverError(f"{file}: {error}") from None
        text = ",".join(line.partition("#")[0].strip() for line in lines)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if (given is not None or file is not None) and len(names) < 2:
        raise DiscoverError("a network has two hosts or more: name them all")
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise DiscoverError(f"host {twice!r} is named twice")
    # ssh would take it for an option.
    if strange := [n for n in names if n.startswith("-") or any(c.isspace() for c in n)]:
        raise DiscoverError(f"{strange[0]!r} is no name of a host")
    return names


def _discover(
    start: Callable[[Channel], object],
    size: int,
    patience_s: float,
    interfaces: str,
    rules: PlanRules,
    out: Path,
    resume: bool,
    json_path: Path | None,
) -> None:
    # It needs scipy, which the hosts that probe do without.
    from crux_torch.cli.discover.output import Hashes, result, write

    state = State(out.with_name(out.name + STATE_SUFFIX))
    began = time.monotonic()
    problem = "the discovery was interrupted"
    channel = Channel()
    plan: Plan | None = None
    try:
        with progress() as shown:
            # The launcher's store has to live until all have met.
            store = start(channel)
            met = meet(channel, size, patience_s, shown.meeting)
            del store
            hosts = _chosen(met, interfaces)
            plan = Plan(hosts, rules)
            if resume:
                for outcome in state.resume(hosts, rules):
                    plan.take(outcome)
            else:
                state.begin(hosts, rules)
            run(channel, met, plan, state.add, shown.watch)
        problem = ""
    except KeyboardInterrupt:
        if plan is not None:
            click.echo(
                f"interrupted; what is known is in {state.path}: the same command with --resume "
                "goes on",
                err=True,
            )
        raise SystemExit(128 + signal.SIGINT) from None
    except CruxError as error:
        problem = str(error)[:1024]
        raise
    finally:
        channel.close(Leave(problem))
        state.close()
    told = [met.told[host.name] for host in met.hosts]
    found = result(plan, told, time.monotonic() - began)
    hashes = Hashes(found) if rules.ports_per_path > 1 else None
    write(found, out, json_path, hashes)
    state.remove()


def _chosen(met: Met, patterns: str) -> list[SeenHost]:
    chosen = [pattern.strip() for pattern in patterns.split(",")]
    hosts = []
    for host in met.hosts:
        nics = [n for n in host.nics if any(fnmatchcase(n.name, p) for p in chosen)]
        hosts.append(SeenHost(host.name, tuple(nics)))
    bare = [host.name for host in hosts if not host.nics]
    if bare:
        raise DiscoverError(
            f"{bare[0]} has no NIC with an address that fits --interfaces {patterns}: see "
            "`ip address` there"
        )
    return hosts
