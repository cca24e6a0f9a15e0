"""What the scheduler sees of the job records: bounded claims, and the links that jobs share."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from crux_torch.control.contested_hosts import holdings, host_devices
from crux_torch.control.records import JobRecord
from crux_torch.fabric.topology import CANDIDATE_LIMIT, Topology
from crux_torch.measure.job_profile import HostFlow, JobProfile
from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.intensity import unrouted_transfer_times_s
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, Path

#: The link that all flows share whose place in the network is not known.
UNLOCATED = "unlocated"
#: Its capacity (100 Gb/s). It counts only for a job whose t_j was not measured either.
UNLOCATED_BPS = 12.5e9
#: More than any device does, in FLOP/s: bounds a job that does not say what its devices can do.
MAX_DEVICE_FLOPS = 1e17
#: Longer than any iteration: bounds the FLOPs of one that a job may claim.
MAX_PERIOD_S = 3600.0
#: More than a host's NICs do together, and less than one exchange between hosts needs: they bound
#: t_j from below.
MAX_HOST_BPS = 1e12
MIN_TRANSFER_S = 1e-6
#: What a flow moves at least, if it moves anything: keeps what is computed of claims finite.
MIN_FLOW_BYTES = 1.0
#: A claim that is cut by less than this share is not worth a word.
SLACK = 0.99
#: Flows of all jobs together that are planned one by one, those of the smallest jobs first.
MAX_PLANNED_FLOWS = 1 << 15
#: Candidates of all flows together; the more flows, the fewer each has.
MAX_CANDIDATES = 1 << 20


def plan_inputs(
    records: Sequence[JobRecord],
    topology: Topology | None,
    limit: int = CANDIDATE_LIMIT,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> Cluster:
    """The profiled jobs, and the capacities of the links that they share.

    - A flow between hosts that the topology knows gets that topology's candidates.
    - All other flows between hosts cross one link, ``unlocated``. So jobs whose place is unknown
      are ordered against each other and against nobody else. Without a topology these are all
      flows: the link stands for one core that everyone shares.
    - A flow between a GPU and a NIC of one host takes the first path between the two if the
      topology describes the host's inside, and counts for nothing otherwise.
    - If t_j was measured, or if a path is not known, the profile's t_j stands: the flows' bytes
      are scaled in one proportion until the links give that time.
    - W_j, t_j and the number of devices are bounded by :func:`claimed_flops`,
      :func:`least_transfer_s` and :func:`claimed_devices`, so that no tenant raises its own
      priority. Of hosts that records claim beyond their devices, what
      :func:`~crux_torch.control.contested_hosts.holdings` gives to each counts.
    - Flows beyond ``MAX_PLANNED_FLOWS`` count as one over ``unlocated`` for each job.

    Args:
        records: live, in any order, no two of one name.
        limit: of the candidates of a pair, see :func:`candidate_limit`.
        weights: of jobs other than 1: W_j, as bounded, is multiplied by it.
    """
    known = frozenset(topology.hosts if topology is not None else ())
    capacity_Bps = dict(topology.capacity_Bps) if topology is not None else {}
    capacity_Bps[UNLOCATED] = UNLOCATED_BPS

    def between(src: str, dst: str) -> tuple[Path, ...]:
        if src == dst:
            return ((),)
        if topology is None or not known.issuperset((src, dst)):
            return ((UNLOCATED,),)
        return topology.candidate_paths(src, dst, limit)

    planned = _planned(records)
    held = holdings(records, topology).devices
    jobs = []
    for record in sorted(records, key=lambda r: r.job):
        profile = record.profile
        if profile is None:
            continue
        flows: tuple[Flow, ...] = (
            *(Flow(_moved(f), between(f.src, f.dst)) for f in profile.flows),
            *_inside_flows(profile, topology),
        )
        if record.job not in planned:
            flows = (Flow(math.fsum(map(_moved, profile.flows)), ((UNLOCATED,),)),)
        job = Job(
            name=record.job,
            gpus=claimed_devices(record, topology, held.get(record.job)),
            flops=claimed_flops(record, profile, topology, held.get(record.job))
            * weights.get(record.job, 1.0),
            compute_s=profile.compute_s,
            flows=flows,
            bursts=_bursts(profile),
            period_s=min(profile.period_s, MAX_PERIOD_S),
        )
        placed = record.job in planned and all(
            known.issuperset((f.src, f.dst)) for f in profile.flows
        )
        measured = profile.t_source == "measured" or topology is None or not placed
        told_s = profile.t_s if measured else 0.0
        jobs.append(_scaled(job, capacity_Bps, told_s, least_transfer_s(profile)))
    return Cluster(capacity_Bps, tuple(jobs))


def candidate_limit(records: Sequence[JobRecord]) -> int:
    """Candidates of one flow: a power of two, so that a job more or less changes little.

    All flows together have ``MAX_CANDIDATES`` at most, and each has at least 32.
    """
    planned = _planned(records)
    flows = sum(len(r.profile.flows) for r in records if r.profile and r.job in planned)
    return min(CANDIDATE_LIMIT, 1 << (MAX_CANDIDATES // max(flows, 1)).bit_length() - 1)


def _planned(records: Sequence[JobRecord]) -> frozenset[str]:
    """The jobs whose flows are planned one by one: the smallest ones, within the limit."""
    sizes = sorted(
        (len(r.profile.flows) + len(r.profile.inside), r.job) for r in records if r.profile
    )
    total = itertools.accumulate(size for size, _ in sizes)
    within = zip(sizes, total, strict=True)
    return frozenset(job for (_, job), so_far in within if so_far <= MAX_PLANNED_FLOWS)


def least_transfer_s(profile: JobProfile) -> float:
    """The time below which the flows between hosts can't end; 0 without any."""
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for flow in profile.flows:
        if flow.src != flow.dst and flow.bytes > 0:
            sent[flow.src] += flow.bytes  # type: ignore[assignment]
            received[flow.dst] += flow.bytes  # type: ignore[assignment]
    most = max([*sent.values(), *received.values()], default=0)
    return max(most / MAX_HOST_BPS, MIN_TRANSFER_S) if most else 0.0


