"""One job's profile from the samples of its ranks: its work W, its traffic, its timeline."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from crux_torch.measure import timeline
from crux_torch.measure.device import DeviceUse
from crux_torch.measure.profile import (
    MAX_FLOWS,
    MAX_PARTS,
    FlopsSource,
    HostFlow,
    JobProfile,
    ProfileBurst,
)
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
from crux_torch.network.topology import Topology

log = logging.getLogger(__name__)

#: A count may ask for so much more of a device than its activity allows before that is said:
#: counters and marks do not cover the same microseconds.
ACTIVITY_SHARE = 1.1
ACTIVITY_SLACK = 0.02
#: The tensor cores' counters and the count agree within this factor: data types differ by 2, and
#: clocks by less.
TENSOR_FACTOR = 3.0
#: A job that computes does a tenth of what its devices could do, or something was not counted.
TIME_FACTOR = 10.0


#: Seconds that bytes from host to host take on their slowest link in a network of its own (§3.2).
LinkTime = Callable[[Mapping[HostPair, float], Topology], float]


class Work(NamedTuple):
    """Work of a job's devices in one iteration: these fields of its ``JobProfile``.

    ``flops`` is never more than the devices could do in a period, where their peak is known.
    """

    flops: float
    flops_source: FlopsSource
    flops_note: str
    flops_by_time: float
    device_flops: float
    device_busy: float | None
    tensor_busy: float | None


class Choice(NamedTuple):
    """An estimate of W, and the reason for taking it in place of another one."""

    flops: float
    source: FlopsSource
    note: str = ""


def work(
    samples: Sequence[RankSample],
    *,
    period_s: float,
    compute_s: float,
    device_flops: float = 0.0,
) -> Work:
    """The work of a job from its ranks' samples, scaled to ranks that sent none.

    Args:
        period_s, compute_s: seconds of an iteration, and of it those in which the devices compute.
        device_flops: FLOP/s of one device, for samples that lack it; 0: not known.
    """
    scale = samples[0].world_size / len(samples)
    in_use = scale * _over_devices(samples, lambda device: device.flops, device_flops)
    peak = scale * _over_devices(samples, lambda device: device.peak_flops, device_flops)
    activities = [s.device.activity for s in samples if s.device and s.device.activity]
    device_busy = _mean([activity.busy for activity in activities])
    busy_s = compute_s if device_busy is None else min(compute_s, device_busy * period_s)
    counted = [_counted(s, period_s) for s in samples if s.flops is not None]
    if 0 < len(counted) < len(samples):
        log.warning("FLOPs counted on %d of %d ranks, scaled", len(counted), len(samples))
    by_time = busy_s * in_use
    choice = choose(
        sum(counted) * samples[0].world_size / len(counted) if counted else None,
        given=any(s.flops_given for s in samples),
        by_tensor=_by_tensor(samples, period_s),
        by_time=by_time,
        uncounted=sorted({name for s in samples for name in s.uncounted_ops}),
    )
    if choice.note and choice.source == "time":
        log.warning("W: %s", choice.note)
    flops = choice.flops
    if peak and flops > peak * period_s:
        log.warning(
            "%s %.3g FLOPs an iteration, and the devices can do %.3g in it: taking those",
            choice.source,
            flops,
            peak * period_s,
        )
        flops = peak * period_s
    for sample in samples:
        _compare_with_activity(sample)
    return Work(
        flops=flops,
        flops_source=choice.source,
        flops_note=choice.note,
        flops_by_time=by_time,
        device_flops=in_use,
        device_busy=device_busy,
        tensor_busy=_mean([activity.tensor for activity in activities]),
    )


def choose(
    counted: float | None,
    *,
    given: bool = False,
    by_tensor: float | None,
    by_time: float,
    uncounted: Sequence[str] = (),
) -> Choice:
    """W out of up to three estimates of it, each in FLOPs of an iteration.

    A count can only be too low, because nothing is counted that does not run. The tensor cores'
    counters see every product, so they are credible. Busy time is an upper bound, so it is credible
    only if they are not known and something is known to be missing from the count.

    Args:
        given: True if the script gave the count; that is never replaced.
        by_tensor: the tensor cores' busy time times their rate; None where it is not known.
        by_time: the devices' busy time times their rate; 0 where that is not known.
        uncounted: operators that multiply, but were not counted.
    """
    if counted is None:
        return Choice(by_tensor or by_time, "time")
    source: FlopsSource = "told" if given else "counted"
    if by_tensor is not None:
        if by_tensor <= TENSOR_FACTOR * counted:
            return Choice(counted, source)
        seen = f"the tensor cores were busy for {by_tensor:.3g} FLOPs"
        found = by_tensor
    else:
        if by_time <= TIME_FACTOR * counted:
            return Choice(counted, source)
        seen = f"the devices could do {by_time:.3g} FLOPs while they computed"
        found = by_time if uncounted else 0.0
    note = f"{counted:.3g} FLOPs were {source}, and {seen}"
    if uncounted:
        note += f"; not counted: {', '.join(uncounted[:3])[:512]}"
    if given or not found:
        return Choice(counted, source, f"{note}; if W is too low, call crux_torch.count_flops()")
    return Choice(
        found, "time", f"{note}; taking the latter. crux_torch.count_flops() knows better"
    )


def _counted(sample: RankSample, period_s: float) -> float:
    """A rank's FLOPs, at most what its own device can do: one rank can't claim for the others."""
    flops = sample.flops or 0.0
    peak = sample.device.peak_flops * period_s if sample.device is not None else 0.0
    if not 0 < peak < flops:
        return flops
    log.warning(
        "rank %d: %.3g FLOPs an iteration, and its device can do %.3g in it: taking those",
        sample.rank,
        flops,
        peak,
    )
    return peak


def _over_devices(
    samples: Sequence[RankSample], rate: Callable[[DeviceUse], float], default: float
) -> float:
    """Sum over the ranks' devices; an unknown rate counts as the mean of the others."""
    rates = [rate(s.device) if s.device is not None else default for s in samples]
    known = [one for one in rates if one > 0]
    return sum(known) / len(known) * len(rates) if known else 0.0


def _by_tensor(samples: Sequence[RankSample], period_s: float) -> float | None:
    """FLOPs of an iteration by the tensor cores' counters, scaled to devices that have none."""
    rates = [
        s.device.activity.tensor * s.device.tensor_flops
        for s in samples
        if s.device and s.device.activity and s.device.activity.tensor is not None
        if s.device.tensor_flops
    ]
    return statistics.fmean(rates) * samples[0].world_size * period_s if rates else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _compare_with_activity(sample: RankSample) -> None:
    """Warn where the counted FLOPs need more time than the device was at work by its counters.

    Less is no contradiction: counters see every product at its own pace, other processes on the
    device, and kernels that wait.
    """
    device = sample.device
    if device is None or device.activity is None or sample.flops is None or not sample.period_s:
        return
    activity = device.activity
    asked: list[tuple[str, float, float | None]] = []
    if device.tensor_s is not None:
        asked.append(("tensor cores", device.tensor_s, activity.tensor))
    if device.flops:
        asked.append(("device", sample.flops / device.flops, activity.busy))
    for what, seconds, seen in asked:
        needed = seconds / sample.period_s
        if seen is not None and needed > ACTIVITY_SHARE * seen + ACTIVITY_SLACK:
            log.warning(
                "rank %d counts FLOPs that take its %s %.0f%% of the time at peak, but the %s "
                "worked %.0f%%: is its W right?",
                sample.rank,
                what,
                100 * needed,
                what,
                100 * seen,
            )
            return


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
