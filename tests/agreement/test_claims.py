"""The profiling slot: never two holders, everyone's turn comes, a crash costs one lease."""

from __future__ import annotations

import random
from typing import Any

from control_fakes import FakeClock, FaultyStore, MemoryStore
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from crux_torch.agreement.claims import ProfilingSlot
from crux_torch.errors import StoreError

LEASE_S = 10.0


def slot(store: MemoryStore, job: str, clock: FakeClock) -> ProfilingSlot:
    return ProfilingSlot(store, "c", job, "i0", lease_s=LEASE_S, clock=clock)


def test_who_asks_first_goes_first(store: MemoryStore, clock: FakeClock) -> None:
    first, second, third = (slot(store, name, clock) for name in ("c", "a", "b"))

    def got_by(*asking: ProfilingSlot) -> list[bool]:
        return [one.acquire_step() for one in asking]

    assert got_by(first, second, third, first) == [True, False, False, True]
    first.release()
    assert got_by(first, third, second) == [False, False, True]
    second.release()
    assert got_by(first, third) == [False, True]
    third.release()
    assert got_by(first) == [True]


def test_a_crashed_holder_frees_the_slot_when_its_lease_ends(
    store: MemoryStore, clock: FakeClock
) -> None:
    crashed, next_one = slot(store, "a", clock), slot(store, "b", clock)
    assert crashed.acquire_step()
    clock.advance(LEASE_S - 0.1)
    assert not next_one.acquire_step()
    clock.advance(0.2)
    assert not crashed.held
    assert next_one.acquire_step()
    crashed.release()
    assert next_one.held
    third = slot(store, "c", clock)
    assert not third.acquire_step()


def test_a_waiting_job_that_falls_silent_loses_its_place(
    store: MemoryStore, clock: FakeClock
) -> None:
    holder, silent, patient = (slot(store, name, clock) for name in "abc")
    assert holder.acquire_step()
    assert not silent.acquire_step()
    for _ in range(7):
        assert not patient.acquire_step()
        clock.advance(1.0)
    holder.release()
    assert patient.acquire_step()


def test_foreign_bytes_block_nobody(store: MemoryStore, clock: FakeClock) -> None:
    store.put("crux/c/slot", b"junk")
    store.put("crux/c/waiting/evil", b"\xff")
    assert slot(store, "a", clock).acquire_step()


def test_without_a_store_nothing_is_held_and_nothing_raised(
    store: MemoryStore, clock: FakeClock
) -> None:
    faulty = FaultyStore(store, random.Random(0))
    one = slot(faulty, "a", clock)  # type: ignore[arg-type]
    faulty.fail = 1.0
    assert not one.acquire_step()
    one.release()
    faulty.fail = 0.0
    assert one.acquire_step()
    faulty.fail = 1.0
    one.release()
    assert not one.held


def test_a_swap_whose_answer_was_lost_counts_as_done(store: MemoryStore, clock: FakeClock) -> None:
    class AnswerLost(MemoryStore):
        lost = True

        def compare_and_swap(self, *args: Any, **kwargs: Any) -> bool:
            done = super().compare_and_swap(*args, **kwargs)
            if self.lost:
                self.lost = False
                raise StoreError("the answer was lost")
            return done

    lossy = AnswerLost(clock)
    one, other = slot(lossy, "a", clock), slot(lossy, "b", clock)
    assert not one.acquire_step()
    assert not other.acquire_step()
    assert one.acquire_step()
    assert not other.acquire_step()


class Turns(RuleBasedStateMachine):
    """Jobs acquire, release, crash and wait in any order on a store that sometimes fails."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore(self.clock), random.Random(1))
        self.slots = [self.make(n) for n in range(4)]

    def make(self, n: int) -> ProfilingSlot:
        return slot(self.store, f"j{n}", self.clock)  # type: ignore[arg-type]

    @rule(n=st.integers(0, 3), fail=st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    def acquire(self, n: int, fail: float) -> None:
        self.store.fail = fail
        assert self.slots[n].acquire_step() == self.slots[n].held
        self.store.fail = 0.0

    @rule(n=st.integers(0, 3), fail=st.sampled_from([0.0, 0.5]))
    def release(self, n: int, fail: float) -> None:
        self.store.fail = fail
        self.slots[n].release()
        assert not self.slots[n].held
        self.store.fail = 0.0

    @rule(n=st.integers(0, 3))
    def crash(self, n: int) -> None:
        self.slots[n] = self.make(n)

    @rule(seconds=st.floats(0.1, 6.0))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def someone_gets_it_in_time(self) -> None:
        for _ in range(40):
            steps = [one.acquire_step() for one in self.slots]
            if any(steps):
                return
            self.clock.advance(1.0)
        raise AssertionError("nobody ever held the slot")

    @invariant()
    def one_holder_at_most(self) -> None:
        assert sum(one.held for one in self.slots) <= 1


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
