"""A host that issues ahead of the device: marks are its times, iterations are the device's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_stream import JOBS, MB, ONE_BURST, Burst, JobSpec, Stream, generate

from crux_torch.measure.chrome_trace import chrome_trace
from crux_torch.measure.iterations import iteration_ends
from crux_torch.measure.merge import merge
from crux_torch.measure.profile import JobProfile
from crux_torch.measure.records import OP_NUMBER, RECORD, Flag, GroupInfo
from crux_torch.measure.sample import RankSample, summarize

MS = 10**6


def sample_of(records: np.ndarray, marks_ns: np.ndarray, rank: int = 0) -> RankSample:
    who = {"rank": rank, "world_size": 2, "host": f"h{rank}"}
    found = summarize(records, [GroupInfo("0", (0, 1), rank)], marks_ns=marks_ns, **who)
    assert found is not None
    return found


def on_device(records: np.ndarray) -> np.ndarray:
    """The same operations, timed by a device that comes to them when they are issued."""
    timed = records.copy()
    timed["device"] = 1
    timed["flags"] |= Flag.DEVICE_CLOCK
    timed["device_ns"] = timed["end_ns"] - timed["start_ns"]
    return timed


def ahead(
    records: np.ndarray, marks_ns: np.ndarray, pace: Sequence[float], waits: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """What a host does that issues all this at its own pace and sometimes waits for the device.

    Args:
        records, marks_ns: as the device does it.
        pace: of each iteration, the time that the host takes to issue it, as a share of the time
            that the device takes to do it.
        waits: whether the host waits for the device behind it.
    """
    issued, marks = on_device(records), marks_ns.copy()
    iteration = np.searchsorted(marks_ns, records["start_ns"], "right")
    begins = np.concatenate((records["start_ns"][:1], marks_ns[:-1]))
    host = int(begins[0])
    for k, (begin, end) in enumerate(zip(begins.tolist(), marks_ns.tolist(), strict=True)):
        mine = iteration == k
        share = pace[k % len(pace)]
        own = host + (share * (records["start_ns"][mine] - begin)).astype(np.int64)
        issued["issue_ns"][mine] = np.minimum(own, records["start_ns"][mine])
        host = marks[k] = min(end, host + int(share * (end - begin)))
        if waits[k % len(waits)]:
            host = end
    return issued, marks


def every(steps: int) -> list[bool]:
    return [step == steps - 1 for step in range(steps)]


def profile_of(
    stream: Stream, pace: Sequence[float] = (), waits: Sequence[bool] = ()
) -> JobProfile:
    """Of hosts at this pace, or in step with their devices."""
    samples = []
    for rank, seen in enumerate(zip(stream.records, stream.marks_ns, strict=True)):
        samples.append(sample_of(*(ahead(*seen, pace, waits) if pace else seen), rank))
    return merge(samples)


def test_the_period_is_the_devices_where_the_host_waits_every_fifth_step() -> None:
    """The device takes 65 ms an iteration; the host issues five in 10 ms each, then waits."""
    step, host = 65 * MS, 10 * MS
    records = np.zeros(60 * 8, dtype=RECORD)
    marks = np.zeros(60, dtype=np.int64)
    for k in range(60):
        mine = records[8 * k : 8 * k + 8]
        waited = k // 5 * 5 * step
        mine["issue_ns"] = waited + k % 5 * host + np.arange(1, 9) * MS
        mine["start_ns"] = k * step + 20 * MS + np.arange(8) * 5 * MS
        marks[k] = waited + (k % 5 + 1) * host
    records["sequence"] = np.arange(len(records))
    records["end_ns"] = records["start_ns"] + 3 * MS
    records["device_ns"] = 3 * MS
    records["bytes"] = np.tile([4 * MB] * 7 + [MB], 60)
    records["op"] = OP_NUMBER["allreduce"]
    records["device"], records["world_size"], records["peer"] = 1, 2, -1
    records["flags"] = Flag.DEVICE_CLOCK
    found = sample_of(records, marks)
    assert found.period_s == pytest.approx(0.065, rel=1e-9)
    assert found.period_source == "both"
    assert found.iterations == 58
    assert found.comm_s == pytest.approx(8 * 0.003, rel=1e-9)
    assert found.exposed_s == pytest.approx(8 * 0.003, rel=1e-9)
    assert [row.bytes for row in found.traffic] == [58 * 29 * MB]
    assert len(found.bursts) == 8
    assert np.diff(found.transfers.bounds).tolist() == [step] * 58


@settings(deadline=None, max_examples=30)
@given(
    job=st.sampled_from(sorted(JOBS)),
    jitter=st.sampled_from([0.0, 0.1, 0.2]),
    seed=st.integers(0, 1000),
    pace=st.lists(st.floats(0.02, 0.98), min_size=1, max_size=7),
    waits=st.one_of(
        st.integers(1, 12).map(every), st.lists(st.booleans(), min_size=1, max_size=11)
    ),
)
def test_however_far_the_host_is_ahead_the_profile_is_the_devices(
    job: str, jitter: float, seed: int, pace: list[float], waits: list[bool]
) -> None:
    stream = generate(JobSpec(JOBS[job], jitter=jitter), seed)
    profile = profile_of(stream, pace, waits)
    truth = stream.truth
    assert profile.period_s == pytest.approx(truth.period_s, rel=0.02)
    assert profile.period_source == "both"
    assert {(f.src, f.dst): f.bytes for f in profile.flows} == {
        ("h0", "h1"): float(truth.bytes),
        ("h1", "h0"): float(truth.bytes),
    }
    assert profile.t_s == pytest.approx(truth.t_s, rel=0.03)
    assert profile.compute_s == pytest.approx(truth.compute_s, rel=0.04)
    in_step = profile_of(stream)
    assert profile.exposed_s == pytest.approx(in_step.exposed_s, rel=0.03)
    assert profile.overlap == pytest.approx(in_step.overlap, abs=0.02)
    assert [b.share for b in profile.bursts] == pytest.approx([b.share for b in in_step.bursts])


@settings(deadline=None, max_examples=20)
@given(
    job=st.sampled_from(sorted(JOBS)),
    jitter=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
    rank=st.integers(0, 1),
)
def test_in_step_a_device_tells_what_a_cpu_tells(
    job: str, jitter: float, seed: int, rank: int
) -> None:
    stream = generate(JobSpec(JOBS[job], jitter=jitter), seed)
    records, marks = stream.records[rank], stream.marks_ns[rank]
    assert sample_of(on_device(records), marks, rank) == sample_of(records, marks, rank)
    found = iteration_ends(marks, on_device(records))
    assert (found.marks_ns == found.ends_ns).all()


@pytest.mark.parametrize("unknown", ["clock", "duration", "both"])
def test_without_the_devices_times_marks_are_what_there_is(unknown: str) -> None:
    stream = generate(JobSpec(ONE_BURST, jitter=0.2))
    records, marks = ahead(stream.records[0], stream.marks_ns[0], [0.3], every(5))
    if unknown != "duration":
        records["flags"] &= ~np.uint8(Flag.DEVICE_CLOCK)
        records["start_ns"] = records["issue_ns"]
    if unknown != "clock":
        records["device_ns"] = records["end_ns"] = -1
    if unknown == "both":
        records["flags"] |= Flag.UNTIMED
    found = iteration_ends(marks, records)
    assert found.ends_ns.tolist() == found.marks_ns.tolist() == marks[:-1].tolist()


def test_a_few_operations_without_times_change_no_end() -> None:
    stream = generate(JobSpec(JOBS["overlapped"], jitter=0.1))
    records, marks = ahead(stream.records[0], stream.marks_ns[0], [0.2], every(6))
    whole = iteration_ends(marks, records)
    lost = np.arange(len(records)) % 4 == 1
    records["device_ns"][lost] = records["end_ns"][lost] = -1
    assert iteration_ends(marks, records).ends_ns.tolist() == whole.ends_ns.tolist()
    # One of four buckets leaves a gap where it was, and no burst where it was issued.
    assert [burst.share for burst in sample_of(records, marks).bursts] == [0.5, 0.5]


def test_marks_a_steady_distance_ahead_part_operations_by_their_issue() -> None:
    """A queue of bounded length: the host is always two and a half iterations ahead."""
    stream = generate(JobSpec((Burst(0.05, (MB, 2 * MB, 3 * MB)),)))
    records, marks = on_device(stream.records[0]), stream.marks_ns[0].copy()
    lead = round(2.5 * stream.truth.period_s * 1e9)
    records["issue_ns"] -= lead
    marks -= lead
    found = sample_of(records, marks)
    assert found.period_s == pytest.approx(stream.truth.period_s, rel=1e-6)
    assert [row.bytes for row in found.traffic] == [found.iterations * 6 * MB]
    ends = iteration_ends(marks, records).ends_ns
    assert ends.tolist() == records["end_ns"][2:-1:3].tolist()


@pytest.mark.parametrize("of", [2, 3, 4])
def test_steps_without_communication_are_iterations(of: int) -> None:
    """Local SGD: gradients are reduced in every second, third or fourth step."""
    stream = generate(JobSpec(ONE_BURST, iterations=48))
    records, marks = ahead(stream.records[0], stream.marks_ns[0], [0.15], every(5))
    iteration = np.arange(len(records)) // 2
    kept = records[iteration % of == 0]
    found = sample_of(kept, marks)
    assert found.period_s == pytest.approx(stream.truth.period_s, rel=0.02)
    assert found.iterations % of == 0
    assert [row.bytes for row in found.traffic] == [found.iterations // of * 50 * MB]


def test_a_pause_of_the_device_is_no_iteration() -> None:
    """Nothing is reduced in an evaluation of 5 s; the host issued it in 1 s."""
    stream = generate(JobSpec(JOBS["multi_burst"], iterations=40))
    records, marks = stream.records[0].copy(), stream.marks_ns[0].copy()
    records, marks = ahead(records, marks, [0.3], every(4))
    behind = records["start_ns"] > stream.marks_ns[0][19]
    for field in ("start_ns", "end_ns"):
        records[field][behind] += 5000 * MS
    records["issue_ns"][behind] += 1000 * MS
    marks[20:] += 1000 * MS
    found = sample_of(records, marks)
    assert found.period_s == pytest.approx(stream.truth.period_s, rel=0.02)


def test_micro_batches_between_marks_are_one_iteration() -> None:
    stream = generate(JobSpec(ONE_BURST, jitter=0.1, iterations=60))
    marks = stream.marks_ns[0][2::3]
    found = sample_of(*ahead(stream.records[0][: 2 * 60], marks, [0.1], every(5)))
    assert found.period_s == pytest.approx(3 * stream.truth.period_s, rel=0.02)
    assert found.period_source == "marks"
    assert [row.bytes for row in found.traffic] == [found.iterations * 150 * MB]


def test_what_an_optimizer_gathers_behind_its_mark_belongs_to_the_next_iteration() -> None:
    """ZeRO: gradients are reduced before the step, parameters gathered behind it."""
    stream = generate(JobSpec((Burst(0.05, (8 * MB, MB)),), iterations=40, step_s=0.0))
    records, _ = ahead(stream.records[0], stream.marks_ns[0], [0.2], every(5))
    gathers = records["bytes"] == MB
    records["op"][gathers] = OP_NUMBER["allgather_single"]
    marks = records["issue_ns"][~gathers] + 1
    records["issue_ns"][gathers] = marks + 1
    found = sample_of(records, marks)
    assert found.period_s == pytest.approx(stream.truth.period_s, rel=0.02)
    assert {row.op: row.bytes for row in found.traffic} == {
        "allreduce": found.iterations * 8 * MB,
        "allgather_single": found.iterations * MB,
    }


def test_an_operation_that_outlasts_its_iteration_stops_no_clock() -> None:
    """On a communicator of its own, from within the fifth iteration to the end of the seventh."""
    stream = generate(JobSpec(ONE_BURST))
    records, marks = ahead(stream.records[0], stream.marks_ns[0], [0.2], every(5))
    other = records[8:9].copy()
    other["group"], other["end_ns"] = 1, records["end_ns"][2 * 7 - 1] - MS
    other["device_ns"] = other["end_ns"] - other["start_ns"]
    both = np.concatenate((records, other))
    found = iteration_ends(marks, both)
    assert (np.diff(found.ends_ns) > 0).all()
    assert len(found.ends_ns) == len(found.marks_ns) == 39
    assert sample_of(both, marks).period_s == pytest.approx(stream.truth.period_s, rel=0.02)


def test_a_rank_that_lost_a_duration_takes_none_from_the_others() -> None:
    """Handles let go for the memory that they held, on the rank that is not the leader."""
    stream = generate(JobSpec(JOBS["overlapped"], jitter=0.1))
    samples = []
    for rank, (records, marks) in enumerate(zip(stream.records, stream.marks_ns, strict=True)):
        issued, host = ahead(records, marks, [0.2], every(5))
        if rank == 1:
            lost = np.arange(len(issued)) % 4 == 1
            issued["device_ns"][lost] = issued["end_ns"][lost] = -1
        samples.append(sample_of(issued, host, rank))
    assert merge(samples).t_s == pytest.approx(stream.truth.t_s, rel=0.03)


@pytest.mark.parametrize("pace", [0.2, 0.9])
def test_iterations_that_a_group_has_not_reported_yet_do_not_count(pace: float) -> None:
    """Two communicators, whose watchdogs report at different times."""
    stream = generate(JobSpec((Burst(0.05, (8 * MB, MB)),), iterations=40))
    records, marks = ahead(stream.records[0], stream.marks_ns[0], [pace], every(5))
    records["group"] = records["bytes"] == MB
    late = (records["group"] == 1) & (records["start_ns"] > stream.marks_ns[0][27])
    found = sample_of(records[~late], marks)
    assert found.iterations == 26
    assert sum(row.bytes for row in found.traffic) == 26 * 8 * MB  # group 0 alone is listed
    # One that is used now and then holds nothing up, nor one that was given up long ago.
    rare = (records["group"] == 1) & (np.arange(len(records)) // 2 % 7 != 1)
    assert sample_of(records[~rare], marks).iterations == 38
    gone = (records["group"] == 1) & (np.arange(len(records)) // 2 > 3)
    assert sample_of(records[~gone], marks).iterations == 38


def test_steps_of_a_trace_are_the_devices() -> None:
    stream = generate(JobSpec((Burst(0.05, (MB, 2 * MB)),), iterations=20))
    records, marks = ahead(stream.records[0], stream.marks_ns[0], [0.1], every(5))
    who = {"rank": 0, "world_size": 2, "backend": "nccl", "clock_offset_ns": 0}
    events = chrome_trace(records, stream.groups[0], marks_ns=marks, **who)["traceEvents"]
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    found = [e for e in events if e.get("cat") == "kernel"]
    assert len(steps) == 20
    for step in steps[1:-1]:
        assert step["dur"] == pytest.approx(stream.truth.period_s * 1e6, rel=1e-6)
        inside = [e for e in found if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
        assert len(inside) == 2


def test_nothing_from_nothing() -> None:
    for marks in (None, [], [1, 2, 3]):
        found = iteration_ends(marks, np.zeros(0, dtype=RECORD))
        assert found.marks_ns.tolist() == found.ends_ns.tolist() == []


@given(st.data())
def test_marks_and_ends_pair_up_whatever_is_recorded(data: st.DataObject) -> None:
    times = st.integers(0, 60).map(lambda ms: ms * MS)
    count = data.draw(st.integers(1, 20))
    records = np.zeros(count, dtype=RECORD)
    for field in ("issue_ns", "start_ns", "device_ns"):
        records[field] = data.draw(st.lists(times, min_size=count, max_size=count))
    records["end_ns"] = records["start_ns"] + records["device_ns"]
    unknown = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    records["device_ns"][unknown] = -1
    flags = st.sampled_from([0, Flag.DEVICE_CLOCK, Flag.DEVICE_CLOCK | Flag.SYNCHRONOUS])
    records["flags"] = data.draw(st.lists(flags, min_size=count, max_size=count))
    marks = sorted(data.draw(st.lists(times, max_size=20, unique=True)))
    found = iteration_ends(marks, records)
    assert len(found.marks_ns) == len(found.ends_ns)
    assert (np.diff(found.ends_ns) > 0).all()
    assert set(found.marks_ns.tolist()) <= set(marks)
    if len(found.marks_ns):
        kept = [m for m in marks if found.marks_ns[0] <= m <= found.marks_ns[-1]]
        assert found.marks_ns.tolist() == kept
    sample = summarize(records, [], rank=0, world_size=2, host="h", marks_ns=marks)
    assert sample is None or RankSample.from_json(sample.to_json()) == sample
