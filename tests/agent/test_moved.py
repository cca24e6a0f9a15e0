"""Two shifted jobs on a modelled link: bursts share it fairly, and delays of one hit the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from control_fakes import FakeClock, MemoryStore, by_name
from led_job import Job as LedJob
from led_job import run
from msgspec.structs import replace
from pace_world import SECOND, Clocked, Marks, World

from crux_torch.agent.orders import Pace
from crux_torch.agent.pace import PaceKeeper, PaceSetter
from crux_torch.agreement.claims import SharedClock
from crux_torch.agreement.outcome import moved_with
from crux_torch.agreement.records import Grid, JobRecord, Moved, Plan, PlanEntry

STEP_NS = 2_000_000
#: Seconds between a leader's rounds, until another leader has its record, and ranks its order.
TICK_S, TOLD_S, ORDER_S = 0.1, 0.6, 0.2
COMPUTE_S, BURST_S = 0.22, 0.18
ALONE_S = COMPUTE_S + BURST_S
GRID_S = 1.02 * ALONE_S


class Shifted:
    """A job that computes, sends over the link, and is held at the end of each iteration."""

    def __init__(self, world: World, name: str, shift_s: float, offset_ns: int) -> None:
        self.world = world
        self.grid = Grid(shift_s, GRID_S)
        self.entry = PlanEntry(
            job=name, level=0, priority=0.0, intensity=0.0, correction=1.0, grid=self.grid
        )
        clock_ns = world.host(offset_ns)
        self.marks, self.offset_ns = Marks(), offset_ns
        self.keeper = PaceKeeper(self.marks, sleep=self._hold, clock_ns=clock_ns)  # type: ignore[arg-type]
        self.keeper.install()
        clock = SharedClock(Clocked(world, lambda: (0, 0)), clock_ns)
        self.setter = PaceSetter(clock, self.keeper, now_s=lambda: clock_ns() / SECOND)
        self.computes_until_ns = world.now_ns + round(COMPUTE_S * SECOND)
        self.left_s = BURST_S
        self.begun_ns: list[int] = []
        self._held_ns = 0
        self._on_the_way: list[tuple[int, Pace | None]] = []
        self._said: list[tuple[int, Moved]] = []

    def _hold(self, seconds: float) -> None:
        self._held_ns = round(seconds * SECOND)

    @property
    def sends(self) -> bool:
        return self.world.now_ns >= self.computes_until_ns

    def send(self, share: float, compute_s: Callable[[], float]) -> None:
        self.left_s -= share * STEP_NS / SECOND
        if self.left_s > 0:
            return
        self._held_ns = 0
        self.marks.mark(self.world.now_ns + self.offset_ns)
        begin = self.world.now_ns + self._held_ns
        self.begun_ns.append(begin)
        self.computes_until_ns = begin + round(compute_s() * SECOND)
        self.left_s = BURST_S

    def lead(self, others: list[Shifted], paced: bool) -> None:
        told = [m for other in others for m in other.said()]
        pace = self.setter.pace(self.entry, told) if paced else None
        self._on_the_way.append((self.world.now_ns + round(ORDER_S * SECOND), pace))
        if self.setter.moved is not None:
            self._said.append((self.world.now_ns, self.setter.moved))
        while self._on_the_way and self._on_the_way[0][0] <= self.world.now_ns:
            self.keeper.follow(self._on_the_way.pop(0)[1])

    def said(self) -> list[Moved]:
        """What another leader has read of this one by now."""
        before = self.world.now_ns - round(TOLD_S * SECOND)
        return [m for at, m in self._said if at <= before][-1:]

    def step_s(self, since_ns: int) -> float:
        begun = [at for at in self.begun_ns if at >= since_ns]
        return (begun[-1] - begun[0]) / (len(begun) - 1) / SECOND


class Link:
    """What two jobs did in the second half of a run."""

    def __init__(
        self, seed: int, *, jitter: float = 0.0, paced: bool = True, held_up: float = 0.0,
        run_s: float = 60.0,
    ) -> None:  # fmt: skip
        rng = random.Random(seed)
        world = World()
        # Bursts lie in the middle of each other's gaps.
        jobs = [Shifted(world, "a", 0.0, 5 * SECOND), Shifted(world, "b", GRID_S / 2, 123)]
        self.jobs = jobs
        half_ns = world.now_ns + round(run_s / 2 * SECOND)
        end_ns = world.now_ns + round(run_s * SECOND)
        tick_ns = world.now_ns
        hold_up = held_up

        def compute_s() -> float:
            return COMPUTE_S + ALONE_S * rng.gauss(0.0, jitter)

        one = two = 0
        while world.now_ns < end_ns:
            sending = [job for job in jobs if job.sends]
            for job in sending:
                job.send(1 / len(sending), compute_s)
            if world.now_ns >= half_ns:
                one += len(sending) > 0
                two += len(sending) > 1
                if hold_up and jobs[0] in sending:
                    jobs[0].computes_until_ns = world.now_ns + round(hold_up * GRID_S * SECOND)
                    hold_up = 0.0
            if world.now_ns >= tick_ns:
                tick_ns += round(TICK_S * SECOND)
                for job, other in (jobs, jobs[::-1]):
                    job.lead([other], paced)
            world.now_ns += STEP_NS
        self.overlap = two / one
        self.steps = [job.step_s(half_ns) / ALONE_S for job in jobs]
        self.corrections = [job.keeper.corrections_per_minute for job in jobs]


def test_without_jitter_bursts_never_meet() -> None:
    seen = Link(1)
    assert seen.overlap < 0.01
    assert max(seen.steps) < 1.025
    assert seen.corrections == [0, 0]


@pytest.mark.parametrize("jitter", [0.01, 0.02, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_jobs_with_jitter_stay_apart(jitter: float, seed: int) -> None:
    free, seen = Link(seed, jitter=jitter, paced=False), Link(seed, jitter=jitter)
    assert seen.overlap < 0.2 * free.overlap
    assert max(seen.steps) < 1.02 + jitter
    assert max(seen.steps) < min(free.steps)


def test_jobs_with_more_jitter_than_gaps_are_no_slower_than_without_a_pace() -> None:
    free, seen = Link(1, jitter=0.05, paced=False), Link(1, jitter=0.05)
    assert seen.overlap < 0.5 * free.overlap
    assert sum(seen.steps) < sum(free.steps)


@pytest.mark.parametrize("held_up", [0.1, 0.15, 0.25, 0.4, 0.6, 0.9, 5.3])
def test_jobs_part_again_after_one_was_held_up(held_up: float) -> None:
    seen = Link(1, held_up=held_up)
    assert seen.overlap < 0.05
    iterations = 30.0 / GRID_S
    lost = (1.0 + held_up) / iterations
    assert max(seen.steps) < 1.025 + lost, "what it was held up for, and a period at most"
    assert max(seen.corrections) <= 3


def test_only_grids_of_one_unit_that_are_still_in_force_move_together() -> None:
    def entry(name: str, grid: Grid) -> PlanEntry:
        return PlanEntry(job=name, level=0, priority=0.0, intensity=0.0, correction=1.0, grid=grid)

    def record(name: str, grid: Grid, by_s: float) -> JobRecord:
        return JobRecord(
            job=name,
            incarnation=name,
            hosts=("h",),
            gpus=1,
            state="running",
            moved=Moved(grid, by_s, 0.0),
        )

    mine, twice, other = Grid(0.0, 0.4), Grid(0.1, 0.8), Grid(0.0, 0.41)
    plan = Plan(
        epoch=1,
        fingerprint="f",
        valid_s=9.0,
        author="a",
        policy="cassini",
        digest="d",
        entries=(entry("a", mine), entry("b", twice), entry("c", other), entry("d", mine)),
    )
    told = [
        record("b", twice, 1.0),
        record("c", other, 2.0),
        record("d", Grid(0.2, 0.4), 3.0),  # of an earlier plan
        record("e", mine, 4.0),  # not in this one
    ]
    assert moved_with(mine, plan, told) == [Moved(twice, 1.0, 0.0)]
    assert moved_with(other, plan, told) == [Moved(other, 2.0, 0.0)]


def test_leaders_hear_how_far_grids_move() -> None:
    class Told:
        gave_up = False

        def __init__(self, moved: Moved | None) -> None:
            self.moved = moved
            self.heard: set[Moved] = set()

        def pace(self, entry: PlanEntry | None, others: Iterable[Moved] = ()) -> Pace | None:
            self.heard |= set(others)
            return None

        def status(self) -> dict[str, object]:
            return {}

    grid = Grid(0.0, 0.4)

    def shifted(*args: Any, **options: Any) -> tuple[PlanEntry, ...]:
        return tuple(replace(entry, grid=grid) for entry in by_name(*args, **options))

    clock = FakeClock()
    store = MemoryStore(clock)
    late, other = Told(Moved(grid, 0.1, 5.0)), Told(None)
    jobs = [
        LedJob(name, clock, store, compute=shifted, pace_setter=told)
        for name, told in (("a", late), ("b", other))
    ]
    run(clock, 20.0, *jobs)
    assert other.heard == {late.moved}
