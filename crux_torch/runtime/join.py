"""Joins the leading rank to its cluster: makes its parts from the settings."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from crux_torch.control.agreed_marks import agreed
from crux_torch.control.bounded_leader import MAX_BYTES, BoundedLeader, SmallOnly
from crux_torch.control.inputs import MAX_DEVICE_FLOPS
from crux_torch.control.leader import Leader
from crux_torch.control.leader_apart import MODULE, START_S, LeaderApart
from crux_torch.control.leader_frames import Begin
from crux_torch.control.left_out import start_line
from crux_torch.control.outcome import Outcome
from crux_torch.control.planner import check_policy, entries_of_agreed_levels
from crux_torch.control.records import JobRecord
from crux_torch.control.shared_clock import SharedClock
from crux_torch.control.slots import ProfilingSlot
from crux_torch.control.topology_reader import TopologyReader
from crux_torch.errors import CruxError
from crux_torch.host.machine import this_host
from crux_torch.log_lines import news
from crux_torch.measure.iterations import IterationMarks
from crux_torch.runtime.lead import GRACE_S, Conductor, Routing
from crux_torch.runtime.pace_keeper import PaceKeeper
from crux_torch.runtime.pace_setter import PaceSetter
from crux_torch.settings import Settings
from crux_torch.store.endpoint import open_store
from crux_torch.store.process_connector import ProcessConnector
from crux_torch.store.shared_store import MAX_LEASE_S, SharedStore
from crux_torch.warn_once import one_line
from cruxrun.launched import is_launched


def make_conductor(
    settings: Settings,
    incarnation: str,
    host: str,
    world_size: int,
    first_number: int,
    keeper: PaceKeeper,
    marks: IterationMarks,
    warn: Callable[[str, str], None],
) -> tuple[Conductor, SharedStore | None]:
    """The leading rank's parts, and its connection to the shared store.

    A part that can't be used is left out, and ``warn`` is told what about, and in words.

    Args:
        settings, incarnation, world_size, first_number: see :class:`Conductor`.
        host: where the leader runs.
        keeper, marks: this rank's.
    """
    topologies = TopologyReader()
    topology, published = None, None
    if settings.topology:
        try:
            topology, published = topologies.load(Path(settings.topology))
        except (OSError, ValueError) as error:
            warn("topology", f"going on without the cluster's topology: {error}")
    if not is_launched():
        # cruxrun has said it itself.
        news(logging.getLogger("crux_torch")).info("%s", one_line(start_line(settings, topology)))
    device_flops, bound_flops = _device_flops(settings, os.environ)
    store: SharedStore | None = None
    leader, slot, routing, setter = None, None, None, None
    if settings.store != "none":
        try:
            check_policy(settings.policy, settings.marks.plan_levels)
            group = settings.store_group
            store = open_store(settings.store, settings.store_secret, group, limit_bytes=MAX_BYTES)
        except CruxError as error:
            warn("join", f"this job takes no part in the cluster's plan: {error}")
    if store is not None:
        record = JobRecord(
            job=settings.job,
            incarnation=incarnation,
            hosts=(host,),
            gpus=world_size,
            state="starting",
            peak_flops=bound_flops * world_size,
            marks=settings.marks or msgspec.UNSET,
            dry_run=settings.dry_run or msgspec.UNSET,
        )
        compute = partial(
            entries_of_agreed_levels,
            max_slowdown=settings.max_slowdown or math.inf,
            guard=settings.guard,
        )
        here = Leader(
            store,
            settings.cluster,
            record,
            compute,
            topologies,
            published,
            policy=settings.policy,
            agree=agreed,
            max_slowdown=settings.max_slowdown or math.inf,
            iteration_ends=marks.marks_ns,
            in_thread=True,
            check=SmallOnly(published, topology),
            lease_s=settings.lease_s,
            plan_valid_s=settings.plan_valid_s,
        )
        apart = partial(_apart, settings, published, marks)
        leader = BoundedLeader(here, apart)
        lease_s = min(settings.profile_s + 2 * GRACE_S, MAX_LEASE_S)
        slot = ProfilingSlot(store, settings.cluster, settings.job, incarnation, lease_s=lease_s)
        # A new generation comes with an order of its own, so its number is new to the store, too.
        routing = Routing(first_generation=first_number) if settings.paths else None
        setter = PaceSetter(SharedClock(store), keeper)
    conductor = Conductor(
        settings,
        incarnation,
        leader,
        slot,
        topology,
        world_size=world_size,
        routing=routing,
        pace_setter=setter,
        first_number=first_number,
        device_flops=device_flops,
    )
    return conductor, store


def _apart(
    settings: Settings,
    published: bytes | None,
    marks: IterationMarks,
    record: JobRecord,
    outcome: Outcome,
) -> LeaderApart:
    """A leader in a process of its own, as the settings say."""
    begin = Begin(
        store=settings.store,
        store_secret=os.path.abspath(settings.store_secret) if settings.store_secret else "",
        store_group=settings.store_group,
        cluster=settings.cluster,
        record=record,
        published=published,
        policy=settings.policy,
        max_slowdown=settings.max_slowdown or math.inf,
        guard=settings.guard,
        lease_s=settings.lease_s,
        plan_valid_s=settings.plan_valid_s,
        log_level=logging.getLogger("crux_torch").getEffectiveLevel(),
    )
    starter = ProcessConnector(settings.store, module=MODULE, start_s=START_S)
    return LeaderApart(begin, starter, outcome, marks.marks_ns)


def _device_flops(settings: Settings, env: Mapping[str, str]) -> tuple[float, float]:
    """FLOP/s of a device: of a rank's that says nothing of it, because it computes on a CPU (0 if
    not known), and the most that any of the job's could do, which bounds the job's claim."""
    if settings.device_flops:
        return settings.device_flops, settings.device_flops
    host = this_host()
    # Ranks on a CPU share it, and none can do more than the whole host.
    cpu = (host.cpu.peak_flops if host.cpu is not None else None) or 0.0
    here = env.get("LOCAL_WORLD_SIZE", "")
    share = int(here) if here.isdecimal() and int(here) else 1
    return cpu / share, max([cpu, *(gpu.peak_flops or MAX_DEVICE_FLOPS for gpu in host.gpus)])
