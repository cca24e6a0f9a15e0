"""From a snapshot of job records to a plan: pure and deterministic, so all leaders agree."""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import msgspec

from crux_torch.control.records import JobRecord, PlanEntry
from crux_torch.control.warn_once import WarnOnce
from crux_torch.errors import SettingsError
from crux_torch.fabric.loaders import parse_yaml
from crux_torch.fabric.topology import Topology
from crux_torch.profile.job_profile import JobProfile
from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.intensity import unrouted_transfer_times_s
from crux_torch.schedule.live import PATH_POLICIES
from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job, Path
from crux_torch.schedule.scheduler import LIVE, SCHEDULERS, Scheduler, SchedulerOptions

_log = logging.getLogger(__name__)

#: The link on which flows meet whose place in the network is not known.
UNLOCATED = "unlocated"
#: Its capacity (100 Gb/s); it counts only for a job whose t_j was not measured either.
UNLOCATED_BPS = 12.5e9
#: More than any device does, in FLOP/s: bounds a job that does not say what its devices can do.
MAX_DEVICE_FLOPS = 1e17
#: More devices than any host has, ranks on a CPU included: bounds a job whose hosts nobody knows.
MAX_HOST_DEVICES = 256
#: JSON has no infinity; the priority of a job without traffic is this.
MAX_FINITE = sys.float_info.max


class TopologyLike(Protocol):
    """The part of :class:`crux_torch.fabric.topology.Topology` that a plan needs."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts."""

    @property
    def capacity_Bps(self) -> Mapping[str, float]:
        """Bytes per second of every link."""

    def candidate_paths(self, src: str, dst: str) -> tuple[Path, ...]:
        """The paths that a flow from ``src`` to ``dst`` may take."""


@runtime_checkable
class KnowsGpus(TopologyLike, Protocol):
    """A topology that also tells what is inside a host."""

    device_flops: float

    @property
    def nodes(self) -> Mapping[str, object]:
        """Every node by name."""

    def gpus(self, host: str | None = None) -> tuple[str, ...]:
        """The GPUs of ``host``; empty where its inside is not described."""

    def host_of(self, node: str) -> str | None:
        """The host that ``node`` sits in."""


def plan_inputs(records: Sequence[JobRecord], topology: TopologyLike | None) -> Cluster:
    """What the scheduler sees: the jobs that were profiled, on the links that they share.

    - A flow between hosts that the topology knows gets that topology's candidates.
    - Any other flow crosses one link, ``unlocated``, that all such flows share: jobs whose place is
      unknown are ordered against each other, and against nobody else. Without a topology
      that is every flow, so the link stands for one core that everyone shares.
    - A flow between a GPU and a NIC of a host whose inside the topology describes takes the first
      path between the two; elsewhere it counts for nothing.
    - t_j is the profile's where it was measured, and where the path is not known: the flows' bytes
      are scaled in one proportion until the cluster's links give that time.
    - W_j and the number of devices are clamped, see :func:`claimed_flops` and
      :func:`claimed_devices`, so that no tenant lifts itself.

    Args:
        records: live job records, in any order, no two of one name.
        topology: of the cluster, None where it is unknown.
    """
    known = frozenset(topology.hosts) if topology is not None else frozenset()
    inside = topology if isinstance(topology, KnowsGpus) else None
    capacity_Bps = dict(topology.capacity_Bps) if topology is not None else {}
    capacity_Bps[UNLOCATED] = UNLOCATED_BPS
    candidates: dict[tuple[str, str], tuple[Path, ...]] = {}

    def between(src: str, dst: str) -> tuple[Path, ...]:
        if src == dst:
            return ((),)
        if topology is None or src not in known or dst not in known:
            return ((UNLOCATED,),)
        if (src, dst) not in candidates:
            candidates[src, dst] = topology.candidate_paths(src, dst)
        return candidates[src, dst]

    jobs = []
    for record in sorted(records, key=lambda r: r.job):
        profile = record.profile
        if profile is None:
            continue
        job = Job(
            name=record.job,
            gpus=claimed_devices(record, inside),
            flops=claimed_flops(record, profile, inside),
            compute_s=profile.compute_s,
            flows=(
                *(Flow(f.bytes, between(f.src, f.dst)) for f in profile.flows),
                *_inside_flows(profile, inside),
            ),
            bursts=_bursts(profile),
        )
        placed = topology is not None and all(h in known for f in profile.flows for h in _ends(f))
        if profile.t_source == "measured" or not placed:
            job = _scaled(job, capacity_Bps, profile.t_s)
        jobs.append(job)
    return Cluster(capacity_Bps, tuple(jobs))


