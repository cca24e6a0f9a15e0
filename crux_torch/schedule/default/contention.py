"""Correction factors against every job that a job contends with, not one reference job alone.

The paper notes (§7.1) that the reference should be all combinations of contending jobs, weighted
by how often they contend, and that this takes exponential time. This module compares pairs instead,
so its time grows with the number of pairs that share links.

Every such pair plays the game of §4.2. Its result f_jr says what k_j / k_r should be. The k that
agree best with all games minimise

    sum over pairs of w_jr (log k_j - log k_r - log f_jr)^2,

a weighted least squares problem (the HodgeRank of a tournament). The weight w_jr says how much the
two contend: on each link that both use, the smaller of the two link times that they ask for in a
second, summed over links. Two jobs that meet only each other get the paper's factor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from crux_torch.schedule.arrays import Arrays, FloatArray, IntArray
from crux_torch.schedule.model import Memory
from crux_torch.schedule.papers.compression import components_of
from crux_torch.schedule.papers.correction import K_MAX, K_MIN, correction_factors, player
from crux_torch.schedule.papers.crux import Priorities
from crux_torch.schedule.papers.intensity import intensities, solo_periods_s, transfer_times_s

#: Games that a job plays at least, if it has rivals: with those that it contends with most.
_NEIGHBOURS = 8
#: Jobs of one link that are paired: those that ask for most of it.
_ON_LINK = 24
#: The iteration ends after so many rounds, or when no log k moves by more than this.
_ROUNDS = 200
_SETTLED = 1e-6


def contention_priorities(arrays: Arrays, traffic: Any, memory: Memory | None = None) -> Priorities:
    """P_j = k_j I_j with k_j of :func:`contention_factors`; ``traffic`` is M_{j,e} in bytes."""
    t_s = transfer_times_s(arrays, traffic)
    intensity = intensities(arrays, t_s)
    correction = contention_factors(arrays, traffic, t_s, memory)
    return Priorities(correction * intensity, intensity, correction)


def contention_factors(
    arrays: Arrays, traffic: Any, t_s: FloatArray, memory: Memory | None = None
) -> FloatArray:
    """k_j of every job; 1 for those that contend with nobody.

    In each group of jobs that a chain of shared links joins, the geometric mean of the factors,
    weighted by how much each job contends, is 1.
    """
    one, other, weight = contending_pairs(arrays, traffic, t_s)
    if not len(one):
        return np.ones(len(arrays.jobs))
    players = list(map(player, arrays.jobs, t_s.tolist()))
    games = zip(one.tolist(), other.tolist(), strict=True)
    known = None if memory is None else memory.games
    factor = correction_factors([(players[r], players[j]) for r, j in games], known)
    log_k = _agree(one, other, weight, np.log(factor), components_of(traffic))
    return np.clip(np.exp(log_k), K_MIN, K_MAX)


def contending_pairs(
    arrays: Arrays, traffic: Any, t_s: FloatArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """Pairs of jobs (each once, the lower index first) that share links, and their weights.

    Each job keeps its ``_NEIGHBOURS`` heaviest pairs, so there are at most that many per job.
    """
    jobs = len(arrays.jobs)
    period_s = solo_periods_s(arrays, t_s)
    rows = np.repeat(np.arange(jobs), np.diff(traffic.indptr))
    asked = traffic.data / arrays.capacity_Bps[traffic.indices] / period_s[rows]
    by_link = np.lexsort((-asked, traffic.indices))
    start = np.searchsorted(traffic.indices[by_link], np.arange(traffic.shape[1] + 1))
    # Pairs at distance d in every link's list of users, for all links at once.
    position = np.arange(len(by_link)) - start[traffic.indices[by_link]]
    users = np.minimum(np.diff(start)[traffic.indices[by_link]], _ON_LINK)
    ones, others, weights = [], [], []
    for distance in range(1, _ON_LINK):
        first = np.flatnonzero(position + distance < users)
        if not len(first):
            break
        a, b = rows[by_link[first]], rows[by_link[first + distance]]
        ones.append(np.minimum(a, b))
        others.append(np.maximum(a, b))
        weights.append(asked[by_link[first + distance]])
    if not ones:
        nobody = np.zeros(0, np.int64)
        return nobody, nobody, np.zeros(0)
    shape = (jobs, jobs)
    entries = (np.concatenate(ones), np.concatenate(others))
    pairs = sparse.coo_array((np.concatenate(weights), entries), shape=shape).tocsr().tocoo()
    one, other = (index.astype(np.int64) for index in pairs.coords)
    kept = _strongest(one, other, pairs.data, jobs)
    return one[kept], other[kept], pairs.data[kept]


def _strongest(one: IntArray, other: IntArray, weight: FloatArray, jobs: int) -> IntArray:
    """Indices of the pairs that are among the ``_NEIGHBOURS`` heaviest of either job."""
    pair = np.tile(np.arange(len(one)), 2)
    job = np.concatenate((one, other))
    order = np.lexsort((pair, -weight[pair], job))
    start = np.searchsorted(job[order], np.arange(jobs))
    rank = np.arange(len(order)) - start[job[order]]
    return np.unique(pair[order[rank < _NEIGHBOURS]])


def _agree(
    one: IntArray, other: IntArray, weight: FloatArray, log_factor: FloatArray, group: IntArray
) -> FloatArray:
    """The log k that minimises the squares; its weighted mean is 0 in each group."""
    jobs = len(group)
    degree = np.bincount(one, weight, jobs) + np.bincount(other, weight, jobs)
    won = weight * log_factor
    pull = np.bincount(other, won, jobs) - np.bincount(one, won, jobs)
    free = degree > 0
    scale = np.where(free, degree, 1.0)
    of_group = np.bincount(group, degree)
    log_k = np.zeros(jobs)
    for _ in range(_ROUNDS):
        drawn = np.bincount(one, weight * log_k[other], jobs)
        drawn += np.bincount(other, weight * log_k[one], jobs)
        # Half a step of Jacobi's method: with whole steps a single pair would oscillate for ever.
        after = np.where(free, 0.5 * log_k + 0.5 * (drawn + pull) / scale, 0.0)
        mean = np.bincount(group, degree * after) / np.where(of_group > 0, of_group, 1.0)
        after = np.where(free, after - mean[group], 0.0)
        moved = float(np.abs(after - log_k).max(initial=0.0))
        log_k = after
        if moved < _SETTLED:
            break
    return log_k
