"""From steps and windows to durations, utilisation and the comparison."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.job import Step
from lab.measurement import Measurement, losses_equal
from lab.phases import Spread, Window, compute_seconds, durations, steps_within, utilisation


def _steps(start: float, period: float, compute: float, count: int) -> list[Step]:
    return [
        Step(i, start + i * period, start + i * period + compute, start + (i + 1) * period, hex(i))
        for i in range(count)
    ]


def test_only_whole_steps_inside_a_window_are_timed() -> None:
    steps = _steps(0.0, 1.0, 0.5, 10)
    assert len(durations(steps, [Window("w", 0.5, 4.0), Window("w", 7.0, 9.5)])) == 3 + 2
    assert durations(steps, []) == []


def test_a_step_across_the_edge_counts_by_its_part() -> None:
    steps = _steps(0.0, 2.0, 0.5, 3)
    assert steps_within(steps, [Window("w", 1.0, 4.5)]) == pytest.approx(0.5 + 1 + 0.25)


def test_utilisation_of_the_papers_example() -> None:
    # Figure 8 style: over 12 s one job computes 4 s on 2 of 4 devices, the other 6 s on the rest.
    done = {"a": 2.0, "b": 3.0}
    compute = {"a": 2.0, "b": 2.0}
    assert utilisation(done, compute, {"a": 2, "b": 2}, 12.0, 4) == pytest.approx(20 / 48)


@given(st.floats(0.1, 5), st.floats(0.0, 1.0), st.floats(0.5, 50))
def test_utilisation_of_one_steady_job_is_its_duty_cycle(
    period: float, share: float, length: float
) -> None:
    steps = _steps(0.0, period, share * period, int(length / period) + 2)
    windows = [Window("w", 0.0, length)]
    done = {"a": steps_within(steps, windows)}
    found = utilisation(done, {"a": share * period}, {"a": 2}, length, 2)
    assert found == pytest.approx(share, rel=1e-6, abs=1e-9)


def test_spread() -> None:
    spread = Spread.of([float(n) for n in range(11)])
    assert (spread.count, spread.median, spread.p10, spread.p90) == (11, 5.0, 1.0, 9.0)


def test_losses_are_compared_over_the_common_steps() -> None:
    a, b = _steps(0, 1, 0.5, 5), _steps(9, 2, 0.5, 3)
    assert losses_equal(a, b) == (True, 3)
    changed = [*b[:2], Step(2, 0, 0, 0, "0x1")]
    assert losses_equal(a, changed) == (False, 3)
    assert losses_equal(a, []) == (None, 0)


def test_a_measurement_becomes_cases_with_the_utilisation_that_they_had() -> None:
    alone_a, alone_b = _steps(0, 2, 1, 5), _steps(10, 4, 1, 5)
    together_a, together_b = _steps(30, 4, 1, 5), _steps(30, 5, 1, 4)
    crux_a, crux_b = _steps(60, 2, 1, 10), _steps(60, 5, 1, 4)
    seen = Measurement(
        stock={"a": alone_a + together_a, "b": alone_b + together_b},
        crux={"a": crux_a, "b": crux_b},
        alone={"a": [Window("", 0, 10)], "b": [Window("", 10, 30)]},
        together=[Window("together", 30, 50)],
        with_crux=[Window("with_crux", 60, 80)],
    )
    assert seen.compute_s() == {"a": 1.0, "b": 1.0}
    found = {case.key: case.utilisation for case in seen.cases()}
    assert found["alone"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert found["together"] == pytest.approx((1 / 4 + 1 / 5) / 2)
    assert found["with_crux"] == pytest.approx((1 / 2 + 1 / 5) / 2)
    assert seen.slowdown("a", "together") == pytest.approx(2.0)
    assert seen.slowdown("a", "with_crux") == pytest.approx(1.0)
    lanes = seen.timelines()[1].lanes
    assert [(i.start, i.end) for i in lanes[0].computing] == [(1.0, 2.0)]
    assert [(i.start, i.end) for i in lanes[0].waiting] == [(0.0, 1.0), (2.0, 3.0)]


def test_compute_time_is_the_median_of_the_windows_steps() -> None:
    steps = _steps(0, 1, 0.4, 5) + _steps(5, 1, 0.9, 5)
    assert compute_seconds(steps, [Window("w", 0, 5)]) == pytest.approx(0.4)
