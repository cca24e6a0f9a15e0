"""Compression: validity, the DP against enumeration, and the paper's figures."""

from __future__ import annotations

from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import on_links
from scipy import sparse

from crux_torch.schedule import compression
from crux_torch.schedule.compression import best_cut, compress, compress_ranked, cut_weight
from crux_torch.schedule.dag import ContentionDag
from crux_torch.schedule.sincronia import compress_first
from crux_torch.schedule.varys import compress_balanced

FOUR = {"1": 4.0, "2": 3.0, "3": 2.0, "4": 1.0}
FIGURE_13 = {"1": {"x"}, "2": {"x"}, "3": {"y"}, "4": {"y"}}


@st.composite
def contending(draw: st.DrawFn, max_jobs: int = 10):
    names = "abcdefghij"[: draw(st.integers(0, max_jobs))]
    priority = {n: float(draw(st.integers(1, 6))) for n in names}
    intensity = {n: float(draw(st.integers(1, 9))) for n in names}
    links = {n: draw(st.sets(st.sampled_from("uvwxyz"), max_size=3)) for n in names}
    levels = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))))
    return priority, intensity, links, levels


def assert_valid(level, priority, links) -> None:
    for a, b in permutations(level, 2):
        if links[a] & links[b] and priority[a] > priority[b]:
            assert level[a] >= level[b]


def crossing(weights, groups) -> float:
    n = len(weights)
    return sum(weights[u, v] for u in range(n) for v in range(u + 1, n) if groups[u] < groups[v])


@settings(deadline=None)
@given(contending())
def test_never_inverts_and_uses_given_levels(case) -> None:
    priority, intensity, links, levels = case
    level = compress(priority, intensity, links, levels)
    assert set(level) == set(priority)
    assert set(level.values()) <= set(levels)
    assert_valid(level, priority, links)


@settings(deadline=None)
@given(contending(), st.randoms())
def test_deterministic_and_independent_of_order(case, random) -> None:
    priority, intensity, links, levels = case
    names = list(priority)
    random.shuffle(names)
    shuffled = {n: priority[n] for n in names}
    assert compress(priority, intensity, links, levels, seed=3) == compress(
        shuffled, intensity, links, levels, seed=3
    )


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_dp_equals_enumeration_of_cuts(n, groups, data) -> None:
    numbers = data.draw(st.lists(st.integers(0, 9), min_size=n * n, max_size=n * n))
    weights = np.triu(np.array(numbers, float).reshape(n, n), 1)
    value, cuts = best_cut(weights, groups)
    best = max(
        crossing(weights, np.searchsorted(cut, np.arange(n), side="right"))
        for count in range(min(groups, n))
        for cut in combinations(range(1, n), count)
    )
    assert value == best
    assert crossing(weights, np.searchsorted(cuts, np.arange(n), side="right")) == best
    assert list(cuts) == sorted(set(cuts))
    assert len(cuts) == min(groups, n) - 1


