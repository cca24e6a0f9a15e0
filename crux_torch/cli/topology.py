"""``crux topology``: topology files, made of other tools' maps, checked and drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import yaml

from crux_torch.cli.discover import discover
from crux_torch.cli.results import FILE, NEW_FILE, STDOUT, json_option, put_json, write_text
from crux_torch.errors import CruxError
from crux_torch.host.machine import Inside, as_entries, host_in, join
from crux_torch.host.nccl_topology import is_nccl_xml, read_nccl_topology
from crux_torch.host.smi_matrix import is_smi_matrix, read_smi_matrix
from crux_torch.network.check import Finding, compare, examine, far_hosts
from crux_torch.network.formats import LINGJUN, READERS, WRITERS, format_of, read_network
from crux_torch.network.formats.draft import parse_rate
from crux_torch.network.loaders import dump_yaml, load_topology, read_text
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.packets import ProbeError
from crux_torch.network.probe.prober import probe
from crux_torch.network.probe.rules import Rules
from crux_torch.network.topology import Topology
from crux_torch.report.tables import console, json_text, say
from crux_torch.report.topology_drawing import print_tree, to_svg

#: What reads the inside of a host, and what tells its format.
INSIDES: dict[str, Callable[[str, str, Mapping[str, float]], Inside]] = {
    "nccl": read_nccl_topology,
    "nvidia-smi": read_smi_matrix,
}
_TELLS = {"nccl": is_nccl_xml, "nvidia-smi": is_smi_matrix}

#: Hosts that ``check --probe`` sends probes to, and seconds for each at most.
MAX_PROBED, PROBE_S = 16, 10.0

file_argument = click.argument("file", type=FILE)
out_option = click.option(
    "--out", type=NEW_FILE, help="Write to this file, not to standard output."
)


@click.group("topology")
def group() -> None:
    """Make, check, draw and convert topology files."""


def _capacities(
    ctx: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> dict[str, float]:
    capacities: dict[str, float] = {}
    for text in given:
        tier, _, rate = text.partition("=")
        try:
            capacities[tier] = parse_rate(rate)
        except CruxError as error:
            raise click.BadParameter(f"{text!r}: {error}") from None
    return capacities


@group.command("import")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE|FOLDER...",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice([*READERS, LINGJUN, *INSIDES]),
    metavar="NAME",
    help="Of all files; default: what each begins like. "
    f"One of {', '.join([*READERS, LINGJUN, *INSIDES])}.",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    metavar="TIER=RATE",
    callback=_capacities,
    help="Capacity of links that the files give none: host-tor=400Gbps, tor-aggregation=..., "
    "aggregation-core=...; inside a host pcie=64GB/s and nvlink=25GB/s. Repeat it for each.",
)
@click.option(
    "--switch",
    "switches",
    multiple=True,
    metavar="PATTERN",
    help="LLDP: systems of this name ('leaf*') are switches, not hosts.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="PATTERN",
    help="Leave these hosts and switches out, such as those of a management network.",
)
@click.option(
    "--into",
    type=FILE,
    metavar="CLUSTER",
    help="For the inside of hosts: print this topology with them.",
)
@click.option("--host", help="For the inside of one host: its name [default: the file's].")
@out_option
def import_command(
    files: tuple[Path, ...],
    format_name: str | None,
    capacities: dict[str, float],
    switches: tuple[str, ...],
    without: tuple[str, ...],
    into: Path | None,
    host: str | None,
    out: Path | None,
) -> None:
    """Print the topology that other tools' files describe.

    Reads lldpcli's JSON (a file for each system, named as it is), ibnetdiscover, Slurm's
    topology.conf and topology.yaml, topograph's graph, kubectl's nodes, the inside of hosts from
    NCCL's XML or nvidia-smi topo -m, and the CSV of the paper's cluster.
    """
    texts = {str(file): read_text(file) for file in _inside_folders(files)}
    name = format_name or _common_format(texts)
    if name in INSIDES:
        named = {host or Path(file).stem: text for file, text in texts.items()}
        if len(named) < len(texts):
            raise click.UsageError("--host goes with one file")
        insides = [INSIDES[name](text, at, capacities) for at, text in named.items()]
        text = _with_insides(insides, into)
        notes = tuple(f"{each.host}: {note}" for each in insides for note in each.notes)
    else:
        if into or host:
            raise click.UsageError(f"--into and --host go with {' and '.join(INSIDES)}")
        topology, notes = read_network(texts, name, capacities, switches, without)
        text = dump_yaml(topology)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    _put(text, out)


@group.command()
@file_argument
@click.option("--format", "format_name", type=click.Choice(list(WRITERS)), required=True)
@out_option
def export(file: Path, format_name: str, out: Path | None) -> None:
    """Print the topology in FILE for another tool.

    They describe a network as a tree: switches side by side become one node.
    """
    text = WRITERS[format_name](load_topology(file))
    _put(text, out)


@group.command()
@file_argument
@click.option(
    "--probe",
    "probes",
    is_flag=True,
    help="Compare with the routers that answer probes from this host, a host of FILE.",
)
@json_option
def check(file: Path, probes: bool, json_path: Path | None) -> None:
    """Say what FILE lacks for choosing paths, and what looks wrong in it.

    Exits with 1 if there is any of that. With --probe, it sends probes to a host below each of up
    to 16 other groups of ToRs. No service sees them.
    """
    try:
        topology = load_topology(file)
        findings = examine(topology)
        if probes:
            findings += _compared(topology)
    except CruxError as error:
        findings = [Finding("wrong", str(error))]
    if not put_json(json_path, json_text([each._asdict() for each in findings])):
        to = console()
        for state, found in findings:
            say(to, f"{state:7}  {found}", indent=9)
    if any(state != "info" for state, _ in findings):
        raise SystemExit(1)


@group.command()
@file_argument
@click.option(
    "--out", type=NEW_FILE, metavar="FILE.svg", help="Write an SVG; default: print a tree."
)
def draw(file: Path, out: Path | None) -> None:
    """Draw the topology in FILE: groups of switches, and the hosts below them."""
    topology = load_topology(file)
    if out is None:
        print_tree(topology, console())
    else:
        write_text(out, to_svg(topology))


def _compared(topology: Topology) -> list[Finding]:
    """Returns what probes from this host show to be other than the topology says."""
    here = host_in(topology, os.environ.get("CRUX_HOST", ""))
    answers: dict[str, set[str]] = {}
    findings: list[Finding] = []
    for host in far_hosts(topology, here, MAX_PROBED):
        address = topology.addresses_of(host)[0]
        try:
            found = probe(address, ROCE_V2_PORT, "udp", rules=Rules(time_limit_s=PROBE_S))
        except ProbeError as error:
            findings.append(Finding("wrong", f"probes to {host} ({address}): {error}"))
            continue
        answers[host] = {who for hops in found.hops.values() for _, who in hops if who} - {address}
    return findings + compare(topology, here, answers)


def _inside_folders(files: tuple[Path, ...]) -> list[Path]:
    found: list[Path] = []
    for file in files:
        if file.is_dir():
            found += sorted(f for f in file.iterdir() if f.is_file() and f.name[0] != ".")
        else:
            found.append(file)
    if not found:
        raise click.UsageError("the folders hold no files")
    return found


def _common_format(texts: Mapping[str, str]) -> str:
    formats: dict[str, str] = {}
    for file, text in texts.items():
        found = format_of(text) or next((name for name, fits in _TELLS.items() if fits(text)), "")
        if not found:
            known = ", ".join((*READERS, LINGJUN, *INSIDES))
            raise click.ClickException(f"{file} is none of {known}; --format says which it is")
        formats.setdefault(found, file)
    if len(formats) > 1:
        listed = ", ".join(f"{file} is {name}" for name, file in formats.items())
        raise click.ClickException(f"expected files of one format: {listed}")
    return next(iter(formats))


def _with_insides(insides: list[Inside], into: Path | None) -> str:
    if into is None:
        if len(insides) > 1:
            raise click.UsageError("several hosts need --into CLUSTER")
        return yaml.safe_dump(as_entries(insides[0]), sort_keys=False, width=100)
    topology: Topology = load_topology(into)
    for inside in insides:
        topology = join(topology, inside)
    return dump_yaml(topology)


def _put(text: str, out: Path | None) -> None:
    if out is None or out == STDOUT:
        click.echo(text, nl=False)
    else:
        write_text(out, text)


group.add_command(discover)
