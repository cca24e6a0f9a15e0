"""Checks of ``cruxrun`` before a job starts: the topology, and this host's place in it."""

from __future__ import annotations

import os
import socket

from crux_torch.errors import SettingsError
from crux_torch.fabric.host_match import match_host
from crux_torch.fabric.topology import Topology, TopologyError
from crux_torch.host.addresses import own_addresses
from crux_torch.settings import Settings


def topology_of(settings: Settings) -> Topology | None:
    """The topology that the settings name; None if they name none.

    Raises:
        SettingsError: the file is not there, or is no topology.
    """
    if not settings.topology:
        return None
    about = f"CRUX_TOPOLOGY={settings.topology!r}"
    if not os.path.isfile(settings.topology):
        raise SettingsError(f"{about}: no such file")
    # Late: most jobs of one host have no topology, and the loaders take time to import.
    from crux_torch.fabric.loaders import load_topology

    try:
        return load_topology(settings.topology)
    except TopologyError as error:
        found = str(error).removeprefix(f"{settings.topology}: ")
        raise SettingsError(f"{about}: {found}") from None


def named_host(topology: Topology, settings: Settings) -> dict[str, str]:
    """The variable that gives this host its name in the topology, if that is not its own name.

    Raises:
        SettingsError: it is in it neither by its name nor by its addresses, or not certainly.
    """
    name = settings.host or socket.gethostname()
    try:
        host = match_host(topology, name, own_addresses(), told=bool(settings.host))
    except TopologyError as error:
        raise SettingsError(f"CRUX_TOPOLOGY={settings.topology!r}: {error}") from None
    return {} if host == name else {"CRUX_HOST": host}
