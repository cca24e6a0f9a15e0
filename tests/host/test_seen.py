"""This host as a discovery describes it: NICs with addresses, and the switches by LLDP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crux_torch.host.interfaces import Nic
from crux_torch.host.seen import of_interfaces, read_neighbours, read_seen_host, seen_nics
from crux_torch.network.discover.fragment import SeenNic
from crux_torch.network.formats.lldp import Neighbour
from crux_torch.network.topology import TopologyError


def neighbour(port: str, switch: str, peer: str = "Ethernet1") -> Neighbour:
    return Neighbour("h0", port, switch, "", False, peer, 12.5e9)


def entry(switch: str, port: str) -> dict[str, object]:
    return {
        "via": "LLDP",
        "chassis": {switch: {"id": {"type": "mac", "value": "42:47:f0:eb:83:a5"}}},
        "port": {"id": {"type": "ifname", "value": port}},
    }


def test_nics_have_addresses_speeds_and_switches(tmp_path: Path) -> None:
    nics = (Nic("eth0", 25e9), Nic("eth1", None), Nic("eth2", 25e9))
    addresses = {"eth0": ("fe80::1", "10.0.0.1"), "eth1": ("10.1.0.1", "fd00::1"), "lo": ("::1",)}
    found = seen_nics(nics, addresses, {"eth0": neighbour("eth0", "leaf0")}, tmp_path)
    assert found == (
        SeenNic("eth0", ("10.0.0.1",), 25e9, "leaf0", "Ethernet1", 12.5e9),
        SeenNic("eth1", ("10.1.0.1", "fd00::1")),
    )


@pytest.mark.parametrize(
    ("switches", "expected"), [(("leaf0", "leaf0"), "leaf0"), (("leaf0", "leaf1"), "")]
)
def test_a_bond_has_the_switch_of_its_cables(
    tmp_path: Path, switches: tuple[str, str], expected: str
) -> None:
    bond = tmp_path / "class" / "net" / "bond0"
    for lower in ("lower_eth0", "lower_eth1"):
        (bond / lower).mkdir(parents=True)
    told = {f"eth{i}": neighbour(f"eth{i}", name) for i, name in enumerate(switches)}
    (nic,) = seen_nics((Nic("bond0", 25e9),), {"bond0": ("10.0.0.1",)}, told, tmp_path)
    assert nic.switch == expected
    assert nic.switch_port == ""
    assert nic.switch_speed_Bps == (25e9 if expected else 0)


def test_this_host_has_a_name_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_more: None)
    host, notes = read_seen_host("h0")
    assert host.name == "h0"
    assert notes == ("no lldpcli: install lldpd, and let it run, to learn the speeds of links",)


def test_an_interface_with_several_neighbours_has_none() -> None:
    seen = [{"eth0": entry("a", "1")}, {"eth0": entry("b", "1")}, {"eth1": entry("c", "7")}]
    found = of_interfaces("h0", json.dumps({"lldp": {"interface": seen}}))
    assert {port: (each.name, each.peer_port) for port, each in found.items()} == {
        "eth1": ("c", "7")
    }
    with pytest.raises(TopologyError):
        of_interfaces("h0", "no JSON")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo '{}'", "expected the output of lldpcli"),
        ("echo '{\"lldp\": {}}'", "lldpd has heard of no neighbour"),
        ("echo '2026 [WARN/control] unable to connect' >&2; exit 1", "lldpcli: unable to connect"),
        ("exit 3", "lldpcli: exit code 3"),
        ("head -c 2000000 /dev/zero", "lldpcli: an answer of over 1048576 bytes"),
    ],
)
def test_what_lldpcli_fails_with_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    program = tmp_path / "lldpcli"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found, said = read_neighbours("h0")
    assert found == {}
    assert reason in said
