"""Record streams of synthetic jobs whose period, bytes, transfer and exposure are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crux_torch.measure.profile import ProfileBurst
from crux_torch.measure.records import OP_NUMBER, RECORD, GroupInfo
from crux_torch.measure.sample import RankSample, summarize


@dataclass(frozen=True)
class Burst:
    """Computation, then buckets of all-reduce that leave at its end, or spread over it."""

    compute_s: float
    buckets: tuple[int, ...]
    overlapped: bool = False


@dataclass(frozen=True)
class JobSpec:
    bursts: tuple[Burst, ...]
    link_Bps: float = 1e9
    ranks: int = 2
    jitter: float = 0.0
    iterations: int = 40
    step_s: float = 0.002
    straggler: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    period_s: float
    bytes: int
    t_s: float
    compute_s: float


@dataclass(frozen=True)
class Stream:
    records: list[np.ndarray]
    marks_ns: list[np.ndarray]
    groups: list[list[GroupInfo]]
    truth: Truth


def generate(spec: JobSpec, seed: int = 0) -> Stream:
    """Run the job: a collective moves once all ranks have issued it and the link is free."""
    rng = np.random.default_rng(seed)
    ranks = range(spec.ranks)
    clock = np.zeros(spec.ranks)
    link_free = 0.0
    rows: list[list[tuple[float, float, int]]] = [[] for _ in ranks]
    marks: list[list[float]] = [[] for _ in ranks]
    computed = []
    factor = 2 * (spec.ranks - 1) / spec.ranks / spec.link_Bps
    for _ in range(spec.iterations):
        busy = np.zeros(spec.ranks)
        last_end = 0.0
        for burst in spec.bursts:
            noise = 1 + spec.jitter * rng.uniform(-1, 1, spec.ranks)
            slow = np.array([spec.straggler.get(r, 1.0) for r in ranks])
            compute = burst.compute_s * noise * slow
            count = len(burst.buckets)
            for i, size in enumerate(burst.buckets):
                share = (i + 1) / count if burst.overlapped else 1.0
                issue = clock + compute * share
                begin = max(issue.max(), link_free)
                last_end = link_free = begin + size * factor
                for r in ranks:
                    rows[r].append((issue[r], last_end, size))
            busy += compute
            clock += compute
            if not burst.overlapped:
                clock = np.maximum(clock, last_end)
        clock = np.maximum(clock, last_end) + spec.step_s
        computed.append(busy.max() + spec.step_s)
        for r in ranks:
            marks[r].append(clock[r])
    name = GroupInfo("0", tuple(ranks), 0).name
    truth = Truth(
        period_s=float(np.diff(marks[0]).mean()),
        bytes=sum(size for burst in spec.bursts for size in burst.buckets),
        t_s=sum(size for burst in spec.bursts for size in burst.buckets) * factor,
        compute_s=float(np.mean(computed)),
    )
    return Stream(
        [_records(rows[r], spec.ranks, 10**12 + 10**9 * r) for r in ranks],
        [np.array([round(m * 1e9) for m in marks[r]]) + 10**12 + 10**9 * r for r in ranks],
        [[GroupInfo(name, tuple(ranks), r)] for r in ranks],
        truth,
    )


def _records(rows: list[tuple[float, float, int]], ranks: int, origin_ns: int) -> np.ndarray:
    """Each rank's clock has its own origin, as CLOCK_MONOTONIC on different hosts."""
    records = np.zeros(len(rows), dtype=RECORD)
    for i, (issue, end, size) in enumerate(rows):
        records[i]["sequence"] = i
        records[i]["issue_ns"] = records[i]["start_ns"] = origin_ns + round(issue * 1e9)
        records[i]["end_ns"] = origin_ns + round(end * 1e9)
        records[i]["bytes"] = size
    records["device_ns"] = -1
    records["world_size"] = ranks
    records["peer"] = -1
    records["op"] = OP_NUMBER["allreduce"]
    return records


MB = 10**6
ONE_BURST = (Burst(0.100, (25 * MB, 25 * MB)),)
#: Equal bursts, unequal spacing: forward is longer than what lies between the bursts.
MULTI_BURST = (Burst(0.090, (10 * MB,)), Burst(0.040, (10 * MB,)), Burst(0.040, (10 * MB,)))
OVERLAPPED = (Burst(0.060, ()), Burst(0.080, (30 * MB,) * 4, True))
JOBS = {"one_burst": ONE_BURST, "multi_burst": MULTI_BURST, "overlapped": OVERLAPPED}


def sample_of(stream: Stream, rank: int = 0, *, marks: bool = True, **changes: Any) -> RankSample:
    """What a rank of the stream tells, as it arrives; each rank has a host of its own."""
    found = summarize(
        changes.pop("records", stream.records[rank]),
        changes.pop("groups", stream.groups[rank]),
        rank=rank,
        world_size=len(stream.records),
        host=changes.pop("host", f"h{rank}"),
        marks_ns=stream.marks_ns[rank] if marks else None,
        **changes,
    )
    assert found is not None
    return RankSample.from_json(found.to_json())


def samples_of(
    stream: Stream, *, marks: bool = True, flops: Sequence[float | None] = (), **changes: Any
) -> list[RankSample]:
    """:func:`sample_of` every rank."""
    ranks = range(len(stream.records))
    counted = flops or [None] * len(ranks)
    return [sample_of(stream, r, marks=marks, flops=counted[r], **changes) for r in ranks]


def plain_sample(rank: int = 0, world_size: int = 1, **changes: Any) -> RankSample:
    """A sample without records: a second an iteration, a quarter of it exposed."""
    values: dict[str, Any] = {
        "host": "h0",
        "iterations": 10,
        "period_s": 1.0,
        "period_source": "marks",
        "exposed_s": 0.25,
        "comm_s": 0.5,
        "bursts": (ProfileBurst(1.0, 1.0),),
    }
    made = RankSample(rank=rank, world_size=world_size, **{**values, **changes})
    return RankSample.from_json(made.to_json())
