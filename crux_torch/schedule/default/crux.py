"""The default policy: fair sharing on Crux's paths, or a plan that a rehearsal shows to be better.

1. **Safe start.** Every job gets Crux's paths (§4.1) and one level, so that nobody starves.
2. **Rehearsal.** The jobs fall into components that share no link. For each component a portfolio
   of plans is played (``rehearsal``): one level on Crux's paths and on the network's, paths that
   flows reconsidered, levels of corrected priorities (``contention``) on two, on four and on all,
   and the paper's levels.
3. **Search.** In a small component a search over paths and levels (``search``) adds plans. All of
   them race; levels are used only where they lead both one-level plans by ``LEAD``.
4. **Cap.** No plan with levels slows a job down by more than ``max_slowdown``, whatever the phases
   (``cap``). One whose rehearsal slows a job down by more than that, and more than fair sharing
   does, drops out.
5. **Guard.** Where plans are tried out (``SchedulerOptions.tried``), a component whose plan is not
   the safe one keeps that until the measurements of its jobs admit the better plan (``guard``).

Budgets are work of the engine, not seconds, so equal clusters give equal plans on any machine. A
component too large for its budget keeps one level on Crux's paths. One that has not changed keeps
its plan: it is looked up in the options' memory, not decided again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy import sparse

from crux_torch import _fluid
from crux_torch.schedule.arrays import (
    Arrays,
    arrays_of,
    check_levels,
    choice_of,
    paths_of,
    traffic_matrix,
)
from crux_torch.schedule.default.cap import SlowdownCap
from crux_torch.schedule.default.contention import contention_priorities
from crux_torch.schedule.default.rehearsal import Length, Rehearsal
from crux_torch.schedule.default.search import (
    Assignment,
    JobPaths,
    can_be_played,
    dense,
    moves_of_levels,
    moves_of_plans,
    race,
    search,
)
from crux_torch.schedule.model import Cluster, Decision, Job, Link, SchedulerOptions, Trial
from crux_torch.schedule.papers.compression import components_of
from crux_torch.schedule.papers.crux import (
    Priorities,
    assign_priorities,
    crux_paper,
    levels_of,
    select_paths,
)
from crux_torch.schedule.papers.intensity import intensities, transfer_times_s

#: Share by which levels must be better than none.
LEAD = 0.01
#: Units of work (5 to 10 ns) of a component of n jobs: the least, by n² and by n at most.
WORK, WORK_BY_SQUARE, WORK_BY_JOB = 2_000_000, 12_000, 500_000
#: Units of a component of few jobs: its search comes to most paths, each with good levels.
FEW_WORK, FEW_JOBS = 12_000_000, 8
#: Units of one decision.
ALL_WORK = 200_000_000
#: Most jobs of a component that searches, that tries reconsidered paths, that is played at all.
SEARCHED_JOBS, SWEPT_JOBS, PLAYED_JOBS = 16, 64, 128
SWEEPS = 4
#: Numbers of levels that corrected priorities are tried on, beside all of them.
COARSER = (2, 4)
#: Plays of a search; it is worth it where its share of the work affords so many plans a start.
BRIEF = Length(phases=1, iterations=150, rounds=5)
PLANS_A_START = 3
SEARCHING = 0.7
#: Work for telling the one-level plans apart, beside that for the others.
SETTLING = 0.5
#: Sets of start times of a race: of a component that searches, and of a larger one.
PHASES, FEW_PHASES = 4, 2
#: Components whose plans are remembered.
REMEMBERED = 1024
#: Digits of the name of a component and its plan: no two of a cluster's are equal by chance.
NAME_DIGITS = 24


def crux(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Paths and levels that are no worse than fair sharing, as far as a rehearsal can tell.

    ``options.max_slowdown`` caps every job's slowdown. A component plays the
    network's own paths if ``options.default_path`` has those of all its jobs.

    Raises:
        ClusterError: a cluster that contradicts itself.
        ValueError: levels that are not ascending, or none; a cap below 1.
    """
    arrays = arrays_of(cluster, options.memory)
    usable = check_levels(options.levels)
    if not options.max_slowdown >= 1:
        raise ValueError(f"max_slowdown is {options.max_slowdown}; expected 1 or more")
    selected = select_paths(arrays, options.memory)
    traffic = traffic_matrix(arrays, selected)
    path = paths_of(arrays, selected)
    level = dict.fromkeys(path, int(usable[-1]))
    notes = []
    trials = []
    left = ALL_WORK
    for count, component in _components(arrays, path, traffic, options, cluster.capacity_Bps):
        if component is None or left <= 0:
            notes.append(f"{count} jobs that meet share one level: no plan was played")
            continue
        left -= component.work
        key = component, options.levels, options.seed, options.max_slowdown
        decided: Decided = options.memory.recall(
            key, partial(_decided, component, options), REMEMBERED
        )
        if decided.note:
            notes.append(f"{count} jobs that meet: {decided.note}")
        found = decided.plan
        if options.tried is not None and found != component.safe:
            names = tuple(job.name for job in component.jobs)
            trial = Trial(decided.name, names, (decided.name, names[0]) in options.tried)
            trials.append(trial)
            found = found if trial.on else component.safe
        first = len(usable) - 1 - max(found.level)
        for job, own, k in zip(component.jobs, found.path, found.level, strict=True):
            path[job.name], level[job.name] = own, int(usable[first + k])
    intensity = arrays.by_name(intensities(arrays, transfer_times_s(arrays, traffic)))
    return Decision(
        path=path,
        level=level,
        # Orders jobs of one level, and does not change with jobs of other components.
        priority=intensity,
        intensity=intensity,
        notes=tuple(notes),
        trials=tuple(trials),
    )


