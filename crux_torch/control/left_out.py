"""Reasons why nothing is prioritised or no paths are chosen, for logs, doctor and status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crux_torch.fabric.topology import Topology
from crux_torch.settings import PATH_POLICIES, Marks, Settings

#: Those that give all jobs one level.
ONE_LEVEL_POLICIES = ("cassini", "ecmp", "mlcc")


class Network(NamedTuple):
    """The facts about the cluster's topology that a rank needs.

    Attributes:
        known: True if there is one.
        addresses: True if it has addresses, so that paths can be taken.
        marks: the DSCP values of its ``qos``; None if it has none.
    """

    known: bool = False
    addresses: bool = False
    marks: Marks | None = None


def network_of(topology: Topology | None) -> Network:
    """Returns the facts about ``topology`` that a rank needs."""
    if topology is None:
        return Network()
    marks = topology.qos.marks if topology.qos is not None else None
    return Network(True, bool(topology.addresses), marks)


def left_out(settings: Settings, network: Network) -> tuple[str, ...]:
    """Sentences without a full stop about what does not happen; none where Crux does all it can.

    Args:
        network: that the job's plans are made for.
    """
    return _sentences(_no_priorities(settings, network), _no_paths(settings, network))


def left_out_of_plan(
    policy: str, levels: Sequence[int], unmarked: str, network: Network
) -> tuple[str, ...]:
    """The same for a plan of all jobs of a cluster.

    Args:
        policy: that the plan was made by.
        levels: that it may give.
        unmarked: why no level has an effect; empty if levels have.
        network: that the plan was made for.
    """
    return _sentences(unmarked or _one_level(policy, levels, network), _no_path(policy, network))


def _sentences(no_priorities: str, no_paths: str) -> tuple[str, ...]:
    said = (
        ("nothing is prioritised", no_priorities),
        ("no paths are chosen", no_paths),
    )
    return tuple(f"{what}, because {why}" for what, why in said if why)


def start_line(settings: Settings, topology: Topology | None) -> str:
    """One line about what a job starts with, and what Crux can't do for it.

    Args:
        topology: of the job's own file; another job of the cluster may still bring one.
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
    about = (
        f"job {settings.job}, store {settings.store}, {where}, "
        f"{marks or 'no marks'}{', dry run' if settings.dry_run else ''}"
    )
    return "; ".join((about, *left_out(settings, network_of(topology))))


def _no_priorities(settings: Settings, network: Network) -> str:
    if settings.store == "none":
        return "jobs without a store have no plan (CRUX_STORE=none)"
    if settings.dry_run:
        return "it is a dry run (CRUX_DRY_RUN)"
    if not settings.marks:
        return "nobody said which DSCP values are Crux's (CRUX_DSCP_MAP, or qos in the topology)"
    return _one_level(settings.policy, settings.marks.plan_levels, network)


def _one_level(policy: str, levels: Sequence[int], network: Network) -> str:
    if policy in ONE_LEVEL_POLICIES:
        return f"the policy {policy} gives all jobs one level (CRUX_POLICY)"
    if len(levels) == 1:
        return "there is one level for plans (CRUX_LEVELS, CRUX_RESERVED_LEVELS)"
    if policy == "crux" and not network.known:
        return "the policy crux gives all jobs one level without a topology (CRUX_TOPOLOGY)"
    return ""


def _no_paths(settings: Settings, network: Network) -> str:
    if settings.store == "none":
        return "jobs without a store have no plan (CRUX_STORE=none)"
    off = [f"CRUX_{name.upper()}" for name in ("paths", "transport") if not getattr(settings, name)]
    if off and settings.policy in PATH_POLICIES:
        return f"that is switched off ({', '.join(off)})"
    return _no_path(settings.policy, network)


def _no_path(policy: str, network: Network) -> str:
    if policy not in PATH_POLICIES:
        return f"the policy {policy} leaves paths to the network (CRUX_POLICY)"
    if not network.known:
        return "there is no topology (CRUX_TOPOLOGY)"
    if not network.addresses:
        return "the topology has no addresses (docs/topology.md)"
    return ""
