"""The guard's judgement: what it may not do by chance, and what it must find."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from crux_torch.schedule.default.guard import (
    BATCH_ITERATIONS,
    ERROR,
    MIN_BATCHES,
    PAUSE,
    TOLERANCE,
    TRIAL_BATCHES,
    WAITING_S,
    Judgement,
    Member,
    Sample,
    Tally,
    enough,
    half_width_s,
    judge,
)

sys.path.insert(0, str(ROOT))
from benchmarks.guard import NOISES, Noise, trial

CAP = 3.0


def sample(mean_s: float, batches: int = 40, spread: float = 0.02) -> Sample:
    return Sample(batches, BATCH_ITERATIONS * batches, mean_s, (spread * mean_s) ** 2)


def member(before_s: float, after: Sample | float, **changes: float) -> Member:
    told = after if isinstance(after, Sample) else sample(after)
    values = {"gpus": 8, "compute_s": 0.6, "alone_s": 1.0, **changes}
    return Member(before=sample(before_s), after=told, **values)  # type: ignore[arg-type]


samples = st.builds(
    Sample,
    batches=st.integers(0, 300),
    iterations=st.integers(0, 3000),
    mean_s=st.floats(0.0, 100.0),
    variance=st.floats(0.0, 100.0),
)
members = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        Member,
        gpus=st.integers(1, 64),
        compute_s=st.floats(0.0, 10.0),
        alone_s=st.floats(0.001, 20.0),
        before=samples,
        after=samples,
        waiting_s=st.floats(0.0, 1e4),
    ),
    min_size=1,
)


@given(members, st.sampled_from([1.0, 3.0, math.inf]), st.booleans())
def test_a_judgement_has_its_reason_in_its_numbers(
    jobs: dict[str, Member], cap: float, late: bool
) -> None:
    found = judge(jobs, cap, late)
    enough_batches = MIN_BATCHES if late else TRIAL_BATCHES
    ended = all(job.after.batches >= enough_batches for job in jobs.values())
    assert (found.verdict != "open") or not ended
    assert not math.isnan(found.change)
    assert found.low <= found.high
    if found.verdict == "worse":
        certain = found.high < -TOLERANCE or found.slowed in jobs
        assert certain or (ended and found.change < -TOLERANCE)
    if found.verdict == "kept":
        assert not found.slowed
        assert found.high >= -TOLERANCE
        assert found.change >= -TOLERANCE if ended else found.low > -TOLERANCE
    if cap == math.inf:
        assert not found.slowed


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=60))
def test_a_tally_has_the_moments_of_its_batches(iterations: list[float]) -> None:
    tally = Tally(alone_s=5.0)
    batches, open_batch = [], []
    for iteration_s in iterations:
        tally.add(iteration_s)
        open_batch.append(iteration_s)
        if len(open_batch) >= BATCH_ITERATIONS and math.fsum(open_batch) >= 1.0:
            batches.append(np.mean(open_batch))
            open_batch = []
    found = tally.sample
    assert found.batches == len(batches)
    if len(batches) > 1:
        assert found.mean_s == pytest.approx(np.mean(batches))
        assert found.variance == pytest.approx(np.var(batches, ddof=1), abs=1e-12)


def test_one_long_iteration_is_a_pause_and_many_are_not() -> None:
    paused, slow, smooth = Tally(1.0), Tally(1.0), Tally(1.0)
    for n in range(50):
        smooth.add(1.5)
        paused.add(1.5)
        slow.add(100.0)
        if n % 10 == 0:
            paused.add(60.0)
    assert paused.sample == smooth.sample
    assert slow.sample.mean_s == PAUSE


def test_no_batch_spans_a_gap() -> None:
    tally = Tally(1.0)
    for _ in range(BATCH_ITERATIONS - 1):
        tally.add(1.0)
    tally.skip()
    tally.add(1.0)
    assert tally.sample.batches == 0


def test_the_bounds_hold_however_often_they_are_looked_at() -> None:
    """Of 600 sequences of 100 batches, hardly any ever leaves a bound of error 2%."""
    rng = np.random.default_rng(1)
    left = 0
    for _ in range(600):
        values = rng.lognormal(0.0, 0.3, 100)
        mean = math.exp(0.3**2 / 2)
        for n in range(MIN_BATCHES, 101):
            known = Sample(n, 5 * n, values[:n].mean(), values[:n].var(ddof=1))
            if known.mean_s - mean > half_width_s(known, 0.02):
                left += 1
                break
    assert left <= 0.03 * 600


@given(st.integers(MIN_BATCHES, 500), st.floats(1e-6, 0.2))
def test_a_bound_narrows_with_batches_and_widens_with_certainty(n: int, error: float) -> None:
    def width(batches: int, of: float) -> float:
        return half_width_s(Sample(batches, 5 * batches, 1.0, 0.01), of)

    assert width(n + 1, error) < width(n, error)
    assert width(n, error / 2) > width(n, error)
    assert half_width_s(Sample(MIN_BATCHES - 1, 1, 1.0, 0.01), error) == math.inf


def test_a_clear_loss_is_worse_and_a_clear_gain_is_kept() -> None:
    worse = judge({"a": member(1.5, 1.8), "b": member(1.5, 1.8)}, CAP)
    assert worse.verdict == "worse"
    assert worse.low < worse.change < worse.high < -TOLERANCE
    assert worse.change == pytest.approx(1.5 / 1.8 - 1)
    assert judge({"a": member(1.5, 1.4), "b": member(1.5, 1.2)}, CAP).verdict == "kept"


def test_times_that_cannot_be_give_no_numbers_that_cannot_be() -> None:
    tiny = Sample(40, 200, 1e-310, 0.0)
    told = judge({"a": Member(64, 0.6, 1.0, tiny, tiny)}, CAP)
    assert (told.change, told.low, told.high) == (0.0, 0.0, 0.0)


def test_what_counts_is_the_sum_of_busy_gpus() -> None:
    jobs = {"a": member(2.0, 1.25, gpus=32), "b": member(1.5, 2.5, gpus=2)}
    found = judge(jobs, CAP)
    assert found.verdict == "kept"
    before, after = 0.6 * (32 / 2.0 + 2 / 1.5), 0.6 * (32 / 1.25 + 2 / 2.5)
    assert found.change == pytest.approx(after / before - 1)
    weighted = {"a": member(2.0, 1.25, gpus=2), "b": member(1.5, 2.5, gpus=32)}
    assert judge(weighted, CAP).verdict == "worse"


def test_a_job_beyond_the_cap_is_a_reason_whatever_the_others_gain() -> None:
    jobs = {"a": member(2.0, 1.0, gpus=64), "b": member(1.5, 4.0, gpus=1)}
    assert judge(jobs, CAP) == judge(jobs, CAP)._replace(verdict="worse", slowed="b")
    assert judge(jobs, math.inf).verdict == "kept"
    # One that the plan before slowed down as much is none.
    as_before = {"a": member(2.0, 1.0, gpus=64), "b": member(4.0, 4.0, gpus=1)}
    assert judge(as_before, CAP).verdict == "kept"


def test_a_job_that_ends_no_iteration_is_found_without_one() -> None:
    others = member(1.5, 1.0)
    stuck = member(1.5, Sample(), waiting_s=WAITING_S)
    found = judge({"a": others, "b": stuck}, CAP)
    assert (found.verdict, found.slowed) == ("worse", "b")
    # A pause after many iterations is none.
    paused = member(1.5, 1.5, waiting_s=60.0)
    assert judge({"a": others, "b": paused}, CAP).verdict == "kept"


def test_nothing_is_kept_before_all_jobs_are_known() -> None:
    jobs = {"a": member(1.5, 1.0, gpus=64), "b": member(1.5, Sample(), gpus=1)}
    found = judge(jobs, CAP)
    assert found.low > -TOLERANCE
    assert found.verdict == "open"


def test_what_is_not_certain_in_the_end_is_decided_by_what_was_measured() -> None:
    def ended(after_s: float, **changes: Any) -> str:
        told = sample(after_s, TRIAL_BATCHES, spread=0.5)
        return judge({"a": member(1.5, told), "b": member(1.5, told)}, CAP, **changes).verdict

    assert [ended(s) for s in (1.4, 1.5, 1.53)] == ["kept", "kept", "worse"]
    none = {"a": member(1.5, Sample())}
    assert judge(none, CAP, late=True).verdict == "open"
    few = {"a": member(1.5, sample(1.53, MIN_BATCHES, spread=0.5))}
    assert [judge(few, CAP, late).verdict for late in (False, True)] == ["open", "worse"]


def test_enough_is_sooner_for_a_job_that_varies_less() -> None:
    assert enough(sample(1.0, MIN_BATCHES, spread=0.001))
    assert not enough(sample(1.0, MIN_BATCHES, spread=0.2))
    assert enough(sample(1.0, 40, spread=0.2))
    assert enough(sample(1.0, MIN_BATCHES, spread=0.2), patient=False)
    assert not enough(sample(1.0, MIN_BATCHES - 1, spread=0.0), patient=False)


def ends(factors: tuple[float, float, float], noise: Noise, count: int) -> list[Judgement]:
    rng = np.random.default_rng(2)
    return [trial(rng, factors, noise)[0] for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_of_a_plan_that_changes_nothing_hardly_ever_a_loss_is_certain(noise: str) -> None:
    found = ends((1.0, 1.0, 1.0), NOISES[noise], 60)
    certain = [j for j in found if j.slowed or j.high < -TOLERANCE]
    assert len(certain) <= max(2, 3 * ERROR * 60)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_a_plan_that_costs_a_quarter_is_taken_back(noise: str) -> None:
    found = ends((1.34, 1.34, 1.34), NOISES[noise], 20)
    assert all(judgement.verdict == "worse" for judgement in found)


def test_equal_members_are_judged_alike_in_any_order() -> None:
    jobs = {name: member(1.5, 1.4 + n / 10) for n, name in enumerate("abc")}
    items = list(jobs.items())
    random.Random(1).shuffle(items)
    assert judge(dict(items), CAP) == judge(jobs, CAP)
