"""The results of a discovery: the topology file with its comments, and JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from crux_torch.cli.discover.insides import furnish, read_insides
from crux_torch.cli.results import put_json, write_text
from crux_torch.network.discover.hashes import explain_switches, polarisation, traces_of_pair
from crux_torch.network.discover.join import Discovered, join
from crux_torch.network.discover.plan import Plan
from crux_torch.network.discover.tasks import Hello
from crux_torch.network.host_match import distinct_addresses
from crux_torch.network.loaders import dump_yaml
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.topology import NETWORK_KINDS, Topology
from crux_torch.report.hash_table import hashes_as_dict, render_hashes
from crux_torch.report.tables import console, say
from crux_torch.words import listed

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
