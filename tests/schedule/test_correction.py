"""The game of two jobs on one link, against the paper's figures and against long games."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from game_reference import Players, rates_when_second
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch import _schedule
from crux_torch.schedule.papers import correction
from crux_torch.schedule.papers.correction import K_MAX, K_MIN, GameJob, correction_factors
from evaluation.variants import factor
from evaluation.variants import play_game as play

# Figure 11: 10 GPUs each; job 1 computes 2 s and sends 2 s, job 2 half of each.
LONG = GameJob(2.0, ((1.0, 2.0),))
SHORT = GameJob(1.0, ((1.0, 1.0),))
# Figure 12: communication may start at half of the computation.
HIDDEN = GameJob(4.0, ((0.5, 1.0),))
EXPOSED = GameJob(2.0, ((0.5, 3.0),))
IDLE = GameJob(1.0, ((1.0, 0.0),))
GREEDY = GameJob(0.0, ((1.0, 1.0),))

seconds = st.floats(0.05, 5.0).map(lambda s: round(s, 3))
players = st.builds(
    lambda compute_s, bursts: GameJob(compute_s, tuple(sorted(bursts))),
    seconds,
    st.lists(
        st.tuples(st.sampled_from((0.0, 0.25, 0.5, 0.9, 1.0)), seconds), min_size=1, max_size=6
    ),
)


def long_run(reference: GameJob, job: GameJob) -> float:
    return float(correction_factors([(reference, job)])[0])


def test_example_1_has_the_papers_seconds_factor_and_utilisation() -> None:
    long_first, short_first = play(LONG, SHORT, 12.0), play(SHORT, LONG, 12.0)
    assert long_first.link_s == pytest.approx((6.0, 3.0))
    assert short_first.link_s == pytest.approx((6.0, 4.0))
    assert factor(LONG, SHORT, 12.0) == pytest.approx(1.5)
    assert long_run(LONG, SHORT) == pytest.approx(1.5, abs=1e-6)
    # GPUs are idle for 6 and 9 seconds: utilisation is 37.5%, and 41.7% the other way round.
    assert [12.0 - s for s in long_first.compute_s] == pytest.approx([6.0, 9.0])
    assert sum(short_first.compute_s) / 24.0 == pytest.approx(10 / 24)


def test_example_2_has_the_papers_idle_seconds() -> None:
    assert 12.0 - play(HIDDEN, EXPOSED, 12.0).compute_s[1] == pytest.approx(7.0)
    assert 12.0 - play(EXPOSED, HIDDEN, 12.0).compute_s[0] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("reference", "job", "k"),
    [
        # Both iterations take 4 s and the link is busy 4 of 4: they fall into step.
        (HIDDEN, EXPOSED, 1.0),
        # One hides any delay behind a long computation; the other hides none.
        (GameJob(10.0, ((0.0, 0.5),)), GameJob(0.77, ((1.0, 0.3),)), K_MAX),
        (GameJob(0.77, ((1.0, 0.3),)), GameJob(10.0, ((0.0, 0.5),)), K_MIN),
        (LONG, IDLE, 1.0),
        (IDLE, LONG, 1.0),
        (GREEDY, GREEDY, 1.0),
    ],
)
def test_factors_where_one_side_or_neither_is_harmed(
    reference: GameJob, job: GameJob, k: float
) -> None:
    assert long_run(reference, job) == k


@settings(max_examples=40)
@given(players, players)
def test_factors_are_bounded_and_reciprocal(one: GameJob, other: GameJob) -> None:
    forth, back = long_run(one, other), long_run(other, one)
    assert K_MIN <= forth <= K_MAX
    assert forth * back == pytest.approx(1.0)


@settings(max_examples=40)
@given(st.lists(players, min_size=2, max_size=5), st.integers(0, 3))
def test_neither_company_nor_memory_changes_a_factor(jobs: list[GameJob], kept: int) -> None:
    pairs = [(jobs[0], job) for job in jobs]
    found: dict[Any, float] = {}
    together = correction_factors(pairs, found).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(correction, "_REMEMBERED", kept)
        for known in range(1, len(jobs) + 1):
            assert correction_factors(pairs[:known], found).tolist() == together[:known]
    for pair, expected in zip(pairs, together, strict=True):
        assert correction_factors([pair]).tolist() == [expected]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (GameJob(1.0, ((0.5, 0.6),)), GameJob(1.3, ((1.0, 0.4),))),
        (GameJob(2.1, ((0.2, 0.3), (0.9, 0.8))), GameJob(0.7, ((0.0, 0.2), (1.0, 0.2)))),
        (GameJob(0.4, ((1.0, 0.3),)), GameJob(3.7, ((0.3, 1.1), (0.6, 1.2), (1.0, 0.5)))),
        (GameJob(1.0, tuple((at, 0.1) for at in (0.0, 0.1, 0.4, 0.6, 0.9))), LONG),
    ],
)
def test_the_long_run_agrees_with_a_long_game(first: GameJob, second: GameJob) -> None:
    assert long_run(first, second) == pytest.approx(
        factor(first, second, 3000.0, fresh=True), rel=0.1
    )


@settings(max_examples=60)
@given(st.lists(st.tuples(players, players), min_size=1, max_size=8), st.integers(1, 9))
def test_rates_are_those_of_the_game_in_numpy(
    pairs: list[tuple[GameJob, GameJob]], phases: int
) -> None:
    expected = [
        rates_when_second(Players([second]), Players([first]), phases, 3, 5, 1e-9)[0]
        for second, first in pairs
    ]
    found = played(pairs, phases=phases, warm_up=3, measured=5)
    if phases == 8:  # numpy adds eight numbers in the same order
        assert found == expected
    assert found == pytest.approx(expected, rel=1e-14)


def played(pairs: list[tuple[GameJob, GameJob]], **length: int) -> list[float]:
    jobs = [job for pair in pairs for job in pair]
    bursts = [(at * job.compute_s, link_s) for job in jobs for at, link_s in job.bursts]
    rates = _schedule.rates_when_second(
        compute_s=np.array([job.compute_s for job in jobs]),
        burst_start=np.cumsum([0, *(len(job.bursts) for job in jobs)]),
        due_s=np.array([due_s for due_s, _ in bursts]),
        burst_s=np.array([link_s for _, link_s in bursts]),
        second=np.arange(0, len(jobs), 2),
        first=np.arange(1, len(jobs), 2),
        rounding=1e-9,
        **length,
    )
    return rates.tolist()


def test_a_job_that_never_leaves_the_link_leaves_nothing_to_the_other() -> None:
    length = {"phases": 8, "warm_up": 8, "measured": 24}
    assert played([(SHORT, GREEDY)], **length) == [0.0]
    assert played([(GREEDY, SHORT)], **length) == pytest.approx([0.5], rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"second": np.array([2])},
        {"first": np.array([-1])},
        {"first": np.array([0, 1])},
        {"burst_start": np.array([0, 2])},
        {"burst_start": np.array([0, 0, 2])},
        {"burst_start": np.array([0, 1, 3])},
        {"due_s": np.ones(1)},
        {"phases": 0},
        {"measured": 0},
        {"warm_up": -1},
    ],
)
def test_numbers_out_of_their_range_are_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "compute_s": np.ones(2),
        "burst_start": np.arange(3),
        "due_s": np.ones(2),
        "burst_s": np.ones(2),
        "second": np.array([0]),
        "first": np.array([1]),
        "phases": 8,
        "warm_up": 8,
        "measured": 24,
        "rounding": 1e-9,
    }
    assert _schedule.rates_when_second(**right)[0] == pytest.approx(0.5)
    with pytest.raises(ValueError):
        _schedule.rates_when_second(**(right | wrong))
