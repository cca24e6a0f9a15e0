"""How well a discovered map tells what the true network does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import NamedTuple

from answering import AnsweringNetwork, Flow

from crux_torch.network.discover.evidence import Nic
from crux_torch.network.discover.fragment import Fragment
from crux_torch.network.discover.join import Discovered
from crux_torch.network.topology import Path


class Score(NamedTuple):
    """Shares of 1: of "these two flows share a link", and of links one by one."""

    precision: float
    recall: float
    links_precision: float
    links_recall: float


def pairs_of(network: AnsweringNetwork) -> list[tuple[str, str]]:
    """All pairs of addresses of different hosts, on rails those of one rail."""
    nic = {address: network.nic(address) for address in network.end_at}
    pairs = permutations(nic, 2)
    return [(a, b) for a, b in pairs if nic[a].host != nic[b].host and nic[a].name == nic[b].name]


def path_of(network: AnsweringNetwork, found: Discovered, flow: Flow) -> Path | None:
    """The path of a flow on the discovered map."""
    src, dst = (network.nic(address) for address in flow[:2])
    return found.path_between(src, dst, network.seen(flow))


def paths_of(fragment: Fragment, found: Discovered) -> list[Path | None]:
    """The paths of a fragment on the map that it was joined to."""
    nic_at = {
        address: Nic(host.name, nic.name)
        for host in fragment.hosts
        for nic in host.nics
        for address in nic.addresses
    }
    return [
        found.path_between(nic_at[pair.src_address], nic_at[pair.dst_address], path.hops)
        for pair in fragment.pairs
        for path in pair.paths
    ]


def score(
    network: AnsweringNetwork,
    found: Discovered,
    pairs: Sequence[tuple[str, str]],
    ports: Sequence[int],
    sample: int = 300,
) -> Score:
    """Compares the map with the true network by ``sample`` flows between ``pairs``."""
    chance = random.Random(1)
    flows = [(*chance.choice(pairs), chance.choice(ports)) for _ in range(sample)]
    true = [network.links_of(flow) for flow in flows]
    topology = found.topology
    inside = {e.name for e in topology.edges if None not in map(topology.host_of, (e.src, e.dst))}
    got = [
        [link for link in path_of(network, found, flow) or () if link not in inside]
        for flow in flows
    ]
    shares = [
        (not set(true[i]).isdisjoint(true[j]), not set(got[i]).isdisjoint(got[j]))
        for i, j in combinations(range(len(flows)), 2)
    ]
    both = shares.count((True, True))
    true_of: dict[str, set[str]] = {}
    got_of: dict[str, set[str]] = {}
    for a, b in zip(true, got, strict=True):
        for x, y in zip(a, b, strict=bool(b)):
            true_of.setdefault(y, set()).add(x)
            got_of.setdefault(x, set()).add(y)
    exact = sum(len(xs) == 1 and len(got_of[min(xs)]) == 1 for xs in true_of.values())
    return Score(
        both / (both + shares.count((False, True))),
        both / (both + shares.count((True, False))),
        exact / len(true_of),
        exact / len(got_of),
    )
