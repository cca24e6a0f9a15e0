"""Verdicts on queues and marks from samples whose truth is known."""

from __future__ import annotations

import random
from dataclasses import replace
from math import comb, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.network.probe.qos_verdicts import (
    DROPPED,
    LevelVerdict,
    Queue,
    Sample,
    judge,
    wilson,
)

DSCP_OF = {0: 0, 1: 10, 2: 18}
TURNS, TICKS = 5, 40


def played(
    draw: random.Random,
    *,
    queue_s: float = 0.01,
    shares: frozenset[int] = frozenset(),
    last: frozenset[int] = frozenset(),
    offset_s: float = 0.0,
    drift: float = 0.0,
    noise_s: float = 1e-4,
    lost: dict[int, float] | None = None,
    seen: dict[int, int] | None = None,
    loaded: bool = True,
) -> list[Sample]:
    """Samples of a network whose loaded level 0 has a queue that the ``shares`` levels share.

    ``last`` levels wait for the loaded one; the other levels are served first.
    """
    samples = []
    tick = 0
    for turn in range(TURNS):
        for busy in (False, True) if loaded else (False,):
            for _ in range(TICKS):
                tick += 1
                # Other traffic, and this machine's load: alike for all probes of a tick.
                common_s = draw.expovariate(1 / noise_s)
                standing_s = draw.uniform(0.5, 1.0) * queue_s if busy else 0.0
                for level in draw.sample(sorted(DSCP_OF), len(DSCP_OF)):
                    waits = standing_s if level in shares or not level else 0.0
                    waits += 2 * queue_s if level in last and busy else 0.0
                    delay_s = common_s + waits + draw.expovariate(1 / noise_s)
                    delay_s += offset_s + drift * tick
                    dscp: int | None = (seen or {}).get(level, DSCP_OF[level])
                    if draw.random() < (lost or {}).get(level, 0.0):
                        delay_s, dscp = inf, None
                    samples.append(Sample(level, tick, turn, busy, delay_s, dscp))
    return samples


def queues(samples: list[Sample]) -> list[Queue]:
    return [one.queue for one in judge(samples, DSCP_OF, 0)]


def test_each_level_has_the_verdict_of_its_queue() -> None:
    draw = random.Random(1)
    assert queues(played(draw)) == ["loaded", "before", "before"]
    assert queues(played(draw, shares=frozenset({2}))) == ["loaded", "before", "same"]
    assert queues(played(draw, last=frozenset({1}))) == ["loaded", "after", "before"]
    assert queues(played(draw, loaded=False)) == ["not tried"] * 3
    assert queues(played(draw, queue_s=0.0)) == ["no queue"] * 3


@given(st.integers(0, 2**32), st.floats(-1e6, 1e6), st.floats(-1e-5, 1e-5))
@settings(max_examples=40, deadline=None)
def test_clocks_that_differ_change_no_verdict(seed: int, offset_s: float, drift: float) -> None:
    """An offset of days, and a drift of 10 us from tick to tick, against a queue of 10 ms."""
    samples = played(random.Random(seed), shares=frozenset({1}), offset_s=offset_s, drift=drift)
    assert queues(samples) == ["loaded", "same", "before"]


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_levels_that_share_a_queue_are_never_told_apart(seed: int) -> None:
    draw = random.Random(seed)
    noise_s = 10 ** draw.uniform(-6, 0)
    samples = played(
        draw, shares=frozenset({1, 2}), noise_s=noise_s, lost=dict.fromkeys(DSCP_OF, 0.05)
    )
    assert not {"before", "after"} & set(queues(samples))


@given(st.permutations(range(600)))
@settings(max_examples=20, deadline=None)
def test_the_order_of_the_samples_does_not_matter(order: list[int]) -> None:
    samples = played(random.Random(3), shares=frozenset({2}))
    shuffled = [samples[n] for n in order] + samples[600:]
    assert judge(shuffled, DSCP_OF, 0) == judge(samples, DSCP_OF, 0)


def test_a_far_host_that_is_too_slow_hides_the_networks_queues() -> None:
    samples = played(random.Random(4), shares=frozenset({1}))
    verdicts = judge(samples, DSCP_OF, 0, choked=True)
    assert [one.queue for one in verdicts] == ["loaded", "choked", "before"]
    assert not verdicts[1].is_right(0)


def test_a_queue_that_drops_all_is_served_last() -> None:
    """Level 0 is starved so that none of its probes arrives beside load: that is no tie."""
    samples = [
        replace(s, delay_s=inf, dscp=None) if s.loaded and not s.level else s
        for s in played(random.Random(5))
    ]
    verdicts = judge(samples, DSCP_OF, 0)
    assert [one.queue for one in verdicts] == ["loaded", "before", "before"]
    assert verdicts[0].loss_loaded == 1.0
    assert verdicts[0].wait_loaded_s == inf


def test_marks_that_change_and_classes_that_are_dropped() -> None:
    draw = random.Random(7)
    kept, remarked, dropped = judge(played(draw, seen={1: 8}, lost={2: 1.0}), DSCP_OF, 0)
    assert (kept.mark, remarked.mark, dropped.mark) == ("kept", "remarked", "dropped")
    assert remarked.seen == {8: 2 * TURNS * TICKS}
    assert "the far end sees DSCP 8" in remarked.text(0)
    assert remarked.queue == "before"
    assert dropped.text(0) == "dropped on the way: 100% lost without load"
    assert [one.is_right(0) for one in (kept, remarked, dropped)] == [True, False, False]


def test_nothing_arrives_and_nothing_was_sent() -> None:
    lost = [Sample(s.level, s.tick, s.turn, s.loaded) for s in played(random.Random(1))]
    assert [one.mark for one in judge(lost, DSCP_OF, 0)] == ["dropped"] * 3
    nothing = judge([], DSCP_OF, 0)
    assert [one.mark for one in nothing] == ["dropped"] * 3
    assert {one.text(0) for one in nothing} == {"dropped on the way: 100% lost without load"}


@given(st.integers(0, 2**32), st.floats(0.0, 0.03))
@settings(max_examples=40, deadline=None)
def test_a_little_loss_is_no_dropped_class(seed: int, share: float) -> None:
    verdicts = judge(played(random.Random(seed), lost={1: share}), DSCP_OF, 0)
    assert verdicts[1].mark == "kept"
    assert share < DROPPED


@pytest.mark.parametrize(
    ("queue", "above", "below"),
    [
        ("before", True, False),
        ("after", False, True),
        ("same", False, False),
        ("unclear", False, False),
        ("no queue", False, False),
        ("not tried", True, True),
    ],
)
def test_a_level_is_right_if_it_is_served_in_its_order(
    queue: Queue, above: bool, below: bool
) -> None:
    def right(level: int) -> bool:
        return LevelVerdict(level=level, dscp=0, mark="kept", queue=queue).is_right(3)

    assert (right(4), right(2)) == (above, below)


@given(st.integers(20, 80), st.floats(0.2, 0.8))
@settings(max_examples=60, deadline=None)
def test_the_bounds_hold_the_share_almost_always(count: int, share: float) -> None:
    """Exactly: the chance of each count of hits, summed over those whose bounds miss the share."""
    missed = sum(
        comb(count, hits) * share**hits * (1 - share) ** (count - hits)
        for hits in range(count + 1)
        if not wilson(hits, count)[0] - 1e-12 <= share <= wilson(hits, count)[1] + 1e-12
    )
    # 99.9% is what it has on average.
    assert missed < 0.005
    assert wilson(0, 0) == (0.0, 1.0)
