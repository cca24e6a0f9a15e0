"""Networks that answer probes, played: true topologies, and what their hosts see of them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from typing import Literal

from crux_torch.network.discover.evidence import Nic
from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.probe.packets import Answer, Kind, Probe
from crux_torch.network.topology import Link, Topology, TopologyBuilder

#: Answers from: the interface that the probe came in by; a loopback address; the interface that
#: leads back, chosen by a hash of the flow, or of the pair of addresses.
Mode = Literal["inbound", "loopback", "back", "back-pair"]
Numbering = Literal["/31", "/30", "/24", "/24 ends", "/127"]
HOST_Bps, SPINE_Bps = 12.5e9, 50e9
LATENCY_S = 0.0005

Flow = tuple[str, str, int]


def clos2(leaves: int = 4, spines: int = 4, per_leaf: int = 4, unequal: int = 0) -> Topology:
    """Leaves and spines; ``unequal`` leaves lack the last spine."""
    builder = TopologyBuilder()
    for i, k in itertools.product(range(leaves), range(per_leaf)):
        builder.node(f"h{i}-{k}", "host")
    _switches(builder, "leaf", "tor", leaves)
    _switches(builder, "spine", "aggregation", spines)
    for i, k in itertools.product(range(leaves), range(per_leaf)):
        builder.cable(f"h{i}-{k}", f"leaf{i}", Link(HOST_Bps))
    for i, j in itertools.product(range(leaves), range(spines)):
        if i >= unequal or j < spines - 1:
            builder.cable(f"leaf{i}", f"spine{j}", Link(SPINE_Bps))
    return builder.build()


def clos3(
    pods: int = 4, leaves: int = 2, planes: int = 2, cores: int = 2, per_leaf: int = 2
) -> Topology:
    """Pods of leaves below one switch of each plane; each plane has its own cores."""
    builder = TopologyBuilder()
    places = list(itertools.product(range(pods), range(leaves)))
    for (p, i), k in itertools.product(places, range(per_leaf)):
        builder.node(f"h{p}-{i}-{k}", "host")
    for p, i in places:
        builder.node(f"leaf{p}-{i}", "tor")
    for p, a in itertools.product(range(pods), range(planes)):
        builder.node(f"agg{p}-{a}", "aggregation")
    for a, c in itertools.product(range(planes), range(cores)):
        builder.node(f"core{a}-{c}", "core")
    for (p, i), k in itertools.product(places, range(per_leaf)):
        builder.cable(f"h{p}-{i}-{k}", f"leaf{p}-{i}", Link(HOST_Bps))
    for (p, i), a in itertools.product(places, range(planes)):
        builder.cable(f"leaf{p}-{i}", f"agg{p}-{a}", Link(SPINE_Bps))
    for p, a, c in itertools.product(range(pods), range(planes), range(cores)):
        builder.cable(f"agg{p}-{a}", f"core{a}-{c}", Link(SPINE_Bps))
    return builder.build()


def rails(groups: int = 2, per_group: int = 4, nics: int = 4, spines: int = 4) -> Topology:
    """Hosts with a NIC on each rail's leaf; spines join all leaves."""
    builder = TopologyBuilder()
    hosts = [(g, k) for g in range(groups) for k in range(per_group)]
    for g, k in hosts:
        builder.node(f"h{g}-{k}", "host")
        for r in range(nics):
            builder.node(f"h{g}-{k}/nic{r}", "nic", f"h{g}-{k}")
            builder.cable(f"h{g}-{k}", f"h{g}-{k}/nic{r}", Link(HOST_Bps))
    for g, r in itertools.product(range(groups), range(nics)):
        builder.node(f"leaf{g}-{r}", "tor")
    _switches(builder, "spine", "aggregation", spines)
    for (g, k), r in itertools.product(hosts, range(nics)):
        builder.cable(f"h{g}-{k}/nic{r}", f"leaf{g}-{r}", Link(HOST_Bps))
    for g, r, j in itertools.product(range(groups), range(nics), range(spines)):
        builder.cable(f"leaf{g}-{r}", f"spine{j}", Link(SPINE_Bps))
    return builder.build()


def _switches(builder: TopologyBuilder, name: str, kind: str, count: int) -> None:
    for i in range(count):
        builder.node(f"{name}{i}", kind)


@dataclass
class Limit:
    """Answers that a router gives: so many a second after a burst, to each peer or to all."""

    per_s: float = 1.0
    burst: float = 6.0
    each_peer: bool = True
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)

    def allows(self, peer: str, now: float) -> bool:
        key = peer if self.each_peer else ""
        tokens, at = self._buckets.get(key, (self.burst, now))
        tokens = min(self.burst, tokens + (now - at) * self.per_s)
        allowed = tokens >= 1
        self._buckets[key] = (tokens - allowed, now)
        return allowed


