"""Shares of the joined network: it has a bound, and who claims too much of it leaves out itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from crux_torch.network.discover.evidence import Nic, canonical, sprayed
from crux_torch.network.discover.fragment import Fragment, SeenPair
from crux_torch.network.discover.routers import Silent
from crux_torch.network.topology import MAX_LINKS

#: Of all owners together: a topology may have a network of this cost.
MAX_COST = MAX_LINKS
#: Links of a claim: a cable's two directions, and as many to the router for what nobody saw.
_LINKS = 4


def cost(claims: int, others: int) -> int:
    """Returns the most links of a network.

    Args:
        claims: interfaces, and pairs of neighbours.
        others: addresses of interfaces, and tails. They add no link, but take time.
    """
    return _LINKS * claims + others


def within(fragments: Mapping[str, Fragment]) -> dict[str, Fragment]:
    """Returns the fragments that together cost ``MAX_COST`` at most, in their order.

    Those of the lowest cost come first, and what one of them claims costs nothing again.
    """
    sizes = sorted((_Claims(fragment).cost, owner) for owner, fragment in fragments.items())
    taken, kept = _Claims(Fragment()), set()
    for _, owner in sizes:
        if taken.take(_Claims(fragments[owner])):
            kept.add(owner)
    return {owner: fragment for owner, fragment in fragments.items() if owner in kept}


class _Claims:
    def __init__(self, fragment: Fragment) -> None:
        self._claims: set[object] = set()
        self._others: set[object] = set()
        self._silent = Silent()
        nic_at: dict[str | None, Nic] = {}
        for host in fragment.hosts:
            for given in host.nics:
                nic = Nic(host.name, given.name)
                self._claims.add(nic)
                self._others.update(given.addresses)
                for address in given.addresses:
                    nic_at.setdefault(canonical(address), nic)
        for pair in fragment.pairs:
            src, dst = (nic_at.get(canonical(a)) for a in (pair.src_address, pair.dst_address))
            if src is not None and dst is not None:
                self._add(pair, str(src), str(dst))

    @property
    def cost(self) -> int:
        return cost(len(self._claims), len(self._others))

    def take(self, more: _Claims) -> bool:
        """Adds the claims of ``more``, unless all then cost too much."""
        claims, others = more._claims - self._claims, more._others - self._others
        fits = self.cost + cost(len(claims), len(others)) <= MAX_COST
        if fits:
            self._claims |= claims
            self._others |= others
        return fits

    def _add(self, pair: SeenPair, src: str, dst: str) -> None:
        for path in pair.paths:
            hops = sprayed(path.hops) if pair.sprays else path.hops
            tail = (*hops[1:-1], hops[-1] or dst) if len(hops) > 1 else ()
            self._others.add(tail)
            nodes = src, *tail
            nodes = self._silent.named(nodes) if None in tail else nodes
            self._claims.update(itertools.pairwise((*nodes, dst)))
