"""``crux probe``: which source ports lead over which path to a host."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from crux_torch.errors import CruxError, SettingsError
from crux_torch.fabric.discovery import Discovery
from crux_torch.fabric.ecmp_hash import HashError, SwitchHash, foretell, parse_hash
from crux_torch.fabric.path_map import ROCE_V2_PORT, PathMap, Transport
from crux_torch.fabric.probe import (
    MAX_TTL,
    Rules,
    default_ports,
    probe,
    resolve,
    source_address,
)
from crux_torch.fabric.topology import Topology, TopologyError
from crux_torch.report.path_table import Report, addresses_of, as_json_text, render

if TYPE_CHECKING:
    from crux_torch.control.path_cache import PathCache

STORE_TIMEOUT_S = 2.0


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


@click.command(name="probe")
@click.argument("destination")
@click.option("--udp", "protocol", flag_value="udp", default=True, help="UDP [default].")
@click.option("--tcp", "protocol", flag_value="tcp", help="TCP; needs --port.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Destination port [default: {ROCE_V2_PORT}, RoCEv2's, for UDP].",
)
@click.option(
    "--ports",
    metavar="A-B",
    callback=_port_range,
    help="Source ports to draw from [default: RoCEv2's, or this host's ephemeral ones].",
)
@click.option("--source", help="Address of this host to probe from [default: by its routes].")
@click.option(
    "--max-ttl",
    type=click.IntRange(1, 64),
    default=MAX_TTL,
    show_default=True,
    help="Routers to look for at most.",
)
@click.option(
    "--ttl",
    "ttls",
    type=click.IntRange(1, 64),
    multiple=True,
    help="Ask about this hop only; may be given several times. One that reaches DESTINATION makes "
    "--tcp connect to it.  [default: all on the way]",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.0, 0.999999),
    default=0.99,
    show_default=True,
    help="Stop when no path is missing with this confidence.",
)
@click.option(
    "--count",
    type=click.IntRange(1, 65535),
    default=1,
    show_default=True,
    help="Ports to find of every path, at least.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.5, 1e5),
    default=200.0,
    show_default=True,
    metavar="N",
    help="Probes a second at most; slow routers are asked more slowly.",
)
@click.option(
    "--time",
    "time_limit_s",
    type=click.FloatRange(0.1, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="End with what is known by then.",
)
@click.option(
    "--topology",
    "topology_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Topology file whose addresses give the switches their names.",
)
@click.option(
    "--via",
    multiple=True,
    metavar="NODE|ADDRESS",
    help="List the ports of paths over it; several: over all of them.",
)
@click.option(
    "--hash",
    "hashes",
    multiple=True,
    metavar="SPEC",
    help="Compute the paths by this hash, checked against a few probes; see docs/probing.md.",
)
@click.option("--store", metavar="URL", help="tcp://HOST:PORT of a store that keeps the paths.")
@click.option("--cluster", help="Name of the cluster in the store [default: CRUX_CLUSTER].")
@click.option("--refresh", is_flag=True, help="Probe even if the store has the paths.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write JSON to this file; - for standard output, in place of the table.",
)
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
    hashes: tuple[str, ...],
    store: str | None,
    cluster: str | None,
    refresh: bool,
    json_path: str | None,
) -> None:
    """Find which source ports lead over which path to DESTINATION.

    Probes are packets whose TTL ends at a router on the way, which says so; they need no
    privilege, and no service at DESTINATION sees them.
    """
    if port is None and protocol == "tcp":
        raise click.UsageError("--tcp needs --port: TCP has no port that is the same everywhere")
    to_port = port or ROCE_V2_PORT
    rules = Rules(confidence, rate, time_limit_s, ports_per_path=count)
    try:
        topology = _topology(topology_path)
        named = tuple(parse_hash(text, topology) for text in hashes)
        for name in via:
            _check_via(name, topology)
        to = resolve(destination)
        leaves = resolve(source) if source is not None else source_address(to)

        def search() -> PathMap:
            with _progress(rules) as watch:
                return _search(
                    to, to_port, protocol, leaves, ports, ttls, max_ttl, rules, named, watch
                )

        if store is None:
            report = Report(search(), topology, via)
        else:
            with _cache(store, cluster) as cache:
                record = None if refresh else cache.get(to, protocol, to_port, leaves)
                if record is not None:
                    age_s = max(0.0, time.time() - record.probed_at_s)
                    report = Report(record.paths, topology, via, age_s)
                else:
                    report = Report(search(), topology, via)
                    if not cache.put(report.found):
                        click.echo("the store does not keep these paths", err=True)
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    except (CruxError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    _show(report, json_path)
    if via and not report.ports_via():
        raise click.ClickException(
            f"none of the {len(report.found.hops)} ports leads via {' and '.join(via)}: no path "
            "to there passes it, or a rare one; a higher --confidence looks longer"
        )


def _search(
    to: str,
    port: int,
    protocol: Transport,
    source: str,
    ports: range | None,
    ttls: tuple[int, ...],
    max_ttl: int,
    rules: Rules,
    hashes: tuple[SwitchHash, ...],
    watch: Callable[[Discovery], None] | None,
) -> PathMap:
    asked = sorted({hash.ttl for hash in hashes} | set(ttls)) or None
    if hashes:
        # A bucket whose next hop is learned must be met again before that can be contradicted.
        buckets = max((hash.buckets for hash in hashes if not hash.next_hops), default=1)
        rules = Rules(
            rules.confidence,
            rules.rate_per_s,
            rules.time_limit_s,
            ports_per_path=max(rules.ports_per_path, buckets),
        )
    found = probe(
        to,
        port,
        protocol,
        source=source,
        ports=ports,
        ttls=asked,
        max_ttl=max_ttl,
        rules=rules,
        watch=watch,
    )
    if not hashes:
        return found
    return foretell(hashes, found, ports or default_ports(protocol, port))


def _topology(path: Path | None) -> Topology | None:
    if path is None:
        return None
    from crux_torch.fabric.loaders import load_topology

    topology = load_topology(path)
    if not topology.addresses:
        raise TopologyError(
            f"{path} gives no node an address; add `addresses:` (docs/topology.md), or leave it out"
        )
    return topology


def _check_via(name: str, topology: Topology | None) -> None:
    for address in addresses_of(name, topology):
        try:
            ip_address(address)
        except ValueError:
            known = topology is not None and name in topology.nodes
            raise HashError(
                f"--via {name}: "
                + (
                    "the topology gives this node no address"
                    if known
                    else "expected an address, or a node of the topology given by --topology"
                )
            ) from None


@contextmanager
def _cache(store: str, cluster: str | None) -> Iterator[PathCache]:
    from crux_torch.settings import Settings

    given = {"CRUX_STORE": store} | ({"CRUX_CLUSTER": cluster} if cluster else {})
    settings = Settings.from_env({**os.environ, **given})
    # After a look at the settings, because these import torch.
    from crux_torch.control.host import parse_endpoint
    from crux_torch.control.path_cache import PathCache
    from crux_torch.control.registry import Registry
    from crux_torch.control.tcp_store import TcpStore

    opened = TcpStore(*parse_endpoint(settings.store), timeout_s=STORE_TIMEOUT_S)
    try:
        here = settings.host or socket.gethostname()
        yield PathCache(Registry(opened, settings.cluster), here)
    finally:
        opened.close()


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


def _show(report: Report, json_path: str | None) -> None:
    if json_path == "-":
        click.echo(as_json_text(report))
        return
    if json_path is not None:
        try:
            Path(json_path).write_text(as_json_text(report) + "\n")
        except OSError as error:
            raise click.ClickException(f"{json_path}: {error.strerror}") from None
    render(report)
