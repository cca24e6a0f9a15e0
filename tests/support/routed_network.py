"""Networks of namespaces from a list of cables: numbering, answers of routers, and true paths."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from types import TracebackType
from typing import Literal

from crux_torch.network.paths import ROCE_V2_PORT
from lab import netns

#: Numbering of cables between switches: a /31, a /24 (or a /64), or none, so that routers answer
#: from their loopback address.
Numbering = Literal["31", "24", "loopback"]
_counter = itertools.count(1)
_LIMITS = "icmp_ratelimit={0} icmp_msgs_per_sec={1} icmp_msgs_burst={2}"


@dataclass(frozen=True)
class Flow:
    """Packets from one host's address to another's, from one source port."""

    src: str
    src_address: str
    dst: str
    dst_address: str
    port: int


def clos(leaves: int, spines: int, hosts_per_leaf: int) -> list[tuple[str, str]]:
    """The cables of two tiers; hosts are called ``h0-0`` and so on."""
    cables = [
        (f"h{i}-{k}", f"leaf{i}") for i in range(leaves) for k in range(hosts_per_leaf)
    ]  # fmt: skip
    return cables + [(f"leaf{i}", f"spine{j}") for i in range(leaves) for j in range(spines)]


def three_tiers(
    pods: int, leaves: int, spines: int, cores: int, hosts: int
) -> list[tuple[str, str]]:
    """The cables of three tiers: each spine of a pod has ``cores`` cores of its own number."""
    cables = []
    for p in range(pods):
        for i in range(leaves):
            cables += [(f"h{p}{i}-{k}", f"leaf{p}{i}") for k in range(hosts)]
            cables += [(f"leaf{p}{i}", f"spine{p}{j}") for j in range(spines)]
        cables += [(f"spine{p}{j}", f"core{j}{c}") for j in range(spines) for c in range(cores)]
    return cables


class RoutedNetwork:
    """Hosts and switches, each a namespace, that exist between ``with`` and its end.

    Args:
        cables: nodes that are joined; those whose name begins with ``h`` are hosts.
        inbound: routers answer from the interface that the probe came in by, as switches do, not
            from the one that leads back, as Linux does.
        silent: routers that don't answer.
        limited: leave the kernel's own limits of ICMP errors.
    """

    def __init__(
        self,
        cables: Sequence[tuple[str, str]],
        numbering: Numbering = "31",
        *,
        ipv6: bool = False,
        inbound: bool = False,
        silent: Collection[str] = (),
        limited: bool = False,
    ) -> None:
        self.prefix = netns.owner_prefix(os.getpid(), 1000 + next(_counter))
        self.cables, self.numbering, self.ipv6 = list(cables), numbering, ipv6
        self.inbound, self.silent, self.limited = inbound, silent, limited
        self.nodes = list(dict.fromkeys(node for cable in cables for node in cable))
        self.hosts = [node for node in self.nodes if node.startswith("h")]
        #: Interfaces of each node with the node at the other end.
        self.ports: dict[str, dict[str, str]] = defaultdict(dict)
        self.addresses: dict[str, list[str]] = defaultdict(list)
        self._setup: dict[str, list[str]] = {node: ["link set lo up"] for node in self.nodes}
        self._via: dict[tuple[str, str], str] = {}

    def __enter__(self) -> RoutedNetwork:
        netns.remove_orphans()
        try:
            self._build()
        except BaseException:
            netns.remove(netns.named(self.prefix))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        netns.remove(netns.named(self.prefix))

    @property
    def links(self) -> set[tuple[str, str]]:
        """Every directed link."""
        return {pair for a, b in self.cables for pair in ((a, b), (b, a))}

    @property
    def node_at(self) -> dict[str, str]:
        return {address: node for node, given in self.addresses.items() for address in given}

    def namespace(self, node: str) -> str:
        return self.prefix + node

    def paths(self, flows: Iterable[Flow]) -> dict[Flow, tuple[tuple[str, str], ...]]:
        """The links that each flow crosses, as the kernels of the routers say."""
        walked: dict[Flow, list[str]] = {}
        at: dict[Flow, str] = {}
        for flow in flows:
            device, first = next(
                (device, peer)
                for device, peer in self.ports[flow.src].items()
                if flow.src_address in self._address_on.get((flow.src, device), ())
            )
            walked[flow] = [flow.src, first]
            at[flow] = first
            del device
        while left := {flow: node for flow, node in at.items() if node != flow.dst}:
            by_node: dict[str, list[Flow]] = defaultdict(list)
            for flow, node in left.items():
                by_node[node].append(flow)
            for node, waiting in by_node.items():
                for flow, device in zip(waiting, self._devices(node, waiting, walked), strict=True):
                    at[flow] = self.ports[node][device]
                    walked[flow].append(at[flow])
        return {flow: tuple(itertools.pairwise(nodes)) for flow, nodes in walked.items()}

    def _devices(self, node: str, flows: list[Flow], walked: dict[Flow, list[str]]) -> list[str]:
        lines = []
        for flow in flows:
            came = next(d for d, peer in self.ports[node].items() if peer == walked[flow][-2])
            lines.append(
                f"route get {flow.dst_address} from {flow.src_address} iif {came} ipproto udp "
                f"sport {flow.port} dport {ROCE_V2_PORT}"
            )
        argv = ["ip", "-n", self.namespace(node), "-j", "-batch", "-"]
        said = subprocess.run(
            argv, input="\n".join(lines) + "\n", text=True, capture_output=True, check=True
        ).stdout
        decoder, found, end = json.JSONDecoder(), [], 0
        while end < len(said.rstrip()):
            routes, end = decoder.raw_decode(said, end)
            end += len(said[end:]) - len(said[end:].lstrip())
            found.append(str(routes[0]["dev"]))
        return found

    def _build(self) -> None:
        self._address_on: dict[tuple[str, str], list[str]] = defaultdict(list)
        netns.run_batch("ip", "".join(f"netns add {self.namespace(n)}\n" for n in self.nodes))
        cables = []
        for number, (a, b) in enumerate(self.cables):
            ends = [f"eth{len(self.ports[node])}" for node in (a, b)]
            self.ports[a][ends[0]] = b
            self.ports[b][ends[1]] = a
            cables.append(
                f"link add {ends[0]} netns {self.namespace(a)} type veth peer name {ends[1]} "
                f"netns {self.namespace(b)}\n"
            )
            self._number(number, (a, ends[0]), (b, ends[1]))
        netns.run_batch("ip", "".join(cables))
        for index, node in enumerate(self.nodes):
            if self.numbering == "loopback" and node not in self.hosts:
                self._add_address(node, "lo", f"10.255.{index >> 8}.{index & 255}/32")
            self._sysctl(node)
        self._route()
        for node, lines in self._setup.items():
            netns.run_batch("ip", "\n".join(lines) + "\n", self.namespace(node))
        for node in self.silent:
            self._silence(node)

    def _number(self, number: int, a: tuple[str, str], b: tuple[str, str]) -> None:
        for node, device in (a, b):
            self._setup[node].append(f"link set {device} up")
        of_host = a[0] in self.hosts or b[0] in self.hosts
        if self.numbering == "loopback" and not of_host:
            return
        if self.ipv6:
            nets = [f"fd00:{number:x}::{end}/64" for end in (1, 2)]
        elif self.numbering == "24":
            nets = [f"10.{number >> 8}.{number & 255}.{end}/24" for end in (1, 2)]
        else:
            base = 2 * number
            nets = [f"10.200.{base + end >> 8}.{base + end & 255}/31" for end in (0, 1)]
        for (node, device), net, other in zip((a, b), nets, reversed(nets), strict=True):
            self._add_address(node, device, net)
            self._via[node, device] = other.partition("/")[0]

    def _add_address(self, node: str, device: str, net: str) -> None:
        address = str(ip_address(net.partition("/")[0]))
        self.addresses[node].append(address)
        self._address_on[node, device].append(address)
        self._setup[node].append(f"addr add {net} dev {device}{' nodad' if self.ipv6 else ''}")

    def _route(self) -> None:
        """Equal-cost shortest paths to every host's addresses."""
        for host in self.hosts:
            for device, first in self.ports[host].items():
                for address in self._address_on[host, device]:
                    distance = self._distances(first, {host})
                    for node in self.nodes:
                        self._add_route(node, address, host, device, first, distance)

    def _distances(self, start: str, without: set[str]) -> dict[str, int]:
        distance, queue = {start: 0}, deque([start])
        while queue:
            node = queue.popleft()
            # Hosts don't forward.
            for peer in self.ports[node].values() if node not in self.hosts else ():
                if peer not in distance and peer not in without:
                    distance[peer] = distance[node] + 1
                    queue.append(peer)
        return distance

    def _add_route(
        self, node: str, address: str, host: str, device: str, first: str, distance: dict[str, int]
    ) -> None:
        if node in (host, first) or node not in distance:
            return
        hops = [
            f"nexthop via {self._next(node, port, peer)} dev {port}"
            + (" onlink" if self.numbering == "loopback" else "")
            for port, peer in self.ports[node].items()
            if distance.get(peer, 1 << 30) == distance[node] - 1
        ]
        bits = 128 if self.ipv6 else 32
        # A host with several NICs sends to each plane by the NIC of that plane.
        self._setup[node].append(f"route add {address}/{bits} {' '.join(hops)}")

    def _next(self, node: str, port: str, peer: str) -> str:
        via = self._via.get((node, port))
        return via if via is not None else self.addresses[peer][-1]

    def _sysctl(self, node: str) -> None:
        settings = [
            "ipv4/ip_forward=1 ipv4/conf/all/rp_filter=0 ipv4/conf/default/rp_filter=0 "
            "ipv4/fib_multipath_hash_policy=3 ipv4/fib_multipath_hash_fields=51 "
            f"ipv4/fib_multipath_hash_seed={self.nodes.index(node) + 1} "
            f"ipv4/icmp_errors_use_inbound_ifaddr={int(self.inbound)} "
            "ipv6/conf/all/accept_dad=0 ipv6/conf/default/accept_dad=0 "
        ]
        if self.ipv6:
            settings.append(
                "ipv6/conf/all/forwarding=1 ipv6/fib_multipath_hash_policy=3 "
                "ipv6/fib_multipath_hash_fields=51 ipv6/icmp/ratelimit=0"
            )
        if not self.limited:
            limits = _LIMITS.format(0, 100000, 10000)
            settings.append(" ".join(f"ipv4/{each}" for each in limits.split()))
        script = "\n".join(
            "echo {1} > /proc/sys/net/{0}".format(*setting.split("="))
            for setting in " ".join(settings).split()
            if node not in self.hosts or "forward" not in setting
        )
        argv = ["ip", "netns", "exec", self.namespace(node), "sh", "-c", script]
        subprocess.run(argv, check=True, capture_output=True)

    def _silence(self, node: str) -> None:
        """Drop the time-exceeded errors that a router sends itself."""
        own = [int(ip_address(address)) for address in self.addresses[node]]
        # Classic BPF on the frame: ICMP (byte 23 is 1) of type 11 (byte 34) from one of its own
        # addresses (at byte 26) is dropped (2), and the rest left alone (-1).
        last = 5 + len(own)
        program = [(48, 0, 0, 23), (21, 0, last - 2, 1), (48, 0, 0, 34), (21, 0, last - 4, 11)]
        program += [(32, 0, 0, 26)]
        program += [(21, last - 5 - i, 0, address) for i, address in enumerate(own)]
        program += [(6, 0, 0, 0xFFFFFFFF), (6, 0, 0, 2)]
        steps = [" ".join(map(str, instruction)) for instruction in program]
        code = ",".join([str(len(program)), *steps])
        lines = []
        for device in self.ports[node]:
            lines += [
                f"qdisc add dev {device} clsact",
                f"filter add dev {device} egress protocol ip bpf da bytecode '{code}'",
            ]
        netns.run_batch("tc", "\n".join(lines) + "\n", self.namespace(node))
