"""A network as another tool's file tells it, and the steps from there to a topology. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crux_torch.network.topology import (
    KINDS,
    Link,
    Topology,
    TopologyBuilder,
    TopologyError,
    check_size,
)
from crux_torch.words import listed

#: Kinds of switches by their distance from the hosts; above the third they are cores, too.
KIND_OF_HEIGHT = ("host", "tor", "aggregation", "core")
#: The longest name of a node; longer ones don't fit into records of a job.
MAX_NAME_LENGTH = 256
#: Layers of switches; built networks have up to five.
MAX_LEVELS = 16
#: Names that a note or an error lists.
LISTED = 5

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(bps|bit/s|b/s|Bps|B/s)")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Imported(NamedTuple):
    """The topology in another tool's files, and the assumptions that were made."""

    topology: Topology
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cable:
    """Cables between two nodes.

    Attributes:
        a, b: names of the two ends.
        capacity_Bps: of each cable, in either direction; None if the file does not tell.
        count: number of parallel cables.
    """

    a: str
    b: str
    capacity_Bps: float | None = None
    count: int = 1


@dataclass
class Capacities:
    """Capacities by tier that the user gives because the file does not.

    Attributes:
        given: bytes per second of each tier, such as ``host-tor``.
        missing: number of links of each tier without any.
        used: the tiers that were asked for.
    """

    given: Mapping[str, float]
    missing: Counter[str] = field(default_factory=Counter)
    used: set[str] = field(default_factory=set)

    def of(self, tier: str, links: int = 1) -> float:
        """Returns the capacity of a tier; without one, notes it for :meth:`check`."""
        self.used.add(tier)
        if tier not in self.given:
            self.missing[tier] += links
        return self.given.get(tier, 1.0)

    def check(self) -> tuple[str, ...]:
        """Returns a note if a given capacity was not needed.

        Raises:
            TopologyError: names every tier that lacks a capacity.
        """
        if self.missing:
            tiers = ", ".join(f"{tier} ({n} links)" for tier, n in sorted(self.missing.items()))
            example = f"--capacity {min(self.missing)}=400Gbps"
            raise TopologyError(f"there is no capacity of {tiers}: say it, such as {example}")
        unused = sorted(set(self.given) - self.used)
        return (f"--capacity of {', '.join(unused)} is not used",) if unused else ()


