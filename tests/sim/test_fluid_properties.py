"""Properties of the fluid engine, and its agreement with a slow, obvious one."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import fluid_reference as reference
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crux_torch._fluid import Engine

if TYPE_CHECKING:
    from crux_torch.sim.scenario import Traffic

Links = dict[str, tuple[float, float]]
Jobs = dict[str, dict[str, Any]]
Changes = Sequence[tuple[float, dict[str, list[Any]]]]

HORIZON_S = 6.1
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

capacities = st.sampled_from([5e8, 1e9, 2e9]) | st.floats(2e8, 3e9)
amounts = st.sampled_from([1e8, 2e8, 5e8]) | st.floats(2e7, 6e8)
shares = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1)


@st.composite
def scenarios(
    draw: st.DrawFn, iterations: bool = True, paced: bool = False, ceilings: bool = False
) -> tuple[Links, Jobs]:
    names = [f"l{i}" for i in range(draw(st.integers(1, 5)))]
    links = {n: (draw(capacities), draw(st.sampled_from([0.0, 0.0, 1e-3, 0.02]))) for n in names}
    jobs = {}
    for i in range(draw(st.integers(1, 6))):
        starts = sorted(draw(st.lists(shares, min_size=1, max_size=2)))
        traffic = st.dictionaries(st.sampled_from(names), amounts, min_size=1)
        jobs[f"j{i}"] = {
            "compute_s": draw(st.sampled_from([0.1, 0.25, 0.5]) | st.floats(0.05, 1.0)),
            "bursts": [(at, draw(traffic)) for at in starts],
            "level": draw(st.integers(0, 2)),
            "weight": draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
            "start_s": draw(st.sampled_from([0.0, 0.0, 0.3, 1.7])),
            "iterations": draw(st.sampled_from([None, 1, 3, 8])) if iterations else None,
        }
        if ceilings:
            jobs[f"j{i}"]["bursts"] = [
                (at, moved, draw(st.sampled_from([0.0, 0.1, 0.5]) | st.floats(0.0, 1.0)))
                for at, moved in jobs[f"j{i}"]["bursts"]
            ]
        if paced and draw(st.booleans()):
            jobs[f"j{i}"]["pace"] = (
                draw(st.sampled_from([0.0, 0.3]) | st.floats(-1.0, 1.0)),
                draw(st.sampled_from([0.25, 0.5, 1.0]) | st.floats(0.2, 2.0)),
                draw(st.sampled_from([0.0, 0.05, 0.25])),
            )
    return links, jobs


def play(
    links: Links, jobs: Jobs, until_s: float = HORIZON_S, changes: Changes = (), **options: Any
) -> Engine:
    engine = Engine([(n, c, d) for n, (c, d) in links.items()], **options)
    for name, job in jobs.items():
        engine.add_job(name, **{key: value for key, value in job.items() if key != "pace"})
        if "pace" in job:
            origin_s, period_s, tolerance = job["pace"]
            engine.set_pace(name, origin_s=origin_s, period_s=period_s, tolerance=tolerance)
    for at_s, traffic in changes:
        engine.run_until(at_s)
        for name, bursts in traffic.items():
            engine.set_traffic(name, bursts)
    engine.run_until(until_s)
    return engine


def assert_agrees_with_the_reference(links: Links, jobs: Jobs, changes: Changes = ()) -> None:
    expected = {n: reference.Job(**copy.deepcopy(j)) for n, j in jobs.items()}
    carried = reference.simulate(
        {n: c for n, (c, _) in links.items()},
        {n: d for n, (_, d) in links.items()},
        expected,
        HORIZON_S,
        changes,
    )
    engine = play(links, jobs, changes=changes)
    for name, result in engine.results().items():
        assert result["compute_s"] == pytest.approx(expected[name].busy_s, abs=1e-6)
        assert result["comm_s"] == pytest.approx(expected[name].comm_s, abs=1e-6)
        assert result["completed"] == expected[name].completed
        if result["completed"]:
            ran_s = expected[name].last_end_s - jobs[name].get("start_s", 0.0)
            assert result["mean_iteration_s"] == pytest.approx(
                ran_s / result["completed"], abs=1e-6
            )
    assert engine.link_bytes() == pytest.approx(carried, rel=1e-6, abs=100)


@settings(SETTINGS, max_examples=120)
@given(scenarios() | scenarios(paced=True) | scenarios(ceilings=True))
def test_agrees_with_the_reference(scenario):
    assert_agrees_with_the_reference(*scenario)


@pytest.mark.parametrize("ceilings", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_the_reference_where_everything_is_crowded(seed, ceilings):
    """Many jobs, each across most links: an event's effects run through several bottlenecks."""
    rng = random.Random(seed)
    for _ in range(12):
        links = {f"l{i}": (rng.uniform(3e8, 3e9), 0.0) for i in range(6)}
        jobs: Jobs = {}
        for i in range(9):
            across = rng.sample(sorted(links), rng.randint(2, 5))
            moved = {e: rng.uniform(2e7, 5e8) for e in across}
            least_s = (rng.choice([0.0, rng.uniform(0.0, 2.0)]),) if ceilings else ()
            jobs[f"j{i}"] = {
                "compute_s": rng.uniform(0.05, 0.5),
                "bursts": [(rng.random(), moved, *least_s)],
                "level": rng.choice([0, 0, 0, 1]),
                "weight": rng.choice([1.0, 1.0, 2.0]),
            }
        assert_agrees_with_the_reference(links, jobs)


