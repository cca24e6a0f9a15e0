"""mlcc's rates: Algorithms 1 and 2 against brute force, and the tables that they read."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from crux_torch.schedule.papers.mlcc import (
    FOREIGN_SLOTS,
    SLOT_S,
    SLOTS,
    LinkLoad,
    aggregation_change_bytes,
    allocate,
    broadcast_change_bytes,
    ceiling_Bps,
    foreign_share_Bps,
    initial_schedule,
    path_load,
    ring_change_bytes,
    room_Bps,
)
from crux_torch.schedule.papers.mlcc_tables import LoadTables


def link(*load_Bps: float, capacity_Bps: float = 10.0) -> LinkLoad:
    return LinkLoad(capacity_Bps, load_Bps)


@st.composite
def paths(draw: st.DrawFn, slots: int | None = None) -> tuple[LinkLoad, ...]:
    slots = slots or draw(st.integers(1, SLOTS))
    loads = st.lists(st.integers(0, 12).map(float), min_size=slots, max_size=slots)
    capacity = st.integers(1, 12).map(float)
    one = st.builds(LinkLoad, capacity, loads.map(tuple))
    return tuple(draw(st.lists(one, min_size=1, max_size=3)))


volumes = st.floats(0.01, 200.0)


def cost(path, rates, slot_s: float) -> float:
    """Equation (11), with the path's load as the price of a slot."""
    last = max((t for t, rate in enumerate(rates, 1) if rate > 0), default=1)
    full = min(each.capacity_Bps for each in path)
    return last + sum(r * at for r, at in zip(rates, path_load(path), strict=True)) / full


def test_the_papers_slots() -> None:
    assert (SLOTS, SLOT_S) == (10, 0.06)


def test_an_empty_path_is_filled_from_now_on() -> None:
    assert initial_schedule([link(0, 0, 0, 0)], 25.0, 1.0) == (10.0, 10.0, 5.0, 0.0)


def test_full_slots_are_left_to_those_who_booked_them() -> None:
    assert initial_schedule([link(10, 10, 0, 0)], 15.0, 1.0) == (0.0, 0.0, 10.0, 5.0)


def test_the_room_is_that_of_the_fullest_link() -> None:
    path = [link(2, 0), link(1, 7, capacity_Bps=8.0)]
    assert room_Bps(path) == (7.0, 1.0)
    assert path_load(path) == (pytest.approx(2 / 10 + 1 / 8), 7 / 8)


def test_cheaper_slots_before_the_same_end_go_first() -> None:
    # Two slots are needed in any case: what is left over goes to the dearer one.
    rates = initial_schedule([link(5, 0, 0)], 13.0, 1.0)
    assert rates == (3.0, 10.0, 0.0)


def test_the_rest_of_the_current_slot_counts() -> None:
    assert initial_schedule([link(0, 0)], 10.0, 1.0, gone=0.5) == (10.0, 5.0)
    assert initial_schedule([link(0, 0)], 10.0, 1.0, gone=1.0) == (0.0, 10.0)


@given(paths(), volumes, st.floats(0.0, 0.9))
def test_nobody_is_overrun_and_the_volume_is_sent_where_it_fits(path, volume, gone) -> None:
    rates, room = initial_schedule(path, volume, 0.5, gone=gone), room_Bps(path)
    assert len(rates) == len(room)
    assert all(0.0 <= rate <= most for rate, most in zip(rates, room, strict=True))
    length = [0.5 * (1 - gone)] + [0.5] * (len(room) - 1)
    most = sum(r * s for r, s in zip(room, length, strict=True))
    sent = sum(r * s for r, s in zip(rates, length, strict=True))
    assert sent == pytest.approx(min(volume, most))


@given(paths(slots=4), st.integers(1, 30))
def test_no_schedule_in_whole_units_costs_less(path, units) -> None:
    room = [int(most) for most in room_Bps(path)]
    assume(sum(room) >= units)
    choices = itertools.product(*(range(most + 1) for most in room))
    least = min(cost(path, rates, 1.0) for rates in choices if sum(rates) == units)
    assert cost(path, initial_schedule(path, float(units), 1.0), 1.0) <= least + 1e-9


