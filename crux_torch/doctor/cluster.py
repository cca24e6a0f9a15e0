"""What the jobs of a cluster share: the store and the topology."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from crux_torch.control.left_out import left_out, network_of
from crux_torch.doctor.check import Check, Part
from crux_torch.errors import Cause, SettingsError, StoreError
from crux_torch.fabric.host_match import match_host
from crux_torch.fabric.loaders import load_topology
from crux_torch.fabric.topology import Topology, TopologyError
from crux_torch.host.addresses import own_addresses
from crux_torch.settings import Settings
from crux_torch.store.endpoint import LOAD_S, looked_into, open_store, sharing
from crux_torch.store.shared_store import PLAN, cluster_prefix

#: Seconds that an exchange with the store may take.
TIMEOUT_S = 2.0
#: What may be over by the time that a job runs. Anything else has to be repaired.
_PASSING = frozenset(
    {Cause.ABSENT, Cause.UNREACHABLE, Cause.SILENT, Cause.CUT, Cause.BUSY, Cause.ETCD_AWAY}
)


def store(settings: Settings) -> Check:
    """Checks that the cluster's store answers this user's jobs, with the secret that they have."""
    if settings.store == "none":
        part = Part("store", "jobs do not coordinate: each runs without a plan")
        return part.missing("switched off: CRUX_STORE=none", "unset CRUX_STORE")
    part = Part("store", "jobs here do not coordinate with others until the store can be used")
    given = settings.store, settings.store_secret, settings.store_group
    try:
        client = open_store(*given, timeout_s=TIMEOUT_S, load_s=LOAD_S)
    except SettingsError as error:
        return part.broken(str(error), "correct the setting (docs/store.md)")
    try:
        client.get(cluster_prefix(settings.cluster) + PLAN)
    except StoreError as error:
        known = looked_into(error, settings.store)
        found = part.missing if known.cause in _PASSING else part.broken
        return found(str(known), known.cause.value)
    finally:
        client.close()
    shared = sharing(*given)
    return part.ok(f"{settings.store} answers" + (f"; {shared}" if shared else ""))


def topology(settings: Settings) -> Iterator[Check]:
    """The topology file, this host's place in it, and what Crux leaves to the network."""
    loaded = None
    if not settings.topology:
        part = Part("topology", "Crux does not know which jobs share a link, and on which paths")
        remedy = "write one (docs/topology.md) and set CRUX_TOPOLOGY to its name"
        yield part.missing("none given", remedy)
    else:
        part = Part("topology", "cruxrun does not start a job")
        try:
            loaded = load_topology(settings.topology)
        except TopologyError as error:
            yield part.broken(str(error), "correct CRUX_TOPOLOGY, or the file (docs/topology.md)")
            return
        place = _place(settings, loaded)
        yield place
        if place.state != "ok":
            return
    part = Part("plans", "the network treats this job's traffic as any other")
    said = left_out(settings, network_of(loaded))
    if said:
        yield part.missing("; ".join(said), "change the setting that it names (docs/settings.md)")
    else:
        yield part.ok("jobs get priorities and paths")


def _place(settings: Settings, loaded: Topology) -> Check:
    part = Part("topology", "cruxrun does not start a job")
    about = f"{settings.topology}: {len(loaded.hosts)} hosts, {len(loaded.edges)} links"
    name = settings.host or socket.gethostname()
    try:
        host = match_host(loaded, name, own_addresses(), told=bool(settings.host))
    except TopologyError as error:
        return part.broken(f"{about}; {error}", "set CRUX_HOST, or add this host to the file")
    by_address = " by its addresses" if host != name else ""
    return part.ok(f"{about}; this host is {host}{by_address}")