def claimed_devices(record: JobRecord, inside: KnowsGpus | None = None) -> int:
    """The devices of a job, at most those of the hosts that it names.

    Args:
        record: the job's.
        inside: tells the GPUs of hosts; one that it does not describe has ``MAX_HOST_DEVICES``.
    """
    hosts = frozenset(record.hosts)
    described = hosts.intersection(inside.hosts) if inside is not None else frozenset()
    bound = (len(hosts) - len(described)) * MAX_HOST_DEVICES
    if inside is not None:
        bound += sum(len(inside.gpus(host)) or MAX_HOST_DEVICES for host in described)
    return min(record.gpus, bound)


def claimed_flops(record: JobRecord, profile: JobProfile, inside: KnowsGpus | None = None) -> float:
    """W_j in FLOPs, at most what the job's devices could do in one period.

    That is what the job says of them, at most what a device can do for each of
    :func:`claimed_devices`: the topology's ``device_flops``, else ``MAX_DEVICE_FLOPS``.
    """
    device = (inside.device_flops if inside is not None else 0.0) or MAX_DEVICE_FLOPS
    peak = claimed_devices(record, inside) * device
    if record.peak_flops > 0:
        peak = min(peak, record.peak_flops)
    return min(profile.flops, peak * profile.period_s)


def compute_entries(
    records: Sequence[JobRecord],
    topology: TopologyLike | None,
    *,
    policy: str,
    levels: Sequence[int],
    seed: int = 0,
    max_slowdown: float | None = None,
    schedulers: Mapping[str, Scheduler] = LIVE,
) -> tuple[PlanEntry, ...]:
    """The plan's entries, one for each profiled job in the order of the names.

    A policy that leaves paths to the network gives entries without any.

    Args:
        records: live job records, in any order.
        topology: of the cluster, None where it is unknown.
        policy: the scheduler, a key of ``schedulers``.
        levels: that may be assigned, ascending.
        seed: of what the scheduler draws.
        max_slowdown: what crux-fair is to guarantee, see ``SchedulerOptions``.
        schedulers: to choose from.

    Raises:
        SettingsError: an unknown policy, or no level.
        CruxError: records or a topology that contradict themselves.
    """
    scheduler = scheduler_named(policy, schedulers)
    if not levels:
        raise SettingsError("no priority level is left to plan with")
    cluster = plan_inputs(records, topology)
    if not cluster.jobs:
        return ()
    options = SchedulerOptions(tuple(levels), seed, max_slowdown=max_slowdown)
    decision = scheduler(cluster, options)
    level = _usable_levels(decision, levels)
    chooses_paths = policy in PATH_POLICIES
    # Paths inside a host are nobody's to choose.
    listed = {r.job: len(r.profile.flows) for r in records if r.profile is not None}
    return tuple(
        PlanEntry(
            job=job.name,
            level=level[job.name],
            priority=_finite(decision.priority.get(job.name, 0.0)),
            intensity=_finite(decision.intensity.get(job.name, 0.0)),
            correction=_finite(decision.correction.get(job.name, 1.0)),
            path=_chosen(decision, job.name, listed[job.name]) if chooses_paths else (),
        )
        for job in sorted(cluster.jobs, key=lambda j: j.name)
    )


def _inside_flows(profile: JobProfile, inside: KnowsGpus | None) -> list[Flow]:
    """The flows within hosts, each on the one path that it can take."""
    found = []
    for flow in profile.inside if inside is not None else ():
        ends = (flow.src, flow.dst)
        if inside is None or any(end not in inside.nodes for end in ends):
            continue
        host = inside.host_of(flow.src)
        if host is not None and host == inside.host_of(flow.dst):
            found.append(Flow(flow.bytes, inside.candidate_paths(*ends)[:1]))
    return found


def _chosen(decision: Decision, job: str, flows: int) -> tuple[int, ...]:
    return tuple(map(int, decision.path.get(job, ())))[:flows]


def scheduler_named(
    policy: str, schedulers: Mapping[str, Scheduler] = LIVE
) -> Callable[[Cluster, SchedulerOptions], Decision]:
    """The scheduler called ``policy``.

    Raises:
        SettingsError: there is none, or only the simulator can carry it out; it names those that
            there are.
    """
    if policy not in schedulers:
        known = "only the simulator can carry it out, " if policy in SCHEDULERS else ""
        raise SettingsError(
            f"policy {policy!r}: {known}expected one of {', '.join(sorted(schedulers))}"
        )
    return schedulers[policy]


