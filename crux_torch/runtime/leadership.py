"""What a job's leading rank works with, made from its settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from crux_torch.control.host import parse_endpoint
from crux_torch.control.leader import Leader
from crux_torch.control.planner import MAX_DEVICE_FLOPS, Planner
from crux_torch.control.records import JobRecord
from crux_torch.control.slots import ProfilingSlot
from crux_torch.control.tcp_store import TcpStore
from crux_torch.errors import CruxError
from crux_torch.fabric.host import this_host
from crux_torch.fabric.loaders import load_topology
from crux_torch.profile.merge import Topology
from crux_torch.runtime.conductor import GRACE_S, Conductor
from crux_torch.runtime.routing import Routing
from crux_torch.settings import Settings

#: (what about, message): says something once.
Warn = Callable[[str, str], None]


def make_conductor(
    settings: Settings, incarnation: str, host: str, world_size: int, first_turn: int, warn: Warn
) -> tuple[Conductor, TcpStore | None]:
    """The leader's parts and its end of the shared store; a part that can't be used is left out.

    Args:
        settings: of the job.
        incarnation: of the job.
        host: where the leader runs.
        world_size: ranks of the job.
        first_turn: above that of every order that may still lie in the job's store.
        warn: told what was left out, and why.
    """
    topology, published = _read_topology(settings, warn)
    device_flops, bound_flops = _device_flops(settings, os.environ)
    store, leader, slot, routing = None, None, None, None
    if settings.store != "none":
        try:
            planner = Planner(
                settings.policy, settings.plan_levels, max_slowdown=settings.max_slowdown or None
            )
            store = TcpStore(*parse_endpoint(settings.store))
        except CruxError as error:
            warn("join", f"this job takes no part in the cluster's plan: {error}")
        else:
            record = JobRecord(
                job=settings.job,
                incarnation=incarnation,
                hosts=(host,),
                gpus=world_size,
                state="starting",
                peak_flops=bound_flops * world_size,
            )
            leader, slot = _join(settings, record, planner, store)
            routing = _routing(settings, planner, first_turn)
    conductor = Conductor(
        settings,
        incarnation,
        leader,
        slot,
        topology,
        published=published,
        routing=routing,
        first_turn=first_turn,
        device_flops=device_flops,
    )
    return conductor, store


def _join(
    settings: Settings, record: JobRecord, planner: Planner, store: TcpStore
) -> tuple[Leader, ProfilingSlot]:
    """This job's part in agreeing on a plan, and its place in the line for measuring."""
    leader = Leader(
        store,
        settings.cluster,
        record,
        planner,
        policy=settings.policy,
        lease_s=settings.lease_s,
        plan_valid_s=settings.plan_valid_s,
    )
    slot = ProfilingSlot(
        store,
        settings.cluster,
        settings.job,
        record.incarnation,
        lease_s=settings.profile_s + 2 * GRACE_S,
    )
    return leader, slot


def _routing(settings: Settings, planner: Planner, first_turn: int) -> Routing | None:
    """What makes routes of the plan's paths.

    Every switch comes with a turn of its own, so that switches numbered from the first turn on
    have no number that an earlier world has left in the job's store.
    """
    if not settings.paths:
        return None
    return Routing(planner.topology_of, first_switch=first_turn)


def _read_topology(settings: Settings, warn: Warn) -> tuple[Topology | None, bytes | None]:
    if not settings.topology:
        return None, None
    try:
        return load_topology(settings.topology), Path(settings.topology).read_bytes()
    except (OSError, ValueError, CruxError) as error:
        warn("topology", f"going on without the cluster's topology: {error}")
        return None, None


def _device_flops(settings: Settings, env: Mapping[str, str]) -> tuple[float, float]:
    """FLOP/s of one of the job's devices, 0 where that is not known.

    Returns:
        of a rank that tells nothing of its device, which computes on a CPU then; and the most that
        any of its devices could do, which bounds its claim.
    """
    if settings.device_flops:
        return settings.device_flops, settings.device_flops
    host = this_host()
    # Ranks on a CPU share it, and none can do more than the whole host.
    cpu = (host.cpu.peak_flops if host.cpu is not None else None) or 0.0
    here = env.get("LOCAL_WORLD_SIZE", "")
    share = int(here) if here.isdecimal() and int(here) else 1
    return cpu / share, max([cpu, *(gpu.peak_flops or MAX_DEVICE_FLOPS for gpu in host.gpus)])
