"""Compression: validity, Algorithm 1 against enumeration, and the paper's figures."""

from __future__ import annotations

import math
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import compress
from scipy import sparse

from crux_torch import _schedule
from crux_torch.schedule.model import Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.papers import compression, crux
from crux_torch.schedule.papers.baselines import compress_balanced, compress_first
from crux_torch.schedule.papers.compression import Edges
from crux_torch.schedule.papers.crux import best_cuts, compress_priorities, crossing_weights

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


def cut_weight(level, names, intensity, links) -> float:
    """Total intensity over contending pairs (the higher first in ``names``) that are set apart."""
    pairs = [(a, b) for a, b in combinations(names, 2) if links[a] & links[b]]
    return sum(intensity[a] for a, b in pairs if level[a] != level[b])


def crossing(weights, groups) -> float:
    n = len(weights)
    return sum(weights[u, v] for u in range(n) for v in range(u + 1, n) if groups[u] < groups[v])


@given(contending(), st.randoms())
def test_uses_the_given_levels_inverts_nobody_and_ignores_the_order(case, random) -> None:
    priority, intensity, links, levels = case
    level = compress(priority, intensity, links, levels, seed=3)
    assert set(level) == set(priority)
    assert set(level.values()) <= set(levels)
    for a, b in permutations(level, 2):
        if links[a] & links[b] and priority[a] > priority[b]:
            assert level[a] >= level[b]
    shuffled = random.sample(list(priority), len(priority))
    assert compress({n: priority[n] for n in shuffled}, intensity, links, levels, seed=3) == level


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_cuts_of_one_order_equal_enumeration(n, groups, data) -> None:
    numbers = data.draw(st.lists(st.integers(0, 9), min_size=n * n, max_size=n * n))
    weights = np.triu(np.array(numbers, float).reshape(n, n), 1)
    value, cuts = best_cuts(crossing_weights(weights), groups)
    best = max(
        crossing(weights, np.searchsorted(cut, np.arange(n), side="right"))
        for count in range(min(groups, n))
        for cut in combinations(range(1, n), count)
    )
    assert value == best
    assert crossing(weights, np.searchsorted(cuts, np.arange(n), side="right")) == best
    assert cuts.tolist() == sorted(set(cuts.tolist()))
    assert len(cuts) == min(groups, n) - 1


