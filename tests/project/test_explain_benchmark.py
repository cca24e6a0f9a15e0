"""``benchmarks/explain.py``: what it makes of its windows, and of what `crux explain` says."""

from __future__ import annotations

import pytest

from benchmarks.explain import Round, StepParts, rows_of, table, verdict
from crux_torch.report.explanation import Explanation, Rival
from crux_torch.report.step_times import JobSteps


def told(job: str, **costs_s: float) -> Explanation:
    rivals = tuple(Rival(name, (), 0, None, cost, None, None) for name, cost in costs_s.items())
    return Explanation(job, "running", JobSteps(), rivals=rivals)


def a_round(extra_s: float) -> Round:
    """B costs A 100 ms and a bit more, C nothing; without B, A also computes 20 ms faster."""
    beside = {name: StepParts(0.5, 0.2) for name in "ABC"}
    without_b = {"A": StepParts(0.38 - extra_s, 0.18), "C": StepParts(0.5, 0.2)}
    without_c = {"A": StepParts(0.5 + extra_s, 0.2), "B": StepParts(0.5, 0.2)}
    without_a = {name: StepParts(0.5, 0.2) for name in "BC"}
    without = {"A": (without_a, 0, 1), "B": (without_b, 0, 1), "C": (without_c, 1, 1)}
    return Round([beside, beside], without)


def test_a_cost_is_what_the_wait_becomes_shorter_and_the_median_of_the_rounds() -> None:
    rounds = [a_round(extra_s) for extra_s in (0.0, 0.002, 0.004)]
    said = {"A": told("A", B=0.11, C=0.0), "B": told("B", A=0.0), "C": told("C", A=0.03)}
    rows = rows_of("crux", said, rounds, dict.fromkeys("ABC", True))
    found = {(row["job"], row["rival"]): row for row in rows}
    of_b = found["A", "B"]
    assert of_b["costs_s"] == pytest.approx(0.102)
    assert of_b["compute_s"] == pytest.approx(0.02), "told beside, and not part of the cost"
    assert of_b["rounds_s"] == pytest.approx([0.1, 0.102, 0.104])
    # Variance 4 ms², 4 degrees of freedom: 2.776 times 1.25 times 2 ms by the root of 3.
    assert of_b["resolution_s"] == pytest.approx(2.776 * 1.25 * 0.002 / 3**0.5, rel=1e-3)
    assert of_b["found"] == "yes"
    assert found["A", "C"]["found"] == "below"
    assert found["C", "A"]["found"] == "no", "nothing was measured, and 30 ms are told"
    text = table(rows)
    assert "are named as they are for 3 of 3 jobs" in text
    assert "of 6 costs: 1 within 20% of the measured one (yes), 4 too" in text


@pytest.mark.parametrize(
    ("told_s", "cost_s", "says"),
    [
        (0.081, 0.1, "yes"),
        (0.079, 0.1, "no"),
        (0.121, 0.1, "no"),
        (0.0, 0.004, "below"),
        (0.004, -0.004, "below"),
        (0.006, 0.004, "no"),
        (0.0, 0.006, "no"),
    ],
)
def test_what_counts_as_found_at_a_resolution_of_5_ms(
    told_s: float, cost_s: float, says: str
) -> None:
    assert verdict(told_s, cost_s, 0.005) == says
