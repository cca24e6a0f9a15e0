"""Local search over plans, each judged by a rehearsal, within a budget of plays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from math import prod
from typing import NamedTuple

import numpy as np

from crux_torch.schedule.model import Job
from crux_torch.schedule.rehearsal import Rehearsal, RoutedJob

#: Choices of paths that one job is offered at a time.
_ALTERNATIVES = 8
BEAM = 5
#: Moves of a plan after which the best are chosen anew.
STRIDE = 4
#: Choices of paths of all jobs together up to which every one is a move.
_ALL_PATHS = 64

#: For each job the candidate that each of its flows takes.
JobPaths = tuple[tuple[int, ...], ...]


class Assignment(NamedTuple):
    """For each job the candidate of each of its flows, and its level; a higher one goes first.

    Levels count from 0 without gaps: plans that differ in their numbers alone are equal.
    """

    path: JobPaths
    level: tuple[int, ...]


#: Plans that differ from one by a step, the most promising kinds first.
Moves = Callable[[Assignment], Iterable[Assignment]]


def search(
    rehearsal: Rehearsal,
    starts: Sequence[Assignment],
    moves: Moves,
    work: int,
    allowed: Callable[[Assignment], bool] = lambda _: True,
) -> list[Assignment]:
    """The best plans found, the best first: from ``starts`` on to the best of their moves.

    This is a beam search. It continues from ``BEAM`` plans with different paths at a time, so that
    paths that need other levels to be best are not lost. Paths that play alike, such as all jobs
    over the other one of two equal switches, are not different. All starts are judged, so that the
    best is no worse than any of them. Each of the best takes ``STRIDE`` of its moves, then the best
    are chosen anew: one that drops out goes on where it was if it comes back. ``work`` is the
    budget of the rehearsal; a step is cut to half of what is left, at the mean work of the plays so
    far. Only ``allowed`` plans, the first start among them, are grown and returned.
    """
    busy = judge(rehearsal, starts)
    untried: dict[Assignment, Iterator[Assignment]] = {}
    while True:
        beam = _beam(rehearsal, busy, allowed)
        a_plan = rehearsal.work * rehearsal.phases // max(1, rehearsal.plays)
        left = (work - rehearsal.work) // max(1, a_plan)
        step: dict[Assignment, None] = {}
        for plan in beam:
            if plan not in untried:
                untried[plan] = iter(moves(plan))
            fresh = (p for p in untried[plan] if p not in busy and p not in step)
            step.update(dict.fromkeys(islice(fresh, STRIDE)))
        # Half of what is left: the next plans may take more work than those so far.
        affordable = list(islice(step, max(0, (left + 1) // 2)))
        if not affordable:
            return beam
        busy |= judge(rehearsal, affordable)


def judge(rehearsal: Rehearsal, plans: Sequence[Assignment]) -> dict[Assignment, float]:
    """The GPUs that each plan keeps busy."""
    by_path: dict[JobPaths, list[Assignment]] = {}
    for plan in plans:
        by_path.setdefault(plan.path, []).append(plan)
    values = rehearsal.busy_gpus(
        (_routes(rehearsal, path), np.array([plan.level for plan in same], np.int64))
        for path, same in by_path.items()
    )
    judged = (plan for same in by_path.values() for plan in same)
    return dict(zip(judged, np.concatenate(values).tolist(), strict=True))


def can_be_played(rehearsal: Rehearsal, plan: Assignment, work: int) -> bool:
    """Whether a plan can be judged within so much work."""
    level = np.array(plan.level, np.int64)
    return rehearsal.takes_at_most(work, _routes(rehearsal, plan.path), level)


def _routes(rehearsal: Rehearsal, path: JobPaths) -> list[RoutedJob]:
    return [rehearsal.route(j, own) for j, own in enumerate(path)]


def _beam(
    rehearsal: Rehearsal,
    busy: Mapping[Assignment, float],
    allowed: Callable[[Assignment], bool],
) -> list[Assignment]:
    """The best plans of different paths, the best first; of equals the one judged first."""
    known: set[frozenset[object]] = set()
    beam: list[Assignment] = []
    for plan in sorted(busy, key=lambda plan: -busy[plan]):
        parts = rehearsal.parts(_routes(rehearsal, plan.path))[1]
        plays = frozenset(part.key for part in parts)
        if plays not in known and allowed(plan):
            known.add(plays)
            beam.append(plan)
            if len(beam) == BEAM:
                break
    return beam


def dense(level: Sequence[float]) -> tuple[int, ...]:
    """The same order of jobs with levels that count from 0 without gaps."""
    rank = {value: i for i, value in enumerate(sorted(set(level)))}
    return tuple(rank[value] for value in level)


def level_moves(level: tuple[int, ...], job: int, levels: int) -> Iterator[tuple[int, ...]]:
    """Job ``job`` on each other level, and on a level of its own between any two."""
    for double in range(-1, 2 * max(level) + 2):
        moved = dense([double / 2 if j == job else other for j, other in enumerate(level)])
        if max(moved) < levels and moved != level:
            yield moved


def swaps(level: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Any two jobs in each other's place."""
    for i, k in combinations(range(len(level)), 2):
        if level[i] != level[k]:
            swapped = list(level)
            swapped[i], swapped[k] = level[k], level[i]
            yield tuple(swapped)


