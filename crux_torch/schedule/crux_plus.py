"""crux+: Crux, then what the paper leaves on the table (§7.1).

Crux's plan is improved in two steps. Correction factors come from every job that a job contends
with (:mod:`crux_torch.schedule.contention`), not from one reference job. Then groups of jobs that
can meet each other, if small enough, search for a better plan by playing plans in the fluid engine
(:mod:`crux_torch.schedule.search`), from several starts: Crux's own, the corrected one, that on
fewer levels, and some on reconsidered paths. Fewer levels, down to fair sharing on Crux's paths,
because a job that meets several others on different links moves only while all of these leave
theirs to it: under strict priority that may be next to never.

The budget is a number of plays, never seconds: equal clusters give equal plans on any machine. It
is spent on the groups with the most GPUs first, and no group gets more than ``GROUP_PLAYS``, so
that a decision takes bounded time whatever the cluster. A larger group keeps the best of the
starts, or the corrected one where even these plays would be too long, or where its jobs are such
that the engine can't play them (bytes and periods that differ beyond what its clock resolves).

Since Crux's plan is one of the starts, no group is worse off than under Crux as far as the
rehearsal can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from scipy import sparse

from crux_torch import _fluid
from crux_torch.schedule.arrays import (
    Arrays,
    IntArray,
    arrays_of,
    choice_of,
    traffic_matrix,
)
from crux_torch.schedule.compression import check_levels, compress, compress_ranked
from crux_torch.schedule.contention import contention_priorities
from crux_torch.schedule.crux import crux_full
from crux_torch.schedule.dag import components_of
from crux_torch.schedule.intensity import by_descending, link_traffic
from crux_torch.schedule.model import Cluster, Decision, Job
from crux_torch.schedule.options import SchedulerOptions
from crux_torch.schedule.priority import Priorities
from crux_torch.schedule.rehearsal import Length, Rehearsal
from crux_torch.schedule.search import (
    Moves,
    Plan,
    dense,
    judge,
    moves_of_levels,
    moves_of_plans,
    search,
)

#: Plays of one decision, and of one group of jobs.
PLAYS, GROUP_PLAYS = 2000, 400
#: Jobs of a group that searches, and of one that still plays its starts.
SEARCHED_JOBS, PLAYED_JOBS = 16, 64
#: Numbers of levels that are tried beside all of them.
COARSER = (1, 2, 4)
#: Times that flows reconsider their paths in some of the starts.
SWEEPS = 4
REHEARSED = Length(phases=1, iterations=150, rounds=5)
CONFIRMED = Length(phases=4, iterations=300, rounds=10)

Path = Mapping[str, tuple[int, ...]]


def crux_plus(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Paths and levels: Crux's, corrected and searched."""
    arrays = arrays_of(cluster)
    usable = check_levels(options.levels)
    found = crux_full(cluster, options)
    choice = choice_of(arrays, found.path)
    priorities = contention_priorities(arrays, traffic_matrix(arrays, choice))
    path, level = dict(found.path), _compressed(arrays, choice, priorities, options)
    candidates = [
        (found.path, found.level),
        (found.path, level),
        *_simpler(cluster, arrays, found.path, priorities, options),
    ]
    left = PLAYS
    for jobs in _groups(arrays):
        if len(jobs) > PLAYED_JOBS or left <= 0:
            continue
        rehearsal = _Twice(Cluster(cluster.capacity_Bps, jobs), options.seed)
        starts = list(
            dict.fromkeys(
                Plan(
                    tuple(paths[job.name] for job in jobs),
                    dense([levels[job.name] for job in jobs]),
                )
                for paths, levels in candidates
            )
        )
        moves = moves_of_plans(jobs, len(usable))
        budget = min(GROUP_PLAYS, left) if len(jobs) <= SEARCHED_JOBS else 0
        try:
            best = _found(rehearsal, starts, moves, budget)
        except _fluid.SpecError:
            continue
        finally:
            left -= rehearsal.plays
        path.update(zip((job.name for job in jobs), best.path, strict=True))
        level.update(_on(usable, jobs, best.level))
    names = [job.name for job in arrays.jobs]
    return Decision(
        path=path,
        level=level,
        priority=_ranks(names, level, priorities),
        intensity=dict(zip(names, priorities.intensity.tolist(), strict=True)),
        correction=dict(zip(names, priorities.correction.tolist(), strict=True)),
    )


def plus_order(cluster: Cluster, path: Path, options: SchedulerOptions) -> tuple[str, ...]:
    """crux+'s order of the jobs, the first to send first, where their paths are given."""
    arrays = arrays_of(cluster)
    choice = choice_of(arrays, path)
    priorities = contention_priorities(arrays, traffic_matrix(arrays, choice))
    start = crux_full(_on_paths(cluster, path), options)
    level = _compressed(arrays, choice, priorities, options)
    names = [job.name for job in arrays.jobs]
    own = tuple(tuple(path[name]) for name in names)
    starts = [Plan(own, dense([of[name] for name in names])) for of in (start.level, level)]
    moves = moves_of_levels(len(options.levels))
    best = _found(_Twice(cluster, options.seed), starts, moves, GROUP_PLAYS)
    rank = _ranks(names, dict(zip(names, best.level, strict=True)), priorities)
    return tuple(sorted(names, key=lambda name: -rank[name]))


