"""The network as one directed graph: hosts, GPUs, PCIe switches, NICs, NVLink and switches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from ipaddress import ip_address
from math import inf, isfinite
from types import MappingProxyType

from crux_torch.errors import CruxError
from crux_torch.network.addresses import cable_mates, ipv4
from crux_torch.network.paths import NETWORK, ShortestPaths
from crux_torch.network.qos import Qos

#: Kinds of node inside a host; ``host`` is its root complex and memory.
HOST_KINDS = ("host", "gpu", "pcie", "nic", "nvswitch")
#: Kinds of node in the network, which forward for everyone.
NETWORK_KINDS = ("tor", "aggregation", "core", "router")
KINDS = HOST_KINDS + NETWORK_KINDS

#: Default limit of candidates of one pair: all that the paper's testbed has.
CANDIDATE_LIMIT = 512

#: Limits of one network, inside and outside its hosts: a leader builds it in seconds.
MAX_NODES = 1 << 18
MAX_LINKS = 1 << 19

Path = tuple[str, ...]
SAME_PLACE: tuple[Path, ...] = ((),)


class TopologyError(CruxError, ValueError):
    """A topology can't be used. Names the node, link or key, and what was expected."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a cable, PCIe lane bundle or NVLink.

    Attributes:
        capacity_Bps: payload bytes per second.
        delay_s: propagation and forwarding delay, the alpha of the alpha-beta model.
        cost: routing metric; paths of the smallest sum are equal-cost candidates.
    """

    capacity_Bps: float
    delay_s: float = 0.0
    cost: int = 1


@dataclass(frozen=True, slots=True)
class Node:
    """End of links; ``host`` is None in the network."""

    kind: str
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """A link with its name and its two ends."""

    name: str
    src: str
    dst: str
    link: Link


class Topology:
    """A validated network; immutable.

    Args:
        nodes: every node by name. A node of kind ``host`` is named as its host.
        edges: every directed link; their order fixes the order of equal-cost paths.
        addresses: the IP addresses of a node: for a host those that its peers connect to, for a
            switch those of all its interfaces. They tell which path a packet took.
        device_flops: FLOP/s of the fastest GPU, an upper bound of what a job may claim for each of
            its GPUs; 0: unknown.
        tables: the host that keeps the load tables of all links
        (docs/research/cassini-and-mlcc.md); empty: each host
            keeps those of the links that leave it.
        qos: the DSCP values that are Crux's; None: unsaid.

    Attributes:
        node_at: the node of every address.
        links, capacity_Bps, delay_s: of every link, by name.

    Raises:
        TopologyError: unknown or repeated names, invalid numbers, or hosts that can't reach each
            other.
    """

    #: False for a network that jobs saw: its hosts have the names that the jobs use.
    is_given = True
    #: Jobs that saw more of such a network than fits, whose part does not count.
    left_out: tuple[str, ...] = ()

    def __init__(
        self,
        nodes: Mapping[str, Node],
        edges: Sequence[Edge],
        addresses: Mapping[str, Sequence[str]] | None = None,
        device_flops: float = 0.0,
        tables: str = "",
        qos: Qos | None = None,
    ) -> None:
        if not (isfinite(device_flops) and device_flops >= 0):
            raise TopologyError(f"device_flops is {device_flops!r}; expected FLOP/s, 0 or more")
        self.device_flops = device_flops
        self.tables = tables
        self.qos = qos
        if qos is not None:
            try:
                qos.check()
            except CruxError as error:
                raise TopologyError(str(error)) from None
        _check_nodes(nodes)
        _check_edges(nodes, edges)
        of_node, node_at = _check_addresses(nodes, addresses or {})
        self.addresses: Mapping[str, tuple[str, ...]] = MappingProxyType(of_node)
        self.node_at: Mapping[str, str] = MappingProxyType(node_at)
        self.nodes: Mapping[str, Node] = MappingProxyType(dict(nodes))
        self.edges = tuple(edges)
        self.hosts = tuple(name for name, node in nodes.items() if node.kind == "host")
        if tables and (tables not in self.hosts or not self.addresses.get(tables)):
            raise TopologyError(f"tables: {tables!r}; expected a host that has addresses")
        self.links: Mapping[str, Link] = MappingProxyType({e.name: e.link for e in edges})
        capacity_Bps = {e.name: e.link.capacity_Bps for e in edges}
        self.capacity_Bps: Mapping[str, float] = MappingProxyType(capacity_Bps)
        delay_s = {e.name: e.link.delay_s for e in edges}
        self.delay_s: Mapping[str, float] = MappingProxyType(delay_s)
        self._edge_by_name = {e.name: e for e in edges}
        self._number = {name: i for i, name in enumerate(nodes)}
        inside: dict[tuple[str, str | None], list[str]] = {}
        for name, node in nodes.items():
            if node.host is not None:
                inside.setdefault((node.host, None), []).append(name)
                inside.setdefault((node.host, node.kind), []).append(name)
        self._inside = {key: tuple(names) for key, names in inside.items()}
        place = {None: NETWORK} | {host: i for i, host in enumerate(self.hosts)}
        self._search = ShortestPaths(
            src=[self._number[e.src] for e in edges],
            dst=[self._number[e.dst] for e in edges],
            cost=[e.link.cost for e in edges],
            owner=[place[node.host] for node in nodes.values()],
            forwards=[node.kind != "gpu" for node in nodes.values()],
        )
        self._candidates = lru_cache(maxsize=1 << 16)(self._find_candidates)
        self._nearest_nics = lru_cache(maxsize=1 << 16)(self._find_nearest_nics)
        if lost := cut_off(self.hosts, nodes, edges):
            raise TopologyError(
                f"host {lost[0]!r} {lost[1]} {self.hosts[0]!r}; expected a connected network"
            )

    def candidate_paths(
        self, src: str, dst: str, limit: int | None = CANDIDATE_LIMIT
    ) -> tuple[Path, ...]:
        """The equal-cost shortest paths from ``src`` to ``dst``, each the links that it crosses.

        A host stands for its NICs, or for itself if it has none: traffic between hosts starts at
        any NIC of one and ends at any NIC of the other. From or to a GPU, a NIC or another inner
        node, paths include the links inside the host. Paths come in the same order on every
        machine, and are cached.

        Args:
            limit: the most paths to return, spread over all of them. None: all, which may be
                millions in a large three-layer network (see :meth:`path_count`).

        Returns:
            At least one path; ``((),)`` if both ends are the same host or node.

        Raises:
            TopologyError: an end is unknown, or no path joins the two.
        """
        return self._candidates(src, dst, limit)

    def as_seen_by(self, job: str) -> Topology:
        """Returns the network with the candidates of one job; in one that was given, of all."""
        return self

    def sees(self, src: str, dst: str) -> bool:
        """True if candidates from one host to the other are known."""
        return True

    def path_count(self, src: str, dst: str) -> int:
        """Number of equal-cost shortest paths, without listing them."""
        if src == dst:
            return 1
        return self._search.count(self._ends(src), self._ends(dst))

    @cached_property
    def cable_mates(self) -> Mapping[str, str]:
        """The address at the other end of the cable, of each address whose subnet tells it."""
        return cable_mates(self.node_at)

    @cached_property
    def is_symmetric(self) -> bool:
        """True if every link has one back of the same cost, so paths lead back as they came."""
        count = Counter((edge.src, edge.dst, edge.link.cost) for edge in self.edges)
        return all(count[dst, src, cost] == n for (src, dst, cost), n in count.items())

    def inside(self, host: str, kind: str | None = None) -> tuple[str, ...]:
        """Returns the nodes of ``host``, itself included, of one kind or all, in their order."""
        if (host, None) not in self._inside:
            raise TopologyError(f"unknown host {host!r}")
        return self._inside.get((host, kind), ())

    def addresses_of(self, host: str) -> tuple[str, ...]:
        """Returns the addresses of ``host`` and of everything inside it."""
        given = (a for node in self.inside(host) for a in self.addresses.get(node, ()))
        return tuple(dict.fromkeys(given))

    def gpus(self, host: str | None = None) -> tuple[str, ...]:
        """The GPUs of ``host``, or of all hosts, host by host."""
        hosts = self.hosts if host is None else (host,)
        return tuple(gpu for h in hosts for gpu in self.inside(h, "gpu"))

    def nearest_nics(self, node: str) -> tuple[str, ...]:
        """The NICs of its host that ``node`` reaches at the least cost; empty without NICs."""
        return self._nearest_nics(node)

    def host_of(self, node: str) -> str | None:
        """The host that ``node`` sits in, or None for a switch of the network."""
        if node not in self.nodes:
            raise TopologyError(f"unknown node {node!r}")
        return self.nodes[node].host

    def ends(self, link: str) -> tuple[str, str]:
        """The nodes that ``link`` leaves and enters."""
        edge = self._edge_by_name[link]
        return edge.src, edge.dst

    def layer(self, link: str) -> str:
        """Returns the layers that ``link`` joins: ``nic-tor``, ``tor-aggregation`` and so on."""
        return "-".join(sorted((self.nodes[n].kind for n in self.ends(link)), key=KINDS.index))

    def _ends(self, name: str) -> tuple[int, ...]:
        node = self.nodes.get(name)
        if node is None:
            raise TopologyError(f"unknown host or node {name!r}")
        names = self.inside(name, "nic") if node.kind == "host" else ()
        return tuple(self._number[n] for n in names or (name,))

    def _find_nearest_nics(self, node: str) -> tuple[str, ...]:
        host = self.host_of(node)
        nics = self.inside(host, "nic") if host is not None and host != node else ()
        inside = self._search.costs_inside(self._number[node])
        costs = {n: inside[self._number[n]] for n in nics if self._number[n] in inside}
        return tuple(n for n, cost in costs.items() if cost == min(costs.values()))

    def _find_candidates(self, src: str, dst: str, limit: int | None) -> tuple[Path, ...]:
        sources, targets = self._ends(src), self._ends(dst)
        if src == dst:
            return SAME_PLACE
        found = self._search.paths(sources, targets, limit)
        if not found:
            raise TopologyError(f"no path leads from {src!r} to {dst!r}")
        edges = self.edges
        return tuple(tuple(edges[i].name for i in path) for path in found)


@dataclass
class TopologyBuilder:
    """Collects nodes and cables; :meth:`build` validates them into a :class:`Topology`."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    addresses: dict[str, Sequence[str]] = field(default_factory=dict)
    device_flops: float = 0.0
    tables: str = ""
    qos: Qos | None = None
    _names: set[str] = field(default_factory=set)
    _next: dict[str, int] = field(default_factory=dict)

    def node(self, name: str, kind: str, host: str | None = None) -> str:
        """Add a node and return its name; a host needs no ``host``."""
        if name in self.nodes:
            raise TopologyError(f"node {name!r} is there twice; names must be unique")
        check_size(len(self.nodes) + 1, 0)
        self.nodes[name] = Node(kind, name if kind == "host" else host)
        return name

    def arrow(self, src: str, dst: str, link: Link, name: str | None = None) -> str:
        """Add one direction; its name is by default ``SRC->DST``, ``SRC->DST#1`` and so on."""
        chosen = name or self.next_name(src, dst)
        self._names.add(chosen)
        self.edges.append(Edge(chosen, src, dst, link))
        return chosen

    def next_name(self, src: str, dst: str) -> str:
        """The name that :meth:`arrow` would give to the next link from ``src`` to ``dst``."""
        first = f"{src}->{dst}"
        n = self._next.get(first, 0)
        while (name := f"{first}#{n}" if n else first) in self._names:
            n += 1
        self._next[first] = n
        return name

    def cable(self, a: str, b: str, link: Link, count: int = 1) -> None:
        """Join ``a`` and ``b`` in both directions, by ``count`` parallel links."""
        check_size(0, len(self.edges) + 2 * count)
        for _ in range(count):
            self.arrow(a, b, link)
            self.arrow(b, a, link)

    def build(self) -> Topology:
        """Returns the topology; raises what :class:`Topology` raises."""
        more = self.addresses, self.device_flops, self.tables, self.qos
        return Topology(self.nodes, self.edges, *more)


