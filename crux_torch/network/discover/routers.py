"""Unites answers of one router: addresses are united by evidence, unless other evidence forbids it.

- All last hops to an interface, and all first hops from it, are one router: its leaf.
- Most switches answer from the interface that a probe came in by ("inbound"). Such an address is
  one end of a cable, so all hops before it are one router.
- The two addresses of a cable's /31 or /30 are ends of one cable: the hop before the one is the
  router of the other.
- Two addresses on one path are two routers. So an address after different routers is not inbound:
  it is a loopback address, or the interface that leads back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from crux_torch.network.addresses import address_order, cable_mates
from crux_torch.network.discover.evidence import Evidence, Witness, combined

#: An address, and the hops that came just before it.
_Edges = tuple[str, dict[str, Witness]]


class Routers:
    """The routers behind the addresses of all traces; a union-find with refusals.

    Attributes:
        loopbacks: addresses that answer whichever way a probe came in by.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._parent: dict[str, str] = {}
        self._members: dict[str, list[str]] = {}
        # By router: the tails that it is in, and those that it comes before.
        self._within: dict[str, set[int]] = {}
        self._leads: dict[str, dict[int, Witness]] = {}
        self.loopbacks: set[str] = set()
        # Routers with a loopback address; and those of which two owners know one.
        self._looped: dict[bool, set[str]] = {False: set(), True: set()}
        # By router: the owners of each of its addresses that has several.
        self._known_to: dict[str, set[frozenset[str]]] = {}
        self._index()
        self._unite_leaves()
        self._before = self._edges()
        mates = self._mates()
        # First by what two owners saw: what only one saw must not stand in the way of that.
        for sure, edges in ((True, _by_several(self._before)), (False, self._before)):
            self._settle(edges, sure)
            self._unite_cables(edges, mates)
            self._settle(edges, sure)

    def router(self, key: str) -> str:
        """Returns one address that stands for the router of ``key``."""
        parent = self._parent
        root = key
        while parent[root] != root:
            root = parent[root]
        while parent[key] != root:
            parent[key], key = root, parent[key]
        return root

    def knows(self, key: str) -> bool:
        """False for an address that only first routers answer from."""
        return key in self._parent

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Returns the addresses of each router, by the one that stands for it."""
        found = {
            root: {m for m in members if is_address(m)} for root, members in self._members.items()
        }
        votes: dict[str, Counter[str]] = {}
        for key, addresses in self._evidence.first_address.items():
            for address, witness in addresses.items():
                if address not in self._parent:
                    count = votes.setdefault(address, Counter())
                    count[self.router(key)] += 2 if witness is None else 1
        for address, count in votes.items():
            (router, most), *others = count.most_common(2)
            if not others or others[0][1] < most:
                found[router].add(address)
        return {root: tuple(sorted(given, key=address_order)) for root, given in found.items()}

    def parallel(self) -> set[tuple[str, str]]:
        """Returns pairs of routers of which the one answers from several addresses after the other.

        Addresses toward one interface don't count: they are one router in any case.
        """
        entered: dict[tuple[str, str], str] = {}
        found = set()
        for key, edges in self._before:
            after = self.router(key)
            for previous in edges:
                ends = self.router(previous), after
                if entered.setdefault(ends, key) != key:
                    found.add(ends)
        return found

    def _index(self) -> None:
        """Notes which tails each router is on: two routers on one path are two."""
        evidence = self._evidence
        for number, tail in enumerate(evidence.tails):
            for key in tail:
                if key is not None:
                    self._within.setdefault(key, set()).add(number)
        self._leads = {first: dict(tails) for first, tails in evidence.leads.items()}
        self._parent = {key: key for key in (*self._within, *self._leads)}
        for key in self._parent:
            self._members[key] = [key]
            self._within.setdefault(key, set())
            self._leads.setdefault(key, {})
            owners = frozenset(evidence.owners[key])
            self._known_to[key] = {owners} if len(owners) > 1 else set()

    def _unite_leaves(self) -> None:
        evidence = self._evidence
        pairs: dict[tuple[str, str], frozenset[str]] = {}
        for keys in evidence.beside.values():
            strongest = min(keys, key=lambda key: (keys[key] is not None, key))
            for key, witness in keys.items():
                if key != strongest:
                    pair = min(key, strongest), max(key, strongest)
                    suspects = _only(witness, keys[strongest])
                    # Two owners that say the same by themselves are no suspects.
                    pairs[pair] = pairs.get(pair, suspects) & suspects
        self._unite_pairs(pairs)
        self._unite_pairs(self._equal_first_hops())
        self._find_loopbacks()

    def _unite_pairs(self, pairs: dict[tuple[str, str], frozenset[str]]) -> None:
        for a, b in sorted(pairs, key=lambda pair: (bool(pairs[pair]), pair)):
            self._unite(a, b, pairs[a, b])

    def _equal_first_hops(self) -> dict[tuple[str, str], frozenset[str]]:
        """Pairs of first routers that answer from one address, each with its only witnesses.

        That is a hint only: with an anycast gateway all leaves answer alike.
        """
        at: dict[str, dict[str, Witness]] = {}
        for key, addresses in self._evidence.first_address.items():
            for address, witness in addresses.items():
                at.setdefault(address, {})[key] = witness
        pairs: dict[tuple[str, str], frozenset[str]] = {}
        for address, keys in at.items():
            centre = min(keys, key=lambda key: (keys[key] is not None, key))
            of_centre = keys[centre]
            if address in self._parent:
                centre, of_centre = address, None
            for key, witness in keys.items():
                if key != centre:
                    suspects = _only(witness, of_centre)
                    pairs[key, centre] = pairs.get((key, centre), suspects) & suspects
        return pairs

    def _find_loopbacks(self) -> None:
        """Finds addresses that answer toward hosts and toward other routers alike."""
        evidence = self._evidence
        last: dict[str | None, Witness] = {}
        for tail, witness in zip(evidence.tails, evidence.tail_witness, strict=True):
            if tail:
                last[tail[-1]] = combined(last.get(tail[-1], witness), witness)
        first: dict[str, Witness] = {}
        for addresses in evidence.first_address.values():
            for address, witness in addresses.items():
                first[address] = combined(first.get(address, witness), witness)
        for key in first.keys() & last.keys():
            # One owner alone can't make it seem so where two know better.
            sure = first[key] is last[key] is None
            if sure or len(evidence.owners[key]) < 3:
                self._add_loopback(key, sure)

    def _edges(self) -> list[_Edges]:
        """The hops that came just before each address; addresses far from hosts come last."""
        evidence = self._evidence
        before: dict[str, dict[str, Witness]] = {}
        height: dict[str, int] = {}
        for first, seconds in evidence.second.items():
            leaf = self.router(first)
            for second, claimant in seconds.items():
                edges = before.setdefault(second, {})
                edges[leaf] = combined(edges.get(leaf, claimant), claimant)
        for tail, witness in zip(evidence.tails, evidence.tail_witness, strict=True):
            end = len(tail) - 1
            previous = None
            for place, key in enumerate(tail):
                if key is not None:
                    now = min(place + 1, end - place)
                    if height.get(key, 99) > now:
                        height[key] = now
                    if previous is not None:
                        edges = before.setdefault(key, {})
                        edges[previous] = combined(edges.get(previous, witness), witness)
                previous = key
        # Leaves come at the end: what is above them tells whether it answers from loopbacks.
        order = sorted(before, key=lambda key: (height[key] == 0, height[key], key))
        return [(key, before[key]) for key in order if is_address(key)]

    def _settle(self, before: list[_Edges], sure: bool) -> None:
        """Unite the hops before each inbound address, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for key, edges in before:
                if key not in self.loopbacks:
                    changed |= self._unite_before(key, edges, sure)

    def _unite_before(self, key: str, edges: dict[str, Witness], sure: bool) -> bool:
        routers: dict[str, Witness] = {}
        for previous, witness in edges.items():
            router = self.router(previous)
            routers[router] = combined(routers.get(router, witness), witness)
        if len(routers) == 1:
            return False
        certain = sorted(r for r, witness in routers.items() if witness is None)
        if self._are_several(certain or sorted(routers), sure or bool(certain)):
            self._add_loopback(key, bool(certain))
            return True
        centre, *others = sorted(routers, key=lambda r: (routers[r] is not None, r))
        changed = False
        for other in others:
            changed |= self._unite(centre, other, _only(routers[centre], routers[other]))
        return changed

    def _add_loopback(self, key: str, sure: bool) -> None:
        self.loopbacks.add(key)
        for kind in {False, sure}:
            self._looped[kind].add(self.router(key))

    def _are_several(self, routers: Iterable[str], sure: bool = False) -> bool:
        """True if two of the routers are different: they are on one path.

        Args:
            sure: only what two owners saw counts.
        """
        before: list[str] = []
        for router in routers:
            if any(self._are_two(router, other, sure) for other in before):
                return True
            before.append(router)
        return False

    def _are_two(self, a: str, b: str, sure: bool) -> bool:
        within, leads = self._within, self._leads
        if self._looped[sure].issuperset((a, b)):
            return True
        if not sure:
            together = not within[a].isdisjoint(within[b])
            # By its keys: then the smaller side is walked, as a forger may make the other one huge.
            return together or any(
                not leads[x].keys().isdisjoint(within[y]) for x, y in ((a, b), (b, a))
            )
        witnesses = self._evidence.tail_witness
        return any(witnesses[number] is None for number in within[a] & within[b]) or any(
            leads[x][number] is None
            for x, y in ((a, b), (b, a))
            for number in leads[x].keys() & within[y]
        )

    def _mates(self) -> dict[str, str]:
        nics = (nic for claims in self._evidence.nics.values() for nic in claims.values())
        return cable_mates(self._parent.keys() | {a for nic in nics for a in nic.addresses})

    def _unite_cables(self, edges_before: list[_Edges], mates: dict[str, str]) -> None:
        before = dict(edges_before)
        for key, edges in edges_before:
            mate = mates.get(key)
            if mate not in self._parent or not self.loopbacks.isdisjoint((key, mate)):
                continue
            back = [self.router(previous) for previous in before.get(mate, ())]
            if any(self._are_several((self.router(key), r)) for r in back if r != self.router(key)):
                continue
            for previous, witness in sorted(edges.items()):
                self._unite(previous, mate, _only(witness))

    def _unite(self, a: str, b: str, suspects: frozenset[str]) -> bool:
        """Make the routers of ``a`` and ``b`` one, unless that contradicts what others saw.

        Args:
            suspects: owners that are the only witness of a part of the evidence. They may add an
                address to a router that others know, but not make two of them one.
        """
        a, b = self.router(a), self.router(b)
        if a == b:
            return False
        if self._are_two(a, b, sure=not suspects):
            return False
        if suspects and self._others_know(a, suspects) and self._others_know(b, suspects):
            return False
        if len(self._members[a]) < len(self._members[b]):
            a, b = b, a
        self._parent[b] = a
        self._members[a] += self._members.pop(b)
        self._within[a] |= self._within.pop(b)
        self._known_to[a] |= self._known_to.pop(b)
        for looped in self._looped.values():
            if b in looped:
                looped.add(a)
        leads = self._leads[a]
        for number, witness in self._leads.pop(b).items():
            if leads.setdefault(number, witness) != witness:
                leads[number] = None
        return True

    def _others_know(self, router: str, suspects: frozenset[str]) -> bool:
        """True if two owners besides the suspects saw one address of a router."""
        return any(len(owners - suspects) > 1 for owners in self._known_to[router])


