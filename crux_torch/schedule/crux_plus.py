"""crux+: Crux, then what the paper leaves on the table (§7.1).

Crux's plan is improved in two steps. First, correction factors come from every job that a job
contends with (:mod:`crux_torch.schedule.contention`), not from one reference job. Second, each
group of jobs that can meet each other, if it is small enough, searches for a better plan by playing
plans in the fluid engine (:mod:`crux_torch.schedule.search`). The search starts from Crux's plan,
from the corrected plan, from the corrected plan on fewer levels, and from plans on reconsidered
paths. Since Crux's plan is one of these, no group is worse off as far as the rehearsal can tell.
Fewer levels help a job that meets several others on different links: it moves only while all of
these links are free, which strict priority may almost never allow.

The budget is a number of plays, not seconds, so equal clusters give equal plans on any machine. The
groups with the most GPUs are searched first. A larger group keeps the best of the starts, or the
corrected plan where even these plays would take too long, or where the engine can't play its jobs
(bytes and periods that differ beyond what its clock resolves). ``Decision.notes`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import sparse

from crux_torch import _fluid
from crux_torch.schedule.arrays import (
    Arrays,
    IntArray,
    arrays_of,
    check_levels,
    choice_of,
    traffic_matrix,
)
from crux_torch.schedule.contention import contention_priorities
from crux_torch.schedule.contention_dag import components_of
from crux_torch.schedule.crux import Priorities, crux, levels_of
from crux_torch.schedule.model import Cluster, Decision, Job, SchedulerOptions
from crux_torch.schedule.rehearsal import Length, Rehearsal
from crux_torch.schedule.search import Assignment, Moves, dense, judge, moves_of_plans, search

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
    found = crux(cluster, options)
    traffic = traffic_matrix(arrays, choice_of(arrays, found.path))
    priorities = contention_priorities(arrays, traffic)
    corrected, _ = levels_of(traffic, priorities, options)
    path, level = dict(found.path), arrays.by_name(corrected)
    candidates = [
        (found.path, found.level),
        (found.path, level),
        *_simpler(cluster, arrays, traffic, found.path, priorities, options),
    ]
    left = PLAYS
    notes = []
    for jobs in _groups(arrays):
        if len(jobs) > PLAYED_JOBS or left <= 0:
            notes.append(f"{len(jobs)} jobs that can meet: no plan was played")
            continue
        rehearsal = Twice(Cluster(cluster.capacity_Bps, jobs), options.seed)
        names = [job.name for job in jobs]
        plans = (
            Assignment(tuple(paths[n] for n in names), dense([levels[n] for n in names]))
            for paths, levels in candidates
        )
        starts = list(dict.fromkeys(plans))
        moves = moves_of_plans(jobs, len(usable))
        budget = min(GROUP_PLAYS, left) if len(jobs) <= SEARCHED_JOBS else 0
        if not budget:
            notes.append(f"{len(jobs)} jobs that can meet: plans were compared, none was searched")
        try:
            best = best_found(rehearsal, starts, moves, budget)
        except _fluid.SpecError:
            notes.append(f"{len(jobs)} jobs that can meet: the engine can't play them")
            continue
        finally:
            left -= rehearsal.plays
        path.update(zip(names, best.path, strict=True))
        level.update(on_levels(usable, jobs, best.level))
    return Decision(
        path=path,
        level=level,
        priority=ranks([job.name for job in arrays.jobs], level, priorities),
        intensity=arrays.by_name(priorities.intensity),
        correction=arrays.by_name(priorities.correction),
        notes=(*found.notes, *notes),
    )


def _simpler(
    cluster: Cluster,
    arrays: Arrays,
    traffic: Any,
    path: Path,
    priorities: Priorities,
    options: SchedulerOptions,
) -> Iterator[tuple[Path, Mapping[str, int]]]:
    """Plans on fewer levels, and plans whose flows have reconsidered their paths."""
    usable = tuple(check_levels(options.levels).tolist())
    for count in COARSER:
        if count < len(usable):
            fewer = replace(options, levels=usable[-count:])
            yield path, arrays.by_name(levels_of(traffic, priorities, fewer)[0])
    swept = crux(cluster, options, sweeps=SWEEPS)
    yield swept.path, swept.level
    yield swept.path, dict.fromkeys(swept.level, usable[-1])


class Twice:
    """A brief rehearsal to search in, and a longer one from other phases to judge what it found."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.brief = Rehearsal(cluster, REHEARSED, seed=seed)
        self.long = Rehearsal(cluster, CONFIRMED, seed=seed + 1)

    @property
    def plays(self) -> int:
        return self.brief.plays + self.long.plays


def best_found(
    rehearsal: Twice, starts: Sequence[Assignment], moves: Moves, plays: int
) -> Assignment:
    """The best of what a search finds and of its starts, in the longer rehearsal.

    A search picks the best of many brief plays, so part of its lead is luck with the phases.
    """
    best = search(rehearsal.brief, starts, moves, plays)
    judged = judge(rehearsal.long, list(dict.fromkeys((*starts, best))))
    return max(judged, key=lambda plan: judged[plan])


def _groups(arrays: Arrays) -> Iterable[tuple[Job, ...]]:
    """Jobs that can meet, directly or through others, on any of their candidate paths.

    Groups of one are left out; those with the most GPUs come first.
    """
    sets = len(arrays.set_start) - 1
    flows = (np.ones(len(arrays.flow_set), np.int32), arrays.flow_set, arrays.flow_start)
    on_set = sparse.csr_array(flows, shape=(len(arrays.jobs), sets))
    finite = np.isfinite(arrays.capacity_Bps[arrays.path_links])
    links = (finite, arrays.path_links, arrays.path_start[arrays.set_start])
    per_set = sparse.csr_array(links, shape=(sets, len(arrays.capacity_Bps)))
    per_set.sum_duplicates()
    per_set.eliminate_zeros()
    member = on_set @ per_set.astype(np.int32)
    member.eliminate_zeros()
    groups: dict[int, list[Job]] = {}
    for job, label in zip(arrays.jobs, components_of(member.tocsr()).tolist(), strict=True):
        groups.setdefault(label, []).append(job)
    contending = [tuple(group) for group in groups.values() if len(group) > 1]
    return sorted(contending, key=lambda group: -sum(job.gpus for job in group))


def on_levels(usable: IntArray, jobs: Sequence[Job], level: Sequence[int]) -> dict[str, int]:
    """``level``, which counts up from 0, on the highest of the usable levels."""
    shift = len(usable) - 1 - max(level)
    return {job.name: int(usable[k + shift]) for job, k in zip(jobs, level, strict=True)}


def ranks(
    names: Sequence[str], level: Mapping[str, int], priorities: Priorities
) -> dict[str, float]:
    """A number for each job, a higher one first: by level, then by corrected priority."""
    priority = dict(zip(names, priorities.priority.tolist(), strict=True))
    order = sorted(names, key=lambda name: (level[name], priority[name]), reverse=True)
    return {name: float(len(order) - rank) for rank, name in enumerate(order)}
