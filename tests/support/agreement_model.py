"""A model of how leaders agree (docs/understand/agreement.md), small enough to look at every
interleaving.

Time is left out: whatever may take long may happen at any time, and leases, plans and patience may
end at any step. A snapshot is the set of the jobs that have a record, and a plan is its epoch and
its snapshot, from which its entries follow. What a leader reads, decides and swaps are steps of
their own, so anything may happen in between; a swap may also succeed without its leader hearing of
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

#: Jobs that a snapshot may hold, as a bit each.
Snapshot = int


class Head(NamedTuple):
    epoch: int
    snapshot: Snapshot


class Leader(NamedTuple):
    """One life of a leader.

    Attributes:
        looked: whether it has looked at the store.
        head, snapshot, before: what its last look showed, and the snapshot of the look before.
        plan: adopted last; ``valid``: whether that still counts.
        swap: what it is about to swap for what.
    """

    up: bool = True
    looked: bool = False
    head: Head | None = None
    snapshot: Snapshot = 0
    before: Snapshot = 0
    plan: Head | None = None
    valid: bool = False
    swap: tuple[Head | None, Head] | None = None

    def applies(self, me: int) -> Head | None:
        """The plan that its ranks are told to follow."""
        heard = self.up and self.valid and self.plan is not None and self.plan.snapshot >> me & 1
        return self.plan if heard else None


class State(NamedTuple):
    """The store, the leaders, and the faults that are still to come."""

    head: Head | None
    records: Snapshot
    leaders: tuple[Leader, ...]
    deaths: int
    leases: int
    losses: int
    expiries: int


def start(leaders: int, deaths: int, leases: int, losses: int, expiries: int) -> State:
    return State(None, 0, (Leader(),) * leaders, deaths, leases, losses, expiries)


def refuses(plan: Head | None, head: Head) -> bool:
    """``AdoptedPlan.refuses`` without leaps."""
    return plan is not None and head != plan and head.epoch <= plan.epoch


def steps(state: State, last_epoch: int) -> Iterator[tuple[str, State]]:
    """Everything that may happen next. No epoch goes beyond ``last_epoch``."""
    for me, leader in enumerate(state.leaders):
        if not leader.up:
            yield f"{me} starts", _with(state, me, Leader())
            continue
        yield from _own_steps(state, me, leader, last_epoch)
        if leader.valid and state.expiries:
            after = _with(state, me, leader._replace(valid=False))
            yield f"{me}'s plan ends", after._replace(expiries=state.expiries - 1)
        if state.deaths:
            after = _with(state, me, Leader(up=False))
            yield f"{me} dies", after._replace(deaths=state.deaths - 1)
    for me in range(len(state.leaders)):
        if state.records >> me & 1 and (state.leases or not state.leaders[me].up):
            left = state.leases - state.leaders[me].up
            yield (
                f"{me}'s lease ends",
                state._replace(records=state.records & ~(1 << me), leases=left),
            )
    if state.losses and (state.head or state.records):
        yield "the store forgets", state._replace(head=None, records=0, losses=state.losses - 1)


def _own_steps(
    state: State, me: int, leader: Leader, last_epoch: int
) -> Iterator[tuple[str, State]]:
    if not state.records >> me & 1:
        yield f"{me} publishes", state._replace(records=state.records | 1 << me)
    if leader.swap is not None:
        yield from _swaps(state, me, leader, leader.swap)
        return
    yield f"{me} looks", look(state, me)
    decided = decide(leader)
    if decided is not None and decided[1].epoch <= last_epoch:
        yield f"{me} decides", _with(state, me, leader._replace(swap=decided))


def look(state: State, me: int) -> State:
    """Read everything, and adopt the stored plan if it follows from what was seen."""
    leader, head = state.leaders[me], state.head
    after = leader._replace(looked=True, head=head, snapshot=state.records, before=leader.snapshot)
    seen = (after.snapshot, after.before)
    if head is not None and not refuses(leader.plan, head) and head.snapshot in seen:
        after = after._replace(plan=head, valid=True)
    return _with(state, me, after)


def decide(leader: Leader) -> tuple[Head | None, Head] | None:
    """What ``Leader._agree`` swaps for what, once its patience has ended; None: nothing."""
    head, plan = leader.head, leader.plan
    if not leader.looked or not leader.snapshot:
        return None
    if head is not None and head == plan and head.snapshot == leader.snapshot:
        return None  # in force: it is renewed only
    if head is None and plan is not None and leader.valid and plan.snapshot == leader.snapshot:
        return None, plan
    known = plan.epoch if plan is not None else 0
    if head is not None and not refuses(plan, head):
        known = max(known, head.epoch)
    return head, Head(known + 1, leader.snapshot)


def _swaps(
    state: State, me: int, leader: Leader, swap: tuple[Head | None, Head]
) -> Iterator[tuple[str, State]]:
    before, after = swap
    done = leader._replace(swap=None)
    if state.head != before:
        yield f"{me} is too late", _with(state, me, done)
        return
    stored = state._replace(head=after)
    yield f"{me} swaps", _with(stored, me, done._replace(plan=after, valid=True))
    yield f"{me} swaps unheard", _with(stored, me, done)


def _with(state: State, me: int, leader: Leader) -> State:
    leaders = (*state.leaders[:me], leader, *state.leaders[me + 1 :])
    return state._replace(leaders=leaders)


def healed(state: State, rounds: int = 8) -> State:
    """After the last fault: leases of the dead end, and the others take turns."""
    up = sum(1 << me for me, leader in enumerate(state.leaders) if leader.up)
    for _ in range(rounds):
        if agrees(state):
            break
        for me, leader in enumerate(state.leaders):
            if not leader.up:
                continue
            state = state._replace(records=state.records & up | 1 << me)
            state = look(state, me)
            swap = state.leaders[me].swap or decide(state.leaders[me])
            if swap is not None:
                with_swap = _with(state, me, state.leaders[me]._replace(swap=None))
                _, state = next(_swaps(with_swap, me, with_swap.leaders[me], swap))
    return state


def agrees(state: State) -> bool:
    """Whether all that live follow one plan of all that live."""
    up = sum(1 << me for me, leader in enumerate(state.leaders) if leader.up)
    plans = {leader.applies(me) for me, leader in enumerate(state.leaders) if leader.up}
    return all(plan is not None and plan.snapshot == up for plan in plans) and len(plans) <= 1
