"""The fluid engine on cases whose outcome is known by hand."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from copy import copy
from typing import Any

import numpy as np
import pytest

from crux_torch._fluid import Engine, SpecError, run_all

GB = 1e9


LINK = [("l", GB, 0.0)]


def one_link(**options: object) -> Engine:
    return Engine(LINK, **options)  # type: ignore[arg-type]


def in_12_s(first: str, *jobs: tuple[float, float, float]) -> dict[str, list[float]]:
    """Seconds in which two jobs (compute seconds, share of them before it sends, bytes) compute and
    send, from where both start to communicate, if the one named goes first."""
    engine = one_link()
    for name, (compute_s, at, sent) in zip("12", jobs, strict=True):
        bursts, start_s = [(at, {"l": sent})], 1.0 if name == "2" else 0.0
        level = int(name == first)
        engine.add_job(name, compute_s=compute_s, bursts=bursts, level=level, start_s=start_s)
    engine.run_until(2.0)
    before = engine.results()
    engine.run_until(14.0)
    after = engine.results()
    return {key: [after[n][key] - before[n][key] for n in "12"] for key in ("compute_s", "comm_s")}


@pytest.mark.parametrize(
    ("first", "utilization", "sent_s"), [("1", 9 / 24, [6.0, 3.0]), ("2", 10 / 24, [4.0, 6.0])]
)
def test_example_1_of_the_crux_paper(first, utilization, sent_s):
    """Figure 11: 37.5% with job 1 first, or 41.7%."""
    seen = in_12_s(first, (2.0, 1.0, 2 * GB), (1.0, 1.0, GB))
    assert sum(seen["compute_s"]) / 24 == utilization
    assert seen["comm_s"] == sent_s


@pytest.mark.parametrize(("first", "idle_s"), [("1", 7.0), ("2", 6.0)])
def test_example_2_of_the_crux_paper(first, idle_s):
    """Figure 12: communication from half of the compute on; job 2 idles."""
    seen = in_12_s(first, (4.0, 0.5, GB), (2.0, 0.5, 3 * GB))
    assert 12.0 - seen["compute_s"][1] == idle_s


def once(compute_s: float, *bursts: tuple[float, dict[str, float]], **more: float) -> dict:
    return {"compute_s": compute_s, "bursts": list(bursts), "iterations": 1, **more}


@pytest.mark.parametrize(
    ("links", "jobs", "end_s"),
    [
        # b is full at 1 GB/s each; `a` takes the other 2 GB/s of link a.
        (
            [("a", 3 * GB, 0.0), ("b", 2 * GB, 0.0)],
            [
                once(0, (1, {"a": GB, "b": GB})),
                once(0, (1, {"a": 2 * GB})),
                once(0, (1, {"b": GB})),
            ],
            [1.0, 1.0, 1.0],
        ),
        # Shares follow weights.
        (LINK, [once(0, (1, {"l": GB})), once(0, (1, {"l": 3 * GB}), weight=3)], [4.0, 4.0]),
        # The delay of the path comes before the transfer.
        (
            [("a", GB, 0.25), ("b", GB, 0.25), ("unused", GB, 7.0)],
            [once(1, (1.0, {"a": GB, "b": GB, "unused": 0.0}), iterations=2)],
            [5.0],
        ),
        # Bursts are sent in order.
        (LINK, [once(1, (0.0, {"l": GB}), (0.25, {"l": GB}))], [2.0]),
        # An iteration waits for computation and communication.
        (LINK, [once(1, (0.5, {"l": 0.25 * GB}), iterations=4)], [4.0]),
    ],
    ids=["water filling", "weights", "delay", "order", "hidden"],
)
def test_when_jobs_end(links, jobs, end_s):
    engine = Engine(links)
    for number, job in enumerate(jobs):
        engine.add_job(f"{number}", **job)
    engine.run_until(10)
    assert [engine.result(f"{n}")["end_s"] for n in range(len(jobs))] == end_s


def test_a_transfer_moves_at_the_pace_of_its_slowest_hop():
    engine = Engine([("fast", 10 * GB, 0.0), ("slow", GB, 0.0)])
    engine.add_job("ring", compute_s=0, bursts=[(1, {"fast": 4 * GB, "slow": 2 * GB})])
    engine.run_until(10)
    assert engine.result("ring")["completed"] == 5
    assert engine.link_bytes() == {"fast": 20 * GB, "slow": 10 * GB}


def test_level_change_takes_effect_in_mid_transfer():
    engine = one_link()
    engine.add_job("a", compute_s=0, bursts=[(1, {"l": 2 * GB})], level=1, iterations=1)
    engine.add_job("b", compute_s=0, bursts=[(1, {"l": 2 * GB})], level=0, iterations=1)
    engine.run_until(1)
    engine.set_level("b", 2)
    engine.run_until(10)
    assert engine.result("b")["end_s"] == 3.0
    assert engine.result("a")["end_s"] == 4.0


def test_path_change_keeps_progress():
    engine = Engine([("l", GB, 0.0), ("m", 2 * GB, 0.0)])
    engine.add_job("a", compute_s=0, bursts=[(1, {"l": 2 * GB})], iterations=1)
    engine.run_until(1)
    engine.set_traffic("a", [{"m": 2 * GB}])
    engine.run_until(10)
    assert engine.result("a")["end_s"] == 1.5
    assert engine.result("a")["comm_s"] == pytest.approx(0.5 * 2 + 0.5 * 1)
    assert engine.link_bytes() == {"l": pytest.approx(GB), "m": pytest.approx(GB)}


def test_path_change_away_from_the_slower_link():
    engine = Engine([("l", 10.0, 0.0), ("m", 4.0, 0.0)])
    engine.add_job("a", compute_s=0, bursts=[(1, {"l": 100.0, "m": 50.0})], iterations=1)
    # Makes l contended, and does not send yet.
    engine.add_job("b", compute_s=100, bursts=[(1, {"l": 100.0})])
    engine.run_until(2.5)
    engine.set_traffic("a", [{"l": 100.0, "m": 10.0}])
    engine.run_until(50)
    assert engine.result("a")["end_s"] == pytest.approx(2.5 + 0.8 * 10)


def test_arrival_and_removal_on_a_link_that_was_skipped_over():
    engine = one_link()
    engine.add_job("a", compute_s=1, bursts=[(1, {"l": GB})])
    engine.run_until(1000.5)
    engine.add_job("b", compute_s=0, bursts=[(1, {"l": 100 * GB})], level=1, iterations=1)
    engine.run_until(1050.0)
    engine.remove_job("b")
    assert engine.result("b")["comm_s"] == pytest.approx(49.5)
    assert engine.result("b")["end_s"] == 1050.0
    engine.run_until(1051.0)
    # Computing until 1001, then shut out until 1050.
    assert engine.result("a")["completed"] == 501
    assert engine.result("a")["compute_s"] == pytest.approx(501)


def test_shift_delays_the_next_iteration_once():
    engine = one_link()
    engine.add_job("a", compute_s=1, bursts=[], iterations=3)
    engine.run_until(0.5)
    engine.shift("a", 0.75)
    engine.run_until(10)
    assert engine.result("a")["end_s"] == 3.75
    assert engine.result("a")["compute_s"] == 3.0


@pytest.mark.parametrize(
    ("origin_s", "period_s", "tolerance", "completed"),
    [
        (0.0, 1.0, 0.05, 100),  # its own period
        (0.25, 1.0, 0.05, 99),  # held once, at its start
        (-0.25, 1.0, 0.25, 100),  # late, but near enough
        (0.01, 1.0, 0.05, 100),  # held for 0.01 s: no start is early, however little
        (0.0, 1.04, 0.05, 96),  # early by 0.04 each time, and held
        (0.0, 0.96, 0.05, 70),  # late by 0.04, then held at 0.08: 2 in each 2.88 s
        (0.0, 0.9, 0.05, 56),  # late each time: one in each 1.8 s
    ],
)
@pytest.mark.parametrize("skip_repeats", [True, False])
def test_a_pace_holds_what_strays_from_it(origin_s, period_s, tolerance, completed, skip_repeats):
    engine = one_link(skip_repeats=skip_repeats)
    engine.add_job("a", compute_s=0.5, bursts=[(1, {"l": 0.5 * GB})])
    engine.set_pace("a", origin_s=origin_s, period_s=period_s, tolerance=tolerance)
    engine.run_until(100.2)
    assert engine.result("a")["completed"] == completed
    if skip_repeats:
        assert engine.events < 60


def test_a_pace_keeps_apart_what_a_disturbance_threw_together():
    """Two jobs that interleave: one is held up once and comes back to its place."""
    engine = one_link()
    for name, origin_s in (("a", 0.0), ("b", 0.5)):
        engine.add_job(name, compute_s=0.5, bursts=[(1, {"l": 0.5 * GB})], start_s=origin_s)
        engine.set_pace(name, origin_s=origin_s, period_s=1.0, tolerance=0.05)
    engine.run_until(1e4)
    assert engine.result("a")["completed"] == 10000
    engine.shift("b", 0.3)
    engine.run_until(1e4 + 100)
    assert engine.result("a")["completed"] == 10100
    # One iteration, begun at 10000.8 instead of 10000.5, is held until 10001.5.
    assert engine.result("b")["completed"] == 10098
    assert engine.events < 150


def test_a_pace_can_be_taken_away():
    engine = one_link()
    engine.add_job("a", compute_s=1, bursts=[])
    engine.set_pace("a", origin_s=0.0, period_s=1.5, tolerance=0.0)
    engine.run_until(15)
    engine.set_pace("a", origin_s=0.0, period_s=None, tolerance=0.0)
    engine.run_until(25)
    assert engine.result("a")["completed"] == 20


def test_stops_at_the_end_of_any():
    engine = one_link()
    engine.add_job("a", compute_s=1, bursts=[], iterations=3)
    engine.add_job("b", compute_s=0.5, bursts=[(1, {"l": 0.5 * GB})], iterations=4)
    assert engine.run_until_end_of_any(100) == ["a"]
    assert engine.now_s == 3.0
    assert engine.run_until_end_of_any(100) == ["b"]
    assert engine.now_s == 4.0
    assert engine.run_until_end_of_any(100) == []
    assert engine.now_s == 100.0


def test_a_job_alone_costs_no_events():
    engine = one_link()
    engine.add_job("a", compute_s=0.5, bursts=[(0.5, {"l": 0.5 * GB})])
    engine.run_until(7.5e5)
    assert engine.result("a")["completed"] == 1_000_000
    assert engine.events < 20


@pytest.mark.parametrize("start_s", [0.0, 395.0])
def test_a_job_that_is_skipped_ahead_from_its_first_iteration_has_its_mean(start_s):
    engine = one_link()
    engine.add_job("a", compute_s=1.0, bursts=[(1.0, {"l": GB})], start_s=start_s)
    engine.run_until(start_s + 21.0)
    assert engine.events < 10
    assert engine.result("a")["completed"] == 10
    assert engine.result("a")["mean_iteration_s"] == 2.0


def test_the_mean_of_a_job_that_was_held_before_it_was_skipped_ahead():
    engine = one_link()
    engine.add_job("a", compute_s=1.0, bursts=[(1.0, {"l": GB})])
    engine.run_until(3.0)
    engine.shift("a", 5.0)  # its third iteration begins at 9
    engine.run_until(30.0)
    assert engine.result("a")["completed"] == 12
    assert engine.result("a")["mean_iteration_s"] == 29.0 / 12


def test_jobs_on_links_that_can_carry_them_all_do_not_meet():
    engine = Engine([("core", 10 * GB, 0.0), ("a", GB, 0.0), ("b", GB, 0.0)])
    for name in "ab":
        engine.add_job(name, compute_s=0.7, bursts=[(1, {"core": GB, name: GB})])
    engine.run_until(1e5)
    assert engine.events < 30


def test_a_starved_job_does_not_move():
    engine = one_link()
    engine.add_job("a", compute_s=0, bursts=[(1, {"l": GB})], level=1)
    engine.add_job("b", compute_s=0, bursts=[(1, {"l": GB})], level=0, start_s=0.5)
    engine.run_until(1e5)
    assert engine.result("b")["completed"] == 0
    assert engine.result("b")["comm_s"] == 0.0
    assert engine.events < 50


def numbered(links: list[int], moved: list[float]) -> tuple[Any, Any]:
    return np.array(links, np.int32), np.array(moved, np.float64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.add_job("a", compute_s=0, bursts=[]), "length of an iteration"),
        (lambda e: e.add_job("a", compute_s=math.nan, bursts=[]), "compute_s is nan"),
        (lambda e: e.add_job("a", compute_s=1, bursts=[(2, {"l": 1})]), "share from 0 to 1"),
        (lambda e: e.add_job("a", compute_s=1, bursts=[(1, {"x": 1})]), "no link x"),
        (lambda e: e.add_job("a", compute_s=1, bursts=[(1, {"l": 1}, -1)]), "least_s is -1"),
        (lambda e: e.add_job("a", compute_s=1, bursts=[(1, {"l": 1}, math.inf)]), "least_s is inf"),
        (lambda e: e.add_job("a", compute_s=1, bursts=[(1,)]), "at, traffic and perhaps least_s"),
        (lambda e: e.add_job("a", compute_s=1, bursts=[], weight=0), "weight is 0"),
        (lambda e: e.add_job("a", compute_s=1, bursts=[], start_s=-1), "before the current time"),
        (lambda e: e.add_job("busy", compute_s=1, bursts=[]), "appears twice"),
        (lambda e: e.remove_job("nobody"), "no job nobody"),
        (lambda e: e.add_job("a", compute_s=1, bursts=[], weight=1e7), "weight is 1e\\+07"),
        (lambda e: e.set_weight("busy", -1.0), "weight"),
        (lambda e: e.set_weight("busy", 1e-7), "weight is 1e-07"),
        (lambda e: e.set_traffic("busy", []), "each of its bursts"),
        (lambda e: e.set_traffic("busy", [numbered([0], [])]), "as many bytes as links"),
        (lambda e: e.set_traffic("busy", [numbered([1], [1.0])]), "an unknown link"),
        (lambda e: e.set_traffic("busy", [numbered([-1], [1.0])]), "an unknown link"),
        (lambda e: e.shift("busy", -1.0), "shift"),
        (lambda e: e.set_pace("busy", origin_s=0, period_s=0, tolerance=0), "finite period"),
        (lambda e: e.set_pace("busy", origin_s=0, period_s=1, tolerance=1), "from 0 to 0.5"),
        (lambda e: e.run_until(math.inf), "finite time"),
        (lambda e: e.run_until(1e15), "can't resolve"),
        (lambda e: Engine([("l", 0.0, 0.0)]), "capacity_Bps is 0"),
        (lambda e: Engine([("l", 1.0, 0.0), ("l", 1.0, 0.0)]), "appears twice"),
        (lambda e: run_all([e, e], [9.0, 9.0]), "appears twice"),
        (lambda e: one_link(steady_tolerance=-0.1), "steady_tolerance"),
        (lambda e: one_link(steady_tolerance=1.0), "steady_tolerance"),
        (lambda e: one_link(steady_tolerance=math.nan), "steady_tolerance"),
    ],
)
def test_what_cannot_be_simulated_is_named(call, message):
    engine = one_link()
    engine.add_job("busy", compute_s=1, bursts=[(1, {"l": GB})])
    with pytest.raises(SpecError, match=message):
        call(engine)
    engine.run_until(4)
    assert engine.result("busy")["completed"] == 2


def test_a_copy_goes_on_by_itself_and_takes_the_same_work():
    engine = Engine([("x", 1.0, 0.0)])
    for name, seconds in (("a", 0.7), ("b", 0.9)):
        engine.add_job(name, compute_s=seconds, bursts=[(0.5, {"x": seconds})])
    engine.run_until(3.0)
    twin = copy(engine)
    twin.run_until(9.0)
    assert engine.now_s == 3.0
    assert twin.work > engine.work
    engine.run_until(9.0)
    assert (twin.results(), twin.work) == (engine.results(), engine.work)
    twin.set_level("b", 1)
    twin.run_until(20.0)
    engine.run_until(20.0)
    assert twin.results() != engine.results()


def test_a_job_that_sends_on_and_on_does_not_disturb_its_neighbours():
    def work(pieces: int) -> int:
        engine = Engine([("x", 1.0, 0.0), ("y", 1.0, 0.0)], skip_repeats=False)
        traffic = {"x": 1.0 / pieces, "y": 0.7 / pieces}
        engine.add_job("a", compute_s=1.0, bursts=[(0.0, traffic)] * pieces)
        for i in range(20):
            engine.add_job(f"b{i}", compute_s=1e3, bursts=[(0.0, {"x": 1e3, "y": 1e3})])
        engine.run_until(1.0)
        before = engine.work
        engine.run_until(20.0)
        return engine.work - before

    event, links = 50, 2
    assert work(101) - work(1) <= 100 * (event + links)


def test_independent_runs_side_by_side_are_as_alone():
    def engine() -> Engine:
        e = Engine([("l", GB, 0.0)], skip_repeats=False)
        for i in range(5):
            e.add_job(f"j{i}", compute_s=0.1 * (i + 1), bursts=[(0.5, {"l": 1e8})], level=i % 2)
        return e

    alone = engine()
    alone.run_until(200)
    side_by_side = [engine() for _ in range(4)]
    run_all(side_by_side, [200.0] * 4, threads=3)
    assert all(e.results() == alone.results() for e in side_by_side)


INTERRUPTED = """
import os, signal, threading
from crux_torch._fluid import Engine, run_all

