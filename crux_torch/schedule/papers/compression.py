"""The communication contention DAG (paper §4.3), in parts that Algorithm 1 runs on one by one.

**Components.** Two jobs are in one component if a chain of shared links joins them. Each component
is compressed by itself, which loses nothing. An assignment is valid if it is valid on every edge of
the DAG, its cut is the sum over edges, and every edge lies inside one component. So the best whole
is the best of each component put together.

**Chains.** A component whose longest chain has at most K jobs needs no search: each job takes the
level of its depth, which is valid and cuts every edge. The other components are the parts.

**Size.** In large parts cuts are placed between runs of jobs, and fewer orders are tried
(``docs/understand/schedulers.md``), so that time and memory are linear in jobs and edges. Where
more than ``_PAIRS`` pairs meet on a component's links, edges are not listed. Such a component is
close to a total order, which has few topological orders. So only the order of priorities is cut,
and a pair counts once for each link that it shares. ``notes`` says when any of this happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from crux_torch import _schedule
from crux_torch.schedule.arrays import FloatArray, IntArray

_POSITIONS = 256
_PAIRS = 1 << 24
#: Edges times orders that are visited at most; a dense DAG has few orders to choose from.
_VISITS = 1 << 22
_LINKS_AT_ONCE = 1 << 13


@dataclass(frozen=True, slots=True)
class ContentionDag:
    """The part of the DAG that is left to Algorithm 1.

    Attributes:
        group: group of each job by rank, 0 the highest; final for jobs that are in no part.
        parts: components that must be searched.
        notes: steps that are more coarse than the paper's.
    """

    group: IntArray
    parts: Sequence[_Listed | _Crowd]
    notes: tuple[str, ...]


def contention_dag(
    member: Any, intensity: FloatArray, groups: int, *, orders: int, seed: int
) -> ContentionDag:
    """The DAG of jobs in the order of their priorities, for K = ``groups`` and m = ``orders``.

    ``member`` (sparse CSR), ``intensity`` and ``seed`` are those of
    :func:`~crux_torch.schedule.papers.crux.compress_priorities`.
    """
    weight = _finite(intensity)
    group = np.zeros(len(weight), np.int64)
    if groups < 2 or not member.nnz:
        return ContentionDag(group, (), ())
    component = components_of(member)
    parts: list[_Listed | _Crowd] = []
    listed = np.ones(len(weight), bool)
    for jobs in _crowded(member, component):
        parts.append(_Crowd(jobs, member[jobs], weight[jobs]))
        listed[jobs] = False
    depth = _schedule.depths(**_users(member))
    group[listed] = depth[listed]
    longest = np.zeros(int(component.max(initial=0)) + 1, np.int64)
    np.maximum.at(longest, component, depth)
    searched = np.flatnonzero(listed & (longest[component] >= groups))
    notes = [f"{len(p.jobs):,} jobs over few links: one order, cut between runs" for p in parts]
    if len(searched):
        part = edges_of(member[searched], weight[searched])
        tried = max(1, min(orders, _VISITS // max(1, len(part.above))))
        if tried < orders:
            notes.append(f"{len(part.above):,} contending pairs: {tried} orders, not m = {orders}")
        found = _split(part, searched, depth[searched], component[searched], tried, seed)
        coarse = [len(one.jobs) for one in found if len(one.jobs) > _POSITIONS]
        notes += [f"{n:,} jobs contend: cut between {_POSITIONS} runs, then moved" for n in coarse]
        parts += found
    return ContentionDag(group, parts, tuple(notes))


@dataclass(frozen=True, slots=True)
class Edges:
    """Jobs by rank, 0 having the highest priority, and an edge for every pair that shares a link.

    ``weight`` is the intensity of each job: the weight of every edge that leaves it. In every edge
    ``above < below``, so that ranks are a topological order.
    """

    weight: FloatArray
    above: IntArray
    below: IntArray

    def random_start_times(self, depth: IntArray, count: int, seed: int) -> FloatArray:
        """Start of each job in each of ``count`` random schedules, a column each.

        A job starts once it is released and all jobs above it have ended. Releases and durations
        are random, so the jobs by their start (then by rank) are a random topological order, and
        every topological order is possible. The first column has no releases: it is a
        breadth-first order. From column to column releases spread further.
        """
        rng = np.random.default_rng(seed)
        n = len(self.weight)
        spread = np.linspace(0.0, 1.0 + float(depth.max(initial=0)), count)
        start = rng.random((n, count)) * spread
        # Without this, jobs with nothing above them would tie in the breadth-first order.
        start[depth == 0] += rng.random((int((depth == 0).sum()), count))
        duration = rng.exponential(size=(n, count)) + 1e-9

        by_layer = np.lexsort((self.below, depth[self.below]))
        above, below = self.above[by_layer], self.below[by_layer]
        layers = np.searchsorted(depth[below], np.arange(1, int(depth.max(initial=0)) + 2))
        for begin, end in zip(layers.tolist(), layers[1:].tolist(), strict=False):
            here = below[begin:end]
            first = np.flatnonzero(np.diff(here, prepend=-1))
            over = above[begin:end]
            ended = np.maximum.reduceat(start[over] + duration[over], first, axis=0)
            start[here[first]] = np.maximum(start[here[first]], ended)
        return start


def components_of(member: Any) -> IntArray:
    """Component number of each job (row of the sparse matrix of jobs by links)."""
    return _schedule.components(**_users(member))


def _users(member: Any) -> dict[str, Any]:
    """A sparse matrix of jobs by links as csrc/schedule/schedule.h takes it."""
    start = member.indptr.astype(np.int64)
    return {"start": start, "links": member.indices, "link_count": member.shape[1]}


def edges_of(member: Any, weight: FloatArray) -> Edges:
    """The edges between jobs, in the order of rank, that use the links in their row."""
    used = sparse.csr_array(
        (np.ones(len(member.indices), np.int32), member.indices, member.indptr), shape=member.shape
    )
    pairs = (used @ used.T).tocoo()
    above, below = pairs.coords
    upper = above < below
    return Edges(weight, above[upper].astype(np.int64), below[upper].astype(np.int64))


def _split(
    edges: Edges, rank: IntArray, depth: IntArray, component: IntArray, orders: int, seed: int
) -> list[_Listed]:
    """The parts of a DAG, their random topological orders drawn together."""
    start = edges.random_start_times(depth, orders, seed)
    by_component = np.argsort(component, kind="stable")
    bounds = np.flatnonzero(np.diff(component[by_component], prepend=-1, append=-1))
    place = np.empty(len(component), np.int64)
    place[by_component] = np.arange(len(component))
    by_edge = np.argsort(component[edges.above], kind="stable")
    above, below = edges.above[by_edge], edges.below[by_edge]
    first_edge = np.searchsorted(component[above], component[by_component[bounds[:-1]]])
    found = []
    for c, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        jobs = by_component[begin:end]
        mine = slice(first_edge[c], first_edge[c + 1] if c + 1 < len(first_edge) else None)
        position = np.empty((orders, len(jobs)), np.int64)
        for o in range(orders):
            position[o, np.argsort(start[jobs, o], kind="stable")] = np.arange(len(jobs))
        weight = edges.weight[above[mine]]
        u, v = place[above[mine]] - begin, place[below[mine]] - begin
        found.append(_Listed(rank[jobs], orders, position, u, v, weight))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Listed:
    """A part whose edges are listed, between places in ``jobs``, which are ascending ranks.

    ``position`` is that of each job (column) in each topological order (row).
    """

    jobs: IntArray
    orders: int
    position: IntArray
    above: IntArray
    below: IntArray
    weight: FloatArray

    def weights(self, order: int) -> FloatArray:
        """Entry (u, v): weight of the edges from position u of that order to position v > u."""
        n = len(self.jobs)
        cells = min(n, _POSITIONS)
        row, column = (self.position[order, end] * cells // n for end in (self.above, self.below))
        summed = np.bincount(row * cells + column, self.weight, cells * cells)
        return np.asarray(summed.reshape(cells, cells), np.float64)

    def groups(self, order: int, cuts: IntArray) -> IntArray:
        """The group of each job, 0 the highest, if that order is cut at these positions."""
        n, position = len(self.jobs), self.position[order]
        if n > _POSITIONS:
            coarse = -(-cuts * n // _POSITIONS)
            cuts = _settle(coarse, position[self.above], position[self.below], self.weight, n)
        return np.asarray(np.searchsorted(cuts, position, side="right"))


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


class _Crowd:
    """A :class:`_Listed` with too many edges to list: one order, by priority, in runs of jobs."""

    orders = 1

    def __init__(self, jobs: IntArray, member: Any, weight: FloatArray) -> None:
        self.jobs = jobs
        n, links = member.shape
        runs = min(n, _POSITIONS)
        self._run = np.arange(n) * runs // n
        row = np.repeat(self._run, np.diff(member.indptr))
        moved = np.repeat(weight, np.diff(member.indptr))
        shape = (runs, links)
        intensity = sparse.csc_array((moved, (row, member.indices)), shape=shape)
        users = sparse.csc_array((np.ones(len(row)), (row, member.indices)), shape=shape)
        total = np.zeros((runs, runs))
        for begin in range(0, links, _LINKS_AT_ONCE):
            here = slice(begin, begin + _LINKS_AT_ONCE)
            total += intensity[:, here].toarray() @ users[:, here].toarray().T
        self._weights: FloatArray = np.triu(total, 1)

    def weights(self, order: int) -> FloatArray:
        return self._weights

    def groups(self, order: int, cuts: IntArray) -> IntArray:
        return np.asarray(np.searchsorted(cuts, self._run, side="right"))


def _finite(weight: FloatArray) -> FloatArray:
    finite = weight[np.isfinite(weight)]
    return np.where(np.isfinite(weight), weight, finite.max() if len(finite) else 1.0)
