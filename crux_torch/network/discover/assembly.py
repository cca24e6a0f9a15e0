"""Builds the topology of routers that were told apart: names, links, capacities and notes."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from crux_torch.network.addresses import address_order
from crux_torch.network.builders import GBPS
from crux_torch.network.discover.evidence import (
    Evidence,
    Nic,
    Witness,
    canonical,
    combined,
    witnesses,
)
from crux_torch.network.discover.fragment import MAX_HOPS, SeenNic
from crux_torch.network.discover.routers import Routers, Through
from crux_torch.network.topology import Link, Topology, TopologyBuilder, cut_off

#: Assumed of every link if nobody told the speed of any interface.
DEFAULT_Bps = 100 * GBPS

_Value = TypeVar("_Value", str, float)


class Capacities:
    """Elects what several owners say of interfaces.

    Args:
        nics: what each owner says of an interface.
        routers: the routers beside each interface.

    Attributes:
        usual_Bps: of an interface, elected by all owners.
    """

    def __init__(
        self, nics: Mapping[Nic, Mapping[str, SeenNic]], routers: Mapping[Nic, Iterable[str]]
    ) -> None:
        self._nics = nics
        self.usual_Bps = DEFAULT_Bps
        self._speed: dict[Nic, float] = {}
        #: Of interfaces whose speed nobody told, what a job reached beyond the default.
        self._reached: dict[Nic, float] = {}
        votes: defaultdict[str, list[float]] = defaultdict(list)
        below: defaultdict[str, defaultdict[str, list[float]]]
        below = defaultdict(lambda: defaultdict(list))
        names: defaultdict[str, defaultdict[str, list[str]]]
        names = defaultdict(lambda: defaultdict(list))
        for nic in routers:
            claims = nics[nic]
            if speeds := [s for claim in claims.values() if (s := claimed_Bps(claim))]:
                self._speed[nic] = vote = elected(speeds)
            elif reached := [r for c in claims.values() if (r := c.reached_Bps) > DEFAULT_Bps]:
                self._reached[nic] = vote = elected(reached)
            else:
                continue
            for owner in claims:
                votes[owner].append(vote)
                for router in routers[nic]:
                    below[router][owner].append(vote)
        # Most networks tell no names.
        named = {r for nic in routers for c in nics[nic].values() if c.switch for r in routers[nic]}
        for nic, beside in routers.items():
            for router in named.intersection(beside):
                for owner, claim in nics[nic].items():
                    names[router][owner].append(claim.switch)
        self.usual_Bps = _by_owner(votes) if votes else DEFAULT_Bps
        self._below = {router: _by_owner(by_owner) for router, by_owner in below.items()}
        self._names = {router: _by_owner(by_owner) for router, by_owner in names.items()}

    def of_nic(self, nic: Nic) -> float:
        """Returns the bytes per second of an interface and its cable."""
        return self._speed.get(nic) or max(self._reached.get(nic, 0.0), self.usual_Bps)

    def is_told(self, nic: Nic) -> bool:
        """True if an owner told the interface's speed."""
        return nic in self._speed

    def between(self, a: str, b: str) -> float:
        """Returns the bytes per second assumed of a link between routers: as below them."""
        below = [self._below[key] for key in (a, b) if key in self._below]
        return max(below, default=self.usual_Bps)

    def switch_names(self) -> dict[str, str]:
        """Returns the names by LLDP of the routers beside hosts."""
        return self._names


def claimed_Bps(nic: SeenNic) -> float:
    """Returns an interface's speed as one owner tells it; 0: unknown."""
    ends = nic.speed_Bps, nic.switch_speed_Bps
    return min(ends) or max(ends)


def elected(votes: Iterable[_Value]) -> _Value:
    """Returns the value of most votes; of several the largest."""
    count = Counter(votes)
    if len(count) == 1:
        return next(iter(count))
    return max(count, key=lambda value: (count[value], value))


def _by_owner(votes: Mapping[str, Sequence[_Value]]) -> _Value:
    # Most owners say one thing only.
    return elected(v[0] if len(v) == 1 else elected(v) for v in votes.values())