class AnsweringNetwork:
    """A true network whose routers answer probes.

    Args:
        topology: its true links; hosts are joined by their NICs, or themselves.
        numbering: of the cables between routers.
        modes: how each router answers that does not answer as ``mode`` says.
        silent: routers that never answer.
        gateway: "host": a leaf has an address for each host; "leaf": one for all.
        limit: of the answers of each router.
    """

    def __init__(
        self,
        topology: Topology,
        numbering: Numbering = "/31",
        mode: Mode = "inbound",
        modes: Mapping[str, Mode] | None = None,
        silent: Iterable[str] = (),
        gateway: Literal["host", "leaf"] = "host",
        limit: Callable[[], Limit] | None = None,
        seed: int = 1,
    ) -> None:
        self.topology, self.seed = topology, seed
        self._mode, self._modes, self.silent = mode, dict(modes or {}), frozenset(silent)
        self._limits: dict[str, Limit] = {}
        self._new_limit = limit
        #: Times at which a probe expired, by router.
        self.expired: dict[str, list[float]] = {}
        six = numbering == "/127"
        self._out: dict[str, list[str]] = {}
        self._into: dict[str, list[str]] = {}
        self.ends: dict[str, str] = {}
        self.address: dict[str, str] = {}
        #: (router, its neighbour): address of the router's interface there.
        self.interface: dict[tuple[str, str], str] = {}
        cables: dict[tuple[str, str], None] = {}
        for edge in topology.edges:
            a, b = edge.src, edge.dst
            if topology.host_of(a) and topology.host_of(b):
                continue
            self._out.setdefault(a, []).append(b)
            self._into.setdefault(b, []).append(a)
            if topology.host_of(a):
                self.ends[a] = b
            elif not topology.host_of(b) and (b, a) not in cables:
                cables[a, b] = None
        leaf_number = {leaf: n for n, leaf in enumerate(dict.fromkeys(self.ends.values()))}
        count = dict.fromkeys(leaf_number, 0)
        for end, leaf in self.ends.items():
            k, n = count[leaf], leaf_number[leaf]
            count[leaf] += 1
            if six:
                net = f"2001:db8:{n:x}:{k:x}::"
                host, gate = (
                    f"{net}2",
                    f"{net}1" if gateway == "host" else f"2001:db8:{n:x}:ffff::1",
                )
            elif gateway == "host":
                low = int(ip_address("10.128.0.0")) + 1024 * n + 2 * k
                gate, host = str(ip_address(low)), str(ip_address(low + 1))
            else:
                low = int(ip_address("10.128.0.0")) + 1024 * n
                gate, host = str(ip_address(low + 1)), str(ip_address(low + 2 + k))
            self.address[end] = str(ip_address(host))
            self.interface[leaf, end] = str(ip_address(gate))
        for n, (a, b) in enumerate(cables):
            self.interface[a, b], self.interface[b, a] = _cable(numbering, n)
        switches = [n for n, node in topology.nodes.items() if node.host is None]
        base = ip_address("2001:db8:ffff::1" if six else "172.16.0.0")
        self.loopback = {name: str(base + n) for n, name in enumerate(switches)}
        self.end_at = {address: end for end, address in self.address.items()}
        self._toward = lru_cache(maxsize=None)(self._find_toward)

    def hops_of(self, flow: Flow) -> tuple[str, ...]:
        """The routers that a flow truly takes."""
        src, dst, port = flow
        at, end = self.ends[self.end_at[src]], self.end_at[dst]
        found = [at]
        while at != self.ends[end]:
            at = self._next(at, self.ends[end], f"{src} {dst} {port}")
            found.append(at)
        return tuple(found)

    def links_of(self, flow: Flow) -> tuple[str, ...]:
        """The network's links that a flow truly takes."""
        through = (self.end_at[flow[0]], *self.hops_of(flow), self.end_at[flow[1]])
        return tuple(f"{a}->{b}" for a, b in itertools.pairwise(through))

    def seen(self, flow: Flow) -> tuple[str | None, ...]:
        """The address that answers at each TTL."""
        hops = (self.end_at[flow[0]], *self.hops_of(flow))
        return tuple(self._answer(a, b, flow) for a, b in itertools.pairwise(hops))

    def fragment(
        self, pairs: Iterable[tuple[str, str]], ports: Sequence[int] = range(50000, 50064)
    ) -> Fragment:
        """What a job sees that probes from all ``ports`` between addresses of ``pairs``."""
        ends: dict[str, None] = {}
        seen = []
        for src, dst in pairs:
            found: dict[tuple[str | None, ...], list[int]] = {}
            for port in ports:
                found.setdefault(self.seen((src, dst, port)), []).append(port)
            paths = tuple(SeenPath(h, tuple(p[:8])) for h, p in found.items())
            ends.update({self.end_at[src]: None, self.end_at[dst]: None})
            seen.append(SeenPair(self._host(src), src, self._host(dst), dst, paths, 0.99))
        return Fragment.of(hosts=self.hosts(ends), pairs=tuple(seen))

    def hosts(self, ends: Iterable[str]) -> tuple[SeenHost, ...]:
        """Hosts with these of their interfaces, as they see themselves."""
        nics: dict[str, list[SeenNic]] = {}
        for end in ends:
            name = self.nic(self.address[end]).name
            speed_Bps = self.topology.capacity_Bps[f"{end}->{self.ends[end]}"]
            nic = SeenNic(name, (self.address[end],), speed_Bps)
            nics.setdefault(self._host(self.address[end]), []).append(nic)
        return tuple(SeenHost(host, tuple(given)) for host, given in nics.items())

    def nic(self, address: str) -> Nic:
        """The interface with this address."""
        end = self.end_at[address]
        return Nic(self._host(address), end.rpartition("/")[2] if "/" in end else "eth0")

    def heard(self, flow: Flow, ttl: int, now: float) -> str | None:
        """The address that answers a probe now; None if the router is silent or limited."""
        hops = (self.end_at[flow[0]], *self.hops_of(flow))
        if ttl >= len(hops):
            return flow[1]
        router = hops[ttl]
        self.expired.setdefault(router, []).append(now)
        if self._new_limit is not None:
            limit = self._limits.setdefault(router, self._new_limit())
            if not limit.allows(flow[0], now):
                return None
        return self._answer(hops[ttl - 1], router, flow)

    def _host(self, address: str) -> str:
        return self.topology.host_of(self.end_at[address]) or ""

    def _answer(self, came_from: str, router: str, flow: Flow) -> str | None:
        if router in self.silent:
            return None
        mode = self._modes.get(router, self._mode)
        if mode == "loopback":
            return self.loopback[router]
        src, dst, port = flow
        home = self.ends[self.end_at[src]]
        if mode == "inbound" or router == home:
            return self.interface[router, came_from]
        key = f"{dst} {src}" + (f" {port}" if mode == "back" else "")
        return self.interface[router, self._next(router, home, key)]

    def _next(self, router: str, leaf: str, key: str) -> str:
        choices = self._toward(leaf)[router]
        if len(choices) == 1:
            return choices[0]
        text = f"{self.seed} {router} {key}".encode()
        return choices[
            int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") % len(choices)
        ]

    def _find_toward(self, leaf: str) -> dict[str, list[str]]:
        """The next routers toward a leaf, by router."""
        distance, layer = {leaf: 0}, [leaf]
        while layer:
            layer = list(
                dict.fromkeys(
                    b
                    for a in layer
                    for b in self._into[a]
                    if not self.topology.host_of(b) and b not in distance
                )
            )
            distance.update(dict.fromkeys(layer, max(distance.values()) + 1))
        return {
            a: [b for b in self._out[a] if distance.get(b, -1) == distance[a] - 1] for a in distance
        }