class Planner:
    """:func:`compute_entries` as a leader calls it: with the topology's bytes from the store.

    A topology that can't be read counts as unknown, with one warning; since all leaders read the
    same bytes, they still plan alike.

    Args:
        policy: the scheduler.
        levels: that may be assigned, ascending.
        seed: of what the scheduler draws.
        max_slowdown: what crux-fair is to guarantee, see ``SchedulerOptions``.
        parse: from the topology's text to a topology.

    Raises:
        SettingsError: an unknown policy, or no level.
    """

    def __init__(
        self,
        policy: str,
        levels: Sequence[int],
        *,
        seed: int = 0,
        max_slowdown: float | None = None,
        parse: Callable[[str], Topology] = parse_yaml,
    ) -> None:
        scheduler_named(policy)
        if not levels:
            raise SettingsError("no priority level is left to plan with")
        self._policy, self._levels, self._seed = policy, tuple(levels), seed
        self._max_slowdown = max_slowdown
        self._parse = parse
        self._parsed: tuple[bytes | None, Topology | None] = (None, None)
        self._warn = WarnOnce(_log)

    def __call__(
        self, records: Sequence[JobRecord], topology: bytes | None
    ) -> tuple[PlanEntry, ...]:
        """The plan's entries; raises as :func:`compute_entries`."""
        return compute_entries(
            records,
            self.topology_of(topology),
            policy=self._policy,
            levels=self._levels,
            seed=self._seed,
            max_slowdown=self._max_slowdown,
        )

    def topology_of(self, topology: bytes | None) -> Topology | None:
        """The topology in these bytes; None without any, and where they can't be read."""
        if topology != self._parsed[0]:
            self._parsed = (topology, self._read(topology))
        return self._parsed[1]

    def _read(self, topology: bytes | None) -> Topology | None:
        if topology is None:
            return None
        try:
            return self._parse(topology.decode())
        except (ValueError, RecursionError) as error:
            self._warn("topology", f"planning without the cluster's topology: {error}")
            return None


def fingerprint(records: Sequence[JobRecord], topology: bytes | None) -> str:
    """Hash of all that a plan follows from and that is the same for all leaders.

    That is each profiled job's name, incarnation, devices and profile, and the topology's bytes.
    A leader's own settings (policy, levels) are not in it: leaders that differ in them would
    overwrite each other's plan for ever; so the first plan for a snapshot stands.
    """
    snapshot = [
        [r.job, r.incarnation, r.gpus, r.peak_flops, msgspec.to_builtins(r.profile)]
        for r in sorted(records, key=lambda r: (r.job, r.incarnation))
        if r.profile is not None
    ]
    canonical = msgspec.json.encode(snapshot, order="deterministic")
    digest = hashlib.sha256(canonical)
    digest.update(b"-" if topology is None else b"+" + topology)
    return digest.hexdigest()


class _HasEnds(Protocol):
    @property
    def src(self) -> str: ...
    @property
    def dst(self) -> str: ...


def _ends(flow: _HasEnds) -> tuple[str, str]:
    return flow.src, flow.dst


def _bursts(profile: JobProfile) -> tuple[Burst, ...]:
    """The profile's bursts in ascending order, their shares brought to a sum of 1."""
    total = math.fsum(b.share for b in profile.bursts)
    if total <= 0:
        return (Burst(1.0, 1.0),)
    ordered = sorted(profile.bursts, key=lambda b: (b.at, b.share))
    return tuple(Burst(b.at, b.share / total) for b in ordered)


def _scaled(job: Job, capacity_Bps: Mapping[str, float], t_s: float) -> Job:
    """``job`` with its bytes multiplied so that it needs ``t_s`` on its slowest link.

    With several candidates the time before paths are chosen counts. A job whose time is not known
    keeps its bytes.
    """
    alone_s = float(unrouted_transfer_times_s(arrays_of(Cluster(capacity_Bps, (job,))))[0])
    if t_s <= 0 or alone_s <= 0:
        return job
    factor = t_s / alone_s
    return replace(job, flows=tuple(replace(f, bytes=f.bytes * factor) for f in job.flows))


def _usable_levels(decision: Decision, levels: Sequence[int]) -> dict[str, int]:
    """The decision's levels; those of a scheduler that heeds none are squeezed into ``levels``.

    Then the highest get a level each, and all that remain share the lowest: never inverted.
    """
    ascending = sorted(levels)
    if set(decision.level.values()) <= set(ascending):
        return dict(decision.level)
    ranks = sorted(set(decision.level.values()), reverse=True)
    onto = {rank: ascending[max(0, len(ascending) - 1 - i)] for i, rank in enumerate(ranks)}
    return {job: onto[rank] for job, rank in decision.level.items()}


def _finite(value: float) -> float:
    if math.isnan(value):
        return 0.0
    return max(-MAX_FINITE, min(MAX_FINITE, float(value)))
