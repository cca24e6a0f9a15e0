"""Joins what jobs saw of the network to one topology. Pure: the order of fragments is no matter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crux_torch.network.discover import shares
from crux_torch.network.discover.assembly import Assembly
from crux_torch.network.discover.evidence import Evidence, Nic, Tail, canonical, split
from crux_torch.network.discover.fragment import Fragment
from crux_torch.network.discover.reading import read
from crux_torch.network.discover.routers import Routers, routers_on
from crux_torch.network.topology import Path, Topology, TopologyError


@dataclass(frozen=True)
class Discovered:
    """A network as its hosts saw it.

    Attributes:
        topology: hosts, their interfaces where they use several, routers and links. A router is
            named by the name that hosts below got by LLDP, else by its kind and lowest address.
        certain: links whose two ends answered by address.
        assumed: links whose capacity nobody told.
        notes: what is assumed, silent, hidden or refused, a line for each kind.
        node_of: node of each interface that paths use.
        left_out: owners whose fragments cost too much beside those of the others
            (:mod:`~crux_torch.network.discover.shares`).
    """

    topology: Topology
    certain: frozenset[str]
    assumed: frozenset[str]
    notes: tuple[str, ...]
    node_of: Mapping[Nic, str]
    left_out: tuple[str, ...]
    _router: Mapping[str, str]
    _through: Mapping[tuple[str, Tail], tuple[str, ...]]

    def path_between(self, src: Nic, dst: Nic, hops: Sequence[str | None]) -> Path | None:
        """Returns the links of a path that was seen; None if it was refused.

        It is the path that its owner saw, whatever others claim.
        """
        if src not in self.node_of or dst not in self.node_of:
            return None
        first, tail = split([hop and canonical(hop) for hop in hops], src, dst)
        router = self._router
        # The last router is the same for all hosts below it, whatever it answers.
        tail = (*tail[:-1], router.get(tail[-1] or "", "")) if tail else ()
        through = self._through.get((router.get(first, ""), tail))
        if through is None:
            return None
        nodes = (self.node_of[src], *through, self.node_of[dst])
        found = tuple(f"{a}->{b}" for a, b in itertools.pairwise(nodes))
        return found if self.topology.links.keys() >= set(found) else None


def join(fragments: Mapping[str, Fragment]) -> Discovered:
    """Returns the network that the fragments show together.

    Args:
        fragments: by owner: the job, or the run of discovery, that saw it. One owner has one voice.

    Raises:
        TopologyError: no fragment has a host, or one owner alone saw a larger network than a
            topology may be.
    """
    if len(fragments) > 1:
        try:
            return _joined(read(fragments, shares.MAX_COST))
        except TopologyError:
            kept = shares.within(fragments)
            return _joined(read(kept), tuple(sorted(fragments.keys() - kept.keys())))
    return _joined(read(fragments))


def _joined(evidence: Evidence, left_out: tuple[str, ...] = ()) -> Discovered:
    routers = Routers(evidence)
    through = routers_on(evidence, routers)
    assembly = Assembly(evidence, routers, through)
    topology = assembly.topology()
    name, router = assembly.name, routers.router
    ended = [(*tail[:-1], router(tail[-1] or "")) if tail else () for tail in evidence.tails]
    return Discovered(
        topology,
        assembly.certain(topology),
        assembly.assumed(topology),
        evidence.notes.lines(),
        assembly.node_of,
        left_out,
        {key: router(key) for key in evidence.owners if routers.knows(key)},
        {
            (first, ended[number]): tuple([name[key] for key in nodes])
            for (first, number), nodes in through.items()
        },
    )