# A program that was started in the background of a shell ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

def endless():
    engine = Engine([("l", 1e9, 0.0)], skip_repeats=False)
    for i in range(3):
        engine.add_job(f"j{i}", compute_s=1e-4 * (1 + i / 3), bursts=[(0.5, {"l": 1e5})])
    return engine

engines = [endless(), endless()]
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    CALL
except KeyboardInterrupt:
    assert all(0 < e.now_s < 1e7 for e in engines[:LOOKED_AT])
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("call", "looked_at"),
    [
        ("engines[0].run_until(1e7)", 1),
        ("run_all(engines, [1e7, 1e7], threads=1)", 1),
        ("run_all(engines, [1e7, 1e7], threads=2)", 2),
    ],
)
def test_ctrl_c_ends_a_run(call, looked_at):
    program = INTERRUPTED.replace("CALL", call).replace("LOOKED_AT", str(looked_at))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "interrupted\n", done.stderr


def test_other_threads_run_while_the_engine_does():
    engine = Engine([("l", GB, 0.0)], skip_repeats=False)
    for i in range(2):
        engine.add_job(f"j{i}", compute_s=1e-4 * (1 + i / 3), bursts=[(0.5, {"l": 1e5})])
    done = threading.Event()
    worker = threading.Thread(target=lambda: (engine.run_until(30.0), done.set()))
    worker.start()
    ticks = 0
    while not done.is_set():
        time.sleep(1e-4)
        ticks += 1
    worker.join()
    assert ticks > 3


