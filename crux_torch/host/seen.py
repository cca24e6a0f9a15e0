"""This host as a discovery of the network describes it: its NICs, their addresses and switches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from crux_torch.host.interfaces import (
    SYSFS,
    Nic,
    addresses_by_interface,
    entries,
    read_nics,
)
from crux_torch.host.lldp import read_neighbours
from crux_torch.network.discover.fragment import SeenHost, SeenNic
from crux_torch.network.formats.lldp import Neighbour
from crux_torch.network.host_match import distinct_addresses

MAX_ADDRESSES = 64


def read_seen_host(name: str) -> tuple[SeenHost, tuple[str, ...]]:
    """Returns this host, called ``name``, and what it does not tell, in words."""
    neighbours, reason = read_neighbours(name)
    nics = seen_nics(read_nics(), addresses_by_interface(), neighbours)
    return SeenHost(name, nics), (reason,) if reason else ()


def seen_nics(
    nics: tuple[Nic, ...],
    addresses: Mapping[str, tuple[str, ...]],
    neighbours: Mapping[str, Neighbour],
    sysfs: Path = SYSFS,
) -> tuple[SeenNic, ...]:
    """Returns the NICs that have addresses for the network.

    A bond or a VLAN has the neighbour of the interfaces below it, if they have the same one.
    """
    found = []
    for nic in nics:
        own = distinct_addresses(addresses.get(nic.name, ()))[:MAX_ADDRESSES]
        if not own:
            continue
        names = [nic.name, *_lower(nic.name, sysfs)]
        heard = [neighbours[name] for name in names if name in neighbours]
        one = heard[0] if len({neighbour.name for neighbour in heard}) == 1 else None
        found.append(
            SeenNic(
                name=nic.name,
                addresses=own,
                speed_Bps=nic.speed_Bps or 0.0,
                switch=one.name[:256] if one else "",
                switch_port=one.peer_port[:256] if one and len(heard) == 1 else "",
                switch_speed_Bps=sum(each.speed_Bps or 0.0 for each in heard) if one else 0.0,
            )
        )
    return tuple(found)


def _lower(interface: str, sysfs: Path) -> list[str]:
    names = (entry.name for entry in entries(sysfs / "class" / "net" / interface))
    return [name.removeprefix("lower_") for name in names if name.startswith("lower_")]