def changing_traffic(rng: random.Random) -> tuple[Links, Jobs, Changes]:
    """Jobs, and plans that move many of them at one instant, in the midst of their bursts."""
    links = {f"l{i}": (rng.uniform(5e8, 2e9), 0.0) for i in range(rng.randint(1, 6))}

    def traffic(bursts: int) -> list[dict[str, float]]:
        some = [rng.sample(sorted(links), rng.randint(1, len(links))) for _ in range(bursts)]
        return [{e: rng.uniform(1e8, 1.5e9) / 10 for e in across} for across in some]

    jobs: Jobs = {}
    for i in range(rng.randint(2, 9)):
        starts = sorted(rng.random() for _ in range(rng.randint(1, 2)))
        jobs[f"j{i}"] = {
            "compute_s": rng.uniform(0.02, 0.3),
            "bursts": list(zip(starts, traffic(len(starts)), strict=True)),
            "start_s": rng.choice([0.0, rng.uniform(0.0, 1.0)]),
            "iterations": rng.randint(2, 20),
        }
    changes = []
    for at_s in sorted(rng.uniform(0.0, 5.0) for _ in range(rng.randint(1, 5))):
        moved = rng.sample(sorted(jobs), rng.randint(1, len(jobs)))
        changes.append((at_s, {name: traffic(len(jobs[name]["bursts"])) for name in moved}))
    return links, jobs, changes


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_the_reference_where_traffic_changes_under_way(seed):
    rng = random.Random(seed)
    for _ in range(12):
        assert_agrees_with_the_reference(*changing_traffic(rng))


@pytest.mark.parametrize("seed", range(10))
def test_links_by_number_are_those_by_name(seed):
    links, jobs, changes = changing_traffic(random.Random(seed))
    numbers = {name: number for number, name in enumerate(links)}

    def by_number(traffic: dict[str, float]) -> Traffic:
        return np.array([numbers[e] for e in traffic], np.int32), np.array([*traffic.values()])

    numbered = {
        name: {**job, "bursts": [(at, by_number(traffic)) for at, traffic in job["bursts"]]}
        for name, job in jobs.items()
    }
    moved = [
        (at_s, {name: [by_number(traffic) for traffic in bursts] for name, bursts in of.items()})
        for at_s, of in changes
    ]
    one, other = play(links, jobs, changes=changes), play(links, numbered, changes=moved)
    assert one.results() == other.results()
    assert one.link_bytes() == other.link_bytes()


@SETTINGS
@given(scenarios(ceilings=True))
def test_no_burst_ends_before_its_least_time_has_passed(scenario):
    links, jobs = scenario
    for job in jobs.values():
        job["iterations"] = 2
    engine = play(links, jobs, until_s=500.0)
    for name, job in jobs.items():
        end_s = 0.0
        for at, moved, least_s in job["bursts"]:
            alone_s = max(m / links[link][0] for link, m in moved.items())
            end_s = max(end_s, at * job["compute_s"]) + max(least_s, alone_s)
        result = engine.result(name)
        ran_s = result["end_s"] - result["start_s"]
        assert ran_s >= 2 * max(job["compute_s"], end_s) * (1 - 1e-9)


