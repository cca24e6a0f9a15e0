"""Crux (paper §4): select paths, assign priorities, compress them onto the network's levels.

Each function here is one part of §4, and its lines are the paper's steps;
``docs/understand/schedulers.md`` puts the two side by side, and names the modules that make a
decision for 5,000 jobs fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from crux_torch import _schedule
from crux_torch.network.topology import Topology
from crux_torch.schedule.arrays import (
    Arrays,
    FloatArray,
    IntArray,
    arrays_of,
    check_levels,
    choice_of,
    paths_of,
    traffic_matrix,
)
from crux_torch.schedule.model import Cluster, Decision, Flow, Job, Link, Memory, SchedulerOptions
from crux_torch.schedule.papers.compression import contention_dag
from crux_torch.schedule.papers.correction import correction_factors, player
from crux_torch.schedule.papers.intensity import (
    by_descending,
    intensities,
    per_second,
    remembered_transfer_times_s,
    solo_periods_s,
    transfer_times_s,
    unrouted_transfer_times_s,
)

#: m of Algorithm 1 ("in practice we set m = 10").
ORDERS = 10
#: Positions i of a topological order for which Algorithm 1 chooses j at a time.
_COLUMNS = 64


class Priorities(NamedTuple):
    """P_j = k_j I_j (Equation 3) and its factors, of each job in the order of names."""

    priority: FloatArray
    intensity: FloatArray
    correction: FloatArray


def crux_paper(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-full of §6.3: all three parts of §4.

    Raises:
        ClusterError: a cluster that contradicts itself.
        ValueError: levels that are not ascending, or none.
    """
    check_levels(options.levels)
    arrays = arrays_of(cluster, options.memory)
    choice = select_paths(arrays, options.memory)  # §4.1, in the order of GPU intensity
    traffic = traffic_matrix(arrays, choice)
    priorities = assign_priorities(arrays, traffic, options.memory)  # §4.2
    level, notes = levels_of(traffic, priorities, options)  # §4.3
    return _decision(arrays, choice, priorities, level, notes)


def select_paths(arrays: Arrays, memory: Memory | None = None, *, sweeps: int = 0) -> IntArray:
    """§4.1: jobs choose from the most GPU-intensive to the least, each the least congested path.

    Returns the candidate that each flow takes. In ``sweeps``, which the paper has none of, every
    flow then chooses again.
    """
    # t_j needs paths: an estimate breaks the circle
    t_s = remembered_transfer_times_s(arrays, memory or Memory())
    order = by_descending(intensities(arrays, t_s))  # "from the most GPU-intensive to the least"
    return place(arrays, order, t_s, sweeps=sweeps)  # "the least congested path at that moment"


def place(arrays: Arrays, order: IntArray, t_s: FloatArray, *, sweeps: int = 0) -> IntArray:
    """The candidate that each flow takes when jobs (by index) choose in ``order``.

    The loop is C++ (``csrc/schedule/place.cc``).

    Each flow of a job, the largest first, takes the candidate whose most utilised link is least
    utilised once the flow is on it; then the one with the smallest sum over its links; then the
    first. A link's utilisation is the share of its capacity that the jobs placed so far ask for
    while they meet nobody: bytes of an iteration over the job's own period, which follows from its
    t_j.

    In each of ``sweeps`` every flow then chooses again, all others in place, until none moves.
    """
    period_s = solo_periods_s(arrays, t_s)[arrays.flow_job]
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    flows = np.lexsort((-arrays.flow_bytes, rank[arrays.flow_job]))
    choice = np.empty(len(flows), np.int64)
    choice[flows] = _schedule.place(
        **arrays.candidates,
        flow_set=arrays.flow_set[flows],
        rate_Bps=per_second(arrays.flow_bytes, period_s)[flows],
        sweeps=sweeps,
    )
    return choice


