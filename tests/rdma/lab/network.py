"""Networks between two Soft-RoCE devices, ``rxe0`` and ``rxe1``, made in the guest.

Both devices stay in the first network namespace, since rxe does not work in another one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

#: Carries a path MTU of 4096 with all headers.
MTU = 4200
PAIR_ADDRESSES = ("10.77.0.1", "10.77.0.2")
FABRIC_ADDRESSES = ("10.1.0.1", "10.2.0.1")
LEAVES = ("leaf0", "leaf1")
SPINES = ("spine0", "spine1")
#: What a spine answers from to a packet of ``rxe0`` that dies there (TTL 2): its port to leaf0.
SPINE_ADDRESSES = ("10.9.0.1", "10.9.2.1")


def connect_pair() -> None:
    """The devices on the two ends of a veth pair, ``v0`` and ``v1``."""
    _sysctl("all/rp_filter", "0")
    _ip("link add v0 type veth peer name v1")
    for i, address in enumerate(PAIR_ADDRESSES):
        _ready(f"v{i}")
        _ip(f"link set v{i} mtu {MTU} up", f"address add {address}/24 dev v{i}")
    for i, peer in ((0, 1), (1, 0)):
        # ARP would answer for both addresses on both ends: they are one machine's.
        hardware = Path(f"/sys/class/net/v{peer}/address").read_text().strip()
        _ip(f"neighbour replace {PAIR_ADDRESSES[peer]} lladdr {hardware} dev v{i} nud permanent")
        _add_device(f"rxe{i}", f"v{i}")


def connect_fabric() -> None:
    """Two leaves and two spines between the devices; leaves choose the spine by a layer-4 hash.

    ``rxe0`` on h0, 10.1.0.1 - leaf0 = spine0, spine1 = leaf1 - 10.2.0.1, h1 ``rxe1``
    """
    _sysctl("all/rp_filter", "0")
    for name in (*LEAVES, *SPINES):
        _ip(f"netns add {name}", f"-n {name} link set lo up")
        _sysctl("all/rp_filter", "0", name)
        _sysctl("default/rp_filter", "0", name)
        _write("/proc/sys/net/ipv4/ip_forward", "1", name)
        _write("/proc/sys/net/ipv4/fib_multipath_hash_policy", "1", name)
        _write("/proc/sys/net/ipv4/icmp_ratelimit", "0", name)
    for i, (leaf, address) in enumerate(zip(LEAVES, FABRIC_ADDRESSES, strict=True)):
        _join_host(i, leaf, address)
        for s, spine in enumerate(SPINES):
            low, high = f"10.9.{2 * s + i}.0", f"10.9.{2 * s + i}.1"
            _ip(
                f"-n {leaf} link add up{s} mtu {MTU} type veth peer down{i} mtu {MTU} netns {spine}"
            )
            _ip(f"-n {leaf} address add {low}/31 dev up{s}", f"-n {leaf} link set up{s} up")
            _ip(f"-n {spine} address add {high}/31 dev down{i}", f"-n {spine} link set down{i} up")
            _ip(f"-n {spine} route add {_network(address)} via {low} dev down{i}")
    for i, leaf in enumerate(LEAVES):
        hops = " ".join(f"nexthop via 10.9.{2 * s + i}.1 dev up{s}" for s in range(len(SPINES)))
        _ip(f"-n {leaf} route add {_network(FABRIC_ADDRESSES[1 - i])} {hops}")
    # What this machine sends from one device's address to the other's is to cross the fabric,
    # although both are local: rules of the sender come before the one for local addresses.
    _ip("rule add pref 100 lookup local", "rule del pref 0")
    for i in range(len(LEAVES)):
        _add_device(f"rxe{i}", f"h{i}")


def _join_host(i: int, leaf: str, address: str) -> None:
    gateway, table = address[:-1] + "254", 101 + i
    _ip(f"link add h{i} mtu {MTU} type veth peer down mtu {MTU} netns {leaf}")
    _ready(f"h{i}")
    _ip(f"address add {address}/24 dev h{i}", f"link set h{i} up")
    _ip(f"-n {leaf} address add {gateway}/24 dev down", f"-n {leaf} link set down up")
    _ip(f"route add default via {gateway} dev h{i} table {table}")
    _ip(f"route add local {address} dev h{i} table {table}")
    _ip(f"rule add pref 10 iif lo from {address} lookup {table}")


def _network(address: str) -> str:
    return f"{address[:-1]}0/24"


def _ready(interface: str) -> None:
    # One machine's two ends: packets come from an address of its own, and each end answers ARP
    # for its own address only. Neighbour discovery of IPv6 would only disturb.
    for name, value in (
        ("accept_local", "1"),
        ("rp_filter", "0"),
        ("arp_ignore", "1"),
        ("arp_announce", "2"),
    ):
        _sysctl(f"{interface}/{name}", value)
    _write(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6", "1")


def _add_device(device: str, interface: str) -> None:
    _run(["rdma", "link", "add", device, "type", "rxe", "netdev", interface])


def _sysctl(name: str, value: str, namespace: str | None = None) -> None:
    _write(f"/proc/sys/net/ipv4/conf/{name}", value, namespace)


def _write(file: str, value: str, namespace: str | None = None) -> None:
    if namespace is None:
        Path(file).write_text(value)
    else:
        _run(["ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} >{file}"])


def _ip(*commands: str) -> None:
    for command in commands:
        _run(["ip", *command.split()])


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