def overclaims(record: JobRecord, topology: Topology | None = None, held: int | None = None) -> str:
    """What of a job's claims counts for less than it says; empty if nothing does.

    ``held`` is as in :func:`claimed_devices`.
    """
    profile = record.profile
    if profile is None:
        return ""
    found = []
    if (devices := claimed_devices(record, topology, held)) < record.gpus:
        found.append(f"{record.gpus} devices as {devices}")
    if (flops := claimed_flops(record, profile, topology, held)) < profile.flops * SLACK:
        found.append(f"{profile.flops:.3g} FLOPs in an iteration as {flops:.3g}")
    if 0 < profile.t_s < (least_s := least_transfer_s(profile)) * SLACK:
        found.append(f"a transfer time of {profile.t_s:.3g} s as {least_s:.3g} s")
    return ", ".join(found)


def claimed_devices(
    record: JobRecord, topology: Topology | None = None, held: int | None = None
) -> int:
    """The devices of a job, at most those of the hosts that it names.

    Args:
        held: those that count, if other records claim its hosts too. One counts in any case.
    """
    if held is not None:
        return max(1, held)
    return min(record.gpus, sum(host_devices(host, topology) for host in frozenset(record.hosts)))


def claimed_flops(
    record: JobRecord,
    profile: JobProfile,
    topology: Topology | None = None,
    held: int | None = None,
) -> float:
    """W_j in FLOPs, at most what the job's devices could do in one period.

    The bound is what the job says of its devices, but for each of its :func:`claimed_devices` no
    more than the topology's ``device_flops``, or ``MAX_DEVICE_FLOPS`` if it gives none. If fewer
    are ``held``, W_j falls in the same proportion.
    """
    device = (topology.device_flops if topology is not None else 0.0) or MAX_DEVICE_FLOPS
    claimed = claimed_devices(record, topology)
    peak = claimed * device
    if record.peak_flops > 0:
        peak = min(peak, record.peak_flops)
    flops = min(profile.flops, peak * min(profile.period_s, MAX_PERIOD_S))
    return flops if held is None else flops * (max(1, held) / claimed)


def _inside_flows(profile: JobProfile, topology: Topology | None) -> list[Flow]:
    """The flows within hosts, each on the one path that it can take."""
    if topology is None:
        return []
    return [
        Flow(_moved(flow), topology.candidate_paths(flow.src, flow.dst)[:1])
        for flow in profile.inside
        if topology.nodes.keys() >= {flow.src, flow.dst}
        and topology.host_of(flow.src) is not None
        and topology.host_of(flow.src) == topology.host_of(flow.dst)
    ]


def _moved(flow: HostFlow) -> float:
    return max(flow.bytes, MIN_FLOW_BYTES) if flow.bytes > 0 else 0.0


def _bursts(profile: JobProfile) -> tuple[Burst, ...]:
    """The profile's bursts in ascending order, with shares that sum to 1."""
    total = math.fsum(b.share for b in profile.bursts)
    if total <= 0:
        return (Burst(1.0, 1.0),)
    ordered = sorted(profile.bursts, key=lambda b: (b.at, b.share))
    return tuple(Burst(b.at, b.share / total) for b in ordered)


def _scaled(job: Job, capacity_Bps: Mapping[str, float], t_s: float, least_s: float) -> Job:
    """``job`` with its bytes scaled to need ``t_s``, if known, before paths are chosen.

    They need ``least_s`` at least.
    """
    # Of the whole cluster's links it would take as long for each job as for all of them.
    sets = {id(flow.candidates): flow.candidates for flow in job.flows}.values()
    links = dict.fromkeys(link for paths in sets for path in paths for link in path)
    own = Cluster({link: capacity_Bps[link] for link in links}, (job,))
    alone_s = float(unrouted_transfer_times_s(arrays_of(own, remember=False))[0])
    if alone_s <= 0:
        return job
    t_s = max(t_s or alone_s, least_s)
    if t_s == alone_s:
        return job
    factor = t_s / alone_s
    return replace(job, flows=tuple(replace(f, bytes=f.bytes * factor) for f in job.flows))
