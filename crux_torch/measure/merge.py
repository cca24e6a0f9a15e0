"""One job's profile from the samples of its ranks: its traffic, its timeline, and its work."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Literal

import msgspec
import numpy as np

from crux_torch.measure import timeline
from crux_torch.measure.profile import MAX_FLOWS, MAX_PARTS, HostFlow, JobProfile, ProfileBurst
from crux_torch.measure.sample import RankSample
from crux_torch.measure.traffic import (
    PER_RANK_OPS,
    HostPair,
    Mover,
    add_flows,
    flows,
    parts_at_hosts,
    parts_of,
)
from crux_torch.measure.work import work
from crux_torch.network.topology import Topology

log = logging.getLogger(__name__)


#: Seconds that bytes from host to host take on their slowest link in a network of its own (§3.2).
LinkTime = Callable[[Mapping[HostPair, float], Topology], float]


#: Measured over computed t outside these bounds is worth a warning.
T_RATIO_BOUNDS = (0.5, 2.0)


def merge(
    samples: Sequence[RankSample],
    *,
    topology: Topology | None = None,
    link_time_s: LinkTime | None = None,
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
        link_time_s: with a topology it gives t; otherwise t is the measured transfer time.
        device_flops: FLOP/s of the device of a rank whose sample lacks it; 0 if unknown.
        measured_alone: True if the job held the profiling class throughout.
        quiet: True if no other job of the cluster was there.

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
    bursts = present[0].bursts if line is None else line.bursts
    if not (measured_alone or quiet):
        # Other jobs may have made them longer.
        bursts = tuple(ProfileBurst(burst.at, burst.share) for burst in bursts)
    exposed_s = min(s.exposed_s for s in present)
    if line is not None:
        exposed_s = min(exposed_s, line.exposed_s)
    compute_s = max(0.0, period_s - exposed_s)
    done = work(present, period_s=period_s, compute_s=compute_s, device_flops=device_flops)
    moved = traffic_by_mover(present)
    matrix: dict[HostPair, float] = {}
    for of_one in moved.values():
        add_flows(matrix, of_one)
    part = parts_of(moved, MAX_PARTS)
    t_s, shared, part_inside = t_measured_s, {}, {}
    if topology is not None:
        shared = inside_flows(matrix, present, topology, whole_hosts=False)
        at = parts_at_hosts(matrix, part)
        part_inside = {pair: at[topology.host_of(pair[0]) or ""] for pair in shared}
    t_source: Literal["topology", "measured"] = "measured"
    if topology is not None and link_time_s is not None:
        t_source = "topology"
        within = inside_flows(matrix, present, topology, whole_hosts=True)
        t_s = link_time_s(matrix | within, topology)
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
        flows=_largest(matrix, part),
        inside=_largest(shared, part_inside),
        bursts=bursts,
        t_s=t_s,
        t_source=t_source,
        t_measured_s=t_measured_s,
        overlap=min(1.0, max(0.0, 1.0 - exposed_s / t_measured_s)) if t_measured_s > 0 else 0.0,
        exposed_s=exposed_s,
        iterations=min(s.iterations for s in present),
        measured_alone=measured_alone or quiet,
        t_note=msgspec.UNSET if measured_alone else _t_note(t_source == "topology", quiet),
    )


def _t_note(from_capacities: bool, quiet: bool) -> str:
    """Returns a note about a transfer time that was measured without the top class."""
    found = "measured without a class above the other jobs'"
    beside = "no other job ran" if quiet else "others may have run"
    if from_capacities:
        checked = "and checked" if quiet else "unchecked"
        return f"{found}: t is from the links' capacities, {checked}, as {beside}"
    return f"{found}: {beside}{'' if quiet else ', so that t may be too long'}"


def traffic_by_mover(present: Sequence[RankSample]) -> dict[Mover, dict[HostPair, float]]:
    """Bytes of one iteration from host to host of each mover, every collective counted once.

    Every rank of a group lists its collectives; those of the lowest group rank count. All-to-alls
    and sends count from every rank, as its own row holds the bytes that it sends.
    """
    placement = {sample.rank: sample.host for sample in present}
    witness: dict[str, int] = {}
    for sample in present:
        for group in sample.groups:
            witness[group.name] = min(witness.get(group.name, group.my_rank), group.my_rank)
    total: dict[Mover, dict[HostPair, float]] = {}
    unplaced = 0
    for sample in present:
        for row in sample.traffic:
            group = sample.groups[row.group]
            if row.op not in PER_RANK_OPS and group.my_rank != witness[group.name]:
                continue
            ends = {"peer": row.peer, "my_rank": group.my_rank}
            try:
                found = flows(row.op, row.bytes, group.ranks, placement, **ends)
            except (KeyError, ValueError):
                unplaced += 1
                continue
            # Each send of a pipeline moves on its own.
            pairs = {(group.name, *pair): {pair: size} for pair, size in found.items()}
            movers = pairs if row.op == "send" else {(group.name,): found}
            for mover, part in movers.items():
                add_flows(total.setdefault(mover, {}), part, 1.0 / sample.iterations)
    if unplaced:
        log.warning("%d kinds of collectives have no known flows and are left out", unplaced)
    return total


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
    A host where the GPU of some rank is not known has no flows.

    Args:
        matrix: bytes from host to host.
        samples, topology: a host whose inside the topology does not describe has no flows.
        whole_hosts: also hosts whose GPUs all belong to the job, which meets nobody there.
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
    """The job's communication without the waiting for stragglers.

    The shortest duration of a collective over the ranks is its transfer
    (docs/understand/measuring.md). On the timeline of the first sample, the leader's, it begins
    that much before its end.

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
            # A length of 0 means that the rank lost the duration.
            if group < 0 or end <= begin:
                continue
            key = (sample.groups[group].name, sequence)
            shortest[key] = min(shortest.get(key, end - begin), end - begin)
            witnesses[key] += 1
    end_ns = np.array(rows.end, dtype=np.int64)
    seen_ns = np.array(rows.begin, dtype=np.int64)
    begin_ns = seen_ns.copy()
    shared = np.zeros(len(end_ns), bool)
    for i, (group, sequence) in enumerate(zip(rows.group, rows.sequence, strict=True)):
        if group >= 0:
            key = (leader.groups[group].name, sequence)
            begin_ns[i] = max(begin_ns[i], end_ns[i] - shortest.get(key, 0))
            shared[i] = witnesses[key] > 1
    order = np.argsort(begin_ns, kind="stable")
    size = np.array(rows.bytes, dtype=np.int64)[order]
    bounds = np.array(rows.bounds, dtype=np.int64)
    # A collective that queued behind another waits for the other's transfer too.
    ready_ns = np.array(rows.ready, dtype=np.int64)
    ready_ns = np.where(ready_ns < seen_ns, ready_ns, begin_ns)
    reached = timeline.Reaches(ready_ns[order], np.array(rows.synchronous, dtype=bool)[order])
    line = timeline.describe(begin_ns[order], end_ns[order], size, bounds, reached, shared[order])
    if line is None:
        return leader.comm_s, None
    if len(present) > 1 and not shared.any():
        log.warning("no collective was seen by two ranks: t includes waiting for stragglers")
    return line.comm_median_s, line


def _largest(
    matrix: Mapping[HostPair, float], part: Mapping[HostPair, int]
) -> tuple[HostFlow, ...]:
    if len(matrix) > MAX_FLOWS:
        log.warning("%d flows: only the %d largest are in the profile", len(matrix), MAX_FLOWS)
    ranked = sorted(matrix.items(), key=lambda item: (-item[1], item[0]))[:MAX_FLOWS]
    return tuple(HostFlow(*pair, moved, part[pair]) for pair, moved in sorted(ranked))
