"""Every interleaving of small cases of a link's semaphore, and of jobs that span two hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from links_model import Broken, Model, explore


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        Model((2, 1), rounds=2),
        Model((3, 2, 1)),
        Model((2, 1, 1)),
        Model((2, 2, 1)),
        Model((2, 1, 1), drop_to=0),
    ],
    ids=["again", "chain", "two below", "two above", "the highest drops"],
)
def test_wakes_alone_lead_everybody_on(model: Model) -> None:
    found = explore(model)
    assert found.states > 100
    assert not found.stuck
    assert not found.lost


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [Model((2, 1), rounds=2, kills=2), Model((3, 2, 1), kills=1), Model((2, 1, 1), kills=1)],
    ids=["one after the other", "chain", "two below"],
)
def test_who_is_left_by_the_dead_goes_on_when_it_looks_again(model: Model) -> None:
    # A death can cost a wake: its sleepers have to look by themselves, and that's enough.
    assert explore(model).stuck
    looking = Model(model.ranks, model.rounds, model.kills, timeouts=True)
    found = explore(looking)
    assert not found.stuck
    assert not found.lost


@pytest.mark.parametrize("mutant", ["no wake", "turn first", "waits unsaid"])
def test_the_search_finds_a_lost_wake(mutant: str) -> None:
    assert explore(Model((2, 1, 1), mutant=mutant)).stuck


def test_the_search_finds_a_passed_operation() -> None:
    class Blind(Model):
        def _at_enter(self, state, me):  # type: ignore[no-untyped-def]
            """The lower one does not look."""
            entered = super()._at_enter(state, me)
            process = entered.processes[me]
            blind = process if me == 0 else process._replace(at="pass")
            processes = (*entered.processes[:me], blind, *entered.processes[me + 1 :])
            return entered._replace(processes=processes)

    with pytest.raises(Broken, match="passed"):
        explore(Blind((2, 1)))


#: Of each job's rank on each of two hosts: operations left to issue, and whether one is in flight.
Rank = tuple[int, bool]
Hosts = tuple[tuple[Rank, ...], ...]


def moves(state: Hosts, levels: tuple[tuple[int, ...], ...], *, bounded: bool) -> Iterator[Hosts]:
    """What can happen next to jobs that each have a rank on every host.

    An operation is issued on each host by itself, once no higher one is in flight there, and ends
    on all of them once it is in flight on all.

    Args:
        levels: of each job, as each host has them.
        bounded: whether a wait may run out.
    """
    jobs = range(len(state[0]))
    for host, ranks in enumerate(state):
        for job in jobs:
            left, in_flight = ranks[job]
            if not left or in_flight:
                continue
            above = any(ranks[j][1] and levels[host][j] > levels[host][job] for j in jobs)
            if not above or bounded:
                yield _with(state, host, job, (left, True))
    for job in jobs:
        if all(ranks[job][1] for ranks in state):
            ended = state
            for host, ranks in enumerate(state):
                ended = _with(ended, host, job, (ranks[job][0] - 1, False))
            yield ended


def _with(state: Hosts, host: int, job: int, rank: Rank) -> Hosts:
    ranks = (*state[host][:job], rank, *state[host][job + 1 :])
    return (*state[:host], ranks, *state[host + 1 :])


def stuck(levels: tuple[tuple[int, ...], ...], *, bounded: bool = False) -> list[Hosts]:
    """States from which nothing happens though operations are left."""
    first: Hosts = tuple(((2, False),) * len(levels[0]) for _ in levels)
    seen, todo, found = {first}, [first], []
    while todo:
        state = todo.pop()
        after = list(moves(state, levels, bounded=bounded))
        if not after and any(left for ranks in state for left, _ in ranks):
            found.append(state)
        todo += [new for new in after if new not in seen]
        seen.update(after)
    return found


@pytest.mark.parametrize("levels", [(2, 1), (3, 2, 1), (2, 1, 1), (1, 1)])
def test_jobs_across_hosts_that_agree_on_their_levels_never_lock_each_other(
    levels: tuple[int, ...],
) -> None:
    assert stuck((levels, levels)) == []


def test_hosts_that_disagree_for_a_while_need_the_bound() -> None:
    assert stuck(((2, 1), (1, 2))) != []
    assert stuck(((2, 1), (1, 2)), bounded=True) == []
    assert stuck(((3, 2, 1), (1, 3, 2)), bounded=True) == []
