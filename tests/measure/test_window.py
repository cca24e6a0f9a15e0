"""The record window: bounded in number and age, newest kept."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.measure.records import RECORD, RecordWindow


def records(*times_s: float) -> np.ndarray:
    made = np.zeros(len(times_s), dtype=RECORD)
    made["issue_ns"] = [round(t * 1e9) for t in times_s]
    return made


@given(
    sizes=st.lists(st.integers(0, 40), max_size=30),
    capacity=st.integers(1, 25),
)
def test_keeps_the_newest(sizes: list[int], capacity: int) -> None:
    window = RecordWindow(capacity, max_age_s=1e9)
    sent = 0
    for size in sizes:
        window.append(records(*range(sent, sent + size)))
        sent += size
        kept = window.records()["issue_ns"] // 10**9
        assert kept.tolist() == list(range(max(0, sent - capacity), sent))
        assert window.dropped == max(0, sent - capacity)


def test_drops_the_old_and_sorts() -> None:
    window = RecordWindow(100, max_age_s=10)
    window.append(records(1, 2, 5, 4, 3))
    assert (window.records()["issue_ns"] // 10**9).tolist() == [1, 2, 3, 4, 5]
    window.append(records(13.5))
    assert (window.records()["issue_ns"] // 10**9).tolist() == [3, 4, 5, 13]
    assert window.dropped == 0
    window.forget_before(10 * 10**9)
    assert len(window) == 1
    window.forget_before(20 * 10**9)
    assert len(window) == 0
    assert len(window.records()) == 0