def assign_priorities(arrays: Arrays, traffic: Any, memory: Memory | None = None) -> Priorities:
    """§4.2: the intensity of each job, corrected by a game against the reference job.

    ``traffic`` is M_{j,e}, the bytes of each job (row) on each link (column).
    """
    t_s = transfer_times_s(arrays, traffic)  # t_j = max_e M_{j,e} / B_e (Definition 2)
    intensity = intensities(arrays, t_s)  # I_j = W_j / t_j (Equation 2)
    correction = np.ones(len(arrays.jobs))
    if arrays.jobs:
        r = reference_job(arrays, traffic, t_s)  # "the most network traffic"
        players = list(map(player, arrays.jobs, t_s.tolist()))
        pairs = [(players[r], job) for job in players]
        known = None if memory is None else memory.games
        correction = correction_factors(pairs, known)  # k_j = (B_j - A_j) / (A_r - B_r)
        correction[r] = 1.0  # "we define k = 1" for the reference job
    return Priorities(correction * intensity, intensity, correction)  # P_j = k_j I_j (Equation 3)


def reference_job(arrays: Arrays, traffic: Any, t_s: FloatArray) -> int:
    """The job with the most traffic: bytes per second, over all its links, while it is alone.

    Per second and on every link, since the reference stands for the job that others are most
    likely to meet; of equals the first by name.
    """
    moved = np.asarray(traffic.sum(axis=1), np.float64)
    return int(np.argmax(per_second(moved, solo_periods_s(arrays, t_s))))


def levels_of(
    traffic: Any, priorities: Priorities, options: SchedulerOptions
) -> tuple[IntArray, tuple[str, ...]]:
    """:func:`compress_priorities` for jobs in the order of names."""
    order = by_descending(priorities.priority)
    level = np.empty(len(order), np.int64)
    level[order], notes = compress_priorities(
        traffic[order], priorities.intensity[order], options.levels, seed=options.seed
    )
    return level, notes


def compress_priorities(
    member: Any, intensity: FloatArray, levels: Sequence[int], *, seed: int, orders: int = ORDERS
) -> tuple[IntArray, tuple[str, ...]]:
    """§4.3, Algorithm 1: a level for each job, so that few contending jobs share one.

    No job is put below one of lower priority that it shares a link with.

    Args:
        member: jobs in the order of their priorities (rows) by the links that they use (columns).
        intensity: I_j, the weight of the edges of job j; infinite counts as the largest finite one.
        levels: those that may be used, ascending; a higher one goes first.
        seed: of the random topological orders.
        orders: m, how many of them are tried.

    Returns:
        The level of each job, and notes on steps that are more coarse than the paper's.

    Raises:
        ValueError: levels that are not ascending, or none.
    """
    usable = check_levels(levels)
    dag = contention_dag(member, intensity, len(usable), orders=orders, seed=seed)  # D = <V, E>
    for part in dag.parts:
        max_cut = -1.0
        output = (0, np.zeros(0, np.int64))
        for order in range(part.orders):  # lines 1, 2: RandomTopoOrder(D)
            crossing = crossing_weights(part.weights(order))  # lines 3 to 8: matrix C
            value, cuts = best_cuts(crossing, len(usable))  # lines 9 to 13: f(n, K) and Cut(n, K)
            if value > max_cut:  # line 14
                max_cut, output = value, (order, cuts)  # lines 15, 16
        dag.group[part.jobs] = part.groups(*output)
    return usable[::-1][dag.group], dag.notes


def crossing_weights(weights: FloatArray) -> FloatArray:
    """C_{j,i}: weight of the edges from the first j positions to positions j+1 to i (lines 3 to 8).

    Args:
        weights: entry (u, v) is the weight of the edge from position u of the order to v > u.
    """
    n = len(weights)
    prefix = np.zeros((n + 1, n + 1))
    prefix[1:, 1:] = weights.cumsum(axis=0).cumsum(axis=1)  # S, by its recurrence
    crossing: FloatArray = prefix - np.diagonal(prefix)[:, None]  # C_{j,i} = S_{j,i} - S_{j,j}
    return crossing


