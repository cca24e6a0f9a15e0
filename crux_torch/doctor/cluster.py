"""What the jobs of a cluster share: the store and the topology."""

from __future__ import annotations

import socket

from crux_torch.doctor.check import Check, Part
from crux_torch.errors import SettingsError
from crux_torch.fabric.loaders import load_topology
from crux_torch.fabric.topology import TopologyError
from crux_torch.settings import Settings
from crux_torch.store.endpoint import ETCD, server_addresses
from crux_torch.store.secret import read_secret

CONNECT_TIMEOUT_S = 1.0


def store(settings: Settings) -> Check:
    """Whether the cluster's store accepts connections."""
    if settings.store == "none":
        part = Part("store", "jobs do not coordinate: each runs without a plan")
        return part.missing("switched off: CRUX_STORE=none", "unset CRUX_STORE")
    part = Part("store", "jobs here do not coordinate with others until the store can be reached")
    remedy = "the first cruxrun on the store's host starts it; open its port in firewalls"
    if settings.store.startswith(ETCD):
        remedy = "start the etcd, or open its port in firewalls"
    try:
        addresses = server_addresses(settings.store)
        read_secret(settings.store_secret)
    except SettingsError as error:
        return part.broken(str(error), "correct the setting (docs/store.md)")
    reason = ""
    for address in addresses:
        try:
            socket.create_connection(address, CONNECT_TIMEOUT_S).close()
        except OSError as error:
            reason = str(error)
        else:
            return part.ok(f"{settings.store} answers")
    return part.missing(f"{settings.store}: {reason}", remedy)


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
