"""Joins the leading rank to its cluster: makes its controller from the settings."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from crux_torch.agent.job_controller import GRACE_S, JobController, Routing
from crux_torch.agent.pace import PaceKeeper, PaceSetter
from crux_torch.agreement.bounded_leader import MAX_BYTES, BoundedLeader, SmallOnly
from crux_torch.agreement.bounds import MAX_DEVICE_FLOPS
from crux_torch.agreement.claims import ProfilingSlot, SharedClock
from crux_torch.agreement.inputs import TopologyReader, agreed
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.leader_process import MODULE, START_S, Begin, LeaderApart
from crux_torch.agreement.outcome import Outcome
from crux_torch.agreement.planner import check_policy, entries_of_agreed_levels
from crux_torch.agreement.problems import start_line
from crux_torch.agreement.records import JobRecord, RunLabels
from crux_torch.apply.transport import is_preloaded
from crux_torch.errors import CruxError
from crux_torch.host.machine import this_host
from crux_torch.logs import news, one_line
from crux_torch.measure.iterations import IterationMarks
from crux_torch.schedule.model import Memory
from crux_torch.settings import Settings, is_launched
from crux_torch.store import MAX_LEASE_S, SharedStore
from crux_torch.store.endpoint import ProcessConnector, open_store


def make_controller(
    settings: Settings,
    *,
    incarnation: str,
    host: str,
    world_size: int,
    first_number: int,
    keeper: PaceKeeper,
    marks: IterationMarks,
    warn: Callable[[str, str], None],
) -> tuple[JobController, SharedStore | None]:
    """Returns the leading rank's controller, and its connection to the shared store.

    Args:
        incarnation, world_size, first_number: see :class:`JobController`.
        host: where the leader runs.
        keeper, marks: this rank's.
        warn: is given the subject and the text of a warning about what is left out.
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
        line = start_line(settings, topology, preloaded=is_preloaded())
        news(logging.getLogger("crux_torch")).info("%s", one_line(line))
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
            run=run_labels(os.environ) or msgspec.UNSET,
        )
        compute = partial(
            entries_of_agreed_levels,
            max_slowdown=settings.max_slowdown or math.inf,
            guard=settings.guard,
            memory=Memory(),
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
    controller = JobController(
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
    return controller, store


def _apart(
    settings: Settings,
    published: bytes | None,
    marks: IterationMarks,
    record: JobRecord,
    outcome: Outcome,
) -> LeaderApart:
    """Returns a leader in a process of its own, as the settings say."""
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
    """Returns (FLOP/s for CPU ranks or 0, upper bound of any device in the job)."""
    if settings.device_flops:
        return settings.device_flops, settings.device_flops
    host = this_host()
    # Ranks on a CPU share it, and none can do more than the whole host.
    cpu = (host.cpu.peak_flops if host.cpu is not None else None) or 0.0
    here = env.get("LOCAL_WORLD_SIZE", "")
    share = int(here) if here.isdecimal() and int(here) else 1
    return cpu / share, max([cpu, *(gpu.peak_flops or MAX_DEVICE_FLOPS for gpu in host.gpus)])


#: Where Kubernetes puts the name of a pod's namespace.
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def run_labels(env: Mapping[str, str], namespace_file: Path = _NAMESPACE) -> RunLabels:
    """Returns the job's names in Slurm and Kubernetes, as this rank's environment has them."""
    pod, namespace = "", env.get("POD_NAMESPACE", "")
    if "KUBERNETES_SERVICE_HOST" in env:
        pod = env.get("POD_NAME", "") or env.get("HOSTNAME", "")
        with contextlib.suppress(OSError, ValueError):
            namespace = namespace or namespace_file.read_text()[:256].strip()
    slurm_job_id = env.get("SLURM_JOB_ID", "")
    return RunLabels(slurm_job_id=slurm_job_id[:256], namespace=namespace[:256], pod=pod[:256])
