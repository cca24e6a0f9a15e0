"""Problems of a job's setting, in words for logs, doctor and status.

Reasons why nothing is prioritised or no paths are chosen, and wrong names of hosts: two machines of
one name count as one host, and a host that the topology lacks has no place in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from crux_torch.host.interfaces import own_addresses
from crux_torch.host.machine import machine_id, network_id
from crux_torch.measure.profile import Name
from crux_torch.network.host_match import distinct_addresses, match_host
from crux_torch.network.topology import Topology, TopologyError
from crux_torch.settings import PATH_POLICIES, Marks, Settings

#: Policies that give all jobs one level.
ONE_LEVEL_POLICIES = ("cassini", "ecmp", "mlcc")
#: Why there is no plan for a network.
NO_NETWORK = "no topology is given (CRUX_TOPOLOGY), and jobs have not seen the network yet"
#: Addresses of a machine that count: one with containers has hundreds.
MAX_ADDRESSES = 256
#: Hosts that a message names.
MOST_HOSTS = 3

Word = Annotated[str, msgspec.Meta(max_length=128)]


class Network(NamedTuple):
    """The facts about the cluster's topology that a rank needs.

    Attributes:
        known: True if there is one.
        addresses: True if it has addresses, so that paths can be taken.
        marks: the DSCP values of its ``qos``; None if it has none.
        seen: True if nobody gave it: it is what jobs saw.
    """

    known: bool = False
    addresses: bool = False
    marks: Marks | None = None
    seen: bool = False


def network_of(topology: Topology | None) -> Network:
    """Return the facts about ``topology`` that a rank needs."""
    if topology is None:
        return Network()
    marks = topology.qos.marks if topology.qos is not None else None
    return Network(True, bool(topology.addresses), marks)


def left_out(settings: Settings, network: Network, *, preloaded: bool = True) -> tuple[str, ...]:
    """Return sentences about what does not happen for a job; none where Crux does all it can.

    Args:
        network: that the job's plans are made for.
        preloaded: True if the job's processes have loaded the transport library.
    """
    if settings.store == "none":
        return _sentences(*["jobs without a store have no plan (CRUX_STORE=none)"] * 2)
    if settings.dry_run:
        no_levels = "it is a dry run (CRUX_DRY_RUN)"
    elif not settings.marks:
        no_levels = (
            "nobody said which DSCP values are Crux's (CRUX_DSCP_MAP, or qos in the topology)"
        )
    else:
        no_levels = _one_level(settings.policy, settings.marks.plan_levels, network)
    off = [f"CRUX_{name.upper()}" for name in ("paths", "transport") if not getattr(settings, name)]
    no_paths = _no_path(settings.policy, network)
    if off and settings.policy in PATH_POLICIES:
        no_paths = f"that is switched off ({', '.join(off)})"
    elif not (preloaded or no_paths):
        no_paths = "the transport library is not preloaded: `crux env` prints the LD_PRELOAD for it"
    return _sentences(no_levels, no_paths)


def left_out_of_plan(
    policy: str, levels: Sequence[int], unmarked: str, network: Network
) -> tuple[str, ...]:
    """Return the same for a plan of all jobs of a cluster.

    Args:
        policy: that the plan was made by.
        levels: that it may give.
        unmarked: why no level has an effect; empty if levels have.
        network: that the plan was made for.
    """
    return _sentences(unmarked or _one_level(policy, levels, network), _no_path(policy, network))


def start_line(settings: Settings, topology: Topology | None, *, preloaded: bool = True) -> str:
    """Return one line about a job's start, and what Crux can't do for it.

    Args:
        topology: of the job's own file; another job of the cluster may still bring one.
        preloaded: see :func:`left_out`.
    """
    where = "no topology of its own"
    if topology is not None:
        where = f"topology {settings.topology}"
        where += f", this host is {settings.host}" if settings.host else ""
    marks = " and ".join(
        f"marks of {kind} (DSCP) {','.join(map(str, values))}"
        for kind, values in (("TCP", settings.marks.tcp), ("queue pairs", settings.marks.rdma))
        if values
    )
    setting = (
        f"job {settings.job}, store {settings.store}, {where}, "
        f"{marks or 'no marks'}{', dry run' if settings.dry_run else ''}"
    )
    return "; ".join((setting, *left_out(settings, network_of(topology), preloaded=preloaded)))


def _sentences(no_levels: str, no_paths: str) -> tuple[str, ...]:
    reasons = ("nothing is prioritised", no_levels), ("no paths are chosen", no_paths)
    return tuple(f"{what}, because {why}" for what, why in reasons if why)


def _one_level(policy: str, levels: Sequence[int], network: Network) -> str:
    if policy in ONE_LEVEL_POLICIES:
        return f"the policy {policy} gives all jobs one level (CRUX_POLICY)"
    if len(levels) == 1:
        return "there is one level for plans (CRUX_LEVELS, CRUX_RESERVED_LEVELS)"
    if policy == "crux" and not network.known:
        return f"the policy crux gives all jobs one level while {NO_NETWORK}"
    return ""


def _no_path(policy: str, network: Network) -> str:
    if policy not in PATH_POLICIES:
        return f"the policy {policy} leaves paths to the network (CRUX_POLICY)"
    if not network.known:
        return NO_NETWORK
    if not network.addresses:
        return "the topology has no addresses (docs/operate/topology.md)"
    return ""


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place where one rank runs.

    Attributes:
        host: the rank's name of its host.
        told: True if its user gave that name (CRUX_HOST).
        machine: id of the boot of its kernel.
        network: id of its network namespace.
        addresses: of the machine.
    """

    host: Name
    told: bool
    machine: Word
    network: Word
    addresses: Annotated[tuple[Word, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()


def place_of_this_process(settings: Settings, host: str) -> Place:
    """Return the place of this process, which calls its host ``host``."""
    addresses = own_addresses()[:MAX_ADDRESSES]
    return Place(host, bool(settings.host), machine_id(), network_id(), addresses)


def problems(places: Mapping[int, Place], topology: Topology | None) -> tuple[str, ...]:
    """Return the faults in the hosts' names, each with its remedy.

    Args:
        places: by rank.
        topology: the cluster's; where nobody gave one, only names that are there twice are wrong.
    """
    named: dict[str, dict[int, Place]] = {}
    for rank, place in sorted(places.items()):
        named.setdefault(place.host, {})[rank] = place
    found = [fault for host, at in named.items() if (fault := _same_name_fault(host, at))]
    if topology is not None and topology.is_given:
        astray = [fault for at in named.values() if (fault := _unknown_name_fault(at, topology))]
        found += astray[:MOST_HOSTS]
        if len(astray) > MOST_HOSTS:
            found.append(f"so it is with {len(astray) - MOST_HOSTS} more hosts")
    return tuple(found)


def _same_name_fault(host: str, at: Mapping[int, Place]) -> str:
    """Return the fault if several machines call themselves ``host``."""
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


def _unknown_name_fault(at: Mapping[int, Place], topology: Topology) -> str:
    """Return the fault if a host is not in the topology under the name that its ranks use."""
    rank, place = next(iter(at.items()))
    machine = f"the machine of rank {rank}"
    try:
        host = match_host(
            topology, place.host, place.addresses, configured=place.told, machine=machine
        )
    except TopologyError as error:
        return f"the topology does not fit: {error}"
    if host == place.host:
        return ""
    return (
        f"{machine} calls itself {place.host!r}, and by its addresses it is {host!r} of the "
        f"topology: start it with cruxrun, which looks that up, or set CRUX_HOST={host} there"
    )


def _address(place: Place) -> str:
    return next(iter(distinct_addresses(place.addresses)), "no address")
