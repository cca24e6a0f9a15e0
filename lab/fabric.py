"""A leaf/spine network of network namespaces on one machine, with eight priority classes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import yaml

from lab import netns

LEVELS = 8
#: The classes that the queues of a fabric tell apart, for jobs under Crux: CS0 to CS7.
MARKS = {"CRUX_DSCP_MAP": ",".join(str(8 * level) for level in range(LEVELS))}
_counter = itertools.count(1)


@dataclass(frozen=True)
class FabricSpec:
    """The shape of a fabric.

    Attributes:
        leaves: leaf switches, 2 to 16.
        spines: spine switches, each linked to every leaf, 1 to 16.
        hosts_per_leaf: hosts below each leaf, 1 to 250; their links are not shaped.
        rate_mbit: rate of each direction of a leaf-spine link, Mbit/s.
        queue_bytes: what each class of a leaf-spine link may queue.
        congestion_control: of every TCP connection between hosts.
        hash_seed: of the leaves' ECMP hash, so that a fabric's paths can be repeated.
        loss: share of the packets that each direction of a leaf-spine link loses at random. With
            any, hosts send packets singly, so that one loss is one packet.
    """

    leaves: int = 2
    spines: int = 1
    hosts_per_leaf: int = 2
    rate_mbit: float = 200.0
    queue_bytes: int = 250_000
    congestion_control: str = "cubic"
    hash_seed: int = 12345
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not (2 <= self.leaves <= 16 and 1 <= self.spines <= 16):
            raise ValueError("a fabric has 2 to 16 leaves and 1 to 16 spines")
        if not 1 <= self.hosts_per_leaf <= 250:
            raise ValueError("a leaf has 1 to 250 hosts")
        if self.rate_mbit <= 0 or self.queue_bytes <= 0:
            raise ValueError("the rate and the queue must be positive")
        if not 0.0 <= self.loss < 1.0:
            raise ValueError("the loss is a share of the packets")


@dataclass(frozen=True)
class Host:
    """One host: ``namespace`` is its network namespace, ``interface`` its only way out."""

    leaf: int
    index: int
    namespace: str
    address: str
    interface: str = "eth0"

    @property
    def name(self) -> str:
        return f"h{self.leaf}-{self.index}"

    @property
    def gateway(self) -> str:
        """Its leaf's address on the link between them."""
        return f"10.{self.leaf}.{self.index}.1"


@dataclass(frozen=True)
class LinkCounters:
    """What one direction of a leaf-spine link has sent, by level (7 is served first)."""

    link: str
    bytes: dict[int, int]
    drops: dict[int, int]


#: Bytes per second that a veth reports as its speed.
VETH_Bps = 1.25e9