@given(paths(), volumes, st.floats(-20.0, 20.0), st.floats(0.0, 12.0))
def test_a_dependency_moves_the_current_rate_alone_and_no_further(path, volume, change, most):
    initial = initial_schedule(path, volume, 1.0)
    rates = allocate(path, volume, 1.0, change, most)
    if change == 0.0:
        assert rates == initial
    elif change > 0.0:
        assert initial[0] <= rates[0] + 1e-9
        assert rates[0] <= max(initial[0], min(initial[0] + change, most)) + 1e-9
    else:
        assert rates[0] == pytest.approx(max(0.0, initial[0] + change), abs=1e-9)
    room = room_Bps(path)
    assert all(r <= m + 1e-9 for r, m in zip(rates[1:], room[1:], strict=True))
    assert sum(rates) <= volume * (1 + 1e-6) + 1e-9


def test_a_raise_beyond_what_was_reached_lately_stops_there() -> None:
    path = [link(6, 6, 6)]
    assert allocate(path, 20.0, 1.0, 3.0, ceiling_Bps((5.0, 6.5, 1.0), 4.0))[0] == 6.5
    assert allocate(path, 20.0, 1.0, 1.0, ceiling_Bps((5.0, 6.5, 1.0), 4.0))[0] == 5.0


def test_a_ring_keeps_the_pace_of_the_flow_before() -> None:
    # Figure 6(b): a worker sends what it has received, and may send its own chunk before.
    assert ring_change_bytes(own=4.0, precedent=7.0) == 3.0
    assert ring_change_bytes(own=7.0, precedent=4.0) == -3.0
    assert ring_change_bytes(own=7.0, precedent=4.0, lead_bytes=2.0) == -1.0
    assert ring_change_bytes(own=7.0, precedent=4.0, lead_bytes=5.0) == 0.0


def test_a_parameter_server_couples_the_slowest_worker_and_the_fastest_broadcast() -> None:
    # Figure 6(a), with f1 = 3, f2 = 5 to the server, and f3 = 4, f4 = 2 from it.
    assert aggregation_change_bytes(3.0, broadcasts=[4.0, 2.0]) == 1.0
    assert aggregation_change_bytes(5.0, broadcasts=[4.0, 2.0]) == 0.0
    assert broadcast_change_bytes(2.0, aggregations=[3.0, 5.0]) == 1.0
    assert broadcast_change_bytes(4.0, aggregations=[3.0, 5.0]) == -1.0


@given(st.floats(0.0, 2.0), st.integers(1, 20))
def test_foreign_flows_keep_what_they_send_and_grow_to_their_share(cross, flows) -> None:
    kept = foreign_share_Bps(cross, 1.0, flows)
    if cross <= 0.2:
        assert kept == 0.0
        return
    assert kept <= 1.0 / (flows + 1)
    assert kept >= min(cross, 1.0 / (flows + 1))
    for _ in range(20):
        kept = foreign_share_Bps(kept, 1.0, flows)
    if flows < 4:  # else its share is taken for noise
        assert kept == 1.0 / (flows + 1)


# ---------------------------------------------------------------- the tables


def test_who_books_second_is_told_that_the_slot_is_taken() -> None:
    tables = LoadTables(4, 1.0)
    links = {"l": 10.0}
    seen = {flow: tables.feedback(flow, links, 0) for flow in "ab"}
    rates = {flow: initial_schedule(seen[flow], 20.0, 1.0) for flow in "ab"}
    assert tables.book("a", links, 0, rates["a"], 0.0)
    assert not tables.book("b", links, 0, rates["b"], 0.0)
    again = initial_schedule(tables.feedback("b", links, 0), 20.0, 1.0)
    assert again == (0.0, 0.0, 10.0, 10.0)
    assert tables.book("b", links, 0, again, 0.0)


