"""The results of a discovery: the topology file with its comments, and JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from crux_torch.cli.results import put_json, write_text
from crux_torch.host.machine import Inside
from crux_torch.network.discover.hashes import explain_switches, polarisation, traces_of_pair
from crux_torch.network.discover.join import Discovered, join
from crux_torch.network.discover.plan import Plan
from crux_torch.network.discover.tasks import Hello
from crux_torch.network.host_match import distinct_addresses
from crux_torch.network.loaders import dump_yaml
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.topology import NETWORK_KINDS, Edge, Topology, TopologyBuilder
from crux_torch.report.tables import console, hashes_as_dict, render_hashes, say
from crux_torch.words import listed


def read_insides(told: Sequence[Hello]) -> tuple[dict[str, Inside], list[str]]:
    """Returns the inside of each host that told one with NICs, and a note for each misfit."""
    insides: dict[str, Inside] = {}
    notes = []
    for hello in told:
        name = hello.host.name
        try:
            inside = msgspec.json.decode(hello.inside, type=Inside | None)
        except (msgspec.MsgspecError, RecursionError):
            notes.append(f"the inside of host {name} can't be read")
            continue
        if inside is not None and inside.nics and _is_own(inside, name):
            insides[name] = inside
    return insides, notes


def _is_own(inside: Inside, host: str) -> bool:
    ends = [end for a, b, _ in inside.cables for end in (a, b)]
    return (
        inside.host == host
        and all(name.startswith(f"{host}/") for name in inside.nodes)
        and all(end == host or end in inside.nodes for end in ends)
    )


def furnish(
    topology: Topology, insides: Mapping[str, Inside], nics: Mapping[str, str]
) -> tuple[Topology, list[str]]:
    """Returns the topology with the insides of its hosts, and a note for each that does not fit.

    Args:
        insides: by host.
        nics: NIC (``HOST/eth0``) of each address.
    """
    moves: dict[str, str] = {}
    notes = []
    fitting: dict[str, Inside] = {}
    for host, inside in insides.items():
        ports = topology.inside(host, "nic") or (host,) if host in topology.hosts else ()
        moved = {port: _nic_of(topology, port, nics) for port in ports}
        if ports and all(nic in inside.nodes for nic in moved.values()):
            moves |= moved
            fitting[host] = inside
        elif ports:
            notes.append(
                f"the inside of host {host} is left out: {', '.join(sorted(moved.values()))} "
                "is no NIC on its PCI bus"
            )
    builder = TopologyBuilder(
        addresses={moves.get(node, node): given for node, given in topology.addresses.items()},
        device_flops=topology.device_flops,
        tables=topology.tables,
        qos=topology.qos,
    )
    for name, node in topology.nodes.items():
        if node.host in fitting and node.kind == "nic":
            continue
        builder.node(name, node.kind, node.host)
        for inner, part in fitting[name].nodes.items() if name in fitting else ():
            builder.node(inner, part.kind, name)
    for edge in _in_cables(topology.edges):
        hosts = {topology.host_of(end) for end in (edge.src, edge.dst)}
        if len(hosts) == 1 and hosts & fitting.keys():
            continue
        src, dst = moves.get(edge.src, edge.src), moves.get(edge.dst, edge.dst)
        builder.arrow(src, dst, edge.link)
    for inside in fitting.values():
        for a, b, link in inside.cables:
            builder.cable(a, b, link)
    return builder.build(), notes


def _in_cables(edges: Sequence[Edge]) -> Iterator[Edge]:
    """The links such that those of one cable follow each other: the file has one line for both."""
    between: dict[frozenset[str], list[Edge]] = {}
    for edge in edges:
        between.setdefault(frozenset((edge.src, edge.dst)), []).append(edge)
    for cable in between.values():
        yield from cable


def _nic_of(topology: Topology, port: str, nics: Mapping[str, str]) -> str:
    """The NIC that a cable ends at: that of the port's addresses."""
    found = (nics[a] for a in topology.addresses.get(port, ()) if a in nics)
    return next(found, port)


#: Owner of the one fragment that a discovery makes.
OWNER = "discover"
_LINE = 96
#: Links of one kind that a comment names.
_NAMES = 8