def crux_first(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Safe start of :func:`crux`, at once: Crux's paths (§4.1), and one level for all."""
    top = check_levels(options.levels)[-1:]
    return crux_paper(cluster, replace(options, levels=tuple(top.tolist())))


class Component(NamedTuple):
    """Jobs that share links with each other and with nobody else: all that their plan depends on.

    Attributes:
        jobs: in the order of their names.
        capacity_Bps: (link, capacity) of the links of their candidates.
        selected: Crux's paths of each job.
        default: the network's own paths, if they are known.
        movable: True if they may take any of their candidates, as nobody else is on any of these.
    """

    jobs: tuple[Job, ...]
    capacity_Bps: tuple[tuple[Link, float], ...]
    selected: JobPaths
    default: JobPaths | None
    movable: bool

    @property
    def safe(self) -> Assignment:
        """Crux's paths, and one level."""
        return Assignment(self.selected, (0,) * len(self.jobs))

    @property
    def work(self) -> int:
        """Budget of its decision, in units of its engines' work."""
        n = len(self.jobs)
        if n <= FEW_JOBS:
            return FEW_WORK
        return max(WORK, min(WORK_BY_SQUARE * n * n, WORK_BY_JOB * n))


class Decided(NamedTuple):
    """The plan of one component.

    Attributes:
        note: steps that were computed more coarsely than usual.
        name: hash of the component with this plan, for trials: equal ones have equal names.
    """

    plan: Assignment
    note: str
    name: str


def _components(
    arrays: Arrays,
    selected: Mapping[str, tuple[int, ...]],
    traffic: Any,
    options: SchedulerOptions,
    capacity_Bps: Mapping[Link, float],
) -> Iterator[tuple[int, Component | None]]:
    """Yields the number of jobs of each component, and itself if it is small enough to be played.

    Components of one job are left out; those with the most GPUs come first.
    """
    known = options.default_path or {}
    default = choice_of(arrays, {**selected, **known})
    default_path = paths_of(arrays, default)
    meet = components_of((traffic + traffic_matrix(arrays, default)).tocsr() if known else traffic)
    reach = components_of(_candidate_links(arrays))
    # Few jobs that can meet decide together, as they may then take any of their candidates.
    movable = np.bincount(reach)[reach] <= SEARCHED_JOBS
    members: dict[tuple[bool, int], list[Job]] = {}
    for j, job in enumerate(arrays.jobs):
        group = reach[j] if movable[j] else meet[j]
        members.setdefault((bool(movable[j]), int(group)), []).append(job)
    groups = [(free, jobs) for (free, _), jobs in members.items() if len(jobs) > 1]
    for free, jobs in sorted(groups, key=lambda group: -sum(job.gpus for job in group[1])):
        if len(jobs) > PLAYED_JOBS:
            yield len(jobs), None
            continue
        paths = (path for job in jobs for flow in job.flows for path in flow.candidates)
        links = sorted(set[Link]().union(*paths))
        if not options.unknown_links.isdisjoint(links):
            yield len(jobs), None
            continue
        yield (
            len(jobs),
            Component(
                jobs=tuple(jobs),
                capacity_Bps=tuple((link, capacity_Bps[link]) for link in links),
                selected=tuple(selected[job.name] for job in jobs),
                default=(
                    tuple(default_path[job.name] for job in jobs)
                    if all(job.name in known for job in jobs)
                    else None
                ),
                movable=free,
            ),
        )


def _candidate_links(arrays: Arrays) -> Any:
    """Links (columns) that each job's candidates cross, of those that can be contended."""
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
    return member.tocsr()


def _decided(component: Component, options: SchedulerOptions) -> Decided:
    plan, note = decide(component, options)
    return Decided(plan, note, _name_of(component, plan))


def _name_of(component: Component, plan: Assignment) -> str:
    """A name that equal components with equal plans have in common, in every process."""
    capacity_Bps = dict(component.capacity_Bps)
    rows = []
    parts = zip(component.jobs, component.selected, plan.path, plan.level, strict=True)
    for job, selected, path, level in parts:
        both = zip(job.flows, selected, path, strict=True)
        taken = [(f.bytes, f.candidates[a], f.candidates[b]) for f, a, b in both]
        links = sorted({link for _, *paths in taken for way in paths for link in way})
        of_links = [(link, capacity_Bps[link]) for link in links]
        # Without a least time the name is that of releases which know none.
        bursts = [(b.at, b.share, *([b.least_s] if b.least_s else ())) for b in job.bursts]
        # So it is without parts.
        own_parts = (job.parts,) if job.parts else ()
        timing = job.gpus, job.flops, job.compute_s, job.period_s, bursts, *own_parts
        rows.append((job.name, level, timing, taken, of_links))
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()[:NAME_DIGITS]


def decide(component: Component, options: SchedulerOptions) -> tuple[Assignment, str]:
    """The plan of one component, and a note on steps that were more coarse than usual."""
    levels = len(check_levels(options.levels))
    jobs = component.jobs
    cluster = Cluster(dict(component.capacity_Bps), jobs)
    arrays = arrays_of(cluster)
    cap = SlowdownCap(arrays, options.max_slowdown)
    safe = [component.safe]
    if component.default is not None and component.default != component.selected:
        safe.append(Assignment(component.default, (0,) * len(jobs)))
    small = len(jobs) <= SEARCHED_JOBS
    plans: Iterable[Assignment] = _portfolio(component, arrays, levels, options)
    left = component.work
    try:
        brief = Rehearsal(cluster, BRIEF, seed=options.seed)
        if small:
            budget = int(SEARCHING * left)
            if can_be_played(brief, safe[0], budget // PLANS_A_START):
                plans = list(dict.fromkeys((*safe, *plans)))
                if brief.work * len(plans) * PLANS_A_START <= budget:
                    free = component.movable
                    moves = moves_of_plans(jobs, levels) if free else moves_of_levels(levels)
                    plans = (*search(brief, plans, moves, budget, cap.keeps), *plans)
            left -= brief.work
        length = Length(PHASES if small else FEW_PHASES, 0, 0)
        rehearsal = brief.anew(length, options.seed + 1)
        capped = (
            plan if cap.keeps(plan) else Assignment(plan.path, dense(cap.raised(plan, levels)))
            for plan in _distinct(plans)
            if plan not in safe
        )
        settling = int(SETTLING * component.work)
        return race(rehearsal, safe, capped, left, settling, LEAD, options.max_slowdown), ""
    except _fluid.SpecError as error:
        return safe[0], f"the engine can't play them: {error}"


def _distinct(plans: Iterable[Assignment]) -> Iterator[Assignment]:
    """Yields each plan once, and makes none before the caller asks for it."""
    seen: set[Assignment] = set()
    for plan in plans:
        if plan not in seen:
            seen.add(plan)
            yield plan


def _portfolio(
    component: Component, arrays: Arrays, levels: int, options: SchedulerOptions
) -> Iterator[Assignment]:
    """Reconsidered paths, corrected levels on fewer and more levels, and the paper's plan.

    Those that gain in the largest components come first: there, not all can be played.
    """

    def plan(path: JobPaths, priorities: Priorities, traffic: Any, count: int) -> Assignment:
        fewer = replace(options, levels=tuple(range(count)))
        return Assignment(path, dense(levels_of(traffic, priorities, fewer)[0].tolist()))

    names = [job.name for job in arrays.jobs]
    swept = None
    if component.movable or len(names) <= SWEPT_JOBS:
        swept = select_paths(arrays, sweeps=SWEEPS)
        path = tuple(paths_of(arrays, swept).values())
        if path == component.selected or not (component.movable or _stays(component, path)):
            swept = None
        else:
            yield Assignment(path, (0,) * len(names))
    selected = dict(zip(names, component.selected, strict=True))
    traffic = traffic_matrix(arrays, choice_of(arrays, selected))
    corrected = contention_priorities(arrays, traffic, options.memory)
    for count in (*(fewer for fewer in COARSER if fewer < levels), levels):
        yield plan(component.selected, corrected, traffic, count)
    as_in_paper = assign_priorities(arrays, traffic, options.memory)
    yield plan(component.selected, as_in_paper, traffic, levels)
    if swept is not None:
        moved = traffic_matrix(arrays, swept)
        yield plan(path, assign_priorities(arrays, moved, options.memory), moved, levels)


def _stays(component: Component, path: JobPaths) -> bool:
    """True if these paths cross only links that the component is on already."""

    def crossed(paths: JobPaths) -> set[Link]:
        pairs = zip(component.jobs, paths, strict=True)
        return {
            link
            for job, own in pairs
            for flow, c in zip(job.flows, own, strict=True)
            for link in flow.candidates[c]
        }

    own = crossed(component.selected)
    return crossed(path) <= (own | crossed(component.default) if component.default else own)
