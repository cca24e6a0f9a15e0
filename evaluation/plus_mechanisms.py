"""Single mechanisms of crux+, for the ablation of §4.4: its order, and its compression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from crux_torch.schedule.arrays import arrays_of, check_levels, choice_of, traffic_matrix
from crux_torch.schedule.contention import contention_priorities
from crux_torch.schedule.crux import compress_priorities, crux, levels_of
from crux_torch.schedule.crux_plus import GROUP_PLAYS, Twice, best_found, on_levels, ranks
from crux_torch.schedule.intensity import link_traffic
from crux_torch.schedule.model import Cluster, SchedulerOptions
from crux_torch.schedule.search import Assignment, dense, moves_of_levels

Path = Mapping[str, tuple[int, ...]]


def plus_order(cluster: Cluster, path: Path, options: SchedulerOptions) -> tuple[str, ...]:
    """crux+'s order of the jobs, the first to send first, where their paths are given."""
    arrays = arrays_of(cluster)
    traffic = traffic_matrix(arrays, choice_of(arrays, path))
    priorities = contention_priorities(arrays, traffic)
    level = arrays.by_name(levels_of(traffic, priorities, options)[0])
    start = crux(_on_paths(cluster, path), options)
    names = [job.name for job in arrays.jobs]
    own = tuple(tuple(path[name]) for name in names)
    starts = [Assignment(own, dense([of[name] for name in names])) for of in (start.level, level)]
    moves = moves_of_levels(len(options.levels))
    best = best_found(Twice(cluster, options.seed), starts, moves, GROUP_PLAYS)
    rank = ranks(names, dict(zip(names, best.level, strict=True)), priorities)
    return tuple(sorted(names, key=lambda name: -rank[name]))


def plus_compression(
    cluster: Cluster, path: Path, order: Sequence[str], options: SchedulerOptions
) -> dict[str, int]:
    """crux+'s levels where paths and the order of the jobs are given: Crux's, then searched.

    No job is put below one that it shares a link with and that comes after it in ``order``.
    """
    arrays = arrays_of(cluster)
    traffic = traffic_matrix(arrays, choice_of(arrays, path))
    names = [job.name for job in arrays.jobs]
    rank = {name: r for r, name in enumerate(order)}
    ranked = np.array([names.index(name) for name in order], np.int64)
    intensity = contention_priorities(arrays, traffic).intensity[ranked]
    cut, _ = compress_priorities(traffic[ranked], intensity, options.levels, seed=options.seed)
    links = {job.name: link_traffic(job, path[job.name]).keys() for job in arrays.jobs}
    pairs = [
        (i, k) if rank[names[i]] < rank[names[k]] else (k, i)
        for i, k in combinations(range(len(names)), 2)
        if not links[names[i]].isdisjoint(links[names[k]])
    ]
    usable = check_levels(options.levels)
    of_levels = moves_of_levels(len(usable))

    def moves(plan: Assignment) -> Iterator[Assignment]:
        for moved in of_levels(plan):
            if all(moved.level[above] >= moved.level[below] for above, below in pairs):
                yield moved

    own = tuple(tuple(path[name]) for name in names)
    start = Assignment(own, dense([int(cut[rank[name]]) for name in names]))
    best = best_found(Twice(cluster, options.seed), [start], moves, GROUP_PLAYS)
    return on_levels(usable, arrays.jobs, best.level)


def _on_paths(cluster: Cluster, path: Path) -> Cluster:
    """``cluster`` with each flow's candidates cut down to the one that ``path`` names."""
    jobs = tuple(
        replace(
            job,
            flows=tuple(
                replace(flow, candidates=(flow.candidates[chosen],))
                for flow, chosen in zip(job.flows, path[job.name], strict=True)
            ),
        )
        for job in cluster.jobs
    )
    return Cluster(cluster.capacity_Bps, jobs)