def plus_compression(
    cluster: Cluster, path: Path, order: Sequence[str], options: SchedulerOptions
) -> dict[str, int]:
    """crux+'s levels where paths and the order of the jobs are given: Crux's, then searched.

    No job is put below one that it shares a link with and that comes after it in ``order``.
    """
    names = sorted(job.name for job in cluster.jobs)
    by_name = {job.name: job for job in cluster.jobs}
    links = {name: link_traffic(by_name[name], path[name]) for name in names}
    rank = {name: float(-r) for r, name in enumerate(order)}
    arrays = arrays_of(cluster)
    priorities = contention_priorities(arrays, traffic_matrix(arrays, choice_of(arrays, path)))
    intensity = dict(zip(names, priorities.intensity.tolist(), strict=True))
    usable = check_levels(options.levels)
    cut = compress(rank, intensity, links, options.levels, seed=options.seed)
    pairs = [
        (i, k) if rank[names[i]] > rank[names[k]] else (k, i)
        for i, k in combinations(range(len(names)), 2)
        if not links[names[i]].keys().isdisjoint(links[names[k]])
    ]
    of_levels = moves_of_levels(len(usable))

    def moves(plan: Plan) -> Iterator[Plan]:
        for moved in of_levels(plan):
            if all(moved.level[above] >= moved.level[below] for above, below in pairs):
                yield moved

    own = tuple(tuple(path[name]) for name in names)
    start = Plan(own, dense([cut[name] for name in names]))
    best = _found(_Twice(cluster, options.seed), [start], moves, GROUP_PLAYS)
    return _on(usable, [by_name[name] for name in names], best.level)


def _simpler(
    cluster: Cluster,
    arrays: Arrays,
    path: Path,
    priorities: Priorities,
    options: SchedulerOptions,
) -> Iterator[tuple[Path, Mapping[str, int]]]:
    """Plans on fewer levels, and plans whose flows have reconsidered their paths."""
    usable = tuple(check_levels(options.levels).tolist())
    choice = choice_of(arrays, path)
    for count in COARSER:
        if count < len(usable):
            fewer = replace(options, levels=usable[-count:])
            yield path, _compressed(arrays, choice, priorities, fewer)
    swept = crux_full(cluster, options, sweeps=SWEEPS)
    yield swept.path, swept.level
    yield swept.path, dict.fromkeys(swept.level, usable[-1])


class _Twice:
    """A brief rehearsal to search in, and a longer one from other phases to judge what it found."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.brief = Rehearsal(cluster, REHEARSED, seed=seed)
        self.long = Rehearsal(cluster, CONFIRMED, seed=seed + 1)

    @property
    def plays(self) -> int:
        return self.brief.plays + self.long.plays


def _found(rehearsal: _Twice, starts: Sequence[Plan], moves: Moves, plays: int) -> Plan:
    """The best of what a search finds and of its starts, in the longer rehearsal.

    A search picks the best of many brief plays, so part of its lead is luck with the phases.
    """
    best = search(rehearsal.brief, starts, moves, plays)
    judged = judge(rehearsal.long, list(dict.fromkeys((*starts, best))))
    return max(judged, key=lambda plan: judged[plan])


def _compressed(
    arrays: Arrays, choice: IntArray, priorities: Priorities, options: SchedulerOptions
) -> dict[str, int]:
    order = by_descending(priorities.priority)
    traffic = traffic_matrix(arrays, choice)
    level = compress_ranked(
        traffic[order], priorities.intensity[order], options.levels, seed=options.seed
    )
    return {arrays.jobs[j].name: k for j, k in zip(order.tolist(), level.tolist(), strict=True)}


def _groups(arrays: Arrays) -> Iterable[tuple[Job, ...]]:
    """Jobs that can meet, directly or through others, on any of their candidate paths.

    Groups of one are left out; those with the most GPUs come first.
    """
    jobs, links = len(arrays.jobs), len(arrays.capacity_Bps)
    sets = len(arrays.set_start) - 1
    shape = (jobs, sets)
    on_set = sparse.csr_array(
        (np.ones(len(arrays.flow_set), np.int32), arrays.flow_set, arrays.flow_start), shape=shape
    )
    entries = arrays.path_start[arrays.set_start]
    per_set = sparse.csr_array(
        (np.isfinite(arrays.capacity_Bps[arrays.path_links]), arrays.path_links, entries),
        shape=(sets, links),
    )
    per_set.sum_duplicates()
    per_set.eliminate_zeros()
    member = on_set @ per_set.astype(np.int32)
    member.eliminate_zeros()
    groups: dict[int, list[Job]] = {}
    for job, label in zip(arrays.jobs, components_of(member.tocsr()).tolist(), strict=True):
        groups.setdefault(label, []).append(job)
    contending = [tuple(group) for group in groups.values() if len(group) > 1]
    return sorted(contending, key=lambda group: -sum(job.gpus for job in group))


def _on(usable: IntArray, jobs: Sequence[Job], level: Sequence[int]) -> dict[str, int]:
    """``level``, which counts up from 0, on the highest of the usable levels."""
    shift = len(usable) - 1 - max(level)
    return {job.name: int(usable[k + shift]) for job, k in zip(jobs, level, strict=True)}


def _ranks(
    names: Sequence[str], level: Mapping[str, int], priorities: Priorities
) -> dict[str, float]:
    """A number for each job, a higher one first: by level, then by corrected priority."""
    priority = dict(zip(names, priorities.priority.tolist(), strict=True))
    order = sorted(names, key=lambda name: (level[name], priority[name]), reverse=True)
    return {name: float(len(order) - rank) for rank, name in enumerate(order)}


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