@settings(max_examples=20)
@given(st.integers(65, 110), st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_the_monotone_choice_loses_nothing(n, groups, seed) -> None:
    rng = np.random.default_rng(seed)
    weights = np.triu(rng.integers(0, 9, (n, n)) * (rng.random((n, n)) < 0.2), 1).astype(float)
    c = crossing_weights(weights)
    best = np.zeros(n + 1)
    for _ in range(groups - 1):
        best = np.array([max(best[j] + c[j, i] for j in range(i + 1)) for i in range(n + 1)])
    assert best_cuts(c, groups)[0] == best[n]


@settings(max_examples=30)
@given(contending(max_jobs=5))
def test_enough_orders_reach_the_optimum(case) -> None:
    priority, intensity, links, levels = case
    names = sorted(priority, key=lambda n: (-priority[n], n))
    found = compress(priority, intensity, links, levels, orders=300)
    optimum = 0.0
    for assigned in product(levels, repeat=len(names)):
        level = dict(zip(names, assigned, strict=True))
        if all(level[a] >= level[b] for a, b in combinations(names, 2) if links[a] & links[b]):
            optimum = max(optimum, cut_weight(level, names, intensity, links))
    assert cut_weight(found, names, intensity, links) == optimum


ONE_LINK = dict.fromkeys(FOUR, frozenset("x"))
FIGURE_14 = {"1": {*"ab"}, "2": {*"ac"}, "5": {*"bd"}, "3": {*"ce"}, "4": {*"df"}}


@pytest.mark.parametrize(
    ("priority", "intensity", "links", "levels", "expected"),
    [
        (FOUR, FOUR, FIGURE_13, (0, 1), {"1": 1, "2": 0, "3": 1, "4": 0}),
        (FOUR, FOUR | {"1": math.inf}, FIGURE_13, (0, 1), {"1": 1, "2": 0, "3": 1, "4": 0}),
        # Job 1 high, 2 and 5 medium, 3 and 4 low: all edges are cut.
        (
            {"1": 5.0, "2": 4.0, "5": 3.5, "3": 3.0, "4": 2.0},
            dict.fromkeys("12345", 1.0),
            FIGURE_14,
            (0, 1, 2),
            {"1": 2, "2": 1, "5": 1, "3": 0, "4": 0},
        ),
        # The order is total, and two cuts of four jobs part all pairs but that of least weight.
        (FOUR, FOUR, ONE_LINK, (0, 3, 5), {"1": 5, "2": 3, "3": 0, "4": 0}),
        # Jobs that meet nobody share the highest level, and on one level all are.
        (FOUR, FOUR, dict.fromkeys(FOUR, frozenset()), (2, 7), dict.fromkeys(FOUR, 7)),
        (FOUR, FOUR, ONE_LINK, (4,), dict.fromkeys(FOUR, 4)),
        ({}, {}, {}, (1,), {}),
    ],
)
def test_figures_and_edge_cases(priority, intensity, links, levels, expected) -> None:
    assert compress(priority, intensity, links, levels) == expected


def test_baselines_compress_by_rank_alone() -> None:
    two, three = np.array([0, 1]), np.array([1, 4, 6])
    assert compress_first(4, two).tolist() == [1, 0, 0, 0]
    assert compress_first(5, three).tolist() == [6, 4, 1, 1, 1]
    assert compress_balanced(4, two).tolist() == [1, 1, 0, 0]
    assert compress_balanced(6, three).tolist() == [6, 6, 4, 4, 1, 1]
    assert compress_balanced(2, three).tolist() == [6, 4]
    assert compress_balanced(0, three).tolist() == []


@pytest.mark.parametrize("levels", [(), (1, 1), (3, 2)])
def test_refuses_levels_that_do_not_ascend(levels) -> None:
    with pytest.raises(ValueError, match="ascending"):
        compress(FOUR, FOUR, FIGURE_13, levels)


def test_random_orders_are_topological_and_reach_all() -> None:
    # 0 -> 2, 1 -> 3, and 4 free: 30 topological orders.
    dag = Edges(np.ones(5), np.array([0, 1]), np.array([2, 3]))
    seen = set()
    for seed in range(60):
        start = dag.random_start_times(np.array([0, 0, 1, 1, 0]), 10, seed)
        for column in start.T:
            order = tuple(np.lexsort((np.arange(5), column)).tolist())
            assert order.index(0) < order.index(2)
            assert order.index(1) < order.index(3)
            seen.add(order)
    assert len(seen) == 30


@given(st.lists(st.sets(st.integers(0, 7), max_size=3), max_size=9))
def test_components_and_depths_are_those_of_the_listed_edges(uses: list[set[int]]) -> None:
    indices = [link for mine in uses for link in sorted(mine)]
    indptr = np.cumsum([0, *map(len, uses)])
    member = sparse.csr_array((np.ones(len(indices)), indices, indptr), shape=(len(uses), 8))
    meet = np.array([[bool(a & b) for b in uses] for a in uses]).reshape(len(uses), len(uses))
    _, label = sparse.csgraph.connected_components(meet) if uses else (0, np.zeros(0))
    assert compression.components_of(member).tolist() == label.tolist()
    depth: list[int] = []
    for j in range(len(uses)):
        depth.append(max((depth[i] + 1 for i in range(j) if meet[i, j]), default=0))
    start = indptr.astype(np.int64)
    assert _schedule.depths(start=start, links=np.int32(indices), link_count=8).tolist() == depth


@pytest.mark.parametrize("number", [_schedule.components, _schedule.depths])
@pytest.mark.parametrize(("start", "links"), [([0, 2], [0, 8]), ([0, 2], [0, -1]), ([0, 3], [0])])
def test_users_of_unknown_links_are_refused(number, start, links) -> None:
    with pytest.raises(ValueError, match=r"a job uses a link|starts must ascend"):
        number(start=np.int64(start), links=np.int32(links), link_count=8)


def test_the_first_order_is_breadth_first() -> None:
    wide = Edges(np.ones(6), np.array([0, 1, 0]), np.array([3, 4, 5]))
    starts = wide.random_start_times(np.array([0, 0, 0, 1, 1, 1]), 2, seed=1)[:, 0]
    assert starts[:3].max() < 1.0


class TestLargeInputs:
    levels = tuple(range(4))

    def case(self, jobs: int, links: int):
        rng = np.random.default_rng(0)
        rows = np.repeat(np.arange(jobs), 3)
        member = sparse.csr_array(
            (np.ones(len(rows)), (rows, rng.integers(0, links, len(rows)))), shape=(jobs, links)
        )
        member.sum_duplicates()
        return member, rng.random(jobs) + 0.1

    def cut(self, member, weight, level) -> float:
        shared = np.triu((member @ member.T).toarray() > 0, 1)
        assert not (shared & (level[:, None] < level[None, :])).any()
        return float(((shared & (level[:, None] != level[None, :])) * weight[:, None]).sum())

    def both(self, monkeypatch, case, name: str, value: int) -> tuple[float, float, str]:
        """The cut as it is and with a limit changed, and the notes of both."""
        member, weight = case
        level, before = compress_priorities(member, weight, self.levels, seed=0)
        monkeypatch.setattr(compression, name, value)
        changed, after = compress_priorities(member, weight, self.levels, seed=0)
        notes = " / ".join(("; ".join(before), "; ".join(after)))
        return self.cut(member, weight, level), self.cut(member, weight, changed), notes

    def test_cuts_between_runs_come_close_to_exact_ones(self, monkeypatch) -> None:
        coarse, exact, notes = self.both(monkeypatch, self.case(600, 150), "_POSITIONS", 600)
        assert 0.99 * exact <= coarse <= exact
        assert notes == "600 jobs contend: cut between 256 runs, then moved / "

    def test_pairs_that_are_not_listed_cost_little(self, monkeypatch) -> None:
        listed, runs, notes = self.both(monkeypatch, self.case(250, 20), "_PAIRS", 1)
        assert runs >= 0.9 * listed
        assert notes == " / 250 jobs over few links: one order, cut between runs"

    def test_fewer_orders_where_pairs_are_many(self, monkeypatch) -> None:
        ten, one, notes = self.both(monkeypatch, self.case(120, 40), "_VISITS", 1)
        assert one <= ten
        assert notes.endswith("contending pairs: 1 orders, not m = 10")

    def test_everyone_on_one_link_needs_no_pairs(self) -> None:
        jobs = 20_000
        member = sparse.csr_array(np.ones((jobs, 1)))
        level, _ = compress_priorities(member, np.ones(jobs), tuple(range(8)), seed=0)
        # All pairs contend alike: the best cut is into equal parts.
        assert (np.diff(level) <= 0).all()
        assert np.bincount(level, minlength=8).max() <= 1.05 * jobs / 8

    def test_a_decision_carries_the_notes(self, monkeypatch) -> None:
        jobs = tuple(Job(f"j{i}", 1, 1.0 + i, 1.0, (Flow(1.0, (("x",),)),)) for i in range(4))
        cluster = Cluster({"x": 1.0}, jobs)
        options = SchedulerOptions(levels=(0, 1))
        assert crux.crux_paper(cluster, options).notes == ()
        monkeypatch.setattr(compression, "_VISITS", 12)
        notes = ("6 contending pairs: 2 orders, not m = 10",)
        assert crux.crux_paper(cluster, options).notes == notes


@given(st.data())
def test_settled_cuts_weigh_no_less_and_no_single_move_gains(data) -> None:
    n = data.draw(st.integers(3, 12))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(sorted)
    edges = data.draw(st.lists(pairs.filter(lambda pair: pair[0] < pair[1]), min_size=1))
    above, below = np.array(edges).T
    weight = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(edges))), float)
    weight = weight[: len(edges)]
    start = sorted(data.draw(st.sets(st.integers(1, n - 1), min_size=1, max_size=3)))

    def parted(cuts) -> float:
        groups = np.searchsorted(cuts, [above, below], side="right")
        return float(weight[groups[0] != groups[1]].sum())

    settled = compression._settle(np.array(start), above, below, weight, n)
    assert parted(settled) >= parted(start)
    bounds = [0, *settled, n]
    for k, cut in enumerate(settled):
        for moved in range(bounds[k] + 1, bounds[k + 2]):
            others = [*settled[:k], moved, *settled[k + 1 :]]
            assert parted(others) <= parted(settled), (cut, moved)