@SETTINGS
@given(scenarios() | scenarios(paced=True))
def test_bursts_without_a_least_time_run_as_they_always_did(scenario):
    links, jobs = scenario
    free = copy.deepcopy(jobs)
    for job in free.values():
        job["bursts"] = [(at, moved, 0.0) for at, moved in job["bursts"]]
    one, other = play(links, jobs), play(links, free)
    assert one.results() == other.results()
    assert one.link_bytes() == other.link_bytes()


@SETTINGS
@given(scenarios(ceilings=True))
def test_a_ceiling_is_a_slow_link_of_the_burst_alone(scenario):
    links, jobs = scenario
    links = {name: (capacity_Bps, 0.0) for name, (capacity_Bps, _) in links.items()}
    slow, narrow = dict(links), copy.deepcopy(jobs)
    for name, job in narrow.items():
        bursts = []
        for b, (at, moved, least_s) in enumerate(job["bursts"]):
            most = max(moved.values())
            if least_s > 1e-9:  # links have a finite capacity
                slow[f"{name} {b}"] = most / least_s, 0.0
                # As busy as the busiest, so that the weights mean the same.
                moved = {**moved, f"{name} {b}": most}
            bursts.append((at, moved))
        job["bursts"] = bursts
    capped, narrowed = play(links, jobs), play(slow, narrow)
    for name, result in capped.results().items():
        other = narrowed.result(name)
        assert result["compute_s"] == pytest.approx(other["compute_s"], abs=1e-6)
        assert result["completed"] == other["completed"]
    expected = narrowed.link_bytes()
    assert capped.link_bytes() == pytest.approx({e: expected[e] for e in links}, rel=1e-6, abs=100)


@SETTINGS
@given(scenarios(), st.lists(st.floats(0.1, 0.9), min_size=1, max_size=3))
def test_bursts_cut_into_pieces_take_as_long(scenario, cuts):
    links, jobs = scenario
    links = {name: (capacity_Bps, 0.0) for name, (capacity_Bps, _) in links.items()}
    for job in jobs.values():
        # Between levels the last digit decides whether a burst ends before it is pre-empted.
        job["level"] = 0
    cut = copy.deepcopy(jobs)
    for job in cut.values():
        pieces = []
        for at, traffic in job["bursts"]:
            for share in cuts:
                pieces.append((at, {link: share * amount for link, amount in traffic.items()}))
                traffic = {link: (1.0 - share) * amount for link, amount in traffic.items()}
            pieces.append((at, traffic))
        job["bursts"] = pieces
    whole, pieces = play(links, jobs), play(links, cut)
    for name, result in whole.results().items():
        expected = {k: pytest.approx(v, rel=1e-6, abs=1e-6) for k, v in result.items() if v}
        assert pieces.result(name) == result | expected
    assert pieces.link_bytes() == pytest.approx(whole.link_bytes(), rel=1e-6, abs=100)


@SETTINGS
@given(scenarios())
def test_links_carry_what_the_jobs_sent_and_no_more_than_they_can(scenario):
    links, jobs = scenario
    for job in jobs.values():
        job["iterations"] = 2
    engine = play(links, jobs, until_s=500.0)
    sent = dict.fromkeys(links, 0.0)
    for name, job in jobs.items():
        assert engine.result(name)["completed"] == 2
        for _, traffic in job["bursts"]:
            for link, amount in traffic.items():
                sent[link] += 2 * amount
    assert engine.link_bytes() == pytest.approx(sent, rel=1e-9)
    running = Engine([(n, c, d) for n, (c, d) in links.items()])
    for name, job in jobs.items():
        running.add_job(name, **job)
    before = running.link_bytes()
    for step in range(1, 12):
        running.run_until(0.37 * step)
        now = running.link_bytes()
        for link, (capacity_Bps, _) in links.items():
            assert now[link] - before[link] <= 0.37 * capacity_Bps * (1 + 1e-9)
            assert now[link] >= before[link] - 1.0
        before = now


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 2), amounts), min_size=1, max_size=6), capacities)
def test_a_link_with_work_never_idles_and_serves_higher_levels_first(transfers, capacity_Bps):
    engine = Engine([("l", capacity_Bps, 0.0)])
    for i, (level, amount) in enumerate(transfers):
        bursts = [(1.0, {"l": amount})]
        engine.add_job(f"t{i}", compute_s=0.0, bursts=bursts, level=level, iterations=1)
    engine.run_until(100.0)
    for level in {level for level, _ in transfers}:
        ahead = sum(amount for other, amount in transfers if other >= level)
        last = max(
            engine.result(f"t{i}")["end_s"]
            for i, (other, _) in enumerate(transfers)
            if other == level
        )
        assert last == pytest.approx(ahead / capacity_Bps, rel=1e-9)