def _by_several(before: list[_Edges]) -> list[_Edges]:
    kept: list[_Edges] = []
    for key, edges in before:
        by_several: dict[str, Witness] = {p: None for p, w in edges.items() if w is None}
        kept += [(key, by_several)] if by_several else []
    return kept


def _only(*witnesses: Witness) -> frozenset[str]:
    return frozenset(witness for witness in witnesses if witness is not None)


def is_address(key: str) -> bool:
    """False for a stand-in."""
    return key[0] not in "?="


#: By the first router of a path and the number of its tail.
Through = Mapping[tuple[str, int], tuple[str, ...]]


def routers_on(evidence: Evidence, routers: Routers) -> Through:
    """Returns the routers on each path, each by the key that stands for it.

    Silent routers at one distance from one router that answers are one node, ``~`` and both: where
    it can't be told, flows share. Paths on which a router is twice are left out.
    """
    tails: dict[str, set[int]] = {}
    for first, seen in evidence.leads.items():
        tails.setdefault(routers.router(first), set()).update(seen)
    known = [
        tuple([key and routers.router(key) for key in tail]) if None in tail else None
        for tail in evidence.tails
    ]
    answered = [
        tuple([routers.router(key) for key in tail if key is not None]) for tail in evidence.tails
    ]
    silent = Silent()
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    for first in sorted(tails):
        for number in tails[first]:
            gaps = known[number]
            nodes = answered[number] if gaps is None else silent.named((first, *gaps))[1:]
            found[first, number] = (first, *nodes)
    if silent.parent:
        found = {at: tuple(map(silent.root, nodes)) for at, nodes in found.items()}
    return {at: nodes for at, nodes in found.items() if len(set(nodes)) == len(nodes)}


class Silent:
    """Silent routers; those that are one have one root.

    Attributes:
        parent: of names that are not their own root.
    """

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}

    def named(self, hops: Sequence[str | None]) -> tuple[str, ...]:
        """Names each silent router by its distance from the nearer end that answers."""
        nodes = []
        both = zip(_away(hops), _away(hops[::-1])[::-1], strict=True)
        for place, (left, right) in enumerate(both):
            after = len(hops) - 1 - place
            if left != right and place == after:
                # Half way it is above both ends, so what is above the one is above the other.
                a, b = sorted((self.root(left), self.root(right)))
                self.parent[b] = a
            nodes.append(left if place <= after else right)
        return tuple(nodes)

    def root(self, key: str) -> str:
        """Returns the name of the router that ``key`` is."""
        while (parent := self.parent.get(key, key)) != key:
            key = parent
        return key


def _away(hops: Sequence[str | None]) -> list[str]:
    names = []
    base, distance = "", 0
    for key in hops:
        base, distance = (key, 0) if key is not None else (base, distance + 1)
        names.append(f"~{distance}~{base}" if distance else base)
    return names
