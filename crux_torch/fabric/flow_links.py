"""The links that a flow between two hosts is sure to cross, whichever path the network chooses."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import msgspec

from crux_torch.fabric.route import Address, NodeName
from crux_torch.fabric.topology import Topology

#: Links of one flow at most, those nearest to its source first.
MAX_LINKS = 16

LinkName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Capacity = Annotated[float, msgspec.Meta(gt=0.0)]


class HostFlowLinks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A flow from one host of a job to another.

    Attributes:
        destinations: addresses of ``dst``.
        links: capacity in bytes per second of each link, in order from ``src``.
        leaves, enters: of these links, the one from ``src`` into the network, and the one from the
            network to ``dst``; empty where the flow has a choice.
    """

    src: NodeName
    dst: NodeName
    destinations: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=64)]
    links: Annotated[dict[LinkName, Capacity], msgspec.Meta(min_length=1, max_length=MAX_LINKS)]
    leaves: str = ""
    enters: str = ""


# A job's pairs are asked for with every order, and a cluster has one topology at a time.
@lru_cache(maxsize=1 << 16)
def flow_links(topology: Topology, src: str, dst: str) -> HostFlowLinks | None:
    """What is known of flows from host ``src`` to host ``dst``; None if no link is sure, or ``dst``
    has no addresses.

    Raises:
        TopologyError: a host is unknown.
    """
    addresses = [a for n in (dst, *topology.inside(dst)) for a in topology.addresses.get(n, ())]
    candidates = topology.candidate_paths(src, dst)
    sure = set(candidates[0]).intersection(*candidates[1:])
    links = [link for link in candidates[0] if link in sure][:MAX_LINKS]
    if not addresses or not links:
        return None

    def host(node: str) -> str | None:
        return topology.host_of(node)

    ends = {link: topology.ends(link) for link in links}
    leaves = [e for e, (a, b) in ends.items() if host(a) == src and host(b) is None]
    enters = [e for e, (a, b) in ends.items() if host(a) is None and host(b) == dst]
    return HostFlowLinks(
        src=src,
        dst=dst,
        destinations=tuple(dict.fromkeys(addresses))[:64],
        links={link: topology.capacity_Bps[link] for link in links},
        leaves="".join(leaves[:1]),
        enters="".join(enters[:1]),
    )
