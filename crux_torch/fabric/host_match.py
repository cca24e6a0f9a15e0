"""Finds a machine in a topology: by its name, else by its addresses."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from crux_torch.fabric.topology import Topology, TopologyError

#: Names that a message lists.
MOST_NAMES = 3


def match_host(
    topology: Topology,
    name: str,
    addresses: Sequence[str],
    *,
    told: bool = False,
    machine: str = "this machine",
) -> str:
    """The host of ``topology`` that a machine is.

    A host whose name is an IP address has that address. Addresses that many machines have
    (loopback, link-local) decide nothing.

    Args:
        name: what the machine is called.
        addresses: its IP addresses.
        told: its user gave the name for the topology, so it must be there.
        machine: what an error calls it.

    Raises:
        TopologyError: it is none of the hosts, or its name and addresses are those of several; the
            message says what to do.
    """
    by_address = hosts_at(topology, addresses)
    if name in topology.hosts:
        own = _addresses_of(topology, name)
        if told or name in by_address or not by_address or not own:
            return name
        raise TopologyError(
            f"it has a host {name!r}, as {machine} is called, which has an address of "
            f"{_listed(by_address)}: say with CRUX_HOST which host it is"
        )
    if told:
        seen = f", but its addresses are those of {_listed(by_address)}" if by_address else ""
        raise TopologyError(
            f"it has no host {name!r}, the name that CRUX_HOST gives to {machine}{seen}. "
            f"{nearest(name, topology.hosts)}"
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
        f"addresses ({_listed(telling(addresses), quoted=False) or 'it has none'}). "
        f"{nearest(name, topology.hosts)}"
    )


def hosts_at(topology: Topology, addresses: Iterable[str]) -> tuple[str, ...]:
    """The hosts that have one of ``addresses``, themselves or on one of their NICs."""
    found: dict[str, None] = {}
    for address in telling(addresses):
        node = topology.node_at.get(address)
        host = topology.host_of(node) if node is not None else None
        if host is None and address in topology.hosts:
            host = address
        if host is not None:
            found[host] = None
    return tuple(found)


def telling(addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns the ``addresses`` that only one machine can have, without other text."""
    found = []
    for address in addresses:
        with contextlib.suppress(ValueError):
            parsed = ip_address(address)
            if not (parsed.is_loopback or parsed.is_link_local):
                found.append(str(parsed))
    return tuple(found)


def nearest(name: str, hosts: Sequence[str]) -> str:
    """A sentence that says how to name a host, with the names that are most like ``name``."""
    alike = difflib.get_close_matches(name, hosts, n=MOST_NAMES, cutoff=0.5)
    shown = f"its nearest names are {_listed(alike)}" if alike else f"it has {_listed(hosts)}"
    return f"Set CRUX_HOST to the name in the topology ({shown}), or add the host to the file"


def _addresses_of(topology: Topology, host: str) -> tuple[str, ...]:
    nodes = (host, *topology.inside(host))
    return tuple(a for node in nodes for a in topology.addresses.get(node, ()))


def _listed(names: Sequence[str], quoted: bool = True) -> str:
    shown = ", ".join(repr(n) if quoted else n for n in names[:MOST_NAMES])
    return shown + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