def test_bursts_below_their_ceilings_leave_each_other_room() -> None:
    """60% and 40% of a link: nobody waits. A third job has what the two leave."""
    engine = Engine([("l", GB, 0.0)])
    engine.add_job("a", compute_s=0.0, bursts=[(1.0, {"l": 0.6 * GB}, 1.0)])
    engine.add_job("b", compute_s=0.0, bursts=[(1.0, {"l": 0.4 * GB}, 1.0)], level=1)
    engine.run_until(10.0)
    for name, share in (("a", 0.6), ("b", 0.4)):
        result = engine.result(name)
        assert result["mean_iteration_s"] == pytest.approx(1.0)
        # The seconds that its links were its own.
        assert result["comm_s"] == pytest.approx(10.0 * share)
    engine.remove_job("b")
    engine.add_job("c", compute_s=0.0, bursts=[(1.0, {"l": 0.4 * GB})], level=-1)
    engine.run_until(20.0)
    assert engine.result("c")["mean_iteration_s"] == pytest.approx(1.0)


def test_a_ceiling_stays_when_the_traffic_changes_and_is_none_where_nothing_moves() -> None:
    engine = Engine([("l", GB, 0.0), ("m", GB, 0.0)])
    engine.add_job("a", compute_s=1.0, bursts=[(1.0, {"l": 0.1 * GB}, 0.5)])
    engine.run_until(1.25)
    assert engine.bytes_left("a") == pytest.approx(0.05 * GB)
    engine.set_traffic("a", [{"m": 0.2 * GB}])
    engine.run_until(1.5)
    assert engine.result("a")["completed"] == 1
    engine.set_traffic("a", [{}])
    engine.run_until(4.5)
    assert engine.result("a")["completed"] == 4


def test_each_part_of_a_burst_takes_its_least_time() -> None:
    engine = Engine([("l", GB, 0.0), ("m", GB, 0.0)])
    parts = [{"l": 0.1 * GB}, {"m": 0.8 * GB}]
    engine.add_job("a", compute_s=0.0, bursts=[(1.0, parts, 0.5)], iterations=1)
    engine.run_until(0.25)
    assert engine.link_bytes() == pytest.approx({"l": 0.05 * GB, "m": 0.25 * GB})
    engine.run_until(2.0)
    assert engine.result("a")["end_s"] == pytest.approx(0.8)
