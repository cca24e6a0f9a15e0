"""Ranks agree on operation counts: the pure verdict, and the rounds over a store that fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.backend.handover.rounds import (
    Agreement,
    Consent,
    Ended,
    Hold,
    Unreachable,
    Verdict,
    decide,
    unanimous,
)
from crux_torch.errors import StoreError


@st.composite
def all_holds(draw: st.DrawFn) -> list[Hold]:
    """Hold points of 2 to 4 ranks; messages are sent before they are received, or the reverse."""
    size = draw(st.integers(2, 4))
    transfers: list[list[tuple[int, int, bool, int]]] = [[] for _ in range(size)]
    for sender in range(size):
        for receiver in range(size):
            if sender == receiver:
                continue
            for tag in draw(st.sets(st.integers(0, 3), max_size=2)):
                sent, received = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
                if sent:
                    transfers[sender].append((receiver, tag, True, sent))
                if received:
                    transfers[receiver].append((sender, tag, False, received))
    return [
        Hold(
            collectives=draw(st.integers(0, 1000)),
            transfers=transfers[rank],
            stay=draw(st.booleans()),
        )
        for rank in range(size)
    ]


@given(all_holds())
def test_nobody_has_passed_the_counts_and_both_ends_have_the_same(holds: list[Hold]) -> None:
    verdict = decide(holds)
    assert verdict.go
    assert verdict.collectives == max(hold.collectives for hold in holds)
    assert verdict.stay == any(hold.stay for hold in holds)
    known = []
    for rank, hold in enumerate(holds):
        collectives, transfers, stay = verdict.for_rank(rank)
        assert (collectives, stay) == (verdict.collectives, verdict.stay)
        own = {(peer, tag, sends): count for peer, tag, sends, count in hold.transfers}
        told = {(peer, tag, sends): count for peer, tag, sends, count in transfers}
        # What is not told is as this rank said, or never used: see HandoverPoint::last_count.
        known.append(own | told)
        assert all(count >= own.get(key, 0) for key, count in told.items())
    for rank, counts in enumerate(known):
        for (peer, tag, sends), count in counts.items():
            assert known[peer].get((rank, tag, not sends), 0) == count


def test_verdicts_of_small_cases() -> None:
    holds = [
        Hold(collectives=7, transfers=[(1, 5, True, 3)]),
        Hold(collectives=9, transfers=[(0, 5, False, 1), (0, 5, True, 2)]),
    ]
    assert decide(holds) == Verdict(go=True, collectives=9, transfers=[(0, 1, 5, 3), (1, 0, 5, 2)])
    assert unanimous([Consent(), Consent()]).go
    assert unanimous([Consent(), Consent(refusal="why")]) == Verdict(go=False, reason="rank 1: why")


class Shared:
    """A store in memory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, str] = {}


class End:
    """One rank's end of it, which fails when it is told to."""

    def __init__(self, shared: Shared, fails: Callable[[str], bool]) -> None:
        self.shared, self.fails = shared, fails

    def _enter(self, call: str) -> None:
        if self.fails(call):
            raise StoreError("injected")

    def set(self, key: str, value: str) -> None:
        self._enter("set")
        with self.shared.lock:
            self.shared.values[key] = value

    def get(self, key: str) -> bytes:
        self._enter("get")
        with self.shared.lock:
            return self.shared.values[key].encode()

    def check(self, keys: Sequence[str]) -> bool:
        self._enter("check")
        with self.shared.lock:
            return all(key in self.shared.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._enter("compare_set")
        with self.shared.lock:
            if self.shared.values.get(key, "") == expected:
                self.shared.values[key] = desired
            return self.shared.values[key].encode()

    def delete_key(self, key: str) -> None:
        self._enter("delete_key")
        with self.shared.lock:
            self.shared.values.pop(key, None)


def hold_round(
    ends: Sequence[End | None], patience_s: float, delays_s: Sequence[float]
) -> list[Verdict | Exception | None]:
    """What each rank takes from a round; None for one that takes no part."""
    results: list[Verdict | Exception | None] = [None] * len(ends)

    def take_part(rank: int, end: End) -> None:
        time.sleep(delays_s[rank])
        agreement = Agreement(end, "g/", rank, len(ends))
        try:
            results[rank] = agreement.round(
                "hold", Hold(collectives=rank), decide, patience_s=patience_s
            )
        except Exception as error:
            results[rank] = error

    threads = [
        threading.Thread(target=take_part, args=(rank, end))
        for rank, end in enumerate(ends)
        if end is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
    failing=st.floats(0.0, 0.7),
    silent=st.booleans(),
)
def test_whoever_learns_a_verdict_learns_the_same(
    size: int, seed: int, failing: float, silent: bool
) -> None:
    chance = random.Random(seed)
    shared = Shared()
    ends: list[End | None] = [
        End(shared, lambda call: chance.random() < failing) for _ in range(size)
    ]
    if silent:
        ends[chance.randrange(size)] = None
    delays_s = [chance.uniform(0.0, 0.04) for _ in range(size)]
    results = [r for r in hold_round(ends, 0.05, delays_s) if r is not None]
    verdicts = [r for r in results if isinstance(r, Verdict)]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert all(isinstance(r, (Verdict, Unreachable)) for r in results)
    if silent:
        assert not any(verdict.go for verdict in verdicts)


def test_without_failures_all_go() -> None:
    shared = Shared()
    ends = [End(shared, lambda call: False) for _ in range(4)]
    results = hold_round(ends, 10.0, [0.0] * 4)
    assert results == [Verdict(go=True, collectives=3)] * 4


def test_a_verdict_that_was_written_too_late_is_followed_by_all() -> None:
    """A rank whose patience has ended finds that the others go: it goes too."""
    shared = Shared()
    first = Agreement(End(shared, lambda call: False), "g/", 0, 2)
    end = End(shared, lambda call: False)
    second = Agreement(end, "g/", 1, 2)
    end.set("g/hold/1", '{"collectives": 4}')
    assert first.round("hold", Hold(collectives=2), decide, patience_s=5.0).collectives == 4
    assert second.round("hold", Hold(collectives=4), decide, patience_s=0.0).go


@pytest.mark.parametrize("written", ["no json", '{"collectives": -1}', "[]"])
def test_nonsense_ends_in_no_switch(written: str) -> None:
    shared = Shared()
    end = End(shared, lambda call: False)
    end.set("g/hold/1", written)
    verdict = Agreement(end, "g/", 0, 2).round("hold", Hold(collectives=2), decide, patience_s=5.0)
    assert not verdict.go
    assert "nonsense" in verdict.reason


def test_the_end_of_the_group_ends_a_round() -> None:
    looks = iter([False, False, True])
    agreement = Agreement(End(Shared(), lambda call: False), "g/", 1, 2, ended=lambda: next(looks))
    with pytest.raises(Ended):
        agreement.round("hold", Hold(collectives=2), decide, patience_s=None)


def test_keys_are_deleted() -> None:
    shared = Shared()
    agreement = Agreement(End(shared, lambda call: False), "g/", 0, 1)
    agreement.round("start", Consent(), unanimous, patience_s=1.0)
    agreement.refuse("made", "why")
    assert shared.values
    agreement.forget()
    assert not shared.values