def check_size(nodes: int, links: int) -> None:
    """Refuse a network of too many nodes or directed links, before it takes memory and time."""
    if nodes > MAX_NODES or links > MAX_LINKS:
        raise TopologyError(
            f"a network of over {MAX_NODES} nodes or {MAX_LINKS} links, each direction counted; "
            "expected a smaller one: leave out what is inside the hosts"
        )


def _check_addresses(
    nodes: Mapping[str, Node], addresses: Mapping[str, Sequence[str]]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Returns (addresses of each node in their shortest form, node at each address)."""
    of_node: dict[str, tuple[str, ...]] = {}
    node_at: dict[str, str] = {}
    for node, given in addresses.items():
        if node not in nodes:
            raise TopologyError(f"addresses of {node!r}: there is no such node")
        try:
            of_node[node] = tuple(a if ipv4(a) else str(ip_address(a)) for a in given)
        except ValueError as error:
            raise TopologyError(f"addresses of {node!r}: {error}") from None
        for address in of_node[node]:
            if node_at.setdefault(address, node) != node:
                raise TopologyError(
                    f"address {address} is given to {node_at[address]!r} and to {node!r}"
                )
    return of_node, node_at


def _check_nodes(nodes: Mapping[str, Node]) -> None:
    hosts = {name for name, node in nodes.items() if node.kind == "host"}
    for name, node in nodes.items():
        problem = ""
        if not name or not isinstance(name, str):
            problem = "expected a name that is not empty"
        elif node.kind not in KINDS:
            problem = f"unknown kind {node.kind!r}; expected {', '.join(KINDS)}"
        elif node.kind in NETWORK_KINDS and node.host is not None:
            problem = f"a {node.kind} belongs to no host"
        elif node.kind == "host" and node.host != name:
            problem = f"a host belongs to itself, not to {node.host!r}"
        elif node.kind in HOST_KINDS and node.host not in hosts:
            problem = f"a {node.kind} needs a host; {node.host!r} is not one"
        if problem:
            raise TopologyError(f"node {name!r}: {problem}")
    if not hosts:
        raise TopologyError("there is no host; expected one or more")


def _check_edges(nodes: Mapping[str, Node], edges: Iterable[Edge]) -> None:
    seen: set[str] = set()
    for e in edges:
        src, dst, link = nodes.get(e.src), nodes.get(e.dst), e.link
        problem = ""
        if e.name in seen:
            problem = " is there twice; names must be unique"
        elif src is None or dst is None:
            problem = f": unknown end {(e.dst if src else e.src)!r}"
        elif e.src == e.dst:
            problem = f": both ends are {e.src!r}"
        elif src.host and dst.host and src.host != dst.host:
            problem = " joins two hosts directly; put a switch or a router between them"
        elif not 0 < link.capacity_Bps < inf:
            expected = "expected bytes per second, more than 0"
            problem = f": capacity {link.capacity_Bps!r}; {expected}"
        elif not 0 <= link.delay_s < inf:
            problem = f": delay {link.delay_s!r}; expected seconds, 0 or more"
        elif isinstance(link.cost, bool) or not isinstance(link.cost, int) or link.cost < 1:
            problem = f": cost {link.cost!r}; expected a whole number, 1 or more"
        if problem:
            raise TopologyError(f"link {e.name!r}{problem}")
        seen.add(e.name)


def cut_off(
    hosts: Sequence[str], nodes: Mapping[str, Node], edges: Iterable[Edge]
) -> tuple[str, str] | None:
    """Returns a host that does not reach the first one or is not reached by it, and which of both.

    None: there is no such host.
    """
    away: dict[str, list[str]] = {}
    back: dict[str, list[str]] = {}
    for e in edges:
        # Within a host everything counts as one place: only its way out is in question.
        src, dst = nodes[e.src].host or e.src, nodes[e.dst].host or e.dst
        away.setdefault(src, []).append(dst)
        back.setdefault(dst, []).append(src)
    for neighbours, words in ((away, "cannot be reached from"), (back, "cannot reach")):
        seen, todo = {hosts[0]}, [hosts[0]]
        while todo:
            for n in neighbours.get(todo.pop(), ()):
                if n not in seen:
                    seen.add(n)
                    if nodes[n].host is None:
                        todo.append(n)
        for host in (host for host in hosts if host not in seen):
            return host, words
    return None
