"""What the jobs of a cluster share: the store and the topology."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from crux_torch.doctor.check import Check, Part
from crux_torch.fabric.loaders import load_topology
from crux_torch.fabric.topology import TopologyError
from crux_torch.settings import Settings

CONNECT_TIMEOUT_S = 1.0


def store(settings: Settings) -> Check:
    """Whether the cluster's store accepts connections."""
    if settings.store == "none":
        part = Part("store", "jobs do not coordinate: each runs without a plan")
        return part.missing("switched off: CRUX_STORE=none", "unset CRUX_STORE")
    part = Part("store", "jobs here do not coordinate with others until the store can be reached")
    url = urlsplit(settings.store)
    try:
        socket.create_connection((url.hostname or "", url.port or 0), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        remedy = "the first cruxrun on the store's host starts it; open its port in firewalls"
        return part.missing(f"{settings.store}: {error}", remedy)
    return part.ok(f"{settings.store} answers")


def topology(settings: Settings) -> Check:
    """Whether there is a topology file, and whether it is valid."""
    cost = "Crux assumes that all hosts share one core link, and chooses no paths"
    part = Part("topology", cost)
    if not settings.topology:
        remedy = "write one (docs/topology.md) and set CRUX_TOPOLOGY to its name"
        return part.missing("none given", remedy)
    try:
        loaded = load_topology(settings.topology)
    except TopologyError as error:
        return part.broken(str(error), "correct CRUX_TOPOLOGY, or the file")
    return part.ok(f"{settings.topology}: {len(loaded.hosts)} hosts, {len(loaded.edges)} links")