def test_a_flow_does_not_see_itself_and_slots_pass() -> None:
    tables = LoadTables(4, 1.0)
    links = {"l": 10.0, "m": 5.0}
    tables.book("a", links, 7, (1.0, 2.0, 3.0), 0.0)
    assert tables.feedback("a", links, 7)[0].load_Bps == (0.0,) * 4
    assert tables.feedback("b", {"m": 5.0}, 8) == [LinkLoad(5.0, (2.0, 3.0, 0.0, 0.0))]
    assert (tables.rate_Bps("a", 9), tables.rate_Bps("a", 10), tables.rate_Bps("b", 7)) == (3, 0, 0)


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_once_all_have_looked_no_link_is_booked_beyond_its_capacity(seed, flows):
    draw = random.Random(seed)
    tables, links = LoadTables(SLOTS, 1.0), {name: draw.uniform(1, 9) for name in "xyz"}
    paths = [
        {name: links[name] for name in draw.sample("xyz", draw.randint(1, 3))} for _ in range(flows)
    ]
    begun: list[int] = []
    for slot in range(8):
        begun += draw.sample(sorted(set(range(flows)) - set(begun)), min(flows - len(begun), 2))
        for flow in begun:
            seen = tables.feedback(str(flow), paths[flow], slot)
            # What it has left may grow, since it may have fallen behind.
            rates = initial_schedule(seen, draw.uniform(0.1, 80), 1.0)
            assert tables.book(str(flow), paths[flow], slot, rates, 0.0)
        for name, capacity_Bps in links.items():
            (seen,) = tables.feedback("nobody", {name: 1e9}, slot)
            assert max(seen.load_Bps) <= capacity_Bps * (1 + 1e-5)
    tables.expire(7 + SLOTS + 8)
    assert len(tables) == 0
    (seen,) = tables.feedback("nobody", {"x": 9.0}, 8 + SLOTS)
    assert set(seen.load_Bps) == {0.0}


def test_a_flow_that_falls_behind_keeps_its_place() -> None:
    tables, links = LoadTables(4, 1.0), {"l": 10.0}
    for flow in "ab":
        rates = initial_schedule(tables.feedback(flow, links, 0), 15.0, 1.0)
        assert tables.book(flow, links, 0, rates, 0.0)
    assert [tables.rate_Bps("b", slot) for slot in range(4)] == [0, 5, 10, 0]
    late = initial_schedule(tables.feedback("a", links, 1), 12.0, 1.0)
    assert late == (10.0, 2.0, 0.0, 0.0)
    assert tables.book("a", links, 1, late, 3.0)
    after = initial_schedule(tables.feedback("b", links, 1), 15.0, 1.0)
    assert after == (0.0, 5.0, 10.0, 0.0)
    # Once it has ended it comes last, as whoever begins now.
    assert tables.book("a", links, 1, (), 15.0)
    assert tables.book("b", links, 1, (10.0, 5.0), 0.0)
    assert tables.feedback("a", links, 1)[0].load_Bps == (10.0, 5.0, 0.0, 0.0)


def test_a_counter_shows_what_foreign_flows_send() -> None:
    tables, links = LoadTables(4, 1.0), {"l": 10.0}
    for slot in range(10):
        tables.book("a", links, slot, (4.0,) * 4, sent=4.0 * slot)
        tables.count("l", slot, 7.0 * slot)
    assert tables.cross_Bps("l", 9) == pytest.approx(3.0)
    # Beside one flow of ours, foreign ones may grow to a half; beside two, to a third.
    (mine,) = tables.feedback("a", links, 9)
    assert mine.load_Bps == (4.5,) * 4
    (seen,) = tables.feedback("b", links, 9)
    # The other one need not wait beside them: it has its third, whatever the first one books.
    assert seen.load_Bps == pytest.approx((10 - 10 / 3,) * 4)
    tables.book("a", links, 9, (8.0,) * 4, sent=36.0)
    assert not tables.book("b", links, 9, (3.4,), sent=0.0)
    assert tables.book("b", links, 9, (10 / 3,), sent=0.0)
    # Alone with the first one it has what that leaves.
    for slot in range(10, 20):
        tables.book("a", links, slot, (8.0,) * 4, sent=40.0 + 8.0 * (slot - 10))
        tables.count("l", slot, 70.0 + 8.0 * (slot - 10))
    assert tables.feedback("b", links, 19)[0].load_Bps[0] == 8.0
    assert not tables.book("b", links, 19, (10 / 3,), sent=0.0)


