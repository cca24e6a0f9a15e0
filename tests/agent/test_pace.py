"""Jobs that keep to the grid of a plan: ranks, leaders and clocks of hosts that differ."""

from __future__ import annotations

from typing import Any

import pytest
from control_fakes import FakeClock, MemoryStore, profile, record
from hypothesis import given
from hypothesis import strategies as st
from led_job import Job as LedJob
from led_job import run
from pace_world import SECOND, Clocked, Marks, World

from crux_torch.agent.orders import Order, Pace
from crux_torch.agent.pace import MAX_CORRECTIONS, MAX_ERROR, PAUSE_S, PaceKeeper, PaceSetter
from crux_torch.agreement.claims import LOOK_S, SharedClock
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import Grid, PlanEntry
from crux_torch.errors import StoreError
from crux_torch.measure.profile import HostFlow, ProfileBurst
from crux_torch.schedule.papers.cassini_grid import (
    DRIFT,
    HELD_UP,
    behind,
    following_point,
    start_point,
)
from crux_torch.schedule.papers.cassini_parts import HEADROOM

GRID_S = 0.4


@given(st.integers(0, 10**15), st.integers(0, 10**15), st.integers(1, 10**11))
def test_a_start_is_held_until_the_next_point_unless_it_is_in_the_window(
    ready: int, origin: int, period: int
) -> None:
    point = start_point(ready, origin, period)
    assert (point - origin) % period == 0
    if point >= ready:
        assert point - ready < period
        assert point == ready or (ready - origin) % period > DRIFT * period
    else:
        assert ready - point <= DRIFT * period


class Rank:
    """One rank: its host's clock, and when it was released from each of its marks, in true time."""

    def __init__(self, world: World, offset_ns: int = 0) -> None:
        self.world, self.offset_ns = world, offset_ns
        self.marks = Marks()
        self.clock_ns = world.host(offset_ns)
        self.keeper = PaceKeeper(self.marks, sleep=world.sleep, clock_ns=self.clock_ns)  # type: ignore[arg-type]
        self.keeper.install()

    def end(self, true_ns: int) -> int:
        """End an iteration at a true time; returns when the next one begins."""
        self.world.now_ns = true_ns
        self.marks.mark(true_ns + self.offset_ns)
        return self.world.now_ns


def entry(shift_s: float = 0.1, grid_s: float = GRID_S) -> PlanEntry:
    return PlanEntry(
        job="a",
        level=0,
        priority=0.0,
        intensity=0.0,
        correction=1.0,
        grid=Grid(shift_s, grid_s),
    )


class Job:
    """A job whose ranks meet in every iteration, and its leader."""

    def __init__(self, world: World, offsets_ns: tuple[int, ...], delay_ns: int = 100_000) -> None:
        self.world = world
        self.ranks = [Rank(world, offset) for offset in offsets_ns]
        leader = self.ranks[0]
        self.clock = SharedClock(Clocked(world, lambda: (delay_ns, delay_ns)), leader.clock_ns)
        self.setter = PaceSetter(
            self.clock, leader.keeper, now_s=lambda: leader.clock_ns() / SECOND
        )
        self.ready_ns = world.now_ns
        self.begun_ns: list[int] = []

    def lead(self, of: PlanEntry | None) -> Pace | None:
        pace = self.setter.pace(of)
        for rank in self.ranks:
            rank.keeper.follow(pace)
        return pace

    def iterate(self, own_s: float, times: int = 1) -> None:
        """Iterations of ``own_s`` without holds; ranks end together, and wait for each other."""
        for _ in range(times):
            begun = [rank.end(self.ready_ns) for rank in self.ranks]
            self.begun_ns.append(max(begun))
            self.ready_ns = max(begun) + round(own_s * SECOND)
            self.world.now_ns = self.ready_ns

    def phase_s(self, of: PlanEntry) -> float:
        """How long after (or before) a point of the plan's grid the last iteration began."""
        assert of.grid
        after_s = (self.begun_ns[-1] / SECOND - of.grid.shift_s) % of.grid.period_s
        return after_s if after_s < of.grid.period_s / 2 else after_s - of.grid.period_s


def test_jobs_on_hosts_with_other_clocks_begin_in_their_slots() -> None:
    for shift_s in (0.0, 0.1, 0.399):
        job = Job(World(), (5 * SECOND, -900 * SECOND, 12_345))
        job.iterate(0.39, 3)
        job.lead(entry(shift_s))
        job.iterate(0.39, 20)
        assert job.phase_s(entry(shift_s)) == pytest.approx(0.0, abs=0.001)
        gaps = {
            round((b - a) / SECOND, 6)
            for a, b in zip(job.begun_ns[-9:], job.begun_ns[-8:], strict=False)
        }
        assert gaps == {GRID_S}
        assert [rank.keeper.corrections_per_minute for rank in job.ranks] == [0, 0, 0]


