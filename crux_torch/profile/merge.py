"""One job's profile from the samples of its ranks."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from crux_torch.profile import timeline
from crux_torch.profile.inside import DescribedHosts, inside_flows
from crux_torch.profile.job_profile import MAX_FLOWS, HostFlow, JobProfile
from crux_torch.profile.network import disagreements
from crux_torch.profile.network import total as network_total
from crux_torch.profile.sample import RankSample, TrafficRow
from crux_torch.profile.traffic import PER_RANK_OPS, Algorithm, HostPair, add_flows, flows
from crux_torch.profile.work import work

log = logging.getLogger(__name__)

#: Measured over computed t outside these bounds is worth a warning.
T_RATIO_BOUNDS = (0.5, 2.0)


class Topology(Protocol):
    """What t needs of a network."""

    @property
    def capacity_Bps(self) -> Mapping[str, float]:
        """Bytes per second of every link."""

    def candidate_paths(self, src_host: str, dst_host: str) -> tuple[tuple[str, ...], ...]:
        """The alternative paths between two hosts, each the links it crosses."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """How the job communicates once waiting for stragglers is taken away.

    Attributes:
        t_s: seconds of transfer in an iteration, the median iteration's.
        line: the timeline of the transfers; None where the leader's sample lists none.
        shared: share of the leader's collectives that another rank has seen as well.
    """

    t_s: float
    line: timeline.Timeline | None
    shared: float


def merge(
    samples: Sequence[RankSample],
    *,
    hosts: Mapping[int, str] | None = None,
    topology: Topology | None = None,
    algorithms: Mapping[str, Algorithm] | None = None,
    device_flops: float = 0.0,
    measured_alone: bool = True,
) -> JobProfile:
    """The profile of a job from its ranks' samples.

    Ranks may be missing: W and the devices are scaled to the world size, and each collective's
    bytes are taken from the lowest rank of its group that reported; one warning says how many.

    Args:
        samples: one of each rank, in any order; the lowest rank's timeline is the job's.
        hosts: host of global ranks that sent no sample, where it is known.
        topology: makes t = max_e M_e / B_e; without it t is the measured transfer time.
        algorithms: by operation, where they differ from ``traffic.DEFAULT_ALGORITHM``.
        device_flops: FLOP/s of one device, for W from time where a rank does not tell its own; 0
            where it is not known.
        measured_alone: whether the job held the profiling class throughout.

    Raises:
        ValueError: no samples, or samples of different jobs.
    """
    by_rank = {sample.rank: sample for sample in samples}
    if not by_rank or len({sample.world_size for sample in samples}) > 1:
        raise ValueError("a profile needs samples of one job, all of the same world size")
    present = [by_rank[rank] for rank in sorted(by_rank)]
    world = present[0].world_size
    if len(present) < world:
        log.warning("profile from %d of %d ranks, scaled to all", len(present), world)
    lost = sum(sample.lost for sample in present)
    if lost:
        log.warning("%d records were dropped while measuring: bytes may be too few", lost)
    scale = world / len(present)
    placement = {**(hosts or {}), **{s.rank: s.host for s in present}}
    period_s = statistics.median(s.period_s for s in present)
    transfer = transfer_time(present)
    exposed_s = min([s.exposed_s for s in present] + _exposed(transfer))
    compute_s = max(0.0, period_s - exposed_s)
    gpus = max(1, round(scale * sum(s.devices for s in present)))
    done = work(present, period_s=period_s, compute_s=compute_s, device_flops=device_flops)
    matrix = traffic_matrix(present, placement, algorithms or {})
    described = topology if isinstance(topology, DescribedHosts) else None
    t_s = transfer.t_s
    if topology is not None:
        within = described and inside_flows(matrix, present, described, whole_hosts=True)
        t_s = slowest_link_s(matrix | (within or {}), topology)
    shared = described and inside_flows(matrix, present, described, whole_hosts=False)
    line = transfer.line
    network = network_total(present)
    profile = JobProfile(
        period_s=period_s,
        period_source=Counter(s.period_source for s in present).most_common(1)[0][0],
        compute_s=compute_s,
        flops=done.flops,
        flops_source=done.source,
        flops_by_time=done.by_time,
        device_flops=done.device_flops,
        device_busy=done.busy,
        tensor_busy=done.tensor,
        uncounted_ops=tuple(sorted({op for s in present for op in s.uncounted_ops}))[:64],
        gpus=gpus,
        flows=_largest(matrix),
        inside=_largest(shared or {}),
        bursts=present[0].bursts if line is None else line.bursts,
        t_s=t_s,
        t_source="measured" if topology is None else "topology",
        t_measured_s=transfer.t_s,
        network_bytes=None if network is None else network.sent_bytes,
        network_s=None if network is None else network.sending_s,
        overlap=min(1.0, max(0.0, 1.0 - exposed_s / transfer.t_s)) if transfer.t_s > 0 else 0.0,
        exposed_s=exposed_s,
        iterations=min(s.iterations for s in present),
        measured_alone=measured_alone,
    )
    _check(profile)
    if network is not None:
        computed_s = None if topology is None else t_s
        for said in disagreements(
            network, computed_bytes=sum(matrix.values()), computed_s=computed_s
        ):
            log.warning("%s", said)
    return profile


def t_ratio(profile: JobProfile) -> float | None:
    """Measured over computed t; None where t is itself the measured one, or either is zero."""
    if profile.t_source == "measured" or profile.t_s <= 0 or profile.t_measured_s <= 0:
        return None
    return profile.t_measured_s / profile.t_s


def _check(profile: JobProfile) -> None:
    ratio = t_ratio(profile)
    if ratio is not None and not T_RATIO_BOUNDS[0] <= ratio <= T_RATIO_BOUNDS[1]:
        log.warning("transfers took %.2f times what the topology says; is it right?", ratio)


def _exposed(transfer: Transfer) -> list[float]:
    return [] if transfer.line is None else [transfer.line.exposed_s]


def traffic_matrix(
    present: Sequence[RankSample],
    placement: Mapping[int, str],
    algorithms: Mapping[str, Algorithm],
) -> dict[HostPair, float]:
    """Bytes of one iteration from host to host, every collective counted once.

    A collective is in the sample of each rank of its group: the lowest group rank's counts. Of
    all-to-alls and sends every rank's own row counts, since it tells what that rank sends.
    """
    witness: dict[str, int] = {}
    for sample in present:
        for group in sample.groups:
            witness[group.name] = min(witness.get(group.name, group.my_rank), group.my_rank)
    total: dict[HostPair, float] = {}
    unplaced = 0
    for sample in present:
        for row in sample.traffic:
            group = sample.groups[row.group]
            if row.op not in PER_RANK_OPS and group.my_rank != witness[group.name]:
                continue
            try:
                part = _row_flows(row, sample, placement, algorithms)
            except (KeyError, ValueError):
                unplaced += 1
                continue
            add_flows(total, part, 1.0 / sample.iterations)
    if unplaced:
        log.warning("%d kinds of collectives have no known flows and are left out", unplaced)
    return total


def _row_flows(
    row: TrafficRow,
    sample: RankSample,
    placement: Mapping[int, str],
    algorithms: Mapping[str, Algorithm],
) -> dict[HostPair, float]:
    group = sample.groups[row.group]
    return flows(
        row.op,
        row.bytes,
        group.ranks,
        placement,
        peer=row.peer,
        my_rank=group.my_rank,
        algorithm=algorithms.get(row.op),
    )


def slowest_link_s(matrix: Mapping[HostPair, float], topology: Topology) -> float:
    """t = max_e M_e / B_e (§3.2), with the job alone on the network.

    Flows in descending order of bytes each take the candidate path that leaves the smallest
    maximum of M_e / B_e, so that a job is not charged for colliding with itself where it need not.
    """
    load: dict[str, float] = {}
    capacity = topology.capacity_Bps
    for (src, dst), moved in sorted(matrix.items(), key=lambda item: (-item[1], item[0])):
        paths = topology.candidate_paths(src, dst)
        if not paths:
            continue

        def busiest(path: tuple[str, ...], moved: float = moved) -> float:
            return max(((load.get(e, 0.0) + moved) / capacity[e] for e in path), default=0.0)

        for link in min(paths, key=busiest):
            load[link] = load.get(link, 0.0) + moved
    return max((moved / capacity[link] for link, moved in load.items()), default=0.0)


def transfer_time(present: Sequence[RankSample]) -> Transfer:
    """Transfer without waiting, on the timeline of the first sample, the leader's.

    A collective ends on all ranks together but lasts longest where it was called first: its
    shortest duration over the ranks is the transfer, the rest is waiting for stragglers. So each
    is taken to begin that much before its end. Sends count as the leader saw them; receives,
    which wait for their sender, don't count.
    """
    leader = present[0]
    rows = leader.transfers
    if not rows.begin or len(rows.bounds) < 2:
        return Transfer(leader.comm_s, None, 0.0)
    shortest: dict[tuple[str, int], int] = {}
    witnesses: Counter[tuple[str, int]] = Counter()
    for sample in present:
        column = sample.transfers
        for group, sequence, begin, end in zip(
            column.group, column.sequence, column.begin, column.end, strict=True
        ):
            # No length is an unknown time: a rank that can't tell takes nothing from the others.
            if group < 0 or end <= begin:
                continue
            key = (sample.groups[group].name, sequence)
            shortest[key] = min(shortest.get(key, end - begin), end - begin)
            witnesses[key] += 1
    end_ns = np.array(rows.end, dtype=np.int64)
    seen_ns = np.array(rows.begin, dtype=np.int64)
    begin_ns = seen_ns.copy()
    shared = 0
    for i, (group, sequence) in enumerate(zip(rows.group, rows.sequence, strict=True)):
        if group >= 0:
            key = (leader.groups[group].name, sequence)
            begin_ns[i] = max(begin_ns[i], end_ns[i] - shortest.get(key, 0))
            shared += witnesses[key] > 1
    order = np.argsort(begin_ns, kind="stable")
    size = np.array(rows.bytes, dtype=np.int64)[order]
    bounds = np.array(rows.bounds, dtype=np.int64)
    # Whoever had to wait for another collective first waits for that one's transfer too.
    ready_ns = np.array(rows.ready, dtype=np.int64)
    ready_ns = np.where(ready_ns < seen_ns, ready_ns, begin_ns)
    reached = timeline.Reaches(ready_ns[order], np.array(rows.synchronous, dtype=bool)[order])
    line = timeline.describe(begin_ns[order], end_ns[order], size, bounds, reached)
    if line is None:
        return Transfer(leader.comm_s, None, 0.0)
    if len(present) > 1 and not shared:
        log.warning("no collective was seen by two ranks: t includes waiting for stragglers")
    return Transfer(line.comm_median_s, line, shared / len(rows.begin))


def _largest(matrix: Mapping[HostPair, float]) -> tuple[HostFlow, ...]:
    if len(matrix) > MAX_FLOWS:
        log.warning("a job of %d flows: only the %d largest are told", len(matrix), MAX_FLOWS)
    ranked = sorted(matrix.items(), key=lambda item: (-item[1], item[0]))[:MAX_FLOWS]
    return tuple(HostFlow(src, dst, moved) for (src, dst), moved in sorted(ranked))
