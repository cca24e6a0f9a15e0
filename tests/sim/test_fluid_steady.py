"""Stretches advanced at measured rates, beside runs that play every event."""

from __future__ import annotations

import random
from typing import Any

import pytest

from crux_torch._fluid import Engine

GB = 1e9
TOLERANCE = 0.02


def crowd(seed: int, jobs: int, levels: int, links: int, **options: Any) -> Engine:
    """Jobs of incommensurate periods that never repeat."""
    rng = random.Random(seed)
    engine = Engine([(f"l{i}", GB, 0.0) for i in range(links)], **options)
    for i in range(jobs):
        across = rng.sample(range(links), rng.randint(1, min(3, links)))
        compute_s = rng.uniform(0.1, 1.5)
        at = rng.choice([0.5, 0.8, 1.0])
        traffic = {f"l{e}": compute_s * rng.uniform(0.1, 0.6) * GB for e in across}
        engine.add_job(
            f"j{i}",
            compute_s=compute_s,
            bursts=[(at, traffic)],
            gpus=rng.choice([1, 8, 32]),
            level=rng.randrange(levels),
            start_s=rng.random(),
        )
    return engine


def two(**options: Any) -> Engine:
    """Two jobs on one link that share it fairly and never repeat."""
    engine = Engine([("l", GB, 0.0)], **options)
    engine.add_job("a", compute_s=0.31, bursts=[(1.0, {"l": 0.17 * GB})])
    engine.add_job("b", compute_s=0.53, bursts=[(0.7, {"l": 0.29 * GB})])
    return engine


@pytest.mark.parametrize(("jobs", "levels", "links"), [(2, 1, 1), (4, 3, 2), (8, 1, 4)])
def test_ends_where_a_played_run_does_within_the_tolerance(jobs, levels, links):
    horizon_s = 3000.0
    events = [0, 0]
    for seed in range(8):
        played = crowd(seed, jobs, levels, links)
        steady = crowd(seed, jobs, levels, links, steady_tolerance=TOLERANCE)
        for engine in (played, steady):
            engine.run_until(horizon_s)
        events[0] += played.events
        events[1] += steady.events
        for name, expected in played.results().items():
            got = steady.result(name)
            # The tolerance bounds the mean over jobs; one of few GPUs may be off by more.
            assert got["compute_s"] == pytest.approx(expected["compute_s"], rel=5 * TOLERANCE)
            assert got["comm_s"] == pytest.approx(expected["comm_s"], rel=5 * TOLERANCE, abs=2)
            assert got["mean_iteration_s"] == pytest.approx(
                expected["mean_iteration_s"], rel=5 * TOLERANCE
            )
        assert steady.gpu_utilization() == pytest.approx(played.gpu_utilization(), rel=TOLERANCE)
        carried = played.link_bytes()
        for link, amount in steady.link_bytes().items():
            assert amount == pytest.approx(carried[link], rel=2 * TOLERANCE, abs=GB)
    assert events[1] < events[0] / 5


def test_is_off_by_default():
    engine, other = two(), two(steady_tolerance=0.0)
    for e in (engine, other):
        e.run_until(1000.0)
    assert engine.results() == other.results()
    assert engine.events == other.events > 2 * 1000


def test_looking_on_the_way_changes_little_and_costs_no_new_windows():
    through, halting = two(steady_tolerance=TOLERANCE), two(steady_tolerance=TOLERANCE)
    through.run_until(20000.0)
    for step in range(1, 101):
        halting.run_until(200.0 * step)
        halting.results()
    assert halting.events < 20 * through.events
    assert halting.events < 20000
    for name, result in halting.results().items():
        assert result["compute_s"] == pytest.approx(
            through.result(name)["compute_s"], rel=TOLERANCE
        )


def test_a_limited_job_ends_after_exactly_its_iterations():
    played, steady = two(), two(steady_tolerance=TOLERANCE)
    for engine in (played, steady):
        engine.add_job("c", compute_s=0.2, bursts=[(1.0, {"l": 0.1 * GB})], iterations=7000)
        assert engine.run_until_end_of_any(1e5) == ["c"]
        assert engine.result("c")["completed"] == 7000
        assert engine.result("c")["compute_s"] == pytest.approx(1400.0)
    assert steady.now_s == pytest.approx(played.now_s, rel=TOLERANCE)
    assert steady.events < played.events / 5


def test_what_comes_from_outside_is_felt_at_once():
    played, steady = two(), two(steady_tolerance=TOLERANCE)
    for engine in (played, steady):
        engine.run_until(2000.0)
        # Shuts both out for 500 s.
        engine.add_job("c", compute_s=0.0, bursts=[(1.0, {"l": 500 * GB})], level=1, iterations=1)
        engine.run_until(2500.0)
        assert engine.result("c")["end_s"] == 2500.0
        engine.remove_job("a")
        engine.run_until(4000.0)
    for name in "ab":
        assert steady.result(name)["compute_s"] == pytest.approx(
            played.result(name)["compute_s"], rel=TOLERANCE
        )
    # Alone again, b iterates exactly.
    alone_s = 0.53 * 0.7 + 0.29
    assert alone_s > 0.53
    before = steady.result("b")["completed"]
    steady.run_until(4000.0 + 100 * alone_s)
    assert steady.result("b")["completed"] - before in (100, 101)


def test_a_starved_job_stays_starved():
    engine = two(steady_tolerance=TOLERANCE)
    for i in range(2):
        engine.add_job(
            f"greedy{i}", compute_s=0.0, bursts=[(1.0, {"l": (0.1 + i / 17) * GB})], level=1
        )
    engine.run_until(10000.0)
    assert engine.result("a")["completed"] == engine.result("b")["completed"] == 0
    assert engine.link_bytes()["l"] == pytest.approx(10000 * GB, rel=TOLERANCE)


def test_paces_hold_across_steady_stretches():
    """Paced jobs of one grid among an unpaced one: their starts stay on the grid."""
    engine = Engine([("l", GB, 0.0)], steady_tolerance=TOLERANCE)
    engine.add_job("free", compute_s=0.37, bursts=[(1.0, {"l": 0.11 * GB})])
    for name, origin_s in (("a", 0.0), ("b", 0.5)):
        engine.add_job(
            name, compute_s=0.5, bursts=[(1.0, {"l": 0.3 * GB})], level=1, start_s=origin_s
        )
        engine.set_pace(name, origin_s=origin_s, period_s=1.0, tolerance=0.05)
    engine.run_until(5000.0)
    assert engine.events < 15000
    for name in "ab":
        assert engine.result(name)["completed"] in (4999, 5000)
    # b computes while a, which began its iteration at a whole second, sends: still interleaved.
    engine.run_until(5000.25)
    first = engine.results()
    engine.run_until(5000.45)
    second = engine.results()
    assert second["a"]["compute_s"] - first["a"]["compute_s"] == pytest.approx(0.2, abs=1e-6)
    assert second["b"]["comm_s"] - first["b"]["comm_s"] == pytest.approx(0.05, abs=1e-6)