@given(
    st.integers(1, 10**10),
    st.integers(-(10**12), 10**12),
    st.integers(0, 10**10),
    st.integers(-(10**12), 10**12),
)
def test_a_late_iteration_begins_at_once_unless_it_was_held_up_for_long(
    period: int, before: int, late: int, after: int
) -> None:
    ready = before + after
    point = following_point(ready, before, late, period)
    assert (point - before) % period == 0
    assert point - ready <= period, "a hold is one period at most"
    over = after - period
    if over <= 0 or over > min(late + HELD_UP * period, period):
        assert point >= ready
    else:
        assert point == before + period


@given(st.lists(st.integers(0, 1000), max_size=5), st.floats(0, 10))
def test_a_job_that_catches_up_does_not_move_grids(late: list[int], ahead: float) -> None:
    by = behind(late, 1000, ahead)
    if by:
        assert min(late[-2:]) > DRIFT * 1000
        assert late[-2] <= late[-1] <= by
    elif len(late) >= 2:
        assert late[-1] < late[-2] or min(late[-2:]) <= DRIFT * 1000


@pytest.mark.parametrize("late", [2 * DRIFT, 0.15, HELD_UP - 0.001])
def test_a_job_that_was_held_up_goes_on_at_once_and_catches_up(late: float) -> None:
    job = Job(World(), (0, 3))
    own_s = GRID_S / (1 + HEADROOM)
    job.iterate(own_s, 3)
    job.lead(entry())
    job.iterate(own_s, 5)
    job.iterate(own_s + late * GRID_S)
    job.iterate(own_s)
    assert job.phase_s(entry()) != pytest.approx(0.0, abs=0.001)
    for _ in range(round((late + 0.05) / HEADROOM)):
        job.iterate(own_s)
        job.lead(entry())
    assert job.phase_s(entry()) == pytest.approx(0.0, abs=0.001)
    assert job.setter.moved is None
    assert [rank.keeper.corrections_per_minute for rank in job.ranks] == [0, 0]


def test_a_job_that_was_held_up_for_long_leaves_points_out_and_is_counted() -> None:
    job = Job(World(), (0, 3))
    job.iterate(0.39, 3)
    job.lead(entry())
    job.iterate(0.39, 5)
    job.iterate(0.39 + 3.9 * GRID_S)
    job.iterate(0.39)
    assert job.phase_s(entry()) == pytest.approx(0.0, abs=0.001)
    assert [rank.keeper.corrections_per_minute for rank in job.ranks] == [1, 1]
    job.iterate(0.39, 200)
    assert job.ranks[0].keeper.corrections_per_minute == 0, "a minute later it is forgotten"


def test_a_job_that_does_not_fit_its_grid_is_left_alone_and_tried_again_later() -> None:
    job = Job(World(), (0,))
    job.iterate(0.45)
    job.lead(entry())
    for _ in range(50):
        job.iterate(0.45)
        job.lead(entry())
    assert job.setter.gave_up
    held = job.ranks[0].keeper.status()["held"]
    assert held <= MAX_CORRECTIONS + 2
    job.iterate(0.45, 30)
    assert job.ranks[0].keeper.status()["held"] == held
    assert "missed the grid" in job.setter.status()["why_not"]
    job.lead(None)  # it is measured
    assert job.lead(entry(0.2)) is None, "not before the pause is over"
    job.world.now_ns = job.ready_ns = job.ready_ns + round(PAUSE_S * SECOND)
    job.iterate(0.39)
    assert job.lead(entry(0.2)) is not None


def test_the_pace_ends_with_the_plan_and_follows_another_one() -> None:
    job = Job(World(), (0, 1))
    job.iterate(0.39)
    first = job.lead(entry())
    job.iterate(0.39, 3)
    assert job.lead(entry()) is first, "while it fits, ranks hear nothing new"
    job.lead(None)
    before = job.ready_ns
    job.iterate(0.39, 3)
    assert job.ready_ns == before + 3 * round(0.39 * SECOND)
    other = entry(0.03, 0.5)
    job.lead(other)
    job.iterate(0.39, 3)
    assert job.phase_s(other) == pytest.approx(0.0, abs=0.001)
    assert job.ranks[0].keeper.corrections_per_minute == 0


def test_ranks_whose_clocks_part_are_told_again_where_the_grid_is() -> None:
    job = Job(World(), (0,))
    job.iterate(0.39)
    paces = set()
    for _ in range(400):
        paces.add(job.lead(entry()))
        job.iterate(0.39)
        job.ranks[0].offset_ns += 40_000  # 100 millionths
        job.ranks[0].clock_ns = job.world.host(job.ranks[0].offset_ns)
        job.clock._clock_ns = job.ranks[0].clock_ns
        job.ranks[0].keeper._clock_ns = job.ranks[0].clock_ns
    assert len(paces) > 1
    assert abs(job.phase_s(entry())) < DRIFT * GRID_S
    assert job.ranks[0].keeper.corrections_per_minute <= 2


