"""The game of two jobs on one link, against the paper's figures and a long game."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.schedule import correction
from crux_torch.schedule.correction import (
    K_MAX,
    K_MIN,
    Player,
    correction_factor,
    correction_factors,
    play,
)

# Figure 11: 10 GPUs each; job 1 computes 2 s and sends 2 s, job 2 half of each.
LONG = Player(2.0, ((1.0, 2.0),))
SHORT = Player(1.0, ((1.0, 1.0),))
# Figure 12: communication may start at half of the computation.
HIDDEN = Player(4.0, ((0.5, 1.0),))
EXPOSED = Player(2.0, ((0.5, 3.0),))

seconds = st.floats(0.05, 5.0).map(lambda s: round(s, 3))
players = st.builds(
    lambda compute_s, bursts: Player(compute_s, tuple(sorted(bursts))),
    seconds,
    st.lists(
        st.tuples(st.sampled_from((0.0, 0.25, 0.5, 0.9, 1.0)), seconds), min_size=1, max_size=6
    ),
)


def test_example_1_is_exact() -> None:
    long_first = play(LONG, SHORT, 12.0)
    short_first = play(SHORT, LONG, 12.0)
    assert long_first.link_s == (6.0, 3.0)
    assert short_first.link_s == (6.0, 4.0)
    assert correction_factor(LONG, SHORT, 12.0) == 1.5
    # GPUs are idle for 6 and 9 seconds: utilisation is 37.5%, and 41.7% the other way round.
    assert [12.0 - s for s in long_first.compute_s] == [6.0, 9.0]
    assert sum(long_first.compute_s) / 24.0 == 0.375
    assert sum(short_first.compute_s) / 24.0 == pytest.approx(10 / 24, abs=1e-12)


def test_example_1_in_the_long_run() -> None:
    assert correction_factor(LONG, SHORT) == pytest.approx(1.5, abs=1e-6)


def test_example_2_idle_seconds() -> None:
    assert 12.0 - play(HIDDEN, EXPOSED, 12.0).compute_s[1] == 7.0
    assert 12.0 - play(EXPOSED, HIDDEN, 12.0).compute_s[0] == 6.0


def test_jobs_that_fall_into_step_need_no_correction() -> None:
    # Both iterations take 4 s and the link is busy 4 of 4: neither loses more than the first few.
    assert correction_factor(HIDDEN, EXPOSED) == 1.0


def test_bursts_are_sent_in_order_and_computation_goes_on() -> None:
    two = Player(4.0, ((0.25, 1.0), (0.5, 3.0)))
    alone = Player(100.0, ((1.0, 1.0),))
    outcome = play(two, alone, 12.0, phase_s=(0.0, 0.0))
    # Iteration: 4 s of computation, bursts from 1 to 2 and from 2 to 5; it takes 5 s.
    assert two.period_s == 5.0
    assert outcome.link_s[0] == pytest.approx(4 + 4 + 1)
    assert outcome.compute_s[0] == pytest.approx(4 + 4 + 2)


def test_preempted_burst_goes_on_where_it_stopped() -> None:
    high = Player(1.0, ((1.0, 1.0),))
    low = Player(0.5, ((1.0, 1.5),))
    # The low one gets the seconds 1..2 and 3..3.5 of its burst's 1.5, computes until 4,
    # and has the link from 5 on.
    assert play(high, low, 4.5).link_s[1] == pytest.approx(1.5)
    assert play(high, low, 6.0).link_s[1] == pytest.approx(2.5)


def test_only_one_side_harmed_is_bounded() -> None:
    # One hides any delay behind a long computation; the other hides none, and never gets in step.
    hides = Player(10.0, ((0.0, 0.5),))
    exposed = Player(0.77, ((1.0, 0.3),))
    assert correction_factor(hides, exposed) == K_MAX
    assert correction_factor(exposed, hides) == K_MIN


def test_a_job_without_traffic_has_factor_one() -> None:
    idle = Player(1.0, ((1.0, 0.0),))
    assert list(correction_factors(LONG, [idle, SHORT])) == [1.0, pytest.approx(1.5)]
    assert list(correction_factors(idle, [LONG])) == [1.0]


def test_saturating_reference_leaves_nothing() -> None:
    greedy = Player(0.0, ((1.0, 1.0),))
    k = correction_factors(greedy, [SHORT, greedy])
    assert K_MIN <= k[0] <= K_MAX
    assert k[1] == 1.0


def test_an_iteration_takes_time() -> None:
    with pytest.raises(ValueError, match="computation or communication"):
        play(Player(0.0, ()), SHORT, 1.0)


@settings(deadline=None)
@given(players, players)
def test_first_player_runs_as_if_alone(first: Player, second: Player) -> None:
    periods = 5
    outcome = play(first, second, periods * first.period_s, phase_s=(0.0, 0.0))
    assert outcome.link_s[0] == pytest.approx(periods * first.link_s, rel=1e-6)
    assert outcome.compute_s[0] == pytest.approx(periods * first.compute_s, rel=1e-6)
    assert sum(outcome.link_s) <= periods * first.period_s * (1 + 1e-9)


@settings(deadline=None)
@given(players, players)
def test_factors_are_bounded_and_reciprocal(one: Player, other: Player) -> None:
    forth, back = correction_factor(one, other), correction_factor(other, one)
    assert K_MIN <= forth <= K_MAX
    assert forth * back == pytest.approx(1.0)


@settings(deadline=None)
@given(st.lists(players, min_size=1, max_size=5))
def test_together_as_one_by_one(jobs: list[Player]) -> None:
    correction._played.cache_clear()
    together = correction_factors(jobs[0], jobs).tolist()
    for job, factor in zip(jobs, together, strict=True):
        correction._played.cache_clear()
        assert correction_factor(jobs[0], job) == factor


@settings(deadline=None)
@given(st.lists(players, min_size=2, max_size=5), st.integers(0, 3))
def test_what_is_remembered_changes_nothing(jobs: list[Player], kept: int) -> None:
    correction._played.cache_clear()
    fresh = correction_factors(jobs[0], jobs).tolist()
    correction._played.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(correction, "_REMEMBERED", kept)
        for known in range(1, len(jobs) + 1):
            assert correction_factors(jobs[0], jobs[:known]).tolist() == fresh[:known]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Player(1.0, ((0.5, 0.6),)), Player(1.3, ((1.0, 0.4),))),
        (Player(2.1, ((0.2, 0.3), (0.9, 0.8))), Player(0.7, ((0.0, 0.2), (1.0, 0.2)))),
        (Player(0.4, ((1.0, 0.3),)), Player(3.7, ((0.3, 1.1), (0.6, 1.2), (1.0, 0.5)))),
    ],
)
def test_long_run_agrees_with_a_long_game(first: Player, second: Player) -> None:
    horizon_s = 1000 * max(first.period_s, second.period_s)
    played = correction_factor(first, second, horizon_s, phase_s=(0.0, 0.0))
    assert correction_factor(first, second) == pytest.approx(played, rel=0.1)
