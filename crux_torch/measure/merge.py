"""One job's profile from the samples of its ranks."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

import msgspec
import numpy as np

from crux_torch.fabric.topology import Topology
from crux_torch.measure import timeline
from crux_torch.measure.job_profile import MAX_FLOWS, HostFlow, JobProfile
from crux_torch.measure.sample import RankSample
from crux_torch.measure.traffic import PER_RANK_OPS, HostPair, add_flows, flows
from crux_torch.measure.work import work
from crux_torch.schedule.model import Flow, Job
from crux_torch.schedule.placing import alone

log = logging.getLogger(__name__)

#: Measured over computed t outside these bounds is worth a warning.
T_RATIO_BOUNDS = (0.5, 2.0)


def merge(
    samples: Sequence[RankSample],
    *,
    topology: Topology | None = None,
    device_flops: float = 0.0,
    measured_alone: bool = True,
    quiet: bool = False,
) -> JobProfile:
    """The profile of a job from its ranks' samples.

    Ranks may be missing: W and the devices are scaled to the world size, and a warning says how
    many reported. The bytes of each collective come from the lowest rank of its group that did. A
    collective of a rank whose host is unknown is left out, with a warning.

    Args:
        samples: one of each rank, in any order; the lowest rank's timeline is the job's.
        topology: gives t = max_e M_e / B_e; without it t is the measured transfer time.
        device_flops: FLOP/s of the device of a rank that does not tell its own; 0 if unknown.
        measured_alone: whether the job held the profiling class throughout.
        quiet: whether no other job of the cluster was there.

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
    period_s = statistics.median(s.period_s for s in present)
    t_measured_s, line = transfers_without_waiting(present)
    exposed_s = min(s.exposed_s for s in present)
    if line is not None:
        exposed_s = min(exposed_s, line.exposed_s)
    compute_s = max(0.0, period_s - exposed_s)
    done = work(present, period_s=period_s, compute_s=compute_s, device_flops=device_flops)
    matrix = traffic_matrix(present)
    t_s, shared = t_measured_s, {}
    if topology is not None:
        shared = inside_flows(matrix, present, topology, whole_hosts=False)
        within = inside_flows(matrix, present, topology, whole_hosts=True)
        t_s = transfer_alone_s(matrix | within, topology)
        low, high = T_RATIO_BOUNDS
        if not (measured_alone or quiet):
            high = inf  # others may have been in the way
        if t_s > 0 and t_measured_s > 0 and not low <= t_measured_s / t_s <= high:
            ratio = t_measured_s / t_s
            log.warning("transfers took %.2f times what the topology says; is it right?", ratio)
    return JobProfile(
        period_s=period_s,
        period_source=Counter(s.period_source for s in present).most_common(1)[0][0],
        compute_s=compute_s,
        **done._asdict(),
        uncounted_ops=tuple(sorted({op for s in present for op in s.uncounted_ops}))[:64],
        gpus=world,
        flows=_largest(matrix),
        inside=_largest(shared),
        bursts=present[0].bursts if line is None else line.bursts,
        t_s=t_s,
        t_source="measured" if topology is None else "topology",
        t_measured_s=t_measured_s,
        overlap=min(1.0, max(0.0, 1.0 - exposed_s / t_measured_s)) if t_measured_s > 0 else 0.0,
        exposed_s=exposed_s,
        iterations=min(s.iterations for s in present),
        measured_alone=measured_alone or quiet,
        t_note=msgspec.UNSET if measured_alone else _t_note(topology is not None, quiet),
    )


def _t_note(from_capacities: bool, quiet: bool) -> str:
    """Returns a note about a transfer time that was measured without the top class."""
    found = "measured without a class above the other jobs'"
    beside = "no other job ran" if quiet else "others may have run"
    if from_capacities:
        checked = "and checked" if quiet else "unchecked"
        return f"{found}: t is from the links' capacities, {checked}, as {beside}"
    return f"{found}: {beside}{'' if quiet else ', so that t may be too long'}"


def traffic_matrix(present: Sequence[RankSample]) -> dict[HostPair, float]:
    """Bytes of one iteration from host to host, every collective counted once.

    Every rank of a group lists its collectives; those of the lowest group rank count. All-to-alls
    and sends count from every rank's own row, which tells what that rank sends.
    """
    placement = {sample.rank: sample.host for sample in present}
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
            ends = {"peer": row.peer, "my_rank": group.my_rank}
            try:
                part = flows(row.op, row.bytes, group.ranks, placement, **ends)
            except (KeyError, ValueError):
                unplaced += 1
            else:
                add_flows(total, part, 1.0 / sample.iterations)
    if unplaced:
        log.warning("%d kinds of collectives have no known flows and are left out", unplaced)
    return total


