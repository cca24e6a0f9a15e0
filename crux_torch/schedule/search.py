"""Local search over plans, each judged by a rehearsal, within a budget of plays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, islice, product
from math import prod
from typing import NamedTuple

import numpy as np

from crux_torch.schedule.model import Job
from crux_torch.schedule.rehearsal import Rehearsal

#: Choices of paths that one job is offered at a time.
_ALTERNATIVES = 8
#: A plan must be better by this share: less is rounding.
_BETTER = 1e-6


class Plan(NamedTuple):
    """For each job the candidate of each of its flows, and its level; a higher one goes first.

    Levels count from 0 without gaps: plans that differ in their numbers alone are equal.
    """

    path: tuple[tuple[int, ...], ...]
    level: tuple[int, ...]


#: Plans that differ from one by a step, the most promising kinds first.
Moves = Callable[[Plan], Iterable[Plan]]


def search(rehearsal: Rehearsal, starts: Sequence[Plan], moves: Moves, plays: int) -> Plan:
    """The best plan found: from the best of ``starts``, always on to the best of its moves.

    Args:
        rehearsal: judges plans.
        starts: judged whatever they cost, so that the result is no worse than any of them.
        moves: from a plan to its neighbours.
        plays: no more plans are judged once the rehearsal has played so many; those of one step
            are cut to what is left.
    """
    best, value = _best(rehearsal, starts)
    seen = set(starts)
    while (left := (plays - rehearsal.plays) // rehearsal.phases) > 0:
        fresh = list(islice((p for p in moves(best) if p not in seen and not seen.add(p)), left))  # type: ignore[func-returns-value]
        if not fresh:
            break
        found, busy = _best(rehearsal, fresh)
        if busy <= value * (1 + _BETTER):
            break
        best, value = found, busy
    return best


def _best(rehearsal: Rehearsal, plans: Sequence[Plan]) -> tuple[Plan, float]:
    by_path: dict[tuple[tuple[int, ...], ...], list[Plan]] = {}
    for plan in plans:
        by_path.setdefault(plan.path, []).append(plan)
    values = rehearsal.busy_gpus_of(
        (
            [rehearsal.route(j, own) for j, own in enumerate(path)],
            np.array([plan.level for plan in same], np.int64),
        )
        for path, same in by_path.items()
    )
    judged = [plan for same in by_path.values() for plan in same]
    busy = np.concatenate(values)
    best = int(np.argmax(busy))
    return judged[best], float(busy[best])


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

    def moves(plan: Plan) -> Iterator[Plan]:
        for job in range(len(plan.level)):
            for level in level_moves(plan.level, job, levels):
                yield Plan(plan.path, level)
        for level in swaps(plan.level):
            yield Plan(plan.path, level)

    return moves


def moves_of_plans(jobs: Sequence[Job], levels: int) -> Moves:
    """One job on other paths and another level at once, or two jobs on other paths."""
    of_levels = moves_of_levels(levels)

    def rerouted(plan: Plan, job: int, path: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (*plan.path[:job], path, *plan.path[job + 1 :])

    def moves(plan: Plan) -> Iterator[Plan]:
        others = [list(alternatives(job, own)) for job, own in zip(jobs, plan.path, strict=True)]
        for j, paths in enumerate(others):
            for path in paths:
                yield Plan(rerouted(plan, j, path), plan.level)
        yield from of_levels(plan)
        for i, k in combinations(range(len(jobs)), 2):
            for one, other in product(others[i][:2], others[k][:2]):
                both = Plan(rerouted(plan, i, one), plan.level)
                yield Plan(rerouted(both, k, other), plan.level)
        for j, paths in enumerate(others):
            for path, level in product(paths, level_moves(plan.level, j, levels)):
                yield Plan(rerouted(plan, j, path), level)

    return moves


def alternatives(job: Job, own: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Other choices of paths: all where they are few, else the next ones for all its flows and
    then for each, the largest first."""
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
