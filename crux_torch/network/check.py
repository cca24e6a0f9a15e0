"""Finds what a topology lacks for choosing paths, and what looks wrong in it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from crux_torch.network.formats.draft import some, tier_of
from crux_torch.network.formats.groups import heights
from crux_torch.network.topology import NETWORK_KINDS, Topology

#: Share of the switches of a kind that have to agree before the others look wrong.
MOST = 0.75
#: Findings of what looks wrong at most; the others are counted.
MOST_FINDINGS = 50


class Finding(NamedTuple):
    """A fact about a topology.

    Attributes:
        state: ``missing`` for paths, ``wrong`` if it looks like a mistake, or ``info``.
        text: the fact, with names of nodes or links.
    """

    state: Literal["missing", "wrong", "info"]
    text: str


def examine(topology: Topology) -> list[Finding]:
    """Returns what is missing, what looks wrong, and sizes and oversubscription."""
    height = heights(topology)
    near = _neighbours(topology)
    wrong = [
        *_one_way(topology),
        *_unequal_twins(topology, height),
        *_unequal_uplinks(topology, height),
        *_dead_ends(topology, near),
        *_alike_names(topology),
    ]
    if len(wrong) > MOST_FINDINGS:
        wrong[MOST_FINDINGS:] = [f"and {len(wrong) - MOST_FINDINGS} more"]
    return [
        *(Finding("missing", text) for text in _missing(topology, height, near)),
        *(Finding("wrong", text) for text in wrong),
        *(Finding("info", text) for text in _sizes(topology, height)),
    ]


def far_hosts(topology: Topology, host: str, limit: int) -> list[str]:
    """Returns a host with addresses below other first switches than those of ``host``, of each."""
    near = _neighbours(topology)
    first = {tuple(sorted(near[host])): host}
    for other in topology.hosts:
        if topology.addresses_of(other):
            first.setdefault(tuple(sorted(near[other])), other)
    return list(first.values())[1 : limit + 1]


def compare(topology: Topology, src: str, answers: Mapping[str, Collection[str]]) -> list[Finding]:
    """Returns where routers that answered probes differ from the topology.

    Args:
        src: host that sent the probes.
        answers: for each host that they went to, the addresses that answered on the way.
    """
    crossed: dict[str, None] = {}
    spoke: set[str | None] = set()
    texts: dict[str, None] = {}
    for dst, addresses in answers.items():
        paths = topology.candidate_paths(src, dst)
        nodes = {topology.ends(link)[1] for path in paths for link in path}
        switches = [n for n in nodes if topology.host_of(n) is None and topology.addresses.get(n)]
        crossed.update(dict.fromkeys(sorted(switches)))
        at = {address: topology.node_at.get(address) for address in sorted(addresses)}
        spoke.update(at.values())
        for address, node in at.items():
            if node is None:
                texts[f"{address} answers on the way to {dst}, and is not in the file"] = None
            elif node not in nodes:
                texts[f"{node} ({address}) answers on the way to {dst}, by no path in the file"] = (
                    None
                )
    silent = [switch for switch in crossed if switch not in spoke]
    if silent:
        texts[f"switches that did not answer from any of their addresses: {some(silent)}"] = None
    return [Finding("wrong", text) for text in texts]


def _missing(
    topology: Topology, height: Mapping[str, int], near: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Addresses of hosts, and of switches beside which a packet could take another one."""
    hosts = [host for host in topology.hosts if not topology.addresses_of(host)]
    beside: dict[str, None] = {}
    for node in height:
        above = [n for n in near[node] if n in height and height[n] >= max(1, height[node])]
        if len(above) > 1:
            beside.update(dict.fromkeys(above))
    switches = [switch for switch in beside if not topology.addresses.get(switch)]
    if not beside:
        yield "no host has a choice of paths: jobs are ordered, but get no paths"
    elif not topology.addresses:
        yield "there are no addresses: jobs are ordered, but get no paths"
    else:
        for kind, names in (("hosts", hosts), ("switches", switches)):
            if names:
                yield f"addresses of {kind} {some(names)}: no paths over them are chosen"


def _one_way(topology: Topology) -> Iterator[str]:
    links = Counter((edge.src, edge.dst) for edge in topology.edges)
    for (src, dst), there in links.items():
        back = links.get((dst, src), 0)
        if there > back:
            yield f"from {src} to {dst} there are {there} links, and {back} back"