def transfer_alone_s(matrix: Mapping[HostPair, float], topology: Topology) -> float:
    """t_j (§3.2) in seconds on ``topology``, with the job alone and on the paths chosen for it."""
    moving = tuple(
        Flow(moved, paths)
        for (src, dst), moved in sorted(matrix.items())
        if (paths := topology.candidate_paths(src, dst))
    )
    job = Job("", gpus=1, flops=0.0, compute_s=0.0, flows=moving)
    return alone(job, topology.capacity_Bps).t_s


def inside_flows(
    matrix: Mapping[HostPair, float],
    samples: Sequence[RankSample],
    topology: Topology,
    *,
    whole_hosts: bool,
) -> dict[HostPair, float]:
    """Bytes of one iteration between GPUs and NICs of the same host.

    NCCL lets every GPU of a job carry an equal share of what the job's collectives send to and get
    from other hosts, each by a nearest NIC; GPUs that have the same nearest NICs share them evenly.
    Where it is not known which GPU a rank of the host has, nothing is told of that host.

    Args:
        matrix: bytes from host to host.
        samples, topology: a host whose inside the topology does not describe has no flows.
        whole_hosts: also those whose GPUs all belong to the job; nobody else is met there.
    """
    found: dict[HostPair, float] = {}
    for host in dict.fromkeys(sample.host for sample in samples):
        ranks = [sample for sample in samples if sample.host == host]
        gpus = topology.gpus(host)
        held = [_gpu(sample, gpus) for sample in ranks]
        own = sorted({gpu for gpu in held if gpu is not None})
        if None in held or len(own) < len(ranks) or (len(own) == len(gpus) and not whole_hosts):
            continue
        out = sum(moved for (src, dst), moved in matrix.items() if src == host != dst)
        into = sum(moved for (src, dst), moved in matrix.items() if dst == host != src)
        for gpu, nic in _nics(own, topology):
            for pair, moved in (((gpu, nic), out), ((nic, gpu), into)):
                if moved > 0:
                    found[pair] = moved / len(own)
    return found


def _gpu(sample: RankSample, gpus: Sequence[str]) -> str | None:
    number = sample.device.gpu if sample.device is not None else None
    return gpus[number] if number is not None and number < len(gpus) else None


def _nics(gpus: Sequence[str], topology: Topology) -> list[tuple[str, str]]:
    taken: dict[tuple[str, ...], int] = {}
    pairs = []
    for gpu in gpus:
        nearest = topology.nearest_nics(gpu)
        if nearest:
            turn = taken.get(nearest, 0)
            taken[nearest] = turn + 1
            pairs.append((gpu, nearest[turn % len(nearest)]))
    return pairs


def transfers_without_waiting(
    present: Sequence[RankSample],
) -> tuple[float, timeline.Timeline | None]:
    """How the job communicates once waiting for stragglers is taken away.

    The shortest duration of a collective over the ranks is its transfer (docs/recorder.md). On the
    timeline of the first sample, the leader's, it begins that much before its end.

    Returns:
        The seconds of transfer in the median iteration, and the timeline of the transfers; None for
        it if the leader's sample lists no transfers.
    """
    leader = present[0]
    rows = leader.transfers
    if not rows.begin or len(rows.bounds) < 2:
        return leader.comm_s, None
    shortest: dict[tuple[str, int], int] = {}
    witnesses: Counter[tuple[str, int]] = Counter()
    for sample in present:
        column = sample.transfers
        for group, sequence, begin, end in zip(
            column.group, column.sequence, column.begin, column.end, strict=True
        ):
            # A rank that lost the duration tells a length of 0, which says nothing of the transfer.
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
    # A collective that queued behind another waits for the other's transfer too.
    ready_ns = np.array(rows.ready, dtype=np.int64)
    ready_ns = np.where(ready_ns < seen_ns, ready_ns, begin_ns)
    reached = timeline.Reaches(ready_ns[order], np.array(rows.synchronous, dtype=bool)[order])
    line = timeline.describe(begin_ns[order], end_ns[order], size, bounds, reached)
    if line is None:
        return leader.comm_s, None
    if len(present) > 1 and not shared:
        log.warning("no collective was seen by two ranks: t includes waiting for stragglers")
    return line.comm_median_s, line


def _largest(matrix: Mapping[HostPair, float]) -> tuple[HostFlow, ...]:
    if len(matrix) > MAX_FLOWS:
        log.warning("a job of %d flows: only the %d largest are told", len(matrix), MAX_FLOWS)
    ranked = sorted(matrix.items(), key=lambda item: (-item[1], item[0]))[:MAX_FLOWS]
    return tuple(HostFlow(src, dst, moved) for (src, dst), moved in sorted(ranked))
