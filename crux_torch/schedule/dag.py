"""The communication contention DAG and random topological orders of it (paper §4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from crux_torch.schedule.arrays import FloatArray, IntArray, layers


@dataclass(frozen=True, slots=True)
class ContentionDag:
    """Jobs by rank, 0 having the highest priority, and an edge for every pair that shares a link.

    Attributes:
        weight: intensity of each job: the weight of every edge that leaves it.
        above: the job of higher priority of each edge.
        below: the other one; greater than ``above``, so that ranks are a topological order.
    """

    weight: FloatArray
    above: IntArray
    below: IntArray

    def depth(self) -> IntArray:
        """For each job the edges of the longest chain that ends in it."""
        return layers(self.above, self.below, len(self.weight))

    def part(self, jobs: IntArray) -> ContentionDag:
        """The DAG of ``jobs`` alone (ascending ranks), which are numbered anew from 0."""
        number = np.full(len(self.weight), -1)
        number[jobs] = np.arange(len(jobs))
        inside = (number[self.above] >= 0) & (number[self.below] >= 0)
        return ContentionDag(
            self.weight[jobs], number[self.above[inside]], number[self.below[inside]]
        )

    def random_start_times(self, depth: IntArray, count: int, seed: int) -> FloatArray:
        """For each job its start in each of ``count`` random schedules, a column each.

        A job starts once it is released and all jobs above it have ended. Releases and durations
        are random, so the jobs by their start (then by rank) are a random topological order, and
        every topological order is possible. The first column has no releases: it is a
        breadth-first order; from column to column releases spread further.
        """
        rng = np.random.default_rng(seed)
        n = len(self.weight)
        spread = np.linspace(0.0, 1.0 + float(depth.max(initial=0)), count)
        start = rng.random((n, count)) * spread
        # Breadth-first orders shuffle each layer, too: jobs with nothing above would else tie.
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
    """For each job (row of the sparse matrix of jobs by links) its component's number."""
    jobs, links = member.shape
    rows = np.repeat(np.arange(jobs), np.diff(member.indptr))
    graph = sparse.coo_array(
        (np.ones(len(rows), np.int8), (rows, jobs + member.indices.astype(np.int64))),
        shape=(jobs + links, jobs + links),
    )
    _, label = sparse.csgraph.connected_components(graph, directed=False)
    return np.asarray(label[:jobs], np.int64)


def dag_of(member: Any, weight: FloatArray) -> ContentionDag:
    """The DAG of jobs, in the order of rank, that use the links in their row of ``member``."""
    used = sparse.csr_array(
        (np.ones(len(member.indices), np.int32), member.indices, member.indptr),
        shape=member.shape,
    )
    pairs = (used @ used.T).tocoo()
    above, below = pairs.coords
    upper = above < below
    return ContentionDag(weight, above[upper].astype(np.int64), below[upper].astype(np.int64))
