"""What the scheduler sees of the job records: bounded claims, and the links that jobs share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from crux_torch.control.records import JobRecord
from crux_torch.fabric.topology import Topology
from crux_torch.measure.job_profile import JobProfile
from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.intensity import unrouted_transfer_times_s
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, Path

#: The link that all flows share whose place in the network is not known.
UNLOCATED = "unlocated"
#: Its capacity (100 Gb/s). It counts only for a job whose t_j was not measured either.
UNLOCATED_BPS = 12.5e9
#: More than any device does, in FLOP/s: bounds a job that does not say what its devices can do.
MAX_DEVICE_FLOPS = 1e17
#: More devices than any host has, ranks on a CPU included: bounds a job on hosts that nobody knows.
MAX_HOST_DEVICES = 256


def plan_inputs(records: Sequence[JobRecord], topology: Topology | None) -> Cluster:
    """The profiled jobs, and the capacities of the links that they share.

    - A flow between hosts that the topology knows gets that topology's candidates.
    - All other flows between hosts cross one link, ``unlocated``. So jobs whose place is unknown
      are ordered against each other and against nobody else. Without a topology these are all
      flows: the link stands for one core that everyone shares.
    - A flow between a GPU and a NIC of one host takes the first path between the two if the
      topology describes the host's inside, and counts for nothing otherwise.
    - If t_j was measured, or if a path is not known, the profile's t_j stands: the flows' bytes
      are scaled in one proportion until the links give that time.
    - W_j and the number of devices are bounded by :func:`claimed_flops` and
      :func:`claimed_devices`, so that no tenant raises its own priority.

    ``records`` are live, in any order, no two of one name.
    """
    known = frozenset(topology.hosts if topology is not None else ())
    capacity_Bps = dict(topology.capacity_Bps) if topology is not None else {}
    capacity_Bps[UNLOCATED] = UNLOCATED_BPS

    def between(src: str, dst: str) -> tuple[Path, ...]:
        if src == dst:
            return ((),)
        if topology is None or not known.issuperset((src, dst)):
            return ((UNLOCATED,),)
        return topology.candidate_paths(src, dst)

    jobs = []
    for record in sorted(records, key=lambda r: r.job):
        profile = record.profile
        if profile is None:
            continue
        job = Job(
            name=record.job,
            gpus=claimed_devices(record, topology),
            flops=claimed_flops(record, profile, topology),
            compute_s=profile.compute_s,
            flows=(
                *(Flow(f.bytes, between(f.src, f.dst)) for f in profile.flows),
                *_inside_flows(profile, topology),
            ),
            bursts=_bursts(profile),
        )
        placed = all(known.issuperset((f.src, f.dst)) for f in profile.flows)
        if profile.t_source == "measured" or topology is None or not placed:
            job = _scaled(job, capacity_Bps, profile.t_s)
        jobs.append(job)
    return Cluster(capacity_Bps, tuple(jobs))


def claimed_devices(record: JobRecord, topology: Topology | None = None) -> int:
    """The devices of a job, at most those of the hosts that it names.

    A host whose GPUs the topology does not describe has at most ``MAX_HOST_DEVICES``.
    """
    hosts = frozenset(record.hosts)
    described = hosts.intersection(topology.hosts) if topology is not None else frozenset()
    bound = (len(hosts) - len(described)) * MAX_HOST_DEVICES
    if topology is not None:
        bound += sum(len(topology.gpus(host)) or MAX_HOST_DEVICES for host in described)
    return min(record.gpus, bound)


def claimed_flops(
    record: JobRecord, profile: JobProfile, topology: Topology | None = None
) -> float:
    """W_j in FLOPs, at most what the job's devices could do in one period.

    The bound is what the job says of its devices, but for each of its :func:`claimed_devices` no
    more than the topology's ``device_flops``, or ``MAX_DEVICE_FLOPS`` if it gives none.
    """
    device = (topology.device_flops if topology is not None else 0.0) or MAX_DEVICE_FLOPS
    peak = claimed_devices(record, topology) * device
    if record.peak_flops > 0:
        peak = min(peak, record.peak_flops)
    return min(profile.flops, peak * profile.period_s)


def _inside_flows(profile: JobProfile, topology: Topology | None) -> list[Flow]:
    """The flows within hosts, each on the one path that it can take."""
    if topology is None:
        return []
    return [
        Flow(flow.bytes, topology.candidate_paths(flow.src, flow.dst)[:1])
        for flow in profile.inside
        if topology.nodes.keys() >= {flow.src, flow.dst}
        and topology.host_of(flow.src) is not None
        and topology.host_of(flow.src) == topology.host_of(flow.dst)
    ]


def _bursts(profile: JobProfile) -> tuple[Burst, ...]:
    """The profile's bursts in ascending order, with shares that sum to 1."""
    total = math.fsum(b.share for b in profile.bursts)
    if total <= 0:
        return (Burst(1.0, 1.0),)
    ordered = sorted(profile.bursts, key=lambda b: (b.at, b.share))
    return tuple(Burst(b.at, b.share / total) for b in ordered)


def _scaled(job: Job, capacity_Bps: Mapping[str, float], t_s: float) -> Job:
    """``job`` with its bytes scaled to need ``t_s``, if known, before paths are chosen."""
    alone_s = float(unrouted_transfer_times_s(arrays_of(Cluster(capacity_Bps, (job,))))[0])
    if t_s <= 0 or alone_s <= 0:
        return job
    factor = t_s / alone_s
    return replace(job, flows=tuple(replace(f, bytes=f.bytes * factor) for f in job.flows))