def best_cuts(crossing: FloatArray, groups: int) -> tuple[float, IntArray]:
    """f(n, K) and where the second and later groups of that cut begin (lines 9 to 13).

    There are fewer than K groups if there are fewer positions.
    """
    n = len(crossing) - 1
    groups = min(groups, n)
    f = [np.zeros(n + 1)]  # f(i, 1) = 0: one group cuts nothing
    for _ in range(groups - 1):
        before, after = f[-1], np.empty(n + 1)
        low = 0
        for i in range(0, n + 1, _COLUMNS):
            here = slice(i, i + _COLUMNS)
            score = before[low : i + _COLUMNS, None] + crossing[low : i + _COLUMNS, here]
            after[here] = score.max(axis=0)  # line 11: f(i, k) = max_j f(j, k - 1) + C_{j,i}
            low += int(score[:, -1].argmax())  # line 12: the choice g(i, k) does not fall with i
        f.append(after)
    cuts = np.zeros(groups - 1, np.int64)
    end = n
    for k in range(groups - 1, 0, -1):  # line 13: from the last group back; each keeps a position
        end = k + int((f[k - 1][k:end] + crossing[k:end, end]).argmax())
        cuts[k - 1] = end
    return float(f[-1][n]), cuts


def crux_pa(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-PA of §6.3: priority assignment only, on the default paths.

    Every job has a level of its own, from 0 to the number of jobs less one; ``options.levels`` is
    ignored.
    """
    arrays = arrays_of(cluster, options.memory)
    return _unique_priorities(arrays, choice_of(arrays, options.default_path), options.memory)


def crux_ps_pa(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-PS-PA of §6.3: path selection and priority assignment, a level for every job."""
    arrays = arrays_of(cluster, options.memory)
    return _unique_priorities(arrays, select_paths(arrays, options.memory), options.memory)


def _unique_priorities(arrays: Arrays, choice: IntArray, memory: Memory) -> Decision:
    priorities = assign_priorities(arrays, traffic_matrix(arrays, choice), memory)
    order = by_descending(priorities.priority)
    level = np.empty(len(order), np.int64)
    level[order] = np.arange(len(order))[::-1]
    return _decision(arrays, choice, priorities, level)


def _decision(
    arrays: Arrays,
    choice: IntArray,
    priorities: Priorities,
    level: IntArray,
    notes: tuple[str, ...] = (),
) -> Decision:
    return Decision(
        path=paths_of(arrays, choice),
        level=arrays.by_name(level),
        priority=arrays.by_name(priorities.priority),
        intensity=arrays.by_name(priorities.intensity),
        correction=arrays.by_name(priorities.correction),
        notes=notes,
    )


class Alone(NamedTuple):
    """A job that meets no other: its paths, t_j and period on them, and I_j in FLOP/s."""

    path: tuple[int, ...]
    t_s: float
    period_s: float
    intensity: float


def alone(job: Job, capacity_Bps: Mapping[Link, float], *, sweeps: int = 0) -> Alone:
    """``job`` on the paths that path selection gives it in an empty network.

    So its own flows meet only where they must. Links other than its own do no harm. ``sweeps``: see
    :func:`place`.

    Raises:
        ClusterError: a job that contradicts itself, or a link without capacity.
    """
    return alone_of(arrays_of(Cluster(capacity_Bps, (job,))), sweeps=sweeps)


def alone_of(arrays: Arrays, *, sweeps: int = 0) -> Alone:
    """As :func:`alone`, for the only job of ``arrays``."""
    before_s = unrouted_transfer_times_s(arrays)
    choice = place(arrays, np.zeros(1, np.int64), before_s, sweeps=sweeps)
    t_s = transfer_times_s(arrays, traffic_matrix(arrays, choice))
    period_s = solo_periods_s(arrays, t_s)
    intensity = intensities(arrays, t_s)
    return Alone(tuple(choice.tolist()), float(t_s[0]), float(period_s[0]), float(intensity[0]))


def link_time_s(matrix: Mapping[tuple[str, str], float], topology: Topology) -> float:
    """t_j (§3.2) of bytes from host to host, of a job alone and on the paths selected for it."""
    flows = tuple(
        Flow(moved, paths)
        for (src, dst), moved in sorted(matrix.items())
        if (paths := topology.candidate_paths(src, dst))
    )
    job = Job("", gpus=1, flops=0.0, compute_s=0.0, flows=flows)
    return alone(job, topology.capacity_Bps).t_s