def moves_of_levels(levels: int) -> Moves:
    """Steps that leave paths as they are, over plans of at most ``levels`` levels."""

    def moves(plan: Assignment) -> Iterator[Assignment]:
        for job in range(len(plan.level)):
            for level in level_moves(plan.level, job, levels):
                yield Assignment(plan.path, level)
        for level in swaps(plan.level):
            yield Assignment(plan.path, level)

    return moves


def moves_of_plans(jobs: Sequence[Job], levels: int) -> Moves:
    """Other paths for some jobs, another level for one, or both for one."""
    of_levels = moves_of_levels(levels)
    counts = [len(flow.candidates) for job in jobs for flow in job.flows]
    few = prod(counts) <= _ALL_PATHS

    def rerouted(path: JobPaths, job: int, own: tuple[int, ...]) -> JobPaths:
        return (*path[:job], own, *path[job + 1 :])

    def repaths(path: JobPaths, others: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[JobPaths]:
        if few:
            yield from product(*([own, *more] for own, more in zip(path, others, strict=True)))
            return
        for j, mine in enumerate(others):
            yield from (rerouted(path, j, own) for own in mine)
        for i, k in combinations(range(len(jobs)), 2):
            for one, other in product(others[i][:2], others[k][:2]):
                yield rerouted(rerouted(path, i, one), k, other)

    def moves(plan: Assignment) -> Iterator[Assignment]:
        others = [list(alternatives(job, own)) for job, own in zip(jobs, plan.path, strict=True)]
        for path in repaths(plan.path, others):
            yield Assignment(path, plan.level)
        yield from of_levels(plan)
        for j, mine in enumerate(others):
            for own, level in product(mine, level_moves(plan.level, j, levels)):
                yield Assignment(rerouted(plan.path, j, own), level)

    return moves


def alternatives(job: Job, own: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Other choices of paths for a job: all of them where they are few.

    Otherwise the next candidates for all its flows together, then for single flows, the largest
    first.
    """
    counts = [len(flow.candidates) for flow in job.flows]
    if prod(counts) <= _ALTERNATIVES + 1:
        every = product(*map(range, counts))
        yield from (path for path in every if path != own)
        return
    turned = [
        tuple((c + turn) % n for c, n in zip(own, counts, strict=True))
        for turn in range(1, min(max(counts), _ALTERNATIVES // 2 + 1))
    ]
    yield from turned
    largest = sorted(range(len(counts)), key=lambda f: -job.flows[f].bytes)
    movable = [f for f in largest if counts[f] > 1]
    for f in movable[: _ALTERNATIVES - len(turned)]:
        yield (*own[:f], (own[f] + 1) % counts[f], *own[f + 1 :])