def test_foreign_flows_that_ended_are_forgotten_within_half_the_window() -> None:
    tables, end = LoadTables(4, 1.0), 20
    for slot in range(end + FOREIGN_SLOTS // 2 + 1):
        tables.count("l", slot, 6.0 * min(slot, end))
        if slot == end:
            assert tables.cross_Bps("l", slot) == pytest.approx(6.0)
    assert tables.cross_Bps("l", end + FOREIGN_SLOTS // 2) == 0.0
    assert tables.cross_Bps("l", 29) == 0.0
    tables.expire(40)
    assert tables.cross_Bps("l", 40) == 0.0


# ---------------------------------------------------------------- parameter servers


def test_a_flow_is_told_how_far_those_into_its_source_and_out_of_its_end_will_be() -> None:
    # Figure 6(a): f1, f2 aggregate at a server, and f3, f4 are its broadcasts.
    tables, links = LoadTables(4, 1.0), {"l": 10.0}
    for flow, src, dst, by_end in (
        ("f1", "w1", "s", 3.0), ("f2", "w2", "s", 5.0), ("f3", "s", "w1", 4.0),
        ("f4", "s", "w2", 2.0),
    ):  # fmt: skip
        tables.book(flow, links, 0, (1.0,), 0.0, job="j", ends=(src, dst), by_end=by_end)
    tables.book("other", links, 0, (1.0,), 0.0, job="k", ends=("w3", "s"), by_end=1.0)
    broadcasts = tables.neighbours("j", "w1", "s").out
    assert broadcasts == {"w1": 4.0, "w2": 2.0}
    assert aggregation_change_bytes(3.0, [*broadcasts.values()]) == 1.0
    aggregations = tables.neighbours("j", "s", "w2").into
    assert aggregations == {"w1": 3.0, "w2": 5.0}
    # Lines 13 to 16: f3 is to give back what f1 has not brought.
    assert broadcast_change_bytes(4.0, [*aggregations.values()]) == -1.0
    # One that has ended tells nothing, since its next iteration begins at 0.
    tables.book("f1", links, 0, (), 0.0, job="j", ends=("w1", "s"), by_end=9.0)
    assert tables.neighbours("j", "s", "w2").into == {"w2": 5.0}


def test_flows_with_a_server_share_their_jobs_room_and_others_wait_for_all_of_them() -> None:
    tables, links = LoadTables(4, 1.0), {"l": 10.0}
    for flow, src in (("f1", "w1"), ("f2", "w2")):
        seen = tables.feedback(flow, links, 0, "j")
        rates = initial_schedule(seen, 12.0, 1.0)
        assert tables.book(flow, links, 0, rates, 0.0, job="j", ends=(src, "s"))
    # The first had the link to itself when it booked. From its next look on each has a half.
    again = initial_schedule(tables.feedback("f1", links, 0, "j"), 12.0, 1.0)
    assert again == (5.0, 5.0, 2.0, 0.0)
    assert tables.book("f1", links, 0, again, 0.0, job="j", ends=("w1", "s"))
    assert tables.feedback("k", links, 0)[0].load_Bps == (10.0, 10.0, 4.0, 0.0)
    # Behind another job, both halve what it leaves.
    tables = LoadTables(4, 1.0)
    tables.book("k", links, 0, (4.0, 10.0), 0.0)
    tables.book("f2", links, 0, (1.0,), 0.0, job="j", ends=("w2", "s"))
    seen = tables.feedback("f1", links, 0, "j")
    assert room_Bps(seen) == (3.0, 0.0, 5.0, 5.0)
    assert not tables.book("f1", links, 0, (7.0,), 0.0, job="j", ends=("w1", "s"))
    assert tables.book("f1", links, 0, (3.0,), 0.0, job="j", ends=("w1", "s"))
