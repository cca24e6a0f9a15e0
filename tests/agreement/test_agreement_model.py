"""The promises of docs/understand/agreement.md, in every interleaving of a small model, and at
random in the real code over a simulated store and clock."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from agreement_model import Head, State, agrees, healed, start, steps
from agreement_model import Leader as ModelLeader
from control_fakes import FakeClock, FaultyStore, MemoryStore, profile
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from leaders import agreed, entries_of, leader_of, run

from crux_torch.agreement.leader import Leader
from crux_torch.agreement.records import Plan


def explored(first: State, last_epoch: int) -> tuple[set[State], list[str]]:
    """All states that can be reached, and what is wrong with the first bad step."""
    seen = {first}
    todo = deque([(first, ())])
    while todo:
        state, trace = todo.popleft()
        for what, after in steps(state, last_epoch):
            for before, now in zip(state.leaders, after.leaders, strict=True):
                went_back = before.plan is not None and now.plan is not None
                if went_back and now.up and now.plan.epoch < before.plan.epoch:
                    return seen, [*trace, what, "an older plan after a newer one"]
            if after not in seen:
                seen.add(after)
                todo.append((after, (*trace, what)))
    return seen, []


def parted(state: State) -> bool:
    """Whether two leaders apply different entries of one epoch."""
    applied = [leader.applies(me) for me, leader in enumerate(state.leaders)]
    of_epoch: dict[int, set[int]] = {}
    for head in applied:
        if head is not None:
            of_epoch.setdefault(head.epoch, set()).add(head.snapshot)
    return any(len(snapshots) > 1 for snapshots in of_epoch.values())


#: The faults that may come: deaths, leases that end, losses of the store, plans that end.
CASES = {
    "a death": (start(2, 1, 0, 0, 0), 2),
    "a lease that ends while its owner lives": (start(2, 0, 1, 0, 0), 2),
    "a store that forgets": (start(2, 0, 0, 1, 0), 2),
    "a plan that ends": (start(2, 0, 0, 0, 1), 2),
    "a lease and a plan": (start(2, 0, 1, 0, 1), 2),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_every_interleaving_keeps_the_promises(case: str) -> None:
    first, last_epoch = CASES[case]
    states, wrong = explored(first, last_epoch)
    assert not wrong, wrong
    assert len(states) > 1_000
    if not first.losses:
        assert not any(map(parted, states))
    stuck = [state for state in states if not agrees(healed(state))]
    assert not stuck, stuck[0]


@pytest.mark.slow
def test_after_a_loss_one_number_may_name_two_plans() -> None:
    """Epochs begin anew then; so plans are told apart by epoch, fingerprint and digest."""
    states, _ = explored(start(2, 0, 0, 1, 0), 2)
    assert any(map(parted, states))


@pytest.mark.slow
def test_the_model_would_notice_a_leader_that_takes_older_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agreement_model.refuses", lambda plan, head: False)
    _, wrong = explored(start(2, 0, 1, 1, 0), 2)
    assert wrong


def test_the_model_would_notice_leaders_that_adopt_what_they_have_not_seen() -> None:
    mine, theirs = Head(1, 1), Head(1, 2)
    state = start(2, 0, 0, 0, 0)._replace(
        leaders=(ModelLeader(plan=mine, valid=True), ModelLeader(plan=theirs, valid=True))
    )
    assert parted(state)
    assert not agrees(state)
    assert agrees(healed(state))


class Agreement(RuleBasedStateMachine):
    """Real leaders, with a store that fails, forgets and answers late, and a clock of the test."""

    def options(self) -> dict[str, Any]:
        """Of a new leader."""
        return {}

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        self.clock = FakeClock()
        self.rng = random.Random(seed)
        self.store = FaultyStore(MemoryStore(self.clock), self.rng)
        self.lives = 0
        self.leaders: list[Leader] = []
        self.highest: dict[str, int] = {}
        self.applied: dict[int, Plan] = {}
        self.forgot = False
        self.start_leader()

    @rule()
    def start_leader(self) -> None:
        if len(self.leaders) < 4:
            self.lives += 1
            name, store = f"j{self.lives % 5}", self.store
            if all(leader.record.job != name for leader in self.leaders):
                options: Any = {"incarnation": f"i{self.lives}", **self.options()}
                self.leaders.append(
                    leader_of(store, name, self.clock, self.lives, **options)  # type: ignore[arg-type]
                )

    @rule(n=st.integers(0, 3), kindly=st.booleans())
    def end_leader(self, n: int, kindly: bool) -> None:
        if len(self.leaders) > 1:
            leader = self.leaders.pop(n % len(self.leaders))
            if kindly:
                leader.close()

    @rule(n=st.integers(0, 3), t_s=st.floats(0.1, 1.0))
    def change(self, n: int, t_s: float) -> None:
        self.leaders[n % len(self.leaders)].update(profile=profile(t_s=t_s))

    @rule(fail=st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    def fail(self, fail: float) -> None:
        self.store.fail = fail

    @rule()
    def forget(self) -> None:
        self.store.inner.entries.clear()
        self.forgot = True

    @rule(seconds=st.floats(0.1, 20.0))
    def go_on(self, seconds: float) -> None:
        until_s = self.clock() + seconds
        while self.clock() < until_s:
            for leader in self.rng.sample(self.leaders, len(self.leaders)):
                leader.tick()
                self.check()
            self.clock.advance(0.2)

    @rule(n=st.integers(0, 3), seconds=st.floats(1.0, 30.0))
    def stand_still(self, n: int, seconds: float) -> None:
        """All but one stand still: stopped past their leases, say."""
        awake = self.leaders[n % len(self.leaders)]
        run([awake], self.clock, seconds, step_s=0.5)
        self.check()

    @invariant()
    def check(self) -> None:
        for leader in getattr(self, "leaders", ()):
            plan = leader.plan
            if plan is None:
                continue
            life = leader.record.incarnation
            assert plan.epoch >= self.highest.get(life, 0), "an older plan after a newer one"
            self.highest[life] = plan.epoch
            if not self.forgot:
                same = self.applied.setdefault(plan.epoch, plan)
                assert same.entries == plan.entries, "two plans of one epoch"

    def teardown(self) -> None:
        if not getattr(self, "leaders", None):
            return
        self.store.fail = 0.0
        run(self.leaders, self.clock, 150, step_s=0.25)
        agreed(sorted(self.leaders, key=lambda leader: leader.record.job))


TestAgreement = Agreement.TestCase
TestAgreement.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


class AgreementOnTrials(Agreement):
    """The same where all jobs are one component that tries plans out, and some do better."""

    def options(self) -> dict[str, Any]:
        step_s = self.rng.uniform(0.3, 0.6)

        def ends(since_ns: int) -> list[int]:
            first, last = since_ns / 1e9 / step_s, self.clock() / step_s
            return [round(n * step_s * 1e9) for n in range(int(first) + 1, int(last) + 1)]

        return {"compute": entries_of, "iteration_ends": ends}


TestAgreementOnTrials = AgreementOnTrials.TestCase
TestAgreementOnTrials.settings = TestAgreement.settings