@settings(deadline=None, max_examples=20)
@given(st.integers(65, 110), st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_monotone_choice_loses_nothing(n, groups, seed) -> None:
    rng = np.random.default_rng(seed)
    weights = np.triu(rng.integers(0, 9, (n, n)) * (rng.random((n, n)) < 0.2), 1).astype(float)
    prefix = np.zeros((n + 1, n + 1))
    prefix[1:, 1:] = weights.cumsum(0).cumsum(1)
    best = np.zeros(n + 1)
    for _ in range(groups - 1):
        best = np.array(
            [max(best[j] + prefix[j, i] - prefix[j, j] for j in range(i + 1)) for i in range(n + 1)]
        )
    assert best_cut(weights, groups)[0] == best[n]


@settings(deadline=None, max_examples=30)
@given(contending(max_jobs=5))
def test_enough_orders_reach_the_optimum(case) -> None:
    priority, intensity, links, levels = case
    names = sorted(priority, key=lambda n: (-priority[n], n))
    found = compress(priority, intensity, links, levels, orders=300)
    optimum = 0.0
    for assigned in product(levels, repeat=len(names)):
        level = dict(zip(names, assigned, strict=True))
        if all(level[a] >= level[b] for a, b in combinations(names, 2) if links[a] & links[b]):
            optimum = max(optimum, cut_weight(level, priority, intensity, links))
    assert cut_weight(found, priority, intensity, links) == optimum


def test_figure_13() -> None:
    assert compress(FOUR, FOUR, FIGURE_13, (0, 1)) == {"1": 1, "2": 0, "3": 1, "4": 0}
    levels = np.array([0, 1])
    assert compress_first(4, levels).tolist() == [1, 0, 0, 0]
    assert compress_balanced(4, levels).tolist() == [1, 1, 0, 0]


def test_baseline_compressions_on_more_levels() -> None:
    levels = np.array([1, 4, 6])
    assert compress_first(5, levels).tolist() == [6, 4, 1, 1, 1]
    assert compress_balanced(6, levels).tolist() == [6, 6, 4, 4, 1, 1]
    assert compress_balanced(2, levels).tolist() == [6, 4]
    assert compress_balanced(0, levels).tolist() == []


def test_figure_14_all_edges_cut() -> None:
    # Job 1 high, 2 and 5 medium, 3 and 4 low.
    priority = {"1": 5.0, "2": 4.0, "5": 3.5, "3": 3.0, "4": 2.0}
    links = {"1": "ab", "2": "ac", "5": "bd", "3": "ce", "4": "df"}
    sets = on_links(**links)
    level = compress(priority, priority, sets, (0, 1, 2))
    assert level == {"1": 2, "2": 1, "5": 1, "3": 0, "4": 0}


def test_clique_is_cut_by_weight() -> None:
    # One link for all: the order is total, and two cuts of four jobs part all but one pair.
    one = {job: {"x"} for job in FOUR}
    level = compress(FOUR, FOUR, one, (0, 3, 5))
    assert level == {"1": 5, "2": 3, "3": 0, "4": 0}


def test_jobs_that_meet_nobody_take_the_highest_level() -> None:
    assert compress(FOUR, FOUR, dict.fromkeys(FOUR, ()), (2, 7)) == dict.fromkeys(FOUR, 7)
    assert compress({}, {}, {}, (1,)) == {}


@pytest.mark.parametrize("levels", [(), (1, 1), (3, 2)])
def test_refuses_levels_that_do_not_ascend(levels) -> None:
    with pytest.raises(ValueError, match="ascending"):
        compress(FOUR, FOUR, FIGURE_13, levels)


def test_infinite_intensity_does_not_spoil_the_sum() -> None:
    intensity = {**FOUR, "1": float("inf")}
    level = compress(FOUR, intensity, FIGURE_13, (0, 1))
    assert level == {"1": 1, "2": 0, "3": 1, "4": 0}


def test_random_orders_are_topological_and_reach_every_one() -> None:
    # 0 above 2, 1 above 3, 4 alone: 30 of 120 orders are topological.
    dag = ContentionDag(np.ones(5), np.array([0, 1]), np.array([2, 3]))
    seen = set()
    for seed in range(60):
        start = dag.random_start_times(dag.depth(), 10, seed)
        for column in start.T:
            order = tuple(np.lexsort((np.arange(5), column)).tolist())
            assert order.index(0) < order.index(2)
            assert order.index(1) < order.index(3)
            seen.add(order)
    assert len(seen) == 30


def large_case(jobs: int, links: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(jobs), 3)
    member = sparse.csr_array(
        (np.ones(len(rows)), (rows, rng.integers(0, links, len(rows)))), shape=(jobs, links)
    )
    member.sum_duplicates()
    return member, rng.random(jobs) + 0.1


def cut_of(member, weight, level) -> tuple[float, float]:
    shared = np.triu((member @ member.T).toarray() > 0, 1)
    inverted = shared & (level[:, None] < level[None, :])
    assert not inverted.any()
    parted = shared & (level[:, None] != level[None, :])
    return float((parted * weight[:, None]).sum()), float((shared * weight[:, None]).sum())


def test_large_component_is_valid_and_close_to_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    member, weight = large_case(600, 150)
    levels = tuple(range(4))
    coarse = cut_of(member, weight, compress_ranked(member, weight, levels, seed=0))[0]
    monkeypatch.setattr(compression, "_POSITIONS", 600)
    exact = cut_of(member, weight, compress_ranked(member, weight, levels, seed=0))[0]
    assert coarse >= 0.99 * exact


def test_crowded_component_is_valid_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    member, weight = large_case(400, 20)
    levels = tuple(range(8))
    listed = cut_of(member, weight, compress_ranked(member, weight, levels, seed=0))[0]
    monkeypatch.setattr(compression, "_PAIRS", 1)
    runs = cut_of(member, weight, compress_ranked(member, weight, levels, seed=0))[0]
    assert runs >= 0.9 * listed


def test_everyone_on_one_link_needs_no_pairs() -> None:
    jobs = 20_000
    member = sparse.csr_array(np.ones((jobs, 1)))
    level = compress_ranked(member, np.ones(jobs), tuple(range(8)), seed=0)
    # All pairs contend alike: the best cut is into equal parts.
    sizes = np.bincount(level, minlength=8)
    assert (np.diff(level) <= 0).all()
    assert sizes.max() <= 1.05 * jobs / 8