class Fabric:
    """A fabric that exists between ``with`` and its end, and removes nothing but itself.

    Each direction of a leaf-spine link serves eight classes in strict order, chosen by the top
    three bits of the IP TOS byte. Leaves spread connections over the spines by a hash of
    addresses, protocol and ports (ECMP).

    Raises:
        netns.NamespaceError: on entry, where the kernel or the rights do not suffice.
    """

    def __init__(self, spec: FabricSpec | None = None) -> None:
        self.spec = spec or FabricSpec()
        self.prefix = netns.owner_prefix(os.getpid(), next(_counter))
        self._started: list[subprocess.Popen[Any]] = []
        self.hosts = tuple(
            Host(leaf, k, f"{self.prefix}h{leaf}-{k}", f"10.{leaf}.{k}.2")
            for leaf in range(self.spec.leaves)
            for k in range(self.spec.hosts_per_leaf)
        )

    def __enter__(self) -> Fabric:
        netns.interrupt_on_signals()
        netns.remove_orphans()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in this fabric and remove it; nothing happens if it is gone already."""
        # One that was started a moment ago may not have entered its namespace yet.
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        netns.remove(netns.named(self.prefix))
        for process in self._started:
            process.kill()
            process.wait()
        self._started.clear()

    def topology_yaml(self, tables: str = "", host_Bps: float = VETH_Bps) -> str:
        """This fabric as a file for ``cruxrun --crux-topology``.

        The links between hosts and leaves are not shaped; a veth calls itself 10 Gbit/s. ``tables``
        is the host that keeps mlcc's load tables. Where a leaf has one host and one uplink, the
        host's link carries no more than that, and ``host_Bps`` may say so.
        """
        shaped_Bps = self.spec.rate_mbit * 1e6 / 8
        leaves = [f"leaf{i}" for i in range(self.spec.leaves)]
        spines = [f"spine{j}" for j in range(self.spec.spines)]
        edges = [
            {"between": [host.name, leaves[host.leaf]], "capacity_Bps": host_Bps}
            for host in self.hosts
        ]
        fabric = [
            {"between": [leaf, spine], "capacity_Bps": shaped_Bps}
            for leaf in leaves
            for spine in spines
        ]
        return yaml.safe_dump(
            {
                "version": 1,
                "hosts": {host.name: {} for host in self.hosts},
                "switches": dict.fromkeys(leaves, "tor") | dict.fromkeys(spines, "aggregation"),
                "links": edges + fabric,
                "addresses": self._addresses(),
                **({"tables": tables} if tables else {}),
            }
        )

    def _addresses(self) -> dict[str, list[str]]:
        """The addresses of every node: a switch answers from that of any of its interfaces."""
        spec = self.spec
        leaves, spines = range(spec.leaves), range(spec.spines)
        found = {host.name: [host.address] for host in self.hosts}
        for i in leaves:
            below = [host.gateway for host in self.hosts if host.leaf == i]
            found[f"leaf{i}"] = below + [f"{_uplink(i, j)}.1" for j in spines]
        for j in spines:
            found[f"spine{j}"] = [f"{_uplink(i, j)}.2" for i in leaves]
        return found

    def host(self, leaf: int, index: int) -> Host:
        """The ``index``-th host of a leaf."""
        return self.hosts[leaf * self.spec.hosts_per_leaf + index]

    def popen(self, host: Host, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` on ``host`` in a session of its own; ``options`` as for ``Popen``."""
        options.setdefault("start_new_session", True)
        process = subprocess.Popen(["ip", "netns", "exec", host.namespace, *argv], **options)
        self._started.append(process)
        return process

    def run(self, host: Host, argv: Sequence[str], timeout_s: float = 60.0) -> str:
        """Run ``argv`` on ``host`` to its end and return its standard output.

        Raises:
            subprocess.CalledProcessError: it failed.
            subprocess.TimeoutExpired: it took longer than ``timeout_s``.
        """
        return subprocess.run(
            ["ip", "netns", "exec", host.namespace, *argv],
            text=True,
            stdout=subprocess.PIPE,
            check=True,
            timeout=timeout_s,
        ).stdout

    def set_rate(self, rate_mbit: float, leaf: int | None = None) -> None:
        """Change the rate of every leaf-spine link, or of one leaf's, while traffic runs."""
        for namespace, devices in self._switch_ports().items():
            chosen = [
                device
                for device, peer in devices.items()
                if leaf is None or f"leaf{leaf}" in (peer, namespace.removeprefix(self.prefix))
            ]
            commands = [c for device in chosen for c in self._classes("change", device, rate_mbit)]
            if commands:
                netns.run_batch("tc", "\n".join(commands) + "\n", namespace)

    def set_hash_seed(self, seed: int, leaf: int | None = None) -> None:
        """Change the leaves' ECMP hash, or one leaf's: connections take the new paths at once."""
        for i in range(self.spec.leaves) if leaf is None else (leaf,):
            _sysctl(self._leaf(i), {"fib_multipath_hash_seed": str(seed)})

    def cut(self, spine: int) -> None:
        """Take a spine out of the network: its links go down, and leaves use the others."""
        for i in range(self.spec.leaves):
            netns.run_batch("ip", f"link set up{spine} down\n", self._leaf(i))

    def counters(self) -> list[LinkCounters]:
        """Bytes and drops of every leaf-spine link, each direction, by level."""
        links = []
        for namespace, devices in self._switch_ports().items():
            argv = ["tc", "-n", namespace, "-j", "-s", "qdisc", "show"]
            queues = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
            switch = namespace.removeprefix(self.prefix)
            for device, peer in devices.items():
                # tc has no JSON for HTB's classes, so read the queue below each of them.
                mine = {
                    _level_of(q["handle"]): q
                    for q in queues
                    if q["dev"] == device and q["kind"] == "bfifo"
                }
                links.append(
                    LinkCounters(
                        f"{switch}->{peer}",
                        {level: q["bytes"] for level, q in sorted(mine.items())},
                        {level: q["drops"] for level, q in sorted(mine.items())},
                    )
                )
        return links

    def spine_taken(self, source: Host, to: Host, source_port: int, port: int) -> int:
        """The spine over which the leaf of ``source`` sends such TCP packets to another leaf."""
        argv = ["ip", "-n", self._leaf(source.leaf), "-j", "route", "get", to.address]
        argv += ["from", source.address, "iif", f"host{source.index}", "ipproto", "tcp"]
        argv += ["sport", str(source_port), "dport", str(port)]
        done = subprocess.run(argv, check=True, capture_output=True)
        (route,) = json.loads(done.stdout)
        return int(route["dev"].removeprefix("up"))

    def spine_of(self, address: str) -> int | None:
        """The spine that answers from ``address``, None if it is not a spine's."""
        part = address.split(".")
        return int(part[2]) % 16 if part[:2] == ["10", "100"] and part[3] == "2" else None

    def _leaf(self, i: int) -> str:
        return f"{self.prefix}leaf{i}"

    def _spine(self, j: int) -> str:
        return f"{self.prefix}spine{j}"

    def _switch_ports(self) -> dict[str, dict[str, str]]:
        """For each switch's namespace, its leaf-spine interfaces and the switch behind each."""
        leaves, spines = range(self.spec.leaves), range(self.spec.spines)
        ports = {self._leaf(i): {f"up{j}": f"spine{j}" for j in spines} for i in leaves}
        ports.update({self._spine(j): {f"down{i}": f"leaf{i}" for i in leaves} for j in spines})
        return ports

    def _build(self) -> None:
        spec = self.spec
        leaves, spines = range(spec.leaves), range(spec.spines)
        switches = [*map(self._leaf, leaves), *map(self._spine, spines)]
        everyone = [*switches, *(host.namespace for host in self.hosts)]
        netns.run_batch("ip", "".join(f"netns add {name}\n" for name in everyone))
        for name in switches:
            _sysctl(name, _SWITCH_SYSCTLS)
        for name in map(self._leaf, leaves):
            _sysctl(name, _ECMP_SYSCTLS | {"fib_multipath_hash_seed": str(spec.hash_seed)})
        for host in self.hosts:
            _sysctl(host.namespace, _HOST_SYSCTLS)
        cables, setup = self._wiring(everyone)
        netns.run_batch("ip", "\n".join(cables) + "\n")
        for name, commands in setup.items():
            netns.run_batch("ip", "\n".join(commands) + "\n", name)
        for name, devices in self._switch_ports().items():
            shaping = [c for device in devices for c in self._shaping(device)]
            netns.run_batch("tc", "\n".join(shaping) + "\n", name)

    def _wiring(self, everyone: list[str]) -> tuple[list[str], dict[str, list[str]]]:
        """The cables between namespaces, and each namespace's addresses and routes."""
        spec = self.spec
        leaves, spines = range(spec.leaves), range(spec.spines)
        cables: list[str] = []
        setup = {name: ["link set lo up"] for name in everyone}
        for i, j in itertools.product(leaves, spines):
            leaf, spine, net = self._leaf(i), self._spine(j), _uplink(i, j)
            cables.append(f"link add up{j} netns {leaf} type veth peer name down{i} netns {spine}")
            setup[leaf] += [f"link set up{j} up", f"addr add {net}.1/30 dev up{j}"]
            setup[spine] += [
                f"link set down{i} up",
                f"addr add {net}.2/30 dev down{i}",
                f"route add 10.{i}.0.0/16 via {net}.1 dev down{i}",
            ]
        single = " gso_max_segs 1" if spec.loss else ""
        for host in self.hosts:
            leaf, port = self._leaf(host.leaf), f"host{host.index}"
            cables.append(
                f"link add {port} netns {leaf} type veth peer name {host.interface} "
                f"netns {host.namespace}"
            )
            setup[leaf] += [f"link set {port} up", f"addr add {host.gateway}/24 dev {port}"]
            setup[host.namespace] += [
                f"link set {host.interface} up{single}",
                f"addr add {host.address}/24 dev {host.interface}",
            ]
            # No default route: a name server outside would be waited for, not known unreachable.
            # Congestion control by route, because its sysctl is refused in a namespace.
            setup[host.namespace] += [
                f"route add 10.{i}.0.0/16 via {host.gateway} congctl {spec.congestion_control}"
                for i in leaves
            ]
        for i, other in itertools.permutations(leaves, 2):
            hops = " ".join(f"nexthop via {_uplink(i, j)}.2 dev up{j} weight 1" for j in spines)
            setup[self._leaf(i)].append(f"route add 10.{other}.0.0/16 {hops}")
        return cables, setup

    def _shaping(self, device: str) -> list[str]:
        commands = [f"qdisc add dev {device} root handle 1: htb default 17 r2q 1"]
        commands += self._classes("add", device, self.spec.rate_mbit)
        for level in range(LEVELS):
            order = LEVELS - 1 - level
            commands += [
                f"qdisc add dev {device} parent 1:1{order} handle 1{order}: "
                f"bfifo limit {self.spec.queue_bytes}",
                f"filter add dev {device} parent 1: protocol ip prio 1 u32 "
                f"match ip dsfield {level << 5:#04x} 0xe0 flowid 1:1{order}",
            ]
        if self.spec.loss:
            # Classic BPF, since few kernels have netem: drop (2) what draws a number above the
            # threshold, and leave the rest (-1) alone.
            most = round((1.0 - self.spec.loss) * 0xFFFFFFFF)
            program = f"4,32 0 0 {_DRAW},37 0 1 {most},6 0 0 2,6 0 0 {0xFFFFFFFF}"
            commands += [
                f"qdisc add dev {device} clsact",
                # Not of ARP, which repeats itself after a second only.
                f"filter add dev {device} egress protocol ip bpf da bytecode '{program}'",
            ]
        return commands

    @staticmethod
    def _classes(verb: str, device: str, rate_mbit: float) -> list[str]:
        """HTB classes: the link, and below it one a level, served in the order of ``prio``."""
        rate = int(rate_mbit * 1e6)
        # At least a millisecond of link time, or timer granularity costs rate.
        burst = max(20_000, rate // 8000)
        commands = [
            f"class {verb} dev {device} parent 1: classid 1:1 htb rate {rate}bit ceil {rate}bit "
            f"burst {burst} cburst {burst} quantum 3028"
        ]
        # HTB guarantees each class its rate whatever the order, so the guarantee is kept tiny.
        commands += [
            f"class {verb} dev {device} parent 1:1 classid 1:1{order} htb rate {rate // 200}bit "
            f"ceil {rate}bit prio {order} burst 3200 cburst {burst} quantum 3028"
            for order in range(LEVELS)
        ]
        return commands


#: Where a packet filter finds a random number: SKF_AD_OFF + SKF_AD_RANDOM.
_DRAW = 0xFFFFF000 + 56


def _uplink(leaf: int, spine: int) -> str:
    """The net of the link between a leaf (.1) and a spine (.2), without its last number."""
    return f"10.100.{16 * leaf + spine}"


_SWITCH_SYSCTLS = {
    "ip_forward": "1",
    "conf/all/rp_filter": "0",
    "conf/default/rp_filter": "0",
    # Path probes read a burst of time-exceeded answers, which the default limits mostly drop.
    "icmp_ratelimit": "0",
    "icmp_msgs_per_sec": "100000",
    "icmp_msgs_burst": "10000",
}
#: Policy 3 hashes the fields of the packet. Policy 1 takes the skb's hash, which inside one machine
#: is still the sending socket's random one. 0x33: addresses, protocol and ports.
_ECMP_SYSCTLS = {"fib_multipath_hash_policy": "3", "fib_multipath_hash_fields": "0x33"}
_HOST_SYSCTLS = {
    "tcp_no_metrics_save": "1",
    "tcp_rmem": "4096 131072 4194304",
    "tcp_wmem": "4096 65536 4194304",
}
#: Without these a fabric is not what it says; the others only make it quieter.
_REQUIRED_SYSCTLS = {
    "ip_forward",
    "fib_multipath_hash_policy",
    "fib_multipath_hash_fields",
    "fib_multipath_hash_seed",
}


def _sysctl(namespace: str, values: dict[str, str]) -> None:
    lines = []
    for key, value in values.items():
        lines.append(
            f"echo '{value}' > /proc/sys/net/ipv4/{key}"
            + (" || exit 1" if key in _REQUIRED_SYSCTLS else " 2>/dev/null")
        )
    argv = ["ip", "netns", "exec", namespace, "sh", "-c", "\n".join([*lines, "exit 0"])]
    done = subprocess.run(argv, text=True, capture_output=True, check=False)
    if done.returncode:
        raise netns.NamespaceError(f"sysctl in {namespace}: {done.stderr.strip()}")


def _level_of(handle: str) -> int:
    """The level of the queue ``1<order>:``."""
    return LEVELS - 1 - int(handle.rstrip(":")[1:])