@dataclass(frozen=True)
class Result:
    """A network that was discovered.

    Attributes:
        lines: facts in words: sizes, what is certain and assumed, notes.
    """

    plan: Plan
    found: Discovered
    topology: Topology
    lines: Sequence[str]
    seconds: float

    def to_yaml(self) -> str:
        """Returns the topology file."""
        title = "Found by `crux topology discover`."
        return "".join(map(_comment, [title, *self.lines])) + dump_yaml(self.topology)

    def to_json(self, hashes: Hashes | None = None) -> str:
        """Returns all results, and the fragment that they were made from."""
        document = {
            "probes": self.plan.sent,
            "seconds": round(self.seconds, 2),
            "hosts": list(self.topology.hosts),
            "switches": [n for n, node in self.topology.nodes.items() if node.host is None],
            "links": len(self.topology.edges),
            "certain": sorted(self.found.certain),
            "assumed": sorted(self.found.assumed),
            "notes": list(self.lines),
            "fragment": {"hosts": self.plan.hosts, "pairs": self.plan.pairs()},
        }
        if hashes is not None:
            # Plain JSON has no infinity, and no probability here is one.
            document["hashes"] = hashes_as_dict(hashes.switches, (), hashes.polarised)
        return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


class Hashes:
    """The hashes of the switches of ``result``, and which of them use but a part of their links."""

    def __init__(self, result: Result) -> None:
        node_at = result.topology.node_at
        traces = [
            trace
            for pair in result.plan.pairs()
            if not pair.sprays
            for trace in traces_of_pair(pair, ROCE_V2_PORT, "udp")
        ]

        def node_of(address: str) -> str:
            return node_at.get(address, address)

        self.switches = explain_switches(traces, node_of)
        self.polarised = tuple(polarisation(traces, node_of))


def result(plan: Plan, told: Sequence[Hello], seconds: float) -> Result:
    """Returns the network that ``plan`` found, with the insides of its hosts.

    Raises:
        TopologyError: it is no network, or too large for a topology.
    """
    fragment = plan.fragment()
    found = join({OWNER: fragment})
    insides, misfits = read_insides(told)
    nics = {
        address: f"{host.name}/{nic.name.replace('/', ':')}"
        for host in fragment.hosts
        for nic in host.nics
        for address in distinct_addresses(nic.addresses)
    }
    topology, left_out = furnish(found.topology, insides, nics)
    nodes = found.topology.nodes.values()
    switches = sum(node.kind in NETWORK_KINDS for node in nodes)
    lines = [
        f"{len(topology.hosts)} hosts, {switches} switches, {len(found.topology.edges)} directed "
        f"links; {plan.sent} probes in {seconds:.0f} s.",
        *_of_links(found),
        *plan.problems(),
        *found.notes,
        *misfits,
        *left_out,
        *_of_hosts(told),
    ]
    return Result(plan, found, topology, list(map(printable, lines)), seconds)


def write(result: Result, out: Path, json_path: Path | None, hashes: Hashes | None = None) -> None:
    """Write the topology file, and the JSON where ``--json`` says; say what was found."""
    write_text(out, result.to_yaml())
    if put_json(json_path, result.to_json(hashes)):
        return
    to = console()
    say(to, f"{out}: {result.lines[0]}")
    for line in result.lines[1:]:
        say(to, f"- {line}", indent=2)
    if hashes is not None:
        render_hashes(to, hashes.switches, (), hashes.polarised)
    say(to, f"Look at it with `crux topology draw {out}`, and start jobs with")
    say(to, f"cruxrun --crux-topology {out} ...")


def _of_links(found: Discovered) -> list[str]:
    links = found.topology.links
    sure, assumed = len(found.certain), found.assumed
    lines = [f"Certain: {sure} of {len(links)} links; both ends answered from addresses."]
    if unsure := sorted(links.keys() - found.certain):
        lines.append(f"Not certain: {listed(unsure, _NAMES)}.")
    kinds = Counter((found.topology.layer(name), links[name].capacity_Bps) for name in assumed)
    lines += [
        f"Assumed: {capacity_Bps * 8 / 1e9:g} Gbit/s for {count} links {layer}."
        for (layer, capacity_Bps), count in sorted(kinds.items())
    ]
    return lines


def _of_hosts(told: Sequence[Hello]) -> list[str]:
    """Returns facts that hosts did not tell, each fact once with the hosts."""
    hosts: dict[str, list[str]] = {}
    for hello in told:
        for note in hello.notes:
            hosts.setdefault(note, []).append(hello.host.name)
    everyone = len(told)
    return [
        f"{'all hosts' if len(names) == everyone else listed(names, _NAMES)}: {note}"
        for note, names in hosts.items()
    ]


def printable(text: str) -> str:
    """Returns ``text`` without control characters: what hosts tell stays in its comment."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _comment(line: str) -> str:
    return textwrap.fill(line, _LINE, initial_indent="# ", subsequent_indent="#   ") + "\n"
