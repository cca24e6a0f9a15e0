"""How long a job's steps take now and alone: right, cheap, and of no effect on plans."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from control_fakes import FakeClock, MemoryStore, by_name, profile, record

from crux_torch.agreement.leader import Leader
from crux_torch.agreement.publish import StepClock
from crux_torch.agreement.records import JobRecord, StepTimes
from crux_torch.agreement.registry import FORBIDDEN_S, Registry
from crux_torch.errors import StoreForbidden
from crux_torch.report.step_times import JobSteps, steps_of

LEASE_S = 6.0


class Training:
    """Iterations that end as the clock goes on."""

    def __init__(self, clock: FakeClock, step_s: float) -> None:
        self.clock, self.step_s = clock, step_s
        self._ends_s = [clock.now]

    def ends_ns(self, since_ns: int) -> list[int]:
        while self._ends_s[-1] + self.step_s <= self.clock.now:
            self._ends_s.append(self._ends_s[-1] + self.step_s)
        return [n for s in self._ends_s if (n := round(s * 1e9)) >= since_ns]


class Counted(MemoryStore):
    """Counts the writes of each key, and may forbid those of steps."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.puts: list[tuple[str, bytes]] = []
        self.forbids = False

    def put(self, key: str, value: bytes, lease_s: float = 600.0) -> None:
        self.puts.append((key, value))
        if self.forbids and "/steps/" in key:
            raise StoreForbidden(key)
        super().put(key, value, lease_s)

    def written(self, part: str) -> list[bytes]:
        return [value for key, value in self.puts if part in key]


@pytest.fixture
def store(clock: FakeClock) -> Counted:
    return Counted(clock)


def shown(store: MemoryStore) -> dict[str, JobSteps]:
    registry = Registry(store, "c")
    return steps_of(registry.look().jobs, registry.steps())


