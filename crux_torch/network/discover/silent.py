"""The routers on each path; those that don't answer are one for each place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crux_torch.network.discover.evidence import Evidence
from crux_torch.network.discover.routers import Routers

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