class PlayedPackets:
    """Packets of one pair in an :class:`AnsweringNetwork`, and the time of their search."""

    def __init__(self, network: AnsweringNetwork, src: str, dst: str, now: float) -> None:
        self.now = now
        self._network, self._src, self._dst = network, src, dst
        self._coming: list[tuple[float, Answer]] = []

    def clock(self) -> float:
        return self.now

    def send(self, probe: Probe) -> bool:
        address = self._network.heard((self._src, self._dst, probe.port), probe.ttl, self.now)
        if address is not None:
            kind: Kind = "destination" if address == self._dst else "hop"
            self._coming.append((self.now + LATENCY_S, Answer(probe, address, kind)))
        return True

    def receive(self, timeout_s: float) -> list[Answer]:
        first = min((at for at, _ in self._coming), default=float("inf"))
        self.now = max(self.now, min(first, self.now + timeout_s))
        due = [answer for at, answer in self._coming if at <= self.now]
        self._coming = [(at, answer) for at, answer in self._coming if at > self.now]
        return due

    def forget(self, probe: Probe) -> None:
        self._coming = [(at, answer) for at, answer in self._coming if answer.probe != probe]


def _cable(numbering: Numbering, n: int) -> tuple[str, str]:
    base = int(ip_address("10.0.0.0"))
    if numbering == "/31":
        return str(ip_address(base + 2 * n)), str(ip_address(base + 2 * n + 1))
    if numbering == "/30":
        return str(ip_address(base + 4 * n + 1)), str(ip_address(base + 4 * n + 2))
    if numbering == "/127":
        six = int(ip_address("2001:db8:fffe::"))
        return str(ip_address(six + 2 * n)), str(ip_address(six + 2 * n + 1))
    last = 2 if numbering == "/24" else 254
    return str(ip_address(base + 256 * n + 1)), str(ip_address(base + 256 * n + last))