#: Name of the node that stands for all of the network that nobody saw.
UNSEEN = "unseen"
#: Cost of a link to it: paths that were seen always cost less.
UNSEEN_COST = 1 << 10
#: Leaves times links between routers that are compared with what owners are sure of.
MAX_COMPARED = 1 << 23
_FAR = 1 << 20
#: Kind of a router by its distance from the nearest host.
_KINDS = ("tor", "aggregation", "core")


class Assembly:
    """The nodes and links of a network that was seen.

    Attributes:
        name: of each router.
        node_of: node of each interface: the host itself, if it uses only one.
    """

    def __init__(self, evidence: Evidence, routers: Routers, through: Through) -> None:
        self._evidence, self._routers, self._through = evidence, routers, through
        self._members = routers.addresses()
        self._beside = {
            nic: sorted({routers.router(key) for key in keys})
            for nic, keys in sorted(evidence.beside.items())
        }
        self._links: dict[tuple[str, str], Witness] = {}
        self._height = {key: 0 for keys in self._beside.values() for key in keys}
        self._sure_height: dict[str, int] = {}
        self._collect()
        self._height.update(self._sure_height)
        self._known = {key for key, owners in evidence.owners.items() if len(owners) > 1}
        self._hosts = sorted({nic.host for nic in evidence.nics})
        used = Counter(nic.host for nic in self._beside)
        self.node_of = {
            nic: nic.host if used[nic.host] == 1 else f"{nic.host}/{nic.name}"
            for nic in self._beside
        }
        # Who claims to be beside a router that others know to be above leaves has no say in it.
        leaves = {
            nic: [key for key in keys if self._height[key] == 0]
            for nic, keys in self._beside.items()
        }
        self._capacities = Capacities(evidence.nics, leaves)
        self.name = self._names({*self._hosts, *self.node_of.values()})
        self._refuse()

    def topology(self) -> Topology:
        """Returns the network; raises TopologyError if it is too large, or has no host."""
        builder, capacities = TopologyBuilder(), self._capacities
        for host in self._hosts:
            builder.node(host, "host")
        for nic, node in self.node_of.items():
            if node != nic.host:
                builder.node(node, "nic", nic.host)
                builder.cable(nic.host, node, Link(capacities.of_nic(nic)))
        joined = {key for ends in self._links for key in ends}.union(*self._beside.values())
        for key, name in sorted(self.name.items(), key=lambda item: item[1]):
            if key in joined:
                builder.node(name, self._kind(key))
        for nic, keys in self._beside.items():
            for key in keys:
                builder.cable(self.node_of[nic], self.name[key], Link(capacities.of_nic(nic)))
        links = [((self.name[a], self.name[b]), capacities.between(a, b)) for a, b in self._links]
        for (a, b), capacity_Bps in sorted(links):
            builder.arrow(a, b, Link(capacity_Bps))
        self._join_parts(builder)
        builder.addresses = self._addresses(builder.nodes)
        self._note()
        return builder.build()

    def certain(self, topology: Topology) -> frozenset[str]:
        """Returns the links whose two ends answered by address."""
        answered = {name for key, name in self.name.items() if self._members.get(key)}
        answered |= set(self.node_of.values())
        return frozenset(e.name for e in topology.edges if {e.src, e.dst} <= answered)

    def assumed(self, topology: Topology) -> frozenset[str]:
        """Returns the links whose capacity nobody told."""
        told = {node for nic, node in self.node_of.items() if self._capacities.is_told(nic)}
        return frozenset(e.name for e in topology.edges if told.isdisjoint((e.src, e.dst)))

    def _collect(self) -> None:
        evidence, routers = self._evidence, self._routers
        first_links: dict[tuple[str, str], Witness] = {}
        for first, seconds in evidence.second.items():
            for second, witness in seconds.items():
                ends = routers.router(first), routers.router(second)
                first_links[ends] = combined(first_links.get(ends, witness), witness)
        # Cables have two directions.
        one_way = {(routers.router(first), number) for first, number in evidence.one_way}
        firsts: dict[str, list[str]] = {}
        for first in evidence.leads:
            firsts.setdefault(routers.router(first), []).append(first)
        for (first, number), nodes in self._through.items():
            witness = evidence.tail_witness[number]
            link = nodes[0], nodes[1] if len(nodes) > 1 else ""
            of_first = (
                first_links[link]
                if link in first_links
                else self._seen_by(firsts.get(first, ()), number)
            )
            witnesses = (of_first, *[witness] * (len(nodes) - 2))
            sure = of_first is None and witness is None
            self._add(nodes, witnesses, sure)
            if (first, number) in one_way:
                self._add(nodes[::-1], witnesses[::-1], sure)

    def _seen_by(self, firsts: Sequence[str], number: int) -> Witness:
        leads = self._evidence.leads
        owners = {leads[first][number] for first in firsts if number in leads[first]}
        return owners.pop() if len(owners) == 1 else None

    def _add(self, nodes: Sequence[str], witnesses: Sequence[Witness], sure: bool) -> None:
        """Adds the links of a path, each with its witness."""
        end, links = len(nodes) - 1, self._links
        for ends, witness in zip(itertools.pairwise(nodes), witnesses, strict=False):
            if links.setdefault(ends, witness) != witness:
                links[ends] = None
        for place, key in enumerate(nodes):
            height = min(place, end - place)
            if self._height.get(key, 99) > height:
                self._height[key] = height
            if sure and self._sure_height.get(key, 99) > height:
                self._sure_height[key] = height

    def _refuse(self) -> None:
        """Takes out what one owner alone claims of paths that others are sure to know.

        A link that only one owner saw may be forged. It stays out if it would be on a path between
        two leaves that two owners are sure of, or make one shorter.
        """
        notes, keyed = self._evidence.notes, list(self._height)
        number = {key: n for n, key in enumerate(keyed)}
        leaf = np.array(
            [
                number[self._beside[nic][0]] if nic in self._beside else -1
                for nic in self._evidence.numbered
            ],
            dtype=np.int64,
        )
        sure = self._evidence.sure
        src, dst = leaf[sure.src], leaf[sure.dst]
        known = (src >= 0) & (dst >= 0)
        most = MAX_COMPARED // max(len(self._links), 1)
        ends, owners = np.append(src[known], dst[known]), np.tile(sure.owner[known], 2)
        claims = np.unique(ends * sure.owners + owners) // max(sure.owners, 1)
        leaves, count = np.unique(claims, return_counts=True)
        if len(leaves) > most:
            # Those that most owners are sure of: two that agree must not crowd others out.
            by_count = leaves[np.argsort(-count, kind="stable")]
            known &= np.isin(src, by_count[:most]) & np.isin(dst, by_count[:most])
            for n in by_count[most:].tolist():
                notes.add("too many leaves to compare links between them", self.name[keyed[n]])
        keys = (src * len(number) + dst) * (MAX_HOPS + 1) + sure.fewest
        pairs, witness = witnesses(keys[known], sure.owner[known], sure.owners)
        pairs, lengths = np.divmod(pairs[witness < 0], MAX_HOPS + 1)
        suspects = sorted(ends for ends, witness in self._links.items() if witness is not None)
        if not len(pairs) or not suspects:
            return
        src, dst = np.divmod(pairs, len(number))
        leaves, rows = np.unique(np.concatenate((src, dst)), return_inverse=True)
        starts, ends = rows[: len(src)], rows[len(src) :]
        named = [keyed[n] for n in leaves.tolist()]
        away = _distances(named, self._links, number)
        back = _distances(named, [(b, a) for a, b in self._links], number)
        for a, b in suspects:
            if np.any(away[starts, number[a]] + 1 + back[ends, number[b]] < lengths):
                del self._links[a, b]
                names = f"{self.name[a]} to {self.name[b]}"
                notes.add("refused, only one of several that should saw it", names)

    def _kind(self, key: str) -> str:
        height = self._height[key]
        return _KINDS[height] if height < len(_KINDS) else "router"

    def _names(self, taken: set[str]) -> dict[str, str]:
        told = self._capacities.switch_names()
        count = Counter(told.values())
        names: dict[str, str] = {}
        for key in sorted(self._height):
            name = told.get(key, "")
            if not name or count[name] > 1 or name in taken:
                name = self._plain_name(key)
            while name in taken:
                name += "'"
            names[key] = name
            taken.add(name)
        return names

    def _plain_name(self, key: str) -> str:
        kind = self._kind(key)
        if key[0] == "~":
            distance, base = key[1:].split("~", 1)
            return f"silent-{kind}-{distance}-of-{(self._members.get(base) or (base[1:],))[0]}"
        if not self._members[key]:
            return f"{'bridge' if key[0] == '=' else 'silent-' + kind}-{key[1:]}"
        # One owner alone can't rename what others know.
        known = [address for address in self._members[key] if address in self._known]
        return f"{kind}-{(known or self._members[key])[0]}"

    def _addresses(self, nodes: Container[str]) -> dict[str, Sequence[str]]:
        claims: defaultdict[str, Counter[Nic]] = defaultdict(Counter)
        for nic, by_owner in self._evidence.nics.items():
            count = Counter(given.addresses for given in by_owner.values())
            for given, owners in count.items():
                for address in {short for a in given if (short := canonical(a))}:
                    claims[address][nic] += owners
        notes = self._evidence.notes
        found: defaultdict[str, list[str]] = defaultdict(list)
        of_router: set[str] = set()
        for key, name in self.name.items():
            if name in nodes:
                # A router that one owner alone saw is none if it has a host's address.
                mine = [
                    a for a in self._members.get(key, ()) if a in self._known or a not in claims
                ]
                of_router.update(mine)
                found[name] += mine
        used = {nic.host for nic in self.node_of}
        for address, votes in claims.items():
            ranked = sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))
            (nic, most), *others = ranked
            if others and others[0][1] == most:
                notes.add("two interfaces have one address, ignored", address)
            elif address in of_router:
                notes.add("a router and a host have one address", address)
            elif nic in self.node_of or nic.host not in used:
                found[self.node_of.get(nic, nic.host)].append(address)
        return {node: sorted(given, key=address_order) for node, given in found.items() if given}

    def _join_parts(self, builder: TopologyBuilder) -> None:
        """Joins parts that no path joins by a node for what nobody saw."""
        if not self._hosts or not cut_off(self._hosts, builder.nodes, builder.edges):
            return
        notes = self._evidence.notes
        link = Link(self._capacities.usual_Bps, cost=UNSEEN_COST)
        builder.node(UNSEEN, "router")
        for key, name in sorted(self.name.items(), key=lambda item: item[1]):
            if self._height[key] == 0 and name in builder.nodes:
                builder.cable(name, UNSEEN, link)
        used = {nic.host for nic in self._beside}
        for host in self._hosts:
            if host not in used:
                builder.cable(host, UNSEEN, link)
                notes.add("no path seen", host)
        notes.add("no path joins all parts, assumed joined by one router", UNSEEN)

    def _note(self) -> None:
        notes, name = self._evidence.notes, self.name
        for key, node in name.items():
            if key[0] == "=":
                notes.add("no router between hosts, a bridge or a tunnel that hides hops", node)
            elif not self._members.get(key):
                notes.add("silent, perhaps several routers", node)
        for before, after in self._routers.parallel():
            if before in name and after in name:
                notes.add(
                    "parallel links, or several routers that answer from the way back, counted as "
                    "one",
                    f"{name[before]} to {name[after]}",
                )
        for nodes in self._through.values():
            if len(nodes) == 2:
                notes.add(
                    "two leaves joined directly, a tunnel may hide routers between them",
                    " and ".join(sorted(name[key] for key in nodes)),
                )


def _distances(
    starts: Sequence[str], links: Iterable[tuple[str, str]], number: Mapping[str, int]
) -> npt.NDArray[np.int32]:
    """The links from each start to each router; more than any path has where there is no way."""
    after: defaultdict[str, list[str]] = defaultdict(list)
    for a, b in links:
        after[a].append(b)
    found = np.full((len(starts), len(number)), _FAR, dtype=np.int32)
    for row, start in enumerate(starts):
        seen, layer, distance = {start}, [start], 0
        while layer and distance < MAX_HOPS:
            found[row, [number[key] for key in layer]] = distance
            layer = [b for b in dict.fromkeys(b for a in layer for b in after[a]) if b not in seen]
            seen.update(layer)
            distance += 1
    return found
