"""``crux probe``: the source ports that lead over each path to a host."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import click
from rich.console import Console

from crux_torch.cli.results import FILE, json_option, number, put_json
from crux_torch.errors import CruxError
from crux_torch.network.discover.hashes import (
    HASH_PORTS,
    Checked,
    Polarised,
    SwitchHash,
    check,
    explain_switches,
    next_hops_in,
    polarisation,
    ports_to_check,
    traces_of,
)
from crux_torch.network.loaders import load_topology
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.discovery import Discovery
from crux_torch.network.probe.packets import ProbeError, Transport
from crux_torch.network.probe.prober import MAX_TTL, PathMap, default_ports, probe
from crux_torch.network.probe.rules import Rules
from crux_torch.network.topology import Topology, TopologyError
from crux_torch.report.tables import (
    PathTable,
    addresses_of,
    as_json_text,
    console,
    hashes_as_dict,
    render,
    render_hashes,
)


def _port_range(ctx: click.Context, option: click.Parameter, text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    try:
        ports = range(int(first), int(last or first) + 1)
    except ValueError:
        raise click.BadParameter("expected A-B, two port numbers") from None
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise click.BadParameter("expected A-B with 1 <= A <= B <= 65535")
    return ports


@click.command(name="probe", context_settings={"show_default": True})
@click.argument("destination")
@click.option(
    "--udp",
    "protocol",
    flag_value="udp",
    default=True,
    show_default=False,
    help="Probe for UDP, such as RoCEv2 [default].",
)
@click.option("--tcp", "protocol", flag_value="tcp", help="Probe for TCP; needs --port.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Destination port [default: {ROCE_V2_PORT}, RoCEv2's, for UDP].",
)
@click.option(
    "--ports",
    metavar="A-B",
    callback=_port_range,
    help="Source ports to try [default: 49152-65535 for RoCEv2, else this host's ephemeral ports].",
)
@click.option("--source", help="Address of this host to probe from [default: by its routes].")
@number("--max-ttl", 1, 64, MAX_TTL, "Look for this many routers at most.")
@click.option(
    "--ttl",
    "ttls",
    type=click.IntRange(1, 64),
    multiple=True,
    help="Ask about this hop only; repeat it for several. With --tcp, a TTL that reaches "
    "DESTINATION opens a connection to it.  [default: all routers on the way]",
)
@number("--confidence", 0.0, 0.999999, 0.99, "Stop when, with this confidence, no path is missing.")
@number("--count", 1, 65535, 1, "Find at least this many ports of every path.")
@click.option(
    "--rate",
    type=click.FloatRange(0.5, 1e5),
    default=200.0,
    metavar="N",
    help="Send at most this many probes a second; slow routers get fewer.",
)
@click.option(
    "--time",
    "time_limit_s",
    type=click.FloatRange(0.1, 3600),
    default=30.0,
    metavar="SECONDS",
    help="Stop after this time with what is known by then.",
)
@click.option(
    "--topology",
    "topology_path",
    type=FILE,
    help="Topology file; its addresses give the switches their names.",
)
@click.option(
    "--via",
    multiple=True,
    metavar="NODE|ADDRESS",
    help="List only ports whose path crosses this node; repeat it for several.",
)
@click.option(
    "--hash",
    "find_hashes",
    is_flag=True,
    help="Find the hash by which each switch chooses, and check ports computed by it.",
)
@json_option
def probe_command(
    destination: str,
    protocol: Transport,
    port: int | None,
    ports: range | None,
    source: str | None,
    max_ttl: int,
    ttls: tuple[int, ...],
    confidence: float,
    count: int,
    rate: float,
    time_limit_s: float,
    topology_path: Path | None,
    via: tuple[str, ...],
    find_hashes: bool,
    json_path: Path | None,
) -> None:
    """Find which source port takes which path to DESTINATION.

    Switches choose one of several equal paths by a hash of a packet's addresses and ports. This
    sends packets whose TTL expires on the way, from many source ports, and lists the routers that
    answer. It needs no privilege, and no service at DESTINATION sees the packets.
    """
    if port is None and protocol == "tcp":
        raise click.UsageError("--tcp needs --port: TCP has no port that is the same everywhere")
    per_path = max(count, HASH_PORTS) if find_hashes else count
    rules = Rules(confidence, rate, time_limit_s, ports_per_path=per_path)
    try:
        topology = None if topology_path is None else load_topology(topology_path)
        if topology is not None and not topology.addresses:
            raise TopologyError(
                f"{topology_path} gives no node an address: add some (docs/operate/topology.md), "
                "or leave it out"
            )
        for name in via:
            _check_via(name, topology)
        with _progress(rules) as watch:
            found = probe(
                destination,
                port or ROCE_V2_PORT,
                protocol,
                source=source,
                ports=ports,
                ttls=ttls or None,
                max_ttl=max_ttl,
                rules=rules,
                watch=watch,
            )
        hashes = _hashes(found, topology, ports, rate) if find_hashes else None
    except (CruxError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    report = PathTable(found, topology, via)
    more = {} if hashes is None else {"hashes": hashes_as_dict(*hashes)}
    if not put_json(json_path, as_json_text(report, more)):
        render(report)
        if hashes is not None:
            render_hashes(console(), *hashes)
    if via and not report.ports_via():
        raise click.ClickException(
            f"none of the {len(found.hops)} ports leads via {' and '.join(via)}; if there "
            "is a path over it, a higher --confidence searches longer"
        )


def _hashes(
    found: PathMap, topology: Topology | None, ports: range | None, rate: float
) -> tuple[tuple[SwitchHash, ...], tuple[Checked, ...], tuple[Polarised, ...]]:
    """The switches' hashes, and what probes of ports computed by them say."""

    def named(address: str) -> str:
        return topology.node_at.get(address, address) if topology is not None else address

    traces = traces_of(found)
    if found.changed:
        raise ProbeError(
            errno.EPROTO,
            f"{found.changed} of {found.repeated} source ports took another path when they were "
            "probed again: the network does not choose by a hash of ports (packet spraying, IPv6 "
            "flow labels), or it changed; without --hash the paths are listed",
        )
    hashes = explain_switches(traces, named)
    known = next_hops_in(topology, found.source, found.destination) if topology else None
    polarised = tuple(polarisation(traces, named, known))
    fresh = [
        port
        for port in ports or default_ports(found.protocol, found.port)
        if port not in found.hops
    ]
    chosen = ports_to_check(hashes, traces[0][0], fresh)
    if not chosen:
        return hashes, (), polarised
    again = probe(
        found.destination,
        found.port,
        found.protocol,
        source=found.source,
        ports=chosen,
        ttls=sorted({ttl for hops in found.hops.values() for ttl, _ in hops}),
        rules=Rules(rate_per_s=rate, ports_per_path=65535, repeats=0),
    )
    return hashes, check(hashes, traces_of(again), named), polarised


def _check_via(name: str, topology: Topology | None) -> None:
    for address in addresses_of(name, topology):
        try:
            ip_address(address)
        except ValueError:
            problem = "expected an address, or a node of the topology given by --topology"
            if topology is not None and name in topology.nodes:
                problem = "the topology gives this node no address"
            raise TopologyError(f"--via {name}: {problem}") from None


@contextmanager
def _progress(rules: Rules) -> Iterator[Callable[[Discovery], None] | None]:
    """A line on standard error while probing, at a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    console = Console(stderr=True)
    with console.status("counting the routers on the way") as status:

        def watch(search: Discovery) -> None:
            status.update(
                f"paths: {search.path_count}, probes: {search.sent}, answers: {search.answered}, "
                f"confidence: {search.confidence:.3f} of {rules.confidence:g}"
            )

        yield watch