def _unequal_twins(topology: Topology, height: Mapping[str, int]) -> Iterator[str]:
    """Capacities that differ between the directions of a cable, or between cables of one node."""
    back = {(e.src, e.dst): e.link.capacity_Bps for e in topology.edges}
    of_node: dict[tuple[str, str], list[float]] = {}
    for edge in topology.edges:
        other = back.get((edge.dst, edge.src))
        twins = [e for e in (other, back[edge.src, edge.dst]) if e is not None]
        if edge.src < edge.dst and len(set(twins)) > 1:
            rates = " and ".join(map(rate_text, twins))
            yield f"the directions of {edge.name} have {rates}"
        src, dst = (topology.host_of(end) or end for end in (edge.src, edge.dst))
        if src != dst and height.get(src, 0) < height.get(dst, 0):
            kinds = (topology.nodes[end].kind for end in (src, dst))
            of_node.setdefault((src, tier_of(*kinds)), []).append(edge.link.capacity_Bps)
    for (node, tier), rates_Bps in of_node.items():
        if len(set(rates_Bps)) > 1:
            yield f"{tier} links of {node} differ: {_counted(map(rate_text, rates_Bps))}"


def _unequal_uplinks(topology: Topology, height: Mapping[str, int]) -> Iterator[str]:
    """Hosts and switches with another number of links upwards than most of their kind."""
    up: Counter[str] = Counter()
    for edge in topology.edges:
        src, dst = (topology.host_of(end) or end for end in (edge.src, edge.dst))
        up[src] += height.get(src, 0) < height.get(dst, 0)
    for kind in ("host", *NETWORK_KINDS):
        counts = {n: up[n] for n in height if topology.nodes[n].kind == kind and up[n]}
        usual, nodes = Counter(counts.values()).most_common(1)[0] if counts else (0, 0)
        odd = [node for node, count in counts.items() if count != usual]
        if odd and nodes >= MOST * len(counts):
            yield f"{kind} {some(f'{n} has {up[n]}' for n in odd)} links up, the others {usual}"


def _dead_ends(topology: Topology, near: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for node, kind in ((name, node.kind) for name, node in topology.nodes.items()):
        if kind in NETWORK_KINDS and len(near[node]) < 2:
            end = f"to {near[node][0]} alone" if near[node] else "nowhere"
            yield f"{kind} {node} leads {end}"


def _alike_names(topology: Topology) -> Iterator[str]:
    """Hosts that differ only in case or in their domain."""
    alike: dict[str, list[str]] = {}
    for host in topology.hosts:
        short = host if host.replace(".", "").isdigit() else host.partition(".")[0]
        alike.setdefault(short.lower(), []).append(host)
    for names in alike.values():
        if len(names) > 1:
            yield f"hosts {some(names)} may be one"


def _sizes(topology: Topology, height: Mapping[str, int]) -> Iterator[str]:
    kinds = Counter(node.kind for node in topology.nodes.values())
    switches = ", ".join(f"{kinds[kind]} {kind}" for kind in NETWORK_KINDS if kinds[kind])
    yield f"hosts: {len(topology.hosts)}; switches: {switches or 'none'}"
    up_Bps: Counter[str] = Counter()
    down_Bps: Counter[str] = Counter()
    for edge in topology.edges:
        src, dst = (topology.host_of(end) or end for end in (edge.src, edge.dst))
        if height.get(src, 0) < height.get(dst, 0):
            up_Bps[topology.nodes[src].kind] += edge.link.capacity_Bps  # type: ignore[assignment]
            down_Bps[topology.nodes[dst].kind] += edge.link.capacity_Bps  # type: ignore[assignment]
    for kind in NETWORK_KINDS:
        if up_Bps[kind]:
            ratio = down_Bps[kind] / up_Bps[kind]
            below, above = rate_text(down_Bps[kind]), rate_text(up_Bps[kind])
            yield f"all {kind}: {below} below, {above} above, oversubscription {ratio:.3g}:1"


def rate_text(rate_Bps: float) -> str:
    """Returns a rate in bits per second, such as ``400 Gbps``."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate_Bps * 8 >= scale:
            return f"{rate_Bps * 8 / scale:.4g} {prefix}bps"
    return f"{rate_Bps * 8:.4g} bps"


def _neighbours(topology: Topology) -> dict[str, list[str]]:
    near: dict[str, dict[str, None]] = {name: {} for name in topology.nodes}
    for edge in topology.edges:
        src, dst = (topology.host_of(end) or end for end in (edge.src, edge.dst))
        near[src][dst] = near[dst][src] = None
    return {name: list(others) for name, others in near.items()}


def _counted(texts: Iterable[str]) -> str:
    return ", ".join(f"{count} × {text}" for text, count in Counter(texts).most_common())
