"""Finds a machine in a topology: by its name, else by its addresses."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from crux_torch.network.topology import Topology, TopologyError
from crux_torch.words import listed

#: Names that a message lists.
MAX_NAMES = 3


def match_host(
    topology: Topology,
    name: str,
    addresses: Sequence[str],
    *,
    configured: bool = False,
    machine: str = "this machine",
) -> str:
    """Returns the host of ``topology`` that a machine is.

    A host whose name is an IP address has that address. Addresses that many machines have
    (loopback, link-local) decide nothing.

    Args:
        name: host name of the machine.
        addresses: its IP addresses.
        configured: True if the user gave the name for the topology, so it must be there.
        machine: subject of the error message.

    Raises:
        TopologyError: it is none of the hosts, or its name and addresses are those of several; the
            message says what to do.
    """
    by_address = hosts_at(topology, addresses)
    if name in topology.hosts:
        if configured or name in by_address or not by_address or not topology.addresses_of(name):
            return name
        raise TopologyError(
            f"it has a host {name!r}, as {machine} is called, which has an address of "
            f"{_listed(by_address)}: say with CRUX_HOST which host it is"
        )
    if configured:
        seen = f", but its addresses are those of {_listed(by_address)}" if by_address else ""
        raise TopologyError(
            f"it has no host {name!r}, the name that CRUX_HOST gives to {machine}{seen}. "
            f"{_remedy(name, topology.hosts)}"
        )
    if len(by_address) == 1:
        return by_address[0]
    if by_address:
        raise TopologyError(
            f"it has no host {name!r}, and {machine} has addresses of {_listed(by_address)}: "
            "say with CRUX_HOST which of them it is"
        )
    raise TopologyError(
        f"it has no host {name!r}, as {machine} is called, and none with one of its "
        f"addresses ({_listed(distinct_addresses(addresses), quoted=False) or 'it has none'}). "
        f"{_remedy(name, topology.hosts)}"
    )


def hosts_at(topology: Topology, addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns the hosts that have one of ``addresses``, themselves or on one of their NICs."""
    found: dict[str, None] = {}
    for address in distinct_addresses(addresses):
        node = topology.node_at.get(address)
        host = topology.host_of(node) if node is not None else None
        if host is None and address in topology.hosts:
            host = address
        if host is not None:
            found[host] = None
    return tuple(found)


def distinct_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns the ``addresses`` that only one machine can have, without other text."""
    found = []
    for address in addresses:
        with contextlib.suppress(ValueError):
            parsed = ip_address(address)
            if not (parsed.is_loopback or parsed.is_link_local):
                found.append(str(parsed))
    return tuple(found)


def _remedy(name: str, hosts: Sequence[str]) -> str:
    alike = difflib.get_close_matches(name, hosts, n=MAX_NAMES, cutoff=0.5)
    shown = f"its nearest names are {_listed(alike)}" if alike else f"it has {_listed(hosts)}"
    return f"Set CRUX_HOST to the name in the topology ({shown}), or add the host to the file"


def _listed(names: Sequence[str], quoted: bool = True) -> str:
    return listed([repr(n) if quoted else n for n in names], MAX_NAMES)
