"""A machine finds its host in a topology, or an error says what to do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.network.host_match import hosts_at, match_host
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.topology import TopologyError

TOPOLOGY = parse_yaml("""
version: 1
hosts: {h0-0: , h0-1: {h0-1/nic0: nic}, h1-0: , 10.0.3.1: , quiet: }
switches: {tor: tor}
links:
  - {between: [h0-0, tor], capacity_Bps: 1e9}
  - {between: [h0-1/nic0, tor], capacity_Bps: 1e9}
  - {between: [h1-0, tor], capacity_Bps: 1e9}
  - {between: [10.0.3.1, tor], capacity_Bps: 1e9}
  - {between: [quiet, tor], capacity_Bps: 1e9}
addresses: {h0-0: [10.0.0.1, "fd00::1"], h0-1/nic0: [10.0.1.1], h1-0: [127.0.0.1], tor: [10.0.9.9]}
""")


@pytest.mark.parametrize(
    ("name", "told", "own", "host"),
    [
        ("h0-0", False, [], "h0-0"),
        ("h0-0", False, ["10.0.0.1", "10.0.1.1"], "h0-0"),
        ("quiet", False, ["10.0.1.1"], "quiet"),
        ("h0-0", True, ["10.0.1.1"], "h0-0"),
        ("vm", False, ["127.0.0.1", "10.0.0.1"], "h0-0"),
        ("vm", False, ["fd00:0::1"], "h0-0"),
        ("vm", False, ["10.0.1.1", "172.17.0.1"], "h0-1"),
        ("vm", False, ["10.0.3.1"], "10.0.3.1"),
    ],
)
def test_a_machine_is_found_by_its_name_else_by_its_addresses(
    name: str, told: bool, own: list[str], host: str
) -> None:
    assert match_host(TOPOLOGY, name, own, configured=told) == host


@pytest.mark.parametrize(
    ("name", "told", "own", "says"),
    [
        # A name that was given and is wrong, with what the addresses say.
        (
            "h0_0",
            True,
            [],
            "no host 'h0_0', the name that CRUX_HOST gives.*its nearest names are 'h0-0'",
        ),
        ("node0", True, ["10.0.1.1"], "to this machine, but its addresses are those of 'h0-1'"),
        # Neither name nor address.
        (
            "h1_0",
            False,
            ["10.9.9.9"],
            "as this machine is called.*10.9.9.9.*CRUX_HOST.*'h1-0', 'h0-1'",
        ),
        ("vm", False, [], "it has none.*it has 'h0-0', 'h0-1', 'h1-0' and 2 more"),
        # What every machine has, and what belongs to a switch, decides nothing.
        ("vm", False, ["127.0.0.1", "fe80::1", "10.0.9.9"], "none with one of its addresses"),
        # Two that contradict each other.
        ("vm", False, ["10.0.0.1", "10.0.1.1"], "addresses of 'h0-0', 'h0-1': say with CRUX_HOST"),
        (
            "h0-0",
            False,
            ["10.0.1.1"],
            "a host 'h0-0', as .*an address of 'h0-1': say with CRUX_HOST",
        ),
    ],
)
def test_what_is_not_certain_is_refused_with_the_remedy(
    name: str, told: bool, own: list[str], says: str
) -> None:
    with pytest.raises(TopologyError) as error:
        match_host(TOPOLOGY, name, own, configured=told)
    assert re.search(says, str(error.value)), str(error.value)
    assert "CRUX_HOST" in str(error.value)


@given(
    name=st.sampled_from(["h0-0", "h0-1", "vm", "10.0.3.1", "quiet"]),
    own=st.lists(st.sampled_from(["10.0.0.1", "10.0.1.1", "10.0.3.1", "10.9.9.9", "::1"])),
    told=st.booleans(),
)
def test_the_order_of_addresses_never_decides(name: str, own: list[str], told: bool) -> None:
    def outcome(addresses: list[str]) -> str:
        try:
            return match_host(TOPOLOGY, name, addresses, configured=told)
        except TopologyError:
            return ""

    assert outcome(own) == outcome(own[::-1]) == outcome(own * 2)
    assert outcome(own) in ("", *TOPOLOGY.hosts)
    assert set(hosts_at(TOPOLOGY, own)) <= set(TOPOLOGY.hosts)