def test_a_rank_without_a_mark_or_without_the_pace_holds_nothing() -> None:
    world = World()
    rank = Rank(world)
    rank.keeper.follow(Pace(mark=3, lead_s=0.1, grid_s=0.4))
    assert rank.end(world.now_ns) == world.now_ns
    assert not rank.keeper.keeps
    rank.end(world.now_ns + 1)
    at = world.now_ns
    assert rank.end(at + 2) - at == pytest.approx(0.1 * SECOND, abs=10)  # the third mark
    assert rank.keeper.keeps
    rank.keeper.remove()
    assert not rank.marks.listeners
    silent = Rank(world)
    setter = PaceSetter(SharedClock(Clocked(world, lambda: (1, 1)), world.host(0)), silent.keeper)
    assert setter.pace(entry()) is None
    assert "no end of an iteration" in setter.status()["why_not"]


@pytest.mark.parametrize("trouble", ["refuses", "slow"])
def test_without_a_known_clock_nothing_is_shifted(trouble: str, caplog: Any) -> None:
    world = World()
    rank = Rank(world)
    delay_ns = round(2 * MAX_ERROR * GRID_S * SECOND)

    def delays() -> tuple[int, int]:
        if trouble == "refuses":
            raise StoreError("no clock here")
        return delay_ns, 0

    setter = PaceSetter(SharedClock(Clocked(world, delays), rank.clock_ns), rank.keeper)
    rank.end(world.now_ns)
    assert setter.pace(entry()) is None
    assert "clock" in setter.status()["why_not"]
    assert ("no clock here" in caplog.text) == (trouble == "refuses")


@given(st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)), min_size=5, max_size=60))
def test_the_offset_is_known_within_its_bound(delays: list[tuple[int, int]]) -> None:
    world = World()
    left = iter(delays * 20)
    offset_ns = 123 * SECOND
    clock = SharedClock(Clocked(world, lambda: next(left)), world.host(offset_ns))
    for _ in range(len(delays) // 5):
        clock.look()
        assert abs(clock.offset_ns + offset_ns) <= clock.error_s * SECOND + 2
        world.now_ns += round(LOOK_S * SECOND)


def _pair(compute_s: float, t_s: float, period_s: float) -> list[Any]:
    told = profile(
        compute_s=compute_s, t_s=t_s, period_s=period_s, bursts=(ProfileBurst(1.0, 1.0),),
        flows=(HostFlow("h0", "h1", 1e9),),
    )  # fmt: skip
    return [record(name, profile=told) for name in "ab"]


def test_a_plan_shifts_a_compatible_pair_and_leaves_another_one_alone() -> None:
    a, b = compute_entries(_pair(0.6, 0.3, 0.95), None, policy="cassini", levels=(0,))
    assert a.grid
    assert b.grid
    assert a.grid.period_s == b.grid.period_s == pytest.approx(0.95 * (1 + HEADROOM))
    apart_s = (b.grid.shift_s - a.grid.shift_s) % a.grid.period_s
    assert 0.3 <= apart_s <= a.grid.period_s - 0.3
    for alone in compute_entries(_pair(0.0, 0.9, 0.95), None, policy="cassini", levels=(0,)):
        assert not alone.grid
    for other in compute_entries(_pair(0.6, 0.3, 0.95), None, policy="ecmp", levels=(0,)):
        assert not other.grid


def test_crux_pa_gives_the_levels_that_there_are_from_the_top() -> None:
    records = [
        record(name, profile=profile(flops=10.0 ** (12 + i))) for i, name in enumerate("abcd")
    ]
    levels = [e.level for e in compute_entries(records, None, policy="crux-pa", levels=(1, 4, 6))]
    assert levels == [1, 1, 4, 6]


def test_orders_carry_the_pace_but_for_measurements() -> None:
    class Told:
        gave_up = False

        def pace(self, entry: PlanEntry | None) -> Pace | None:
            return None if entry is None else Pace(1, 0.1, GRID_S)

        def status(self) -> dict[str, Any]:
            return {}

    clock = FakeClock()
    led = LedJob("a", clock, MemoryStore(clock), pace_setter=Told())
    run(clock, 10.0, led)
    assert {order.pace for order in led.orders if order.measuring} == {None}
    assert led.told.pace == Pace(1, 0.1, GRID_S)
    assert Order.from_json(led.told.to_json()) == led.told
    led.changed = True
    before = len(led.orders)
    run(clock, 10.0, led)
    led.changed = False
    run(clock, 10.0, led)
    assert {order.pace for order in led.orders[before:] if order.measuring} == {None}
    assert led.told.pace is not None
