"""Communication, exposure and bursts of hand-made timelines."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.profile import timeline
from crux_torch.profile.record import RECORD


def ns(*seconds: float) -> np.ndarray:
    return np.array([round(s * 1e9) for s in seconds], dtype=np.int64)


def test_overlapping_issues_wait_from_the_last_one() -> None:
    # DDP: buckets leave at 1, 2 and 3 s, the last transfer ends at 5 s; step at 5 s.
    line = timeline.describe(ns(1, 2, 3), ns(2.5, 4, 5), ns(1, 1, 2), ns(0, 5))
    assert line is not None
    assert line.comm_s == pytest.approx(4)
    assert line.exposed_s == pytest.approx(2)
    assert line.compute_s == pytest.approx(3)
    assert line.overlap == pytest.approx(0.5)
    assert [(b.at, b.share) for b in line.bursts] == [(pytest.approx(1 / 3), 1.0)]
    assert line.comm_start == pytest.approx(1 / 3)


def test_synchronous_calls_are_exposed_in_full() -> None:
    # Two calls of 1 s, the second issued the moment the first returns, and one later.
    line = timeline.describe(ns(1, 2, 4), ns(2, 3, 5), ns(1, 1, 2), ns(0, 6))
    assert line is not None
    assert line.exposed_s == pytest.approx(3)
    assert line.compute_s == pytest.approx(3)
    assert line.overlap == pytest.approx(0)
    assert [b.at for b in line.bursts] == pytest.approx([1 / 3, 2 / 3])
    assert [b.share for b in line.bursts] == pytest.approx([0.5, 0.5])


def test_a_transfer_across_a_mark_belongs_to_both_iterations() -> None:
    line = timeline.describe(ns(1, 5), ns(5, 7), ns(1, 1), ns(0, 4, 8))
    assert line is not None
    assert line.comm_s == pytest.approx(3)
    assert line.iterations == 2


def test_device_times_override_the_hosts() -> None:
    records = np.zeros(2, dtype=RECORD)
    records["start_ns"], records["end_ns"] = 10, 100
    records["device_ns"] = [-1, 30]
    begin, end = timeline.intervals(records)
    assert begin.tolist() == [10, 70]
    assert end.tolist() == [100, 100]


def test_nothing_in_flight_is_all_compute() -> None:
    line = timeline.describe(ns(), ns(), ns(), ns(0, 1, 2))
    assert line is not None
    assert (line.comm_s, line.exposed_s, line.compute_s) == (0, 0, 1)
    assert timeline.describe(ns(), ns(), ns(), ns(0)) is None


def test_bounds_follow_the_longest_quiet() -> None:
    begin = ns(3, 5, 13, 15, 23, 25)
    end = ns(4, 6, 14, 16, 24, 26)
    assert timeline.bounds_from_operations(begin, end, 2).tolist() == ns(6, 16, 26).tolist()
    assert timeline.bounds_from_period(begin, end, 10.0).tolist() == ns(6, 16, 26).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(1, 200)), min_size=1, max_size=40),
    st.lists(st.integers(0, 1200), min_size=2, max_size=8, unique=True),
)
def test_union_equals_brute_force(spans: list[tuple[int, int]], cuts: list[int]) -> None:
    spans.sort()
    begin = np.array([b for b, _ in spans], dtype=np.int64)
    end = np.array([b + d for b, d in spans], dtype=np.int64)
    bounds = np.array(sorted(cuts), dtype=np.int64)
    busy = {t for b, d in spans for t in range(b, b + d)}
    found = timeline.stretches(begin, end)
    inside = timeline._within(found.begin_ns, found.end_ns, bounds)
    expected = [sum(t in busy for t in range(a, b)) for a, b in itertools.pairwise(bounds)]
    assert inside.tolist() == pytest.approx(expected)
    assert (found.begin_ns <= found.wait_ns).all()
    assert (found.wait_ns < found.end_ns).all()
    assert (found.end_ns[:-1] <= found.begin_ns[1:]).all()
    line = timeline.describe(begin, end, np.ones_like(begin), bounds)
    assert line is not None
    assert 0 <= line.exposed_s <= line.comm_s + 1e-12
    assert sum(b.share for b in line.bursts) == pytest.approx(1)
