"""LLDP: both forms of lldpd's JSON, hosts told from switches, and real daemons."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from control_fakes import until
from lldp_daemons import BOUND_S, ask, daemons, needs_lldpd

from crux_torch.network.formats import format_of, read_network
from crux_torch.network.formats.draft import Imported
from crux_torch.network.formats.lldp import neighbours
from crux_torch.network.topology import TopologyError
from lab import netns

Seen = Mapping[str, tuple[str, str, str]]
LINUX = "Debian GNU/Linux 12 (bookworm) Linux 6.1.0 x86_64"
SONIC = "SONiC Software Version: SONiC.202311 - HwSku: ACS-MSN4600C"


def entry(name: str, peer_port: str, description: str, speed: str) -> dict[str, Any]:
    """A neighbour as lldpd 1.0.16 prints it under ``details``."""
    told = {"supported": True, "enabled": True, "current": speed} if speed else None
    return {
        "via": "LLDP",
        "rid": "1",
        "age": "0 day, 00:00:04",
        "chassis": {
            name: {
                "id": {"type": "mac", "value": "42:47:f0:eb:83:a5"},
                "descr": description,
                "mgmt-ip": ["10.0.0.9", "fe80::708f:25ff:fef0:a62d"],
                "capability": [
                    {"type": "Bridge", "enabled": description == SONIC},
                    {"type": "Station", "enabled": description == LINUX},
                ],
            }
        },
        "port": {"id": {"type": "ifname", "value": peer_port}, "descr": "d", "ttl": "120"}
        | ({"auto-negotiation": told} if told else {}),
    }


def output(seen: Seen, description: str = LINUX, speed: str = "") -> str:
    """Returns the output of a system with the neighbours ``seen``.

    Args:
        seen: port -> (neighbour, its port, description).
    """
    entries = [
        {port: entry(name, peer_port, text or description, speed)}
        for port, (name, peer_port, text) in seen.items()
    ]
    interfaces: Any = entries[0] if len(entries) == 1 else entries
    return json.dumps({"lldp": {"interface": interfaces} if entries else {}})


def as_json0(text: str) -> str:
    """The same in the form of ``-f json0``: lists everywhere, and no names as keys."""

    def listed(value: Any) -> list[Any]:
        if isinstance(value, list):
            return [each for one in value for each in listed(one)]
        if isinstance(value, dict):
            return [
                {k: v if isinstance(v, bool) or k in ("type", "value", "via") else listed(v)
                 for k, v in value.items()}
            ]  # fmt: skip
        return [{"value": value}]

    document = json.loads(text)["lldp"]
    found = document.get("interface", [])
    interfaces = []
    for each in found if isinstance(found, list) else [found]:
        for port, inner in each.items():
            ((name, chassis),) = inner["chassis"].items()
            inner = inner | {"chassis": chassis | {"name": name}}
            interfaces.append({"name": port} | listed(inner)[0])
    return json.dumps({"lldp": [{"interface": interfaces}]})


def read(files: Mapping[str, str], **options: Any) -> Imported:
    assert {format_of(text) for text in files.values()} == {"lldp"}
    capacities = {"host-tor": 50e9, "tor-aggregation": 100e9}
    return read_network(files, "lldp", options.pop("capacities", capacities), **options)


HOSTS = {
    "h0": {"eth1": ("leaf0", "Ethernet0", SONIC), "eth2": ("leaf1", "Ethernet0", SONIC)},
    "h1": {"eth1": ("leaf0", "Ethernet4", SONIC), "eth2": ("leaf1", "Ethernet4", SONIC)},
}
LEAVES: dict[str, Seen] = {
    f"leaf{i}": {
        "Ethernet0": ("h0", f"eth{i + 1}", LINUX),
        "Ethernet4": ("h1", f"eth{i + 1}", LINUX),
        "Ethernet64": ("spine0", f"Ethernet{8 * i}", SONIC),
        "Ethernet68": ("spine0", f"Ethernet{8 * i + 4}", SONIC),
    }
    for i in range(2)
}


@pytest.mark.parametrize("form", [str, as_json0])
def test_both_forms_tell_the_same(form: Any) -> None:
    for seen in ({}, {"eth0": HOSTS["h0"]["eth1"]}, HOSTS["h0"], LEAVES["leaf0"]):
        text = form(output(seen, speed="100GbaseCR4 - 40GBASE-R PCS/PMA over 4 lane copper"))
        found = list(neighbours("me", "f", text))
        assert [each.port for each in found] == list(seen)
        assert [(n.name, n.peer_port, n.description) for n in found] == list(seen.values())
        assert {each.speed_Bps for each in found} <= {100e9 / 8}


@pytest.mark.parametrize(
    ("current", "bps"),
    [
        ("10GbaseT - Four-pair Category 6A or better, full duplex mode only", 10e9),
        ("1000BaseTFD - Four-pair Category 5 UTP, full duplex mode", 1e9),
        ("10GigBaseSR - R fiber over 850 nm optics", 10e9),
        ("2.5GbaseT", 2.5e9),
    ],
)
def test_speeds_of_ports(current: str, bps: float) -> None:
    (found,) = neighbours("h0", "f", output({"eth0": ("s", "p", LINUX)}, speed=current))
    assert found.speed_Bps == bps / 8


def test_a_neighbour_without_a_name_has_its_address() -> None:
    neighbour = {"chassis": {"id": {"type": "mac", "value": "42:47"}}, "port": {"descr": "swp1"}}
    text = json.dumps({"lldp": {"interface": {"eth0": neighbour}}})
    (found,) = neighbours("h0", "f", text)
    assert (found.name, found.peer_port) == ("42:47", "swp1")


def test_hosts_alone_show_one_cable_far() -> None:
    one_leaf = {"h0.json": output({"eth1": ("leaf0", "1", SONIC)}),
                "h1.json": output({"eth1": ("leaf1", "1", SONIC)})}  # fmt: skip
    topology, notes = read(one_leaf)
    assert topology.inside("h0", "nic") == ("h0/eth1",)
    assert topology.nodes["above"].kind == "aggregation"
    assert any("LLDP reaches one cable far" in note for note in notes)
    assert any("'above' stands for what is between them" in note for note in notes)


def test_switches_without_hosts_are_left_out_and_named() -> None:
    files = {"h0.json": output({"eth1": ("leaf0", "1", SONIC)}),
             "leaf9.json": output({"1": ("spine9", "1", SONIC)})}  # fmt: skip
    topology, notes = read(files, switches=("leaf*",))
    assert set(topology.nodes) == {"h0", "h0/eth1", "leaf0"}
    assert "left out, joined to none of the others: switches leaf9, spine9" in notes


def test_cables_that_both_ends_tell_count_once() -> None:
    files = {f"{name}.json": output(seen) for name, seen in (HOSTS | LEAVES).items()}
    topology, notes = read(files)
    assert "taken for switches: leaf0, leaf1" in notes
    ends = Counter((edge.src, edge.dst) for edge in topology.edges)
    assert ends["h0/eth1", "leaf0"] == ends["h1/eth2", "leaf1"] == 1
    assert ends["leaf0", "spine0"] == ends["spine0", "leaf1"] == 2
    assert len(topology.edges) == 2 * (4 + 4)
    only_leaves = {name: text for name, text in files.items() if name.startswith("leaf")}
    again, _ = read(only_leaves, switches=("leaf*",))
    assert Counter((edge.src, edge.dst) for edge in again.edges) == ends


def test_full_domain_names_are_those_of_the_files() -> None:
    files = {"h0.json": output({"eth1": ("leaf0", "1", SONIC)}),
             "leaf0.json": output({"1": ("h0.example.com", "eth1", LINUX)})}  # fmt: skip
    topology, _ = read(files, switches=("leaf*",))
    assert topology.hosts == ("h0",)
    assert len(topology.edges) == 2


def test_switches_that_look_like_hosts_have_to_be_named() -> None:
    files = {f"{name}.json": output({p: (n, q, LINUX) for p, (n, q, _) in seen.items()})
             for name, seen in (HOSTS | LEAVES).items()}  # fmt: skip
    with pytest.raises(TopologyError, match="both count as hosts: name the switches"):
        read(files)
    assert len(read(files, switches=("leaf*",)).topology.edges) == 16


def test_speeds_make_capacities_unnecessary() -> None:
    files = {"h0.json": output({"eth1": ("leaf0", "1", SONIC)}, speed="100GbaseCR4")}
    assert set(read(files, capacities={}).topology.capacity_Bps.values()) == {12.5e9}
    with pytest.raises(TopologyError, match="no capacity of host-tor"):
        read({"h0.json": output({"eth1": ("leaf0", "1", SONIC)})}, capacities={})


_OK, _REASON = netns.available()
ENDS = {("h0", "eth0"): ("leaf0", "swp1"), ("h1", "eth0"): ("leaf0", "swp2"),
        ("h2", "eth0"): ("leaf1", "swp1"), ("leaf0", "swp3"): ("spine0", "swp1"),
        ("leaf0", "swp4"): ("spine0", "swp2"), ("leaf1", "swp3"): ("spine0", "swp3")}  # fmt: skip


@pytest.fixture
def sockets() -> Iterator[dict[str, Path]]:
    """Sockets of the lldpd in the namespace of each system of ``ENDS``."""
    prefix = netns.owner_prefix(os.getpid(), 97)
    namespaces = {name: f"{prefix}{name}" for pair in ENDS.items() for name, _ in pair}
    lines = [f"netns add {namespace}" for namespace in namespaces.values()]
    for (a, port), (b, peer) in ENDS.items():
        ends = f"{port} netns {namespaces[a]} type veth peer name {peer} netns {namespaces[b]}"
        lines += [f"link add {ends}"]
    try:
        netns.run_batch("ip", "\n".join(lines) + "\n")
        for end in (*ENDS, *ENDS.values()):
            netns.run_batch("ip", f"link set {end[1]} up\n", namespaces[end[0]])
        with daemons({namespace: name for name, namespace in namespaces.items()}) as folder:
            yield {name: folder / namespace for name, namespace in namespaces.items()}
    finally:
        netns.remove(list(namespaces.values()))


@pytest.mark.slow
@pytest.mark.skipif(not _OK, reason=_REASON)
@needs_lldpd
def test_real_daemons(sockets: dict[str, Path]) -> None:
    """Names of this machine are all the same, so each daemon gets the one of its namespace."""

    def seen(name: str, form: str) -> str:
        text = ask(sockets[name], "-f", form, "show", "neighbors", "details")
        assert text is not None
        return text

    def have_heard() -> bool:
        for each in sockets.values():
            # They send by themselves every 30 seconds only.
            ask(each, "update")
        return all(
            {(n.port, n.name, n.peer_port) for n in neighbours(name, name, seen(name, "json"))}
            == {(port, b, peer) for (a, port), (b, peer) in ENDS.items() if a == name}
            | {(peer, a, port) for (a, port), (b, peer) in ENDS.items() if b == name}
            for name in sockets
        )

    until(have_heard, BOUND_S, "each daemon to hear its neighbours")
    for form in ("json", "json0"):
        files = {f"{name}.json": seen(name, form) for name in sockets}
        topology, _ = read(files, switches=("leaf*", "spine*"), capacities={})
        assert topology.hosts == ("h0", "h1", "h2")
        assert topology.path_count("h0", "h2") == 2
        assert len(topology.edges) == 2 * len(ENDS)
        # What a veth tells of itself.
        assert set(topology.capacity_Bps.values()) == {10e9 / 8}
