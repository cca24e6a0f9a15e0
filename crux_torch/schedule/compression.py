"""Priority compression: many priorities onto the few levels of NICs and switches (paper §4.3).

**Components.** Jobs fall into components: two are in one if a chain of shared links joins them.
Each component is compressed by itself. That loses nothing: an assignment is valid if it is valid
on every edge of the contention DAG, and its cut is the sum over edges; every edge lies inside one
component, so both validity and cut of the whole are those of the parts, and the best whole is the
best of each part put together. Jobs of separate components have no common link, so that their
levels being equal or not changes nothing on the wire.

**Chains.** A component whose longest chain has at most K jobs needs no search: each job takes the
level of its depth, which is valid and cuts every edge. Other components are searched as in
Algorithm 1, over m random topological orders.

**Size.** The DP works on a matrix over positions of the order. Up to ``_POSITIONS`` jobs that is
the paper's exact one; in larger components a cut may lie only between ``_POSITIONS`` equal runs of
the order, and then each cut of the best order moves to its exact optimum between its neighbours
until none moves. Time and memory are then linear in jobs and edges. The number of edges is
bounded too: where more than ``_PAIRS`` pairs of jobs meet on a component's links (thousands of
jobs over one link, say), the DAG is not built. Such a component is close to a total order, which
has few topological orders; the order of priorities is cut, between runs of jobs, with matrix
entries summed over links. Pairs that share several links then count once for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from crux_torch.schedule.arrays import FloatArray, IntArray
from crux_torch.schedule.dag import ContentionDag, components_of, dag_of
from crux_torch.schedule.model import Link

#: m of Algorithm 1.
ORDERS = 10

_POSITIONS = 256
_PAIRS = 1 << 24
#: Edges times orders that are visited at most; a dense DAG has few orders to choose from.
_VISITS = 1 << 22
_COLUMNS = 64
_LINKS_AT_ONCE = 1 << 13


def compress(
    priority: Mapping[str, float],
    intensity: Mapping[str, float],
    links: Mapping[str, Collection[Link]],
    levels: Sequence[int],
    *,
    seed: int = 0,
    orders: int = ORDERS,
) -> dict[str, int]:
    """Maps jobs onto levels so that few jobs that share a link share a level.

    No job is put below one that it shares a link with and that has lower priority. Among the
    assignments that Algorithm 1 visits, the one with the largest total intensity of jobs that are
    set apart from a contending job below them is taken.

    Args:
        priority: P_j; equal ones rank in the order of names.
        intensity: I_j, the weight of a job's edges; infinite counts as the largest finite one.
        links: the links that each job uses.
        levels: those that may be used, ascending; a higher one goes first.
        seed: of the random topological orders.
        orders: m, how many of them are tried.

    Raises:
        ValueError: levels that are not ascending, or none.
    """
    names = sorted(priority, key=lambda name: (-priority[name], name))
    index: dict[Link, int] = {}
    rows, columns = [], []
    for row, name in enumerate(names):
        for link in dict.fromkeys(links[name]):
            rows.append(row)
            columns.append(index.setdefault(link, len(index)))
    member = sparse.csr_array(
        (np.ones(len(rows)), (rows, columns)), shape=(len(names), max(1, len(index)))
    )
    weight = np.array([intensity[name] for name in names], np.float64)
    level = compress_ranked(member, weight, levels, seed=seed, orders=orders)
    return dict(zip(names, level.tolist(), strict=True))


def compress_ranked(
    member: Any, weight: FloatArray, levels: Sequence[int], *, seed: int, orders: int = ORDERS
) -> IntArray:
    """:func:`compress` for jobs in the order of their priorities.

    Args:
        member: sparse CSR matrix of jobs by links; its entries say which links a job uses.
        weight: intensity of each job.
    """
    usable = check_levels(levels)
    groups = len(usable)
    weight = _finite(weight)
    group = np.zeros(len(weight), np.int64)
    if groups > 1 and member.nnz:
        component = components_of(member)
        sparse_jobs = np.ones(len(weight), bool)
        for jobs in _crowded(member, component):
            group[jobs] = _cut_runs(member[jobs], weight[jobs], groups)
            sparse_jobs[jobs] = False
        jobs = np.flatnonzero(sparse_jobs)
        dag = dag_of(member[jobs], weight[jobs])
        group[jobs] = _cut_components(dag, component[jobs], groups, seed, orders)
    return usable[::-1][group]


def check_levels(levels: Sequence[int]) -> IntArray:
    """``levels`` as an array; ValueError if there are none or they do not ascend."""
    usable = np.array(levels, np.int64)
    if not len(usable) or (np.diff(usable) <= 0).any():
        raise ValueError(f"levels must be one or more ascending numbers, not {tuple(levels)}")
    return usable


def best_cut(weights: FloatArray, groups: int) -> tuple[float, tuple[int, ...]]:
    """Max K-Cut of one topological order (Algorithm 1, lines 3 to 13).

    Args:
        weights: upper triangular; entry (u, v) is the weight of the edge from position u to v.
        groups: K.

    Returns:
        The cut's weight, and the positions at which the second and later groups begin. There are
        fewer than K groups if there are fewer positions.
    """
    values, cuts = _best_cuts(weights[None], min(groups, len(weights)))
    return float(values[0]), tuple(cuts[0].tolist())


def _best_cuts(weights: FloatArray, groups: int) -> tuple[FloatArray, IntArray]:
    """:func:`best_cut` of several orders of equal length, stacked along the first axis."""
    orders, n, _ = weights.shape
    # S: prefix sums; C(j, i) = S(j, i) - S(j, j): weight from the first j to positions j+1..i.
    prefix = np.zeros((orders, n + 1, n + 1))
    np.cumsum(weights, axis=1, out=prefix[:, 1:, 1:])
    np.cumsum(prefix[:, 1:, 1:], axis=2, out=prefix[:, 1:, 1:])
    crossing = prefix
    crossing -= np.diagonal(prefix, axis1=1, axis2=2).copy()[:, :, None]

    best = [np.zeros((orders, n + 1))]
    for _ in range(groups - 1):
        before = best[-1]
        after = np.empty_like(before)
        low = 0
        for begin in range(0, n + 1, _COLUMNS):
            end = min(begin + _COLUMNS, n + 1)
            scores = before[:, low:end, None] + crossing[:, low:end, begin:end]
            scores.max(axis=1, out=after[:, begin:end])
            # The optimal j does not decrease with i: later columns need no smaller one.
            low += int(scores[:, :, -1].argmax(axis=1).min())
        best.append(after)

    cuts = np.zeros((orders, groups - 1), np.int64)
    for o in range(orders):
        end = n
        for k in range(groups - 1, 0, -1):
            # Every group keeps a position: more groups never cut less.
            end = k + int((best[k - 1][o, k:end] + crossing[o, k:end, end]).argmax())
            cuts[o, k - 1] = end
    return best[-1][:, n], cuts


def _cut_components(
    dag: ContentionDag, component: IntArray, groups: int, seed: int, orders: int
) -> IntArray:
    """The group of each job, 0 being the highest, where the edges of the DAG are at hand."""
    depth = dag.depth()
    longest = np.zeros(int(component.max(initial=0)) + 1, np.int64)
    np.maximum.at(longest, component, depth)
    group = depth.copy()
    searched = np.flatnonzero(longest[component] >= groups)
    if len(searched):
        group[searched] = _search(
            dag.part(searched), depth[searched], component[searched], groups, seed, orders
        )
    return group


def _search(
    dag: ContentionDag,
    depth: IntArray,
    component: IntArray,
    groups: int,
    seed: int,
    orders: int,
) -> IntArray:
    """Algorithm 1 on every component."""
    orders = max(1, min(orders, _VISITS // max(1, len(dag.above))))
    start = dag.random_start_times(depth, orders, seed)
    by_component = np.argsort(component, kind="stable")
    bounds = np.flatnonzero(np.diff(component[by_component], prepend=-1, append=-1))
    first = np.empty(len(component), np.int64)
    first[by_component] = np.repeat(bounds[:-1], np.diff(bounds))
    position = np.empty((orders, len(component)), np.int64)
    for o in range(orders):
        sequence = np.lexsort((start[:, o], component))
        position[o, sequence] = np.arange(len(component))
    position -= first

    by_edge = np.argsort(first[dag.above], kind="stable")
    above, below = dag.above[by_edge], dag.below[by_edge]
    edges = np.searchsorted(first[above], bounds)
    group = np.zeros(len(component), np.int64)
    for c in range(len(bounds) - 1):
        jobs = by_component[bounds[c] : bounds[c + 1]]
        mine = slice(int(edges[c]), int(edges[c + 1]))
        u, v = position[:, above[mine]], position[:, below[mine]]
        o, cuts = _best_order(u, v, dag.weight[above[mine]], len(jobs), groups)
        group[jobs] = np.searchsorted(cuts, position[o, jobs], side="right")
    return group


def _best_order(
    above: IntArray, below: IntArray, weight: FloatArray, n: int, groups: int
) -> tuple[int, IntArray]:
    """Of several orders (rows of edge positions) the one with the largest cut, and its cuts."""
    orders = len(above)
    cells = min(n, _POSITIONS)
    row, column = above * cells // n, below * cells // n
    key = (np.arange(orders)[:, None] * cells + row) * cells + column
    weights = np.bincount(
        key.ravel(), np.broadcast_to(weight, key.shape).ravel(), orders * cells * cells
    ).reshape(orders, cells, cells)
    values, cuts = _best_cuts(weights.astype(np.float64), groups)
    o = int(np.argmax(values))
    if cells == n:
        return o, cuts[o]
    coarse = -(-cuts[o] * n // cells)
    return o, _settle(coarse, above[o], below[o], weight, n)


def _settle(
    cuts: IntArray, above: IntArray, below: IntArray, weight: FloatArray, n: int
) -> IntArray:
    """Moves each cut to its optimum between its neighbours until none gains."""
    cuts = np.concatenate(([0], cuts, [n]))
    moved = True
    while moved:
        moved = False
        for k in range(1, len(cuts) - 1):
            low, high = int(cuts[k - 1]), int(cuts[k + 1])
            inside = np.flatnonzero((above >= low) & (below < high))
            # A cut at p parts u and v if u < p <= v.
            change = np.bincount(above[inside] + 1 - low, weight[inside], high - low + 1)
            change -= np.bincount(below[inside] + 1 - low, weight[inside], high - low + 1)
            gain = np.cumsum(change)[1:-1]
            p = int(np.argmax(gain))
            # A real gain, not one of rounding, so that this ends.
            if gain[p] > gain[int(cuts[k]) - low - 1] * (1 + 1e-9):
                cuts[k], moved = low + 1 + p, True
    return np.asarray(cuts[1:-1])


def _crowded(member: Any, component: IntArray) -> list[IntArray]:
    """The components on whose links too many pairs of jobs meet to list them."""
    users = np.bincount(member.indices, minlength=member.shape[1]).astype(np.float64)
    rows = np.repeat(np.arange(member.shape[0]), np.diff(member.indptr))
    # Summed over a link's users, its number of users is its number of ordered pairs.
    pairs = np.bincount(component[rows], users[member.indices], int(component.max()) + 1)
    return [np.flatnonzero(component == c) for c in np.flatnonzero(pairs > _PAIRS)]


def _cut_runs(member: Any, weight: FloatArray, groups: int) -> IntArray:
    """The group of each job of a component that is too dense for its DAG to be listed."""
    n, links = member.shape
    runs = min(n, _POSITIONS)
    run = np.arange(n) * runs // n
    row = np.repeat(run, np.diff(member.indptr))
    moved = np.repeat(weight, np.diff(member.indptr))
    shape = (runs, links)
    intensity = sparse.csc_array((moved, (row, member.indices)), shape=shape)
    users = sparse.csc_array((np.ones(len(row)), (row, member.indices)), shape=shape)
    weights = np.zeros((runs, runs))
    for begin in range(0, links, _LINKS_AT_ONCE):
        part = slice(begin, begin + _LINKS_AT_ONCE)
        weights += intensity[:, part].toarray() @ users[:, part].toarray().T
    _, cuts = best_cut(np.triu(weights, 1), groups)
    return np.asarray(np.searchsorted(np.array(cuts, np.int64), run, side="right"))


def _finite(weight: FloatArray) -> FloatArray:
    finite = weight[np.isfinite(weight)]
    return np.where(np.isfinite(weight), weight, finite.max() if len(finite) else 1.0)


def cut_weight(
    level: Mapping[str, int],
    priority: Mapping[str, float],
    intensity: Mapping[str, float],
    links: Mapping[str, Collection[Link]],
) -> float:
    """The objective of compression: total intensity over contending pairs that are set apart."""
    names = sorted(priority, key=lambda name: (-priority[name], name))
    total = 0.0
    for i, high in enumerate(names):
        mine = set(links[high])
        for low in names[i + 1 :]:
            if level[high] != level[low] and not mine.isdisjoint(links[low]):
                total += intensity[high]
    return total
