"""Communication, exposure and bursts of hand-made timelines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.measure import timeline
from crux_torch.measure.records import RECORD, Flag


def ns(*seconds: float) -> np.ndarray:
    return np.array([round(s * 1e9) for s in seconds], dtype=np.int64)


def describe(
    begin: np.ndarray,
    end: np.ndarray,
    size: np.ndarray,
    bounds: np.ndarray,
    ready: np.ndarray | None = None,
    synchronous: Sequence[bool] | None = None,
) -> timeline.Timeline:
    """Asynchronous collectives that computation comes to when they begin, unless given."""
    waits = np.array([False] * len(begin) if synchronous is None else synchronous, dtype=bool)
    reached = timeline.Reaches(begin if ready is None else ready, waits)
    line = timeline.describe(begin, end, size, bounds, reached)
    assert line is not None
    return line


@pytest.mark.parametrize(
    ("begin", "end", "size", "bounds", "comm_s", "exposed_s", "bursts"),
    [
        # DDP: buckets leave at 1, 2 and 3 s, the last transfer ends at 5 s; step at 5 s.
        ((1, 2, 3), (2.5, 4, 5), (1, 1, 2), (0, 5), 4, 2, [(1 / 3, 1)]),
        # Two synchronous calls of 1 s, the second issued as the first returns, and one later.
        ((1, 2, 4), (2, 3, 5), (1, 1, 2), (0, 6), 3, 3, [(1 / 3, 0.5), (2 / 3, 0.5)]),
        # A transfer across a mark belongs to both iterations.
        ((1, 5), (5, 7), (1, 1), (0, 4, 8), 3, 3, [(1, 1)]),
    ],
)
def test_timelines_by_hand(begin, end, size, bounds, comm_s, exposed_s, bursts) -> None:
    line = describe(ns(*begin), ns(*end), ns(*size), ns(*bounds))
    assert (line.comm_s, line.exposed_s) == pytest.approx((comm_s, exposed_s))
    assert line.iterations == len(bounds) - 1
    assert [(b.at, b.share) for b in line.bursts] == [pytest.approx(burst) for burst in bursts]


def test_device_times_override_the_hosts() -> None:
    records = np.zeros(2, dtype=RECORD)
    records["start_ns"], records["end_ns"] = 10, 100
    records["device_ns"] = [-1, 30]
    begin, end = timeline.intervals(records)
    assert begin.tolist() == [10, 70]
    assert end.tolist() == [100, 100]


def test_what_nobody_timed_counts_when_it_was_issued() -> None:
    records = np.zeros(2, dtype=RECORD)
    records["issue_ns"] = 5
    records["start_ns"], records["end_ns"], records["device_ns"] = [-1, 7], -1, -1
    begin, end = timeline.intervals(records)
    assert begin.tolist() == end.tolist() == [5, 5]
    assert timeline.reaches(records).ready_ns.tolist() == [5, 5]


def test_what_a_device_did_without_a_duration_counts_where_it_was() -> None:
    """Issued at 1 to 4, done at 100 to 400: the second one's time is lost, and the third's end."""
    records = np.zeros(4, dtype=RECORD)
    records["device"] = 1
    records["issue_ns"] = [1, 2, 3, 4]
    records["start_ns"], records["end_ns"] = [100, 2, 300, 400], [150, -1, -1, 450]
    records["device_ns"] = [50, -1, -1, 50]
    records["flags"] = [Flag.DEVICE_CLOCK, 0, Flag.DEVICE_CLOCK, Flag.DEVICE_CLOCK]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        begin, end = timeline.intervals(records[order])
        assert begin.tolist() == [[100, 150, 300, 400][i] for i in order]
        assert end.tolist() == [[150, 150, 300, 450][i] for i in order]
        ready = timeline.reaches(records[order]).ready_ns
        assert ready.tolist() == begin.tolist()
    # Where nothing is timed there is nothing but the issue.
    records["flags"], records["end_ns"] = Flag.UNTIMED, -1
    assert timeline.intervals(records)[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("begin", "end", "ready", "synchronous", "comm_s", "exposed_s"),
    [
        # Buckets of 1 s are reached at 1, 1.2 and 1.4 s, where backward ends; they run one by one.
        ((1, 2, 3), (2, 3, 4), (1, 1.2, 1.4), (), 3, 4 - 1.4),
        # An asynchronous call from 1 to 5 s; within it a synchronous one, and one that ends it.
        ((1, 2, 4.5), (5, 3, 5), (1, 2, 4.5), (1,), 4, 1 + 0.5),
        # A synchronous call waits for what is queued before it, too.
        ((1, 3), (3, 4), (1, 1.5), (1,), 3, 2.5),
    ],
)
def test_what_waits_is_exposed(begin, end, ready, synchronous, comm_s, exposed_s) -> None:
    waits = [i in synchronous for i in range(len(begin))]
    line = describe(ns(*begin), ns(*end), np.ones(len(begin)), ns(0, 6), ns(*ready), waits)
    assert (line.comm_s, line.exposed_s) == pytest.approx((comm_s, exposed_s))


def test_nothing_in_flight_is_all_compute() -> None:
    line = describe(ns(), ns(), ns(), ns(0, 1, 2))
    assert (line.comm_s, line.exposed_s) == (0, 0)
    nothing = timeline.Reaches(ns(), np.zeros(0, dtype=bool))
    assert timeline.describe(ns(), ns(), ns(), ns(0), nothing) is None


def test_bounds_follow_the_longest_quiet() -> None:
    begin = ns(3, 5, 13, 15, 23, 25)
    end = ns(4, 6, 14, 16, 24, 26)
    assert timeline.bounds_from_operations(begin, end, 2).tolist() == ns(6, 16, 26).tolist()
    assert timeline.bounds_from_period(begin, end, 10.0).tolist() == ns(6, 16, 26).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(1, 200)), min_size=1, max_size=40),
    st.lists(st.integers(0, 1200), min_size=2, max_size=8, unique=True),
    st.randoms(use_true_random=False),
)
def test_union_equals_brute_force(
    spans: list[tuple[int, int]], cuts: list[int], random: Random
) -> None:
    spans.sort()
    begin = np.array([b for b, _ in spans], dtype=np.int64)
    end = np.array([b + d for b, d in spans], dtype=np.int64)
    bounds = np.array(sorted(cuts), dtype=np.int64)
    busy = {t for b, d in spans for t in range(b, b + d)}
    found = timeline.stretches(begin, end, begin)
    inside = timeline._within(found.begin_ns, found.end_ns, bounds)
    expected = [sum(t in busy for t in range(a, b)) for a, b in itertools.pairwise(bounds)]
    assert inside.tolist() == pytest.approx(expected)
    assert (found.begin_ns <= found.wait_ns).all()
    assert (found.wait_ns < found.end_ns).all()
    assert (found.end_ns[:-1] <= found.begin_ns[1:]).all()
    line = describe(begin, end, np.ones_like(begin), bounds)
    assert 0 <= line.exposed_s <= line.comm_s + 1e-12
    assert sum(b.share for b in line.bursts) == pytest.approx(1)
    # Computation came to each no later than it began.
    ready = np.array([max(0, b - random.randint(0, 50)) for b, _ in spans], dtype=np.int64)
    waits = [random.random() < 0.3 for _ in spans]
    line = describe(begin, end, np.ones_like(begin), bounds, ready, waits)
    idle: set[int] = set()
    queues: list[list[int]] = []
    for i, b in enumerate(begin.tolist()):
        reach = max(end[:i].tolist(), default=0)
        if b >= reach and ready[i] >= reach:
            queues.append([])
        queues[-1].append(i)
    for queue in queues:
        comes = {max(int(ready[i]) for i in queue): max(int(end[i]) for i in queue)}
        head = int(begin[queue[0]])
        idle |= {t for a, z in comes.items() for t in range(max(a, head), z)}
        for i in queue:
            if waits[i]:
                idle |= set(range(max(int(ready[i]), head), int(end[i])))
    idle &= busy
    waited = [sum(t in idle for t in range(a, b)) for a, b in itertools.pairwise(bounds)]
    assert line.exposed_s * 1e9 == pytest.approx(sum(waited) / len(waited))


def test_an_iteration_has_no_more_bursts_than_a_profile_may_hold() -> None:
    # Six long iterations of 75 bursts; four short ones make the mean period, so the gap, small.
    long_s, short_s, bursts = 10.0, 0.1, 75
    bounds = np.cumsum([0.0] + [long_s] * 6 + [short_s] * 4)
    gaps = np.linspace(0.9, 1.0, bursts) * long_s / bursts
    begin = np.concatenate([start + np.cumsum(gaps) - gaps[0] for start in bounds[:6]])
    line = describe(ns(*begin), ns(*(begin + 1e-3)), ns(*[1] * len(begin)), ns(*bounds))
    assert timeline.MAX_BURSTS // 2 < len(line.bursts) <= timeline.MAX_BURSTS


def test_a_burst_takes_the_shortest_of_its_times_in_which_nobody_waited() -> None:
    # Three iterations of 10 s: a burst of two collectives with 0.1 s between them, and another.
    begin = [10.0 * i + s for i in range(3) for s in (1.0, 2.1, 6.0)]
    lasted = (1.0, 1.2, 0.5, 1.0, 1.0, 2.0, 1.0, 0.5, 1.0)
    end = [b + d for b, d in zip(begin, lasted, strict=True)]
    size, bounds = ns(*[1] * 9), ns(0, 10, 20, 30)
    reached = timeline.Reaches(ns(*begin), np.zeros(9, bool))

    def least_s(*waiting: int) -> list[float]:
        moving = np.array([i not in waiting for i in range(9)])
        line = timeline.describe(ns(*begin), ns(*end), size, bounds, reached, moving)
        assert line is not None
        return [burst.least_s for burst in line.bursts]

    assert least_s() == pytest.approx([1.6, 0.5])
    assert least_s(2, 6) == pytest.approx([2.1, 1.0])
    assert least_s(2, 5, 8) == pytest.approx([1.6, 0.0])
    assert [b.least_s for b in describe(ns(*begin), ns(*end), size, bounds).bursts] == [0.0, 0.0]
