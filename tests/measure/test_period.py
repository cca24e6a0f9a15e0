"""The period estimator: harmonics, jitter, strays, marks."""

from __future__ import annotations

import numpy as np
import pytest
from measure_stream import JOBS, MB, Burst, JobSpec, generate

from crux_torch.measure.iterations import Period, estimate_period, pattern_length, spectral_period

NINE_EQUAL = (Burst(0.05, (5 * MB,)), *[Burst(0.02, (5 * MB,))] * 8)
BUCKETS = (Burst(0.06, ()), Burst(0.04, (*[6 * MB] * 10, 2 * MB), True))
HARD = {**JOBS, "nine_equal": NINE_EQUAL, "buckets": BUCKETS}


NONE = np.zeros(0, dtype=np.int64)


def period_of(records: np.ndarray, marks_ns: np.ndarray = NONE) -> Period:
    times = records["start_ns"], records["end_ns"]
    found = estimate_period(*times, records["bytes"], records["bytes"], marks_ns)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("jitter", [0.0, 0.2])
@pytest.mark.parametrize("job", HARD)
def test_within_two_percent_without_marks(job: str, jitter: float, seed: int) -> None:
    stream = generate(JobSpec(HARD[job], jitter=jitter, iterations=30), seed)
    found = period_of(stream.records[0])
    assert found.period_s == pytest.approx(stream.truth.period_s, rel=0.02)
    assert found.source == "fourier"
    assert found.operations == sum(len(burst.buckets) for burst in HARD[job])


@pytest.mark.parametrize("job", ["one_burst", "overlapped", "buckets"])
def test_the_spectrum_alone_finds_single_bursts(job: str) -> None:
    stream = generate(JobSpec(HARD[job], jitter=0.2), 1)
    records = stream.records[0]
    found = spectral_period(
        records["start_ns"].astype(np.int64),
        records["end_ns"].astype(np.int64),
        records["bytes"].astype(float),
    )
    assert found is not None
    assert found == pytest.approx(stream.truth.period_s, rel=0.02)


def test_payloads_that_never_repeat_leave_the_spectrum() -> None:
    """All-to-alls of experts have another size every time."""
    stream = generate(JobSpec(JOBS["one_burst"], jitter=0.1), 2)
    records = stream.records[0].copy()
    records["bytes"] += np.random.default_rng(0).permutation(len(records)) * 1000
    found = period_of(records)
    assert found.operations is None
    assert found.period_s == pytest.approx(stream.truth.period_s, rel=0.02)


def test_a_stray_collective_now_and_then_does_no_harm() -> None:
    """A logged loss is reduced every tenth iteration."""
    stream = generate(JobSpec(JOBS["overlapped"], jitter=0.2, iterations=40), 4)
    records = stream.records[0]
    stray = records[39::40].copy()
    stray["start_ns"] = stray["end_ns"] + 10**6
    stray["end_ns"] += 2 * 10**6
    stray["bytes"] = 4
    mixed = np.concatenate((records, stray))
    found = period_of(mixed)
    assert found.period_s == pytest.approx(stream.truth.period_s, rel=0.02)


def test_a_pause_is_not_an_iteration() -> None:
    stream = generate(JobSpec(JOBS["multi_burst"], iterations=30))
    records, marks = stream.records[0].copy(), stream.marks_ns[0].copy()
    for times in (records["start_ns"], records["end_ns"], marks):
        times[times > marks[14]] += 5 * 10**9
    for given in (NONE, marks):
        assert period_of(records, given).period_s == pytest.approx(0.202, rel=0.02)


def test_marks_agree_or_win() -> None:
    stream = generate(JobSpec(JOBS["multi_burst"], jitter=0.2), 5)
    marks = stream.marks_ns[0]
    assert period_of(stream.records[0], marks).source == "both"
    # Two iterations of the signal to a step: the optimizer defines the iteration.
    halved = period_of(stream.records[0], marks[::2])
    assert halved.source == "marks"
    assert halved.period_s == pytest.approx(2 * stream.truth.period_s, rel=0.02)
    assert halved.operations is None
    assert period_of(stream.records[0], marks[:3]).source == "fourier", "too few to judge"


def test_equal_bursts_evenly_spaced_need_marks() -> None:
    """Nothing in the signal tells where such an iteration ends."""
    stream = generate(JobSpec((Burst(0.03, (MB,)),) * 3, step_s=0.0))
    records = stream.records[0]
    assert period_of(records).period_s == pytest.approx(stream.truth.period_s / 3, rel=0.02)
    found = period_of(records, stream.marks_ns[0])
    assert found.period_s == pytest.approx(stream.truth.period_s, rel=0.02)


def test_nothing_from_nothing() -> None:
    assert estimate_period(NONE, NONE, NONE, NONE, NONE) is None
    ones = np.ones(5, dtype=np.int64)
    assert estimate_period(ones, 2 * ones, ones, ones, NONE) is None
    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(0, 10**12, 200))
    assert pattern_length(start, rng.integers(0, 10**6, 200)) is None
    only_marks = estimate_period(NONE, NONE, NONE, NONE, np.arange(4) * 10**9)
    assert only_marks == Period(1.0, "marks")