@SETTINGS
@given(scenarios(iterations=False))
def test_nobody_is_faster_in_company_than_alone(scenario):
    links, jobs = scenario
    together = play(links, jobs).results()
    for name, job in jobs.items():
        alone = play(links, {name: job}).result(name)
        assert together[name]["compute_s"] <= alone["compute_s"] + 1e-6
        assert together[name]["completed"] <= alone["completed"]


@SETTINGS
@given(scenarios())
def test_the_highest_level_does_not_notice_the_others(scenario):
    links, jobs = scenario
    top = max(job["level"] for job in jobs.values())
    above = {name: job for name, job in jobs.items() if job["level"] == top}
    together, apart = play(links, jobs), play(links, above)
    for name in above:
        assert together.result(name)["comm_s"] == pytest.approx(
            apart.result(name)["comm_s"], abs=1e-6
        )


@SETTINGS
@given(scenarios())
def test_the_output_is_repeated_and_stops_on_the_way_change_nothing(scenario):
    links, jobs = scenario
    through = play(links, jobs).results()
    assert through == play(links, jobs).results()
    halting = play(links, jobs, until_s=0.0)
    for step in range(1, 20):
        halting.run_until(HORIZON_S * step / 20)
        halting.results()
    halting.run_until(HORIZON_S)
    for name, result in halting.results().items():
        assert result["completed"] == through[name]["completed"]
        assert result["compute_s"] == pytest.approx(through[name]["compute_s"], abs=1e-7)
        assert result["comm_s"] == pytest.approx(through[name]["comm_s"], abs=1e-7)


@SETTINGS
@given(scenarios(iterations=False) | scenarios(iterations=False, paced=True))
def test_skipped_stretches_end_where_an_unskipped_run_does(scenario):
    links, jobs = scenario
    skipped = play(links, jobs, until_s=150.0)
    played = play(links, jobs, until_s=150.0, skip_repeats=False)
    assert skipped.events <= played.events
    for name, result in skipped.results().items():
        other = played.result(name)
        assert result["compute_s"] == pytest.approx(other["compute_s"], abs=1e-4)
        assert abs(result["completed"] - other["completed"]) <= 1
        if result["completed"] == other["completed"]:
            expected_s = other["mean_iteration_s"]
            assert result["mean_iteration_s"] == pytest.approx(expected_s, abs=1e-4)


def test_jobs_that_lock_into_step_are_skipped():
    links: Links = {"l": (1e9, 0.0)}
    jobs: Jobs = {
        "a": {"compute_s": 0.3, "bursts": [(1.0, {"l": 2e8})], "level": 1},
        "b": {"compute_s": 0.2, "bursts": [(1.0, {"l": 3e8})], "level": 0},
        "c": {"compute_s": 0.1, "bursts": [(0.5, {"l": 1e8})], "level": 0, "iterations": 5000},
    }
    skipped = play(links, jobs, until_s=1e4)
    played = play(links, jobs, until_s=1e4, skip_repeats=False)
    assert skipped.events < played.events / 100
    for name in jobs:
        a, b = skipped.result(name), played.result(name)
        assert abs(a["completed"] - b["completed"]) <= 1
        assert a["comm_s"] == pytest.approx(b["comm_s"], abs=1e-3)
