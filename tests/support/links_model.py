"""The semaphore of a link as a state machine: every step of csrc/links that others can see.

One step is one access to shared memory or one system call, in the order of the C++. A process can
be killed between any two. What it must never come to is asked of every state that can be reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A process's place in the table: ``locked`` says who holds the kernel's lock on it."""

    rank: int
    count: int = 0
    locked: int | None = None


class Process(NamedTuple):
    """Where one process is.

    Attributes:
        at: the next step.
        look: place that the scan has come to.
        then: where the scan goes on, by what it finds.
        turn: as read before.
        marked: whether it counts as waiting.
        rounds: operations that are left.
        before: ghost: places of higher ranks that have been busy ever since this operation came.
    """

    at: str = "enter"
    look: int = 0
    then: tuple[str, str] = ("", "")
    turn: int = 0
    marked: bool = False
    rounds: int = 1
    before: frozenset[int] = frozenset()


class State(NamedTuple):
    """The whole: processes, and what they share."""

    processes: tuple[Process, ...]
    places: tuple[Place, ...]
    turn: int = 0
    waiting: bool = False
    kills: int = 0


class Broken(AssertionError):
    """A step led to what must not be."""


@dataclass(frozen=True, slots=True)
class Model:
    """The rules.

    Attributes:
        ranks: of the processes; who has a higher one goes first.
        rounds: operations of each.
        kills: processes that may be killed.
        drop_to: the rank that process 0 is given at some moment by its other thread; None: none.
        timeouts: whether a sleeper may look again by itself.
        mutant: which rule is broken, to see that the checks can fail.
    """

    ranks: tuple[int, ...]
    rounds: int = 1
    kills: int = 0
    drop_to: int | None = None
    timeouts: bool = False
    mutant: str = ""

    def first(self) -> State:
        processes = [Process(rounds=self.rounds) for _ in self.ranks]
        if self.drop_to is not None:
            processes.append(Process(at="drop"))
        places = tuple(Place(rank, locked=i) for i, rank in enumerate(self.ranks))
        return State(tuple(processes), places, kills=self.kills)

    def final(self, state: State) -> bool:
        return all(p.at in ("done", "dead") for p in state.processes)

    def steps(self, state: State) -> Iterator[State]:
        """Every state that one step of one process leads to."""
        for me, process in enumerate(state.processes):
            if process.at not in ("done", "dead", "asleep") or self._looks(process):
                yield getattr(self, f"_at_{process.at}")(state, me)

    def deaths(self, state: State) -> Iterator[State]:
        """Every state that the death of one process leads to."""
        for me in range(len(self.ranks)):
            if state.kills and state.processes[me].at not in ("done", "dead"):
                yield self._kill(state, me)

    def _looks(self, process: Process) -> bool:
        return self.timeouts and process.at == "asleep"

    def _kill(self, state: State, me: int) -> State:
        """Its locks go with it; what it wrote stays."""
        places = tuple(
            place._replace(locked=None) if place.locked == me else place for place in state.places
        )
        killed = _moved(state._replace(places=places, kills=state.kills - 1), me, at="dead")
        if self.drop_to is not None and me == 0:
            killed = _moved(killed, len(self.ranks), at="done")
        return _no_longer_before(killed, me)

    def _at_enter(self, state: State, me: int) -> State:
        mine = state.places[me].rank
        higher = frozenset(
            i
            for i, place in enumerate(state.places)
            if place.rank > mine and place.count and place.locked == i
        )
        return _scan(_moved(state, me, before=higher), me, hindered="mark", free="pass")

    def _at_scan(self, state: State, me: int) -> State:
        process, look = state.processes[me], state.processes[me].look
        if look == len(state.places):
            return _moved(state, me, at=process.then[1])
        other = state.places[look]
        if look == me or other.rank <= state.places[me].rank or not other.count:
            return _moved(state, me, look=look + 1)
        return _moved(state, me, at="alive")

    def _at_alive(self, state: State, me: int) -> State:
        process = state.processes[me]
        if state.places[process.look].locked is not None:
            return _moved(state, me, at=process.then[0])
        return _moved(state, me, at="sweep")

    def _at_sweep(self, state: State, me: int) -> State:
        """Takes the lock of a dead process's place, if nobody was faster."""
        look = state.processes[me].look
        if state.places[look].locked is not None:
            return _moved(state, me, at="scan", look=look + 1)
        return _moved(_place(state, look, locked=me), me, at="empty")

    def _at_empty(self, state: State, me: int) -> State:
        return _moved(_place(state, state.processes[me].look, count=0), me, at="unlock")

    def _at_unlock(self, state: State, me: int) -> State:
        look = state.processes[me].look
        return _moved(_place(state, look, locked=None), me, at="scan", look=look + 1)

    def _at_mark(self, state: State, me: int) -> State:
        if state.processes[me].marked:
            return _moved(state, me, at="read_turn")
        marked = _place(state, me, count=state.places[me].count + 1)
        return _moved(marked, me, at="read_turn", marked=True)

    def _at_read_turn(self, state: State, me: int) -> State:
        if self.mutant == "waits unsaid":
            return _scan(_moved(state, me, turn=state.turn), me, hindered="say_late", free="look")
        return _moved(state, me, at="say", turn=state.turn)

    def _at_say(self, state: State, me: int) -> State:
        return _scan(state._replace(waiting=True), me, hindered="sleep", free="look")

    def _at_say_late(self, state: State, me: int) -> State:
        return _moved(state._replace(waiting=True), me, at="sleep")

    def _at_sleep(self, state: State, me: int) -> State:
        if state.places[me].rank == max(self.ranks):
            raise Broken("the highest waits")
        return _moved(state, me, at="asleep" if state.turn == state.processes[me].turn else "look")

    def _at_asleep(self, state: State, me: int) -> State:
        return _moved(state, me, at="look")

    def _at_look(self, state: State, me: int) -> State:
        return _scan(state, me, hindered="mark", free="pass")

    def _at_pass(self, state: State, me: int) -> State:
        process = state.processes[me]
        if process.before:
            raise Broken("it passed an operation of a higher level")
        if not process.marked:
            state = _place(state, me, count=state.places[me].count + 1)
        return _moved(state, me, at="leave", marked=False)

    def _at_leave(self, state: State, me: int) -> State:
        left = _place(state, me, count=state.places[me].count - 1)
        left = _no_longer_before(left, me)
        rounds = state.processes[me].rounds - 1
        return _moved(left, me, at=self._waker(), rounds=rounds)

    def _at_drop(self, state: State, me: int) -> State:
        assert self.drop_to is not None
        dropped = _place(state, 0, rank=self.drop_to)
        return _moved(_no_longer_before(dropped, 0), me, at=self._waker(), rounds=0)

    def _waker(self) -> str:
        return "turn_first" if self.mutant == "turn first" else "ask"

    def _at_ask(self, state: State, me: int) -> State:
        if not state.waiting or self.mutant == "no wake":
            return self._left(state, me)
        return _moved(state, me, at="exchange")

    def _at_exchange(self, state: State, me: int) -> State:
        if not state.waiting:
            return self._left(state, me)
        return _moved(state._replace(waiting=False), me, at="add")

    def _at_add(self, state: State, me: int) -> State:
        return _moved(state._replace(turn=state.turn + 1), me, at="wake")

    def _at_turn_first(self, state: State, me: int) -> State:
        return _moved(state._replace(turn=state.turn + 1), me, at="exchange_late")

    def _at_exchange_late(self, state: State, me: int) -> State:
        if not state.waiting:
            return self._left(state, me)
        return _moved(state._replace(waiting=False), me, at="wake")

    def _at_wake(self, state: State, me: int) -> State:
        woken = tuple(p._replace(at="look") if p.at == "asleep" else p for p in state.processes)
        return self._left(state._replace(processes=woken), me)

    def _left(self, state: State, me: int) -> State:
        return _moved(state, me, at="enter" if state.processes[me].rounds else "done")


