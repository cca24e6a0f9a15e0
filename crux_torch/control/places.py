"""Where the ranks of a job run, and what is wrong with the names of their hosts.

Names are wrong silently: two machines of one name count as one host, and a host that the topology
lacks has no place in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from crux_torch.fabric.host_match import match_host, telling
from crux_torch.fabric.topology import Topology, TopologyError
from crux_torch.host.addresses import machine_id, network_id, own_addresses
from crux_torch.measure.job_profile import Name
from crux_torch.settings import Settings

#: Addresses of a machine that count: one with containers has hundreds.
MAX_ADDRESSES = 256
#: Hosts that a message names.
MOST_HOSTS = 3

Word = Annotated[str, msgspec.Meta(max_length=128)]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rank runs.

    Attributes:
        host: what the rank calls its host.
        told: its user gave that name (CRUX_HOST).
        machine: of the boot of its kernel.
        network: of its network namespace.
        addresses: of the machine, as its kernel tells them.
    """

    host: Name
    told: bool
    machine: Word
    network: Word
    addresses: Annotated[tuple[Word, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()


def place_of_this_process(settings: Settings, host: str) -> Place:
    """Where this process runs, on a host that it calls ``host``."""
    addresses = own_addresses()[:MAX_ADDRESSES]
    return Place(host, bool(settings.host), machine_id(), network_id(), addresses)


def problems(places: Mapping[int, Place], topology: Topology | None) -> tuple[str, ...]:
    """Returns the faults in the hosts' names, each with its remedy.

    Args:
        places: by rank.
        topology: the cluster's; None: without one, only names that are there twice are wrong.
    """
    named: dict[str, dict[int, Place]] = {}
    for rank, place in sorted(places.items()):
        named.setdefault(place.host, {})[rank] = place
    found = [said for host, at in named.items() if (said := _said_of_twins(host, at))]
    if topology is not None:
        astray = [said for at in named.values() if (said := _said_of_place(at, topology))]
        found += astray[:MOST_HOSTS]
        if len(astray) > MOST_HOSTS:
            found.append(f"so it is with {len(astray) - MOST_HOSTS} more hosts")
    return tuple(found)


def _said_of_twins(host: str, at: Mapping[int, Place]) -> str:
    """Returns the fault if several machines call themselves ``host``."""
    # Containers of one machine have a network each, and their user may call them one host.
    one_by_choice = all(place.told for place in at.values())
    machines: dict[tuple[str, str], int] = {}
    for rank, place in at.items():
        machines.setdefault((place.machine, "" if one_by_choice else place.network), rank)
    if len(machines) < 2:
        return ""
    shown = sorted(machines.values())[:2]
    each = " and ".join(f"that of rank {rank} ({_address(at[rank])})" for rank in shown)
    return (
        f"{len(machines)} machines are called {host!r}, {each}: what they send to each other "
        "counts as traffic inside one host. Give each its own name with CRUX_HOST "
        "(cruxrun --crux-host)"
    )


def _said_of_place(at: Mapping[int, Place], topology: Topology) -> str:
    """Returns the fault if a host is not in the topology under the name that its ranks use."""
    rank, place = next(iter(at.items()))
    machine = f"the machine of rank {rank}"
    try:
        host = match_host(topology, place.host, place.addresses, told=place.told, machine=machine)
    except TopologyError as error:
        return f"the topology does not fit: {error}"
    if host == place.host:
        return ""
    return (
        f"{machine} calls itself {place.host!r}, and by its addresses it is {host!r} of the "
        f"topology: start it with cruxrun, which looks that up, or set CRUX_HOST={host} there"
    )


def _address(place: Place) -> str:
    return next(iter(telling(place.addresses)), "no address")
