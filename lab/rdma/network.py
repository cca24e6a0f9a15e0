"""Networks between two Soft-RoCE devices, ``rxe0`` and ``rxe1``, made in the guest.

Both devices stay in the first network namespace, since rxe does not work in another one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

#: Carries a path MTU of 4096 with all headers.
MTU = 4200
PAIR_ADDRESSES = ("10.77.0.1", "10.77.0.2")
FABRIC_ADDRESSES = ("10.1.0.1", "10.2.0.1")
LEAVES = ("leaf0", "leaf1")
SPINES = ("spine0", "spine1")
#: What each spine answers from where a packet of rxe0 (first) or rxe1 (second) dies: TTL 2.
SPINE_ADDRESSES = (("10.9.0.1", "10.9.1.1"), ("10.9.2.1", "10.9.3.1"))


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
    switches = (*LEAVES, *SPINES)
    _ip(*(f"netns add {name}" for name in switches))
    for name in switches:
        _become_switch(name)
    _ip(*(command for i in range(len(LEAVES)) for command in _wiring(i)))
    for i in range(len(LEAVES)):
        _ready(f"h{i}")
    for name, commands in _addressing().items():
        _ip(*commands, namespace=name)
    for i in range(len(LEAVES)):
        _add_device(f"rxe{i}", f"h{i}")


def _wiring(i: int) -> Iterator[str]:
    leaf = LEAVES[i]
    yield f"link add h{i} mtu {MTU} type veth peer name host mtu {MTU} netns {leaf}"
    for s, spine in enumerate(SPINES):
        up, down = f"up{s} netns {leaf} mtu {MTU}", f"down{i} netns {spine} mtu {MTU}"
        yield f"link add {up} type veth peer name {down}"


def _addressing() -> dict[str | None, list[str]]:
    """Commands by namespace; ``None`` is the first."""
    # What this machine sends from one device's address to the other's is to cross the fabric,
    # although both are local: rules of the sender come before the one for local addresses.
    first = ["rule add pref 100 lookup local", "rule del pref 0"]
    inside: dict[str | None, list[str]] = {name: ["link set lo up"] for name in (*LEAVES, *SPINES)}
    for i, (leaf, address) in enumerate(zip(LEAVES, FABRIC_ADDRESSES, strict=True)):
        gateway, table = address[:-1] + "254", 101 + i
        first += [f"address add {address}/24 dev h{i}", f"link set h{i} up"]
        first += [f"route add default via {gateway} dev h{i} table {table}"]
        first += [f"route add local {address} dev h{i} table {table}"]
        first += [f"rule add pref 10 iif lo from {address} lookup {table}"]
        inside[leaf] += [f"address add {gateway}/24 dev host", "link set host up"]
        for s, spine in enumerate(SPINES):
            low, high = f"10.9.{2 * s + i}.0", f"10.9.{2 * s + i}.1"
            inside[leaf] += [f"address add {low}/31 dev up{s}", f"link set up{s} up"]
            inside[spine] += [f"address add {high}/31 dev down{i}", f"link set down{i} up"]
            inside[spine] += [f"route add {_network(address)} via {low} dev down{i}"]
        hops = " ".join(f"nexthop via 10.9.{2 * s + i}.1 dev up{s}" for s in range(len(SPINES)))
        inside[leaf] += [f"route add {_network(FABRIC_ADDRESSES[1 - i])} {hops}"]
    return {None: first, **inside}


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
    Path(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6").write_text("1")


def _add_device(device: str, interface: str) -> None:
    _run(["rdma", "link", "add", device, "type", "rxe", "netdev", interface])


def _sysctl(name: str, value: str) -> None:
    Path(f"/proc/sys/net/ipv4/conf/{name}").write_text(value)


def _become_switch(name: str) -> None:
    # Policy 1 would take the sending socket's own random hash, which a switch never sees; policy 3
    # hashes these fields of the packet: addresses, protocol, ports. Probes wait for ICMP errors.
    values = {
        "ip_forward": 1,
        "fib_multipath_hash_policy": 3,
        "fib_multipath_hash_fields": 0x37,
        "icmp_ratelimit": 0,
        "conf/all/rp_filter": 0,
        "conf/default/rp_filter": 0,
    }
    script = "; ".join(f"echo {v} >/proc/sys/net/ipv4/{k}" for k, v in values.items())
    _run(["ip", "netns", "exec", name, "sh", "-ec", script])


def _ip(*commands: str, namespace: str | None = None) -> None:
    inside = ["-n", namespace] if namespace else []
    _run(["ip", *inside, "-batch", "-"], "".join(f"{command}\n" for command in commands))


def _run(argv: list[str], stdin: str = "") -> None:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