@dataclass
class Draft:
    """Hosts, switches and cables of a file.

    Attributes:
        hosts: the NICs of each host by their node names; without any, cables end at the host.
        switches: their names.
        cables: every cable once.
        addresses: IP addresses of hosts, NICs and switches.
        tree: True if each cable leads from the lower node ``a`` to the higher ``b``.
        top: name of a switch to add above parts that the file does not join; empty: the largest
            part is taken.
        notes: facts that the file does not have, in words.
    """

    hosts: dict[str, list[str]] = field(default_factory=dict)
    switches: dict[str, None] = field(default_factory=dict)
    cables: list[Cable] = field(default_factory=list)
    addresses: dict[str, list[str]] = field(default_factory=dict)
    tree: bool = False
    top: str = ""
    notes: list[str] = field(default_factory=list)

    def to_topology(self, capacities: Mapping[str, float]) -> Imported:
        """Returns the topology, with the kind of each switch by its distance from the hosts.

        Args:
            capacities: bytes per second by tier, for cables without a capacity.

        Raises:
            TopologyError: a name is no name, a tier lacks a capacity, or nothing is joined.
        """
        self._check()
        host_of = {nic: host for host, nics in self.hosts.items() for nic in nics}
        if self.top:
            self._add_top(host_of)
        kept = self._largest_part(host_of)
        height = self._heights(host_of)
        builder = TopologyBuilder()
        for host, nics in self.hosts.items():
            if host in kept:
                builder.node(host, "host")
                for nic in nics:
                    builder.node(nic, "nic", host)
        for switch in self.switches:
            if switch in kept:
                builder.node(switch, KIND_OF_HEIGHT[min(height[switch], len(KIND_OF_HEIGHT) - 1)])
        rates = Capacities(capacities)
        for cable in self.cables:
            if host_of.get(cable.a, cable.a) in kept:
                capacity_Bps = cable.capacity_Bps
                if capacity_Bps is None:
                    kinds = (builder.nodes[end].kind for end in (cable.a, cable.b))
                    capacity_Bps = rates.of(tier_of(*kinds), cable.count)
                builder.cable(cable.a, cable.b, Link(capacity_Bps), cable.count)
        for node, addresses in self.addresses.items():
            if node in builder.nodes:
                builder.addresses[node] = tuple(dict.fromkeys(addresses))
        unused = rates.check()
        return Imported(builder.build(), (*self.notes, *unused))

    def _check(self) -> None:
        nics = [nic for names in self.hosts.values() for nic in names]
        names = (*self.hosts, *nics, *self.switches)
        check_size(len(names), 2 * sum(cable.count for cable in self.cables))
        for name in names:
            if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
                expected = f"1 to {MAX_NAME_LENGTH} letters that can be printed"
                raise TopologyError(f"{name[:80]!r} is no name of a node; expected {expected}")
        if not self.hosts:
            raise TopologyError("there is no host; expected one or more")
        both = self.hosts.keys() & self.switches.keys()
        if both:
            raise TopologyError(f"{min(both)!r} is both a host and a switch; expected another name")

    def _add_top(self, host_of: Mapping[str, str]) -> None:
        """Join the parts that have hosts by a switch above the highest switch of each."""
        parts = [part for part in self._parts(host_of) if not self.hosts.keys().isdisjoint(part)]
        if len(parts) < 2:
            return
        height = self._heights(host_of)
        top = _unused(self.top, {*self.hosts, *self.switches})
        for part in parts:
            switches = [node for node in part if node in self.switches]
            self.cables.append(Cable(max(switches, key=lambda s: height[s], default=part[0]), top))
        self.switches[top] = None
        self.notes.append(
            f"the file does not say how its {len(parts)} parts are joined: the switch {top!r} "
            "stands for what is between them"
        )

    def _largest_part(self, host_of: Mapping[str, str]) -> set[str]:
        """Returns the part with most hosts, and notes the hosts and switches of the others."""
        parts = self._parts(host_of)
        largest = max(parts, key=lambda part: sum(node in self.hosts for node in part))
        left_out = [node for part in parts if part is not largest for node in part]
        for kind, known in (("hosts", self.hosts), ("switches", self.switches)):
            names = [node for node in left_out if node in known]
            if names:
                self.notes.append(f"left out, joined to none of the others: {kind} {some(names)}")
        return set(largest)

    def _parts(self, host_of: Mapping[str, str]) -> list[list[str]]:
        """Returns the connected parts, in the order of their first nodes."""
        near = self._neighbours(host_of)
        parts: list[list[str]] = []
        seen: set[str] = set()
        for start in (*self.hosts, *self.switches):
            if start not in seen:
                seen.add(start)
                part = [start]
                for node in part:
                    new = [n for n in near[node] if n not in seen]
                    seen.update(new)
                    part += dict.fromkeys(new)
                parts.append(part)
        return parts

    def _heights(self, host_of: Mapping[str, str]) -> dict[str, int]:
        """Returns the links from each node down to the nearest leaf, in a tree to the farthest."""
        near = self._neighbours(host_of)
        height = dict.fromkeys(self.hosts, 0)
        if self.tree:
            return self._heights_in_tree(height)
        todo = self._leaves(near)
        height |= dict.fromkeys(todo, 1)
        for node in todo:
            for neighbour in near[node]:
                if neighbour not in height:
                    height[neighbour] = height[node] + 1
                    todo.append(neighbour)
        return height

    def _leaves(self, near: Mapping[str, Sequence[str]]) -> list[str]:
        """Returns the switches with hosts, but not a spine at which a few hosts are.

        Such a spine's neighbours are leaves, so most of them have more hosts than it has.
        """
        hosts = {s: sum(n in self.hosts for n in near[s]) for s in self.switches}
        leaves = []
        for switch in (s for s in self.switches if hosts[s]):
            others = [n for n in near[switch] if n in self.switches]
            fuller = sum(hosts[n] > hosts[switch] for n in others)
            if 2 * fuller <= len(others):
                leaves.append(switch)
        return leaves

    def _heights_in_tree(self, height: dict[str, int]) -> dict[str, int]:
        above: dict[str, list[str]] = {}
        below = Counter(cable.b for cable in self.cables)
        for cable in self.cables:
            above.setdefault(cable.a, []).append(cable.b)
        todo = [node for node in (*self.hosts, *self.switches) if not below[node]]
        for node in todo:
            for higher in above.get(node, ()):
                height[higher] = max(height.get(higher, 1), height.get(node, 0) + 1)
                below[higher] -= 1
                if not below[higher]:
                    todo.append(higher)
        circle = [node for node in (*self.hosts, *self.switches) if below[node] > 0]
        if circle:
            raise TopologyError(f"{some(circle)} are above each other; expected a tree")
        return dict.fromkeys(self.switches, 1) | height

    def _neighbours(self, host_of: Mapping[str, str]) -> dict[str, list[str]]:
        near: dict[str, list[str]] = {name: [] for name in (*self.hosts, *self.switches)}
        for cable in self.cables:
            a, b = (host_of.get(end, end) for end in (cable.a, cable.b))
            for end in (a, b):
                if end not in near:
                    raise TopologyError(
                        f"a cable ends at {end!r}, which the file does not describe"
                    )
            if a in self.hosts and b in self.hosts:
                raise TopologyError(f"{a!r} and {b!r} are hosts and joined directly")
            near[a].append(b)
            near[b].append(a)
        return near


def draft_of_layers(layers: Mapping[str, Sequence[str]]) -> Draft:
    """Returns a network in which each host names the switches above it.

    Args:
        layers: for each host the names of its switches, that at the host first.
    """
    draft = Draft(tree=True, top="above")
    taken = set(layers)
    named: dict[tuple[int, str], str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for host, above in layers.items():
        if len(above) > MAX_LEVELS:
            raise TopologyError(f"{host[:80]!r} is below {len(above)} layers of switches")
        draft.hosts[host] = []
        low = host
        for level, name in enumerate(above, start=1):
            switch = named.get((level, name))
            if switch is None:
                # A label may repeat on another level; there it is another switch.
                switch = named[level, name] = _unused(name, taken)
                taken.add(switch)
                draft.switches[switch] = None
            pairs[low, switch] = None
            low = switch
    draft.cables = [Cable(low, high) for low, high in pairs]
    return draft


def tier_of(a: str, b: str) -> str:
    """Returns the name of a tier, such as ``host-tor``, from the kinds of its two ends."""
    low, high = sorted(("host" if kind == "nic" else kind for kind in (a, b)), key=KINDS.index)
    return f"{low}-{high}"


def parse_rate(text: str) -> float:
    """Returns the bytes per second of a rate, such as ``400Gbps`` or ``31.5GB/s``.

    Raises:
        TopologyError: it is no rate above 0.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise TopologyError(f"{text!r} is no rate; expected one such as 400Gbps or 50GB/s")
    bytes_each = 1.0 if match[3].startswith("B") else 1 / 8
    return float(match[1]) * _PREFIXES[match[2]] * bytes_each


def some(names: Iterable[str]) -> str:
    """Returns the first few names and the number of the others."""
    return listed(list(names), LISTED)


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "'"
    return name