def test_two_jobs_that_slow_each_other_down_are_shown_so_and_their_plan_stays(
    clock: FakeClock, store: Counted
) -> None:
    alone_s = {"a": 0.3406, "b": 0.3215}
    jobs = {job: Training(clock, step_s) for job, step_s in alone_s.items()}
    leaders = []
    for seed, (job, training) in enumerate(jobs.items()):
        measured = profile(period_s=alone_s[job], measured_alone=True)
        leaders.append(
            Leader(
                store,
                "c",
                record(job, profile=measured),
                by_name,
                lease_s=LEASE_S,
                clock=clock,
                rng=random.Random(seed),
                iteration_ends=training.ends_ns,
            )
        )

    def run(seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            for leader in leaders:
                leader.tick()
            clock.advance(0.1)

    run(40)
    before = shown(store)
    plan, records = leaders[0].plan, [leader.record for leader in leaders]
    for job, step_s in alone_s.items():
        assert before[job].step_s == pytest.approx(step_s, rel=0.01)
        assert before[job].slowdown == pytest.approx(1.0, rel=0.01)

    now_s = {"a": 0.587, "b": 0.5705}
    for job, training in jobs.items():
        training.step_s = now_s[job]
    del store.puts[:]
    run(45)
    after = shown(store)
    for job, step_s in now_s.items():
        assert after[job].step_s == pytest.approx(step_s, rel=0.01)
        assert after[job].alone_s == pytest.approx(alone_s[job], rel=0.01)
        assert after[job].alone_source == "measured"
        assert after[job].slowdown == pytest.approx(step_s / alone_s[job], rel=0.01)
        age_s = after[job].step_age_s
        assert age_s is not None
        assert 0 <= age_s <= step_s
        assert after[job].alone_age_s == pytest.approx(85, abs=LEASE_S + 1)
    assert leaders[0].plan == plan
    assert [leader.record for leader in leaders] == records
    assert len(set(store.written("/jobs/a"))) == 1
    assert 6 <= len(store.written("/steps/a")) <= 9
    assert max(map(len, store.written("/steps/"))) < 256

    leaders[0].close()
    assert set(Registry(store, "c").steps()) == {"b"}


def told(clock: FakeClock, store: MemoryStore) -> StepTimes:
    return Registry(store, "c").steps()["a"]


def clock_of(store: MemoryStore, ends_ns: Callable[[int], list[int]]) -> StepClock:
    return StepClock(Registry(store, "c"), "a", LEASE_S, ends_ns)


def test_a_pause_is_no_step_and_a_job_that_stands_still_shows_its_age(
    clock: FakeClock, store: Counted
) -> None:
    training = Training(clock, 0.5)
    steps = clock_of(store, training.ends_ns)
    clock.advance(10)
    training.ends_ns(0)
    training.step_s = 9.0  # a checkpoint
    clock.advance(9)
    training.ends_ns(0)
    training.step_s = 0.5
    clock.advance(5)
    steps.publish(clock(), None)
    first = told(clock, store)
    assert first.step_s == pytest.approx(0.5)
    assert first.profile_age_s is first.fastest_s is None
    training.step_s = 1e9
    clock.advance(60)
    steps.publish(clock(), None)
    assert told(clock, store).age_s == pytest.approx(60, abs=0.6)
    assert told(clock, store).step_s == pytest.approx(0.5)
    # Who has died tells nothing for long.
    clock.advance(3 * LEASE_S + 0.1)
    assert Registry(store, "c").steps() == {}


def test_slow_steps_count_however_long_they_take(clock: FakeClock, store: Counted) -> None:
    training = Training(clock, 40.0)
    steps = clock_of(store, training.ends_ns)
    steps.publish(clock(), None)
    assert not store.puts
    clock.advance(400)
    steps.publish(clock(), None)
    assert told(clock, store).step_s == pytest.approx(40)
    assert told(clock, store).iterations == 5


def test_a_profile_is_published_with_the_steps_of_its_time(
    clock: FakeClock, store: Counted
) -> None:
    steps = clock_of(store, Training(clock, 0.5).ends_ns)
    steps.publish(clock(), None)
    clock.advance(0.6 * LEASE_S)
    steps.publish(clock(), None)
    assert told(clock, store).profile_age_s is None
    measured = profile(period_s=0.5)
    for _ in range(3):
        clock.advance(0.01)
        steps.publish(clock(), measured)
    assert told(clock, store).profile_age_s == 0.0
    assert len(store.puts) == 2


def test_a_role_that_may_not_tell_is_not_asked_all_the_time(
    clock: FakeClock, store: Counted
) -> None:
    store.forbids = True
    steps = clock_of(store, Training(clock, 0.5).ends_ns)
    for _ in range(1200):
        clock.advance(0.1)
        steps.publish(clock(), None)
    steps.withdraw()
    assert len(store.puts) <= 120 / FORBIDDEN_S + 1


def test_what_is_no_step_time_is_ignored(clock: FakeClock, store: Counted) -> None:
    for raw in (b"junk", b'{"version":2}', b'{"version":9,"step_s":1,"iterations":1,"age_s":0}'):
        store.write("crux-plan/c/steps/a", raw, 60.0)
        assert Registry(store, "c").steps() == {}


def steps_alone(changes: dict[str, object], fastest_s: float | None) -> tuple[object, ...]:
    job: JobRecord = record("a", profile=profile(**changes))  # type: ignore[arg-type]
    now = StepTimes(step_s=1.2, iterations=9, age_s=0.5, fastest_s=fastest_s, profile_age_s=70.0)
    found = steps_of([job], {"a": now})["a"]
    assert (found.step_s, found.step_age_s, found.alone_age_s) == (1.2, 0.5, 70.0)
    assert found.alone_s is not None
    assert found.slowdown == pytest.approx(1.2 / found.alone_s)
    return found.alone_source, found.least_alone_s, pytest.approx(found.alone_s)


def test_a_step_alone_is_measured_or_computed_or_between_bounds() -> None:
    # 0.8 s of compute with one burst of t = 0.3 s from its middle on, and 1.0 s when measured.
    measured = {"period_s": 1.0, "t_s": 0.3}
    assert steps_alone(measured, None) == ("measured", 1.0, 1.0)
    assert steps_alone(measured, 0.9) == ("measured", 0.9, 0.9)
    assert steps_alone(measured, 1.1) == ("measured", 1.0, 1.0)
    beside = measured | {"measured_alone": False}
    assert steps_alone(beside, None) == ("bound", 0.8, 1.0)
    assert steps_alone(beside, 0.9) == ("bound", 0.8, 0.9)
    assert steps_alone(beside, 0.7) == ("bound", 0.7, 0.7)
    placed = beside | {"t_source": "topology"}
    assert steps_alone(placed, None) == ("computed", 0.8, 0.8)
    late = steps_alone(placed | {"t_s": 0.5}, None)  # it ends after the compute
    assert late == ("computed", pytest.approx(0.9), 0.9)
    assert steps_alone(placed | {"t_s": 3.0}, None) == ("computed", 1.0, 1.0)


def test_without_a_profile_there_is_a_step_and_no_slowdown() -> None:
    job = record("a", profile=None)
    now = StepTimes(step_s=1.2, iterations=9, age_s=0.5)
    assert steps_of([job], {"a": now}) == {"a": JobSteps(1.2, 0.5)}
    assert steps_of([job], {}) == {"a": JobSteps()}
    assert msgspec.json.decode(msgspec.json.encode(now), type=StepTimes) == now
    nothing = record("a", profile=profile(period_s=0.0, compute_s=0.0))
    assert steps_of([nothing], {"a": now})["a"].slowdown is None