def _moved(state: State, me: int, **changes: Any) -> State:
    processes = list(state.processes)
    processes[me] = processes[me]._replace(**changes)
    return state._replace(processes=tuple(processes))


def _place(state: State, at: int, **changes: Any) -> State:
    places = list(state.places)
    places[at] = places[at]._replace(**changes)
    return state._replace(places=tuple(places))


def _scan(state: State, me: int, *, hindered: str, free: str) -> State:
    return _moved(state, me, at="scan", look=0, then=(hindered, free))


def _no_longer_before(state: State, left: int) -> State:
    """An operation of the process has ended: nobody was passed by who comes now."""
    processes = tuple(p._replace(before=p.before - {left}) for p in state.processes)
    return state._replace(processes=processes)


@dataclass(frozen=True, slots=True)
class Explored:
    """What was found.

    Attributes:
        states: that can be reached.
        stuck: without a next step, though not final.
        lost: from which no final one can be reached, unless somebody dies.
    """

    states: int
    stuck: tuple[State, ...]
    lost: tuple[State, ...]


def explore(model: Model, limit: int = 2_000_000) -> Explored:
    """Every state that can be reached.

    Raises:
        Broken: a step led to what must not be.
    """
    first = model.first()
    number = {first: 0}
    order = [first]
    before: list[list[int]] = [[]]
    stuck = []
    for at, state in enumerate(order):
        steps = list(model.steps(state))
        for after in (*steps, *model.deaths(state)):
            if after not in number:
                assert len(order) < limit, "too many states"
                number[after] = len(order)
                order.append(after)
                before.append([])
        for after in steps:
            before[number[after]].append(at)
        if not steps and not model.final(state):
            stuck.append(state)
    ends = [i for i, state in enumerate(order) if model.final(state)]
    reached = set(ends)
    while ends:
        new = [b for b in before[ends.pop()] if b not in reached]
        reached.update(new)
        ends.extend(new)
    lost = tuple(state for i, state in enumerate(order) if i not in reached)
    return Explored(len(order), tuple(stuck), lost)
