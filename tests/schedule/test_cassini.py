"""CASSINI: unified circles, rotations, the Affinity graph, and shifts that pay."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import clusters

from crux_torch.schedule.arrays import arrays_of, choice_of, traffic_matrix
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.schedule.papers.cassini import (
    Candidate,
    Meeting,
    cassini,
    compatibility,
    loop_free,
    time_shifts,
    without,
)
from crux_torch.schedule.papers.cassini_grid import (
    FAMILY_ANGLES,
    ROUNDING,
    best_rotation,
    circle,
    compatibility_score,
    families,
    perimeter,
)
from crux_torch.schedule.papers.cassini_parts import parts_of
from crux_torch.sim.play import play


def job(name: str, compute_s: float, moved: float, *links: str) -> Job:
    return Job(name, 8, 1e12, compute_s, (Flow(moved, (links or ("l",),)),))


def demand_of(circles: list[np.ndarray], angles: tuple[int, ...]) -> np.ndarray:
    around = perimeter(circles)
    return sum(
        np.roll(np.tile(c, around // len(c)), a) for c, a in zip(circles, angles, strict=True)
    )


def test_two_jobs_of_40_and_60_ms_meet_on_a_circle_of_120_ms() -> None:
    """§3, Figure 5: three iterations of j1 and two of j2, compatible after a rotation."""
    grid = families(np.array([0.040, 0.060]))
    assert grid.units * grid.unit_s == pytest.approx([0.040, 0.060])
    assert math.lcm(*grid.units.tolist()) * grid.unit_s[0] == pytest.approx(0.120)
    angles = (grid.units * 12).tolist()
    up = [(0.030, 0.040)], [(0.050, 0.060)]
    circles = [circle(u, p, n) for u, p, n in zip(up, (0.040, 0.060), angles, strict=True)]
    around = perimeter(circles)
    assert [around // len(c) for c in circles] == [3, 2]
    # Unrotated, both end their 120 ms together: 10 ms of excess.
    assert compatibility_score(demand_of(circles, (0, 0))) == pytest.approx(1 - 10 / 120)
    rotation = best_rotation(circles)
    assert rotation.score == pytest.approx(1.0)
    assert demand_of(circles, rotation.angles).max() == pytest.approx(1.0)


def test_equal_iterations_have_the_papers_72_angles() -> None:
    grid = families(np.array([0.255, 0.255]))
    circles = [circle([(0.141, 0.255)], 0.255, n) for n in (grid.units * 12).tolist()]
    assert perimeter(circles) == 72
    # Figure 3: Down for 141 of 255 ms; two of these can't be interleaved (228 ms of Up in 255).
    assert circles[0].sum() / 72 == pytest.approx(114 / 255)
    assert best_rotation(circles).score == pytest.approx(1.0)
    three = best_rotation([*circles, circles[0]])
    assert three.score == pytest.approx(1 - (3 * 114 - 255) / 255, abs=2e-2)


def test_the_score_is_equation_2() -> None:
    demand = np.array([0.5, 1.0, 1.5, 3.0])
    assert compatibility_score(demand) == pytest.approx(1 - (0.5 + 2.0) / 4)
    assert compatibility_score(np.full(8, 3.0)) == pytest.approx(-1.0)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from((24, 36, 72)), st.floats(0.05, 0.9), st.floats(0.1, 1.0)),
        min_size=2,
        max_size=2,
    ),
    st.floats(0, 0.5),
)
def test_two_jobs_get_the_best_rotation_of_all(jobs, background) -> None:
    circles = [circle([(0.0, busy)], 1.0, n) * height for n, busy, height in jobs]
    found = best_rotation(circles, background)
    tried = [
        compatibility_score(demand_of(circles, angles) + background)
        for angles in itertools.product(*(range(len(c)) for c in circles))
    ]
    assert found.score == pytest.approx(max(tried), abs=1e-6)
    achieved = compatibility_score(demand_of(circles, found.angles) + background)
    assert achieved == pytest.approx(found.score, abs=1e-9)
    assert found.angles[0] == 0
    assert all(0 <= a < len(c) for a, c in zip(found.angles, circles, strict=True))


#: Figures 1(d) and 6: six Up phases of a GPT-3 in hybrid parallelism, in Gbit/s of 50. The paper
#: prints no numbers, so these are only like its drawing.
HYBRID = ((0.10, 0.16, 15), (0.20, 0.26, 15), (0.34, 0.44, 15), (0.48, 0.58, 15), (0.62, 0.66, 10))
HYBRID += ((0.70, 0.95, 35),)


def hybrid(name: str, *links: str) -> Job:
    """A job of an iteration of 1 s that computes all the time, on links of 50 Gbit/s."""
    moved = [(end - start) * rate for start, end, rate in HYBRID]
    bursts = tuple(
        Burst(start, size / sum(moved), end - start)
        for (start, end, _), size in zip(HYBRID, moved, strict=True)
    )
    return Job(name, 8, 1e12, 1.0, (Flow(sum(moved), (links or ("l",),)),), bursts)


def test_six_up_phases_are_arcs_of_their_own_length_and_height() -> None:
    """Figure 6."""
    cluster = Cluster({"l": 50.0}, (hybrid("a"), hybrid("b")))
    arrays = arrays_of(cluster)
    ((_, part),) = parts_of(arrays, traffic_matrix(arrays, choice_of(arrays, None)))
    assert part.period_s == pytest.approx((1.0, 1.0))
    for entries, arcs in zip(part.entries, part.arcs, strict=True):
        ((_, highest),) = entries
        assert highest == pytest.approx(35 / 50)
        found = [(arc.start_s, arc.end_s, highest * arc.height * 50) for arc in arcs]
        assert found == [pytest.approx(up) for up in HYBRID]
    circles = part.circles()
    mean = sum((end - start) * rate for start, end, rate in HYBRID) / 50
    assert float(circles.rate[0].mean()) * 35 / 50 == pytest.approx(mean)
    assert float(circles.busy[0].mean()) == pytest.approx(sum(e - s for s, e, _ in HYBRID))


def test_low_arcs_lie_over_high_ones() -> None:
    """Two of Figure 6's jobs are Up for 61% of the time each, and the link has room for both."""
    cluster = Cluster({"l": 50.0}, (hybrid("a"), hybrid("b")))
    path = {job.name: (0,) for job in cluster.jobs}
    assert compatibility(Candidate(cluster, path), "a").score == pytest.approx(1.0)
    shifted = play(cluster, cassini(cluster, SchedulerOptions()), 200.0)
    together = play(cluster, ecmp(cluster, SchedulerOptions()), 200.0)
    for name in path:
        assert shifted.jobs[name].mean_iteration_s == pytest.approx(1.0, rel=1e-3)
        # Both send 35 of 50 Gbit/s at once.
        assert together.jobs[name].mean_iteration_s == pytest.approx(0.7 + 0.25 * 70 / 50)


def test_jobs_whose_ceilings_fit_beside_each_other_are_not_shifted() -> None:
    at_once = tuple(
        Job(n, 8, 1e12, 0.5, (Flow(0.2, (("l",),)),), (Burst(1.0, 1.0, 0.5),)) for n in "ab"
    )
    capped = Cluster({"l": 1.0}, at_once)
    assert not cassini(capped, SchedulerOptions()).shift_s
    full = tuple(replace(job, bursts=(Burst(1.0, 1.0),)) for job in at_once)
    assert cassini(replace(capped, jobs=full), SchedulerOptions()).shift_s


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 0.5), st.floats(0.1, 1.0)), min_size=2, max_size=3))
def test_a_ceiling_shifts_jobs_like_a_narrow_link_of_their_own(jobs) -> None:
    capped, narrow, capacity = [], [], {"l": 1.0}
    for i, (up_s, height) in enumerate(jobs):
        flow = Flow(up_s * height, (("l",),))
        capped.append(Job(f"j{i}", 8, 1e12, 1 - up_s, (flow,), (Burst(1.0, 1.0, up_s),)))
        narrow.append(job(f"j{i}", 1 - up_s, up_s * height, "l", f"nic{i}"))
        capacity[f"nic{i}"] = height
    found = cassini(Cluster({"l": 1.0}, tuple(capped)), SchedulerOptions())
    expected = cassini(Cluster(capacity, tuple(narrow)), SchedulerOptions())
    assert found.shift_s == pytest.approx(expected.shift_s)
    assert found.grid_s == pytest.approx(expected.grid_s)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12))
def test_jobs_are_slowed_by_five_percent_at_most_and_share_small_multiples(periods) -> None:
    grid = families(np.array(periods))
    stretch = grid.units * grid.unit_s / np.array(periods)
    assert (stretch >= 1 - 1e-9).all()
    assert (stretch <= 1 + ROUNDING + 1e-9).all()
    for number in set(grid.number.tolist()):
        mine = grid.number == number
        assert len(set(grid.unit_s[mine].tolist())) == 1
        assert FAMILY_ANGLES % (math.lcm(*grid.units[mine].tolist()) * 12) == 0


def random_meetings(rng: random.Random, jobs: int, links: int) -> list[Meeting]:
    meetings = []
    for _ in range(links):
        here = sorted(rng.sample(range(jobs), rng.randint(2, min(4, jobs))))
        meetings.append(
            Meeting(
                {j: rng.randrange(PERIOD[j]) for j in here},
                rng.random(),
                {j: rng.random() for j in here},
            )
        )
    return meetings


PERIOD = [24, 36, 48, 72, 72, 108, 144, 216]


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_theorem_1_every_link_keeps_its_relative_shifts(rng, links) -> None:
    graph = loop_free(random_meetings(rng, len(PERIOD), links))
    trees = time_shifts(graph, PERIOD)
    shift = {j: s for tree in trees for j, s in tree.items()}
    assert len(shift) == sum(map(len, trees)), "one shift a job"
    for meeting in graph:
        edges = meeting.shift
        around = math.lcm(*(PERIOD[j] for j in edges))
        assert any(
            all((shift[j] - moved - edges[j]) % PERIOD[j] == 0 for j in edges)
            for moved in range(around)
        ), "all jobs of a link are moved by one common amount"


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_the_graph_has_no_loop_and_joins_what_was_joined(rng, links) -> None:
    meetings = random_meetings(rng, len(PERIOD), links)
    graph = loop_free(meetings)
    edges = sum(len(m.shift) for m in graph)
    jobs = len({job for m in graph for job in m.shift})
    trees = time_shifts(graph, PERIOD)
    assert edges == jobs + len(graph) - len(trees), "a forest"
    reached = {frozenset(tree) for tree in trees}
    everything = time_shifts(meetings, PERIOD)
    assert reached == {frozenset(tree) for tree in everything}
    assert loop_free(meetings[::-1]) == graph


def test_a_graph_without_a_job_keeps_the_links_where_others_meet() -> None:
    meetings = [Meeting({0: 1, 1: 2, 2: 3}, 1.0, {}), Meeting({0: 4, 1: 5}, 2.0, {})]
    left = without(meetings, {0})
    assert left == [Meeting({1: 2, 2: 3}, 1.0, {})]


def test_the_order_of_meetings_that_differ_by_a_rounding_error_decides_nothing() -> None:
    meetings = [Meeting({0: 0, 1: 0}, gain, {0: 0.0, 1: 0.0}) for gain in (7.6e-29, 0.0)]
    assert loop_free(meetings) == loop_free(meetings[::-1])


def test_the_appendix_example() -> None:
    """Appendix A: Figure 8(b), j1 and j2 on l1, j2 and j3 on l2."""
    graph = [Meeting({0: 10, 1: 40}, 1.0, {0: 1, 1: 1}), Meeting({1: 5, 2: 20}, 1.0, {1: 1, 2: 1})]
    assert time_shifts(graph, [1000] * 3) == [{0: 0, 1: -10 + 40, 2: -10 + 40 - 5 + 20}]


def test_two_jobs_that_fill_the_link_in_turn_run_as_if_alone() -> None:
    cluster = Cluster({"l": 1.0}, (job("a", 0.05, 0.05), job("b", 0.05, 0.05)))
    decision = cassini(cluster, SchedulerOptions())
    assert decision.shift_s == {"a": 0.0, "b": pytest.approx(0.05)}
    assert decision.grid_s == pytest.approx({"a": 0.1, "b": 0.1})
    assert set(decision.level.values()) == {0}
    assert play(cluster, decision, 100.0).gpu_utilization == pytest.approx(0.5, abs=1e-3)


def test_jobs_of_40_and_60_ms_are_shifted_apart() -> None:
    cluster = Cluster({"l": 1.0}, (job("a", 0.03, 0.01), job("b", 0.05, 0.01)))
    decision = cassini(cluster, SchedulerOptions())
    assert decision.grid_s == pytest.approx({"a": 0.04, "b": 0.06}, rel=0.02)
    report = play(cluster, decision, 120.0)
    for name, alone_s in (("a", 0.04), ("b", 0.06)):
        assert report.jobs[name].mean_iteration_s == pytest.approx(alone_s, rel=0.02)


@pytest.mark.parametrize("moved", [(0.04, 0.1), (0.08, 0.08), (0.12, 0.04)])
def test_jobs_of_320_and_160_ms_that_fit_run_as_if_alone(moved) -> None:
    periods = (0.32, 0.16)
    jobs = tuple(job(f"j{p}", p - m, m) for p, m in zip(periods, moved, strict=True))
    cluster = Cluster({"l": 1.0}, jobs)
    decision = cassini(cluster, SchedulerOptions())
    assert sorted(decision.grid_s.values()) == pytest.approx(sorted(periods))
    report = play(cluster, decision, 60.0)
    for p in periods:
        assert report.jobs[f"j{p}"].mean_iteration_s == pytest.approx(p, rel=1e-2)


def test_shifts_that_are_adopted_do_not_lose_to_random_starts() -> None:
    """Seeded clusters of two to four jobs on one or two links."""
    draw = random.Random(5)
    adopted = 0
    for _ in range(24):
        links = ["l", "m"][: draw.choice((1, 1, 2))]
        jobs = []
        for i in range(draw.choice((2, 2, 3, 4))):
            period_s = draw.choice((0.32, 0.32, 0.16, 0.16, 0.1, 0.2)) * draw.uniform(0.97, 1.0)
            moved = period_s * draw.uniform(0.1, 0.6)
            mine = draw.sample(links, draw.randint(1, len(links)))
            jobs.append(job(f"j{i}", period_s - moved, moved, *mine))
        cluster = Cluster(dict.fromkeys(links, 1.0), tuple(jobs))
        decision = cassini(cluster, SchedulerOptions())
        starts = [{j.name: draw.uniform(0, 0.3) for j in jobs} for _ in range(4)]
        if not decision.grid_s:
            continue
        adopted += 1
        plain = ecmp(cluster, SchedulerOptions())
        by_chance = [play(cluster, plain, 24.0, start_s=s).gpu_utilization for s in starts]
        shifted = play(cluster, decision, 24.0).gpu_utilization
        assert shifted >= 0.99 * statistics.mean(by_chance)
    assert adopted >= 6


@pytest.mark.parametrize(
    ("demand", "period_s", "bursts_s"),
    [
        (0.7, 0.2812, (0.138, 0.148)),
        (0.9, 0.2812, (0.138, 0.148)),
        (0.6, 0.3696, (0.168, 0.163, 0.055)),
        (0.8, 0.3864, (0.168, 0.163, 0.055)),
    ],
)
def test_bursts_that_touch_do_not_hold_each_other_up_for_good(demand, period_s, bursts_s) -> None:
    """Bursts of CASSINI's Table 2 that just fit, or overlap by some ms."""
    capacity = {"l": 1.0} | {f"nic{j}": demand for j in range(len(bursts_s))}
    jobs = tuple(
        job(f"j{j}", period_s - b, b * demand, "l", f"nic{j}") for j, b in enumerate(bursts_s)
    )
    cluster = Cluster(capacity, jobs)
    decision = cassini(cluster, SchedulerOptions())
    assert len(decision.grid_s) == len(jobs)
    for result in play(cluster, decision, 300 * period_s).jobs.values():
        assert result.mean_iteration_s == pytest.approx(period_s, rel=0.025)


def test_bursts_do_not_stretch_with_the_grid() -> None:
    """A grid 20% longer than the jobs: rotations for stretched bursts put them onto each other."""
    cluster = Cluster({"l": 1.0}, (job("a", 0.18, 0.14), job("b", 0.08, 0.08)))
    shifted = play(cluster, cassini(cluster, SchedulerOptions()), 32.0).gpu_utilization
    plain = play(cluster, ecmp(cluster, SchedulerOptions()), 32.0).gpu_utilization
    assert shifted >= 0.99 * plain


def test_who_cannot_be_interleaved_is_left_alone() -> None:
    full = Cluster({"l": 1.0}, (job("a", 0.001, 0.1), job("b", 0.001, 0.1)))
    odd = Cluster({"l": 1.0}, (job("a", 0.05, 0.05), job("b", 0.067, 0.067)))
    apart = Cluster({"l": 1.0, "m": 1.0}, (job("a", 0.05, 0.05, "l"), job("b", 0.05, 0.05, "m")))
    for cluster in (full, odd, apart):
        decision = cassini(cluster, SchedulerOptions())
        assert not decision.shift_s
        assert not decision.grid_s


def test_a_chain_of_links_gives_each_job_one_shift() -> None:
    """Figure 7: j2 meets j1 on one link and j3 on another."""
    cluster = Cluster(
        {"l1": 1.0, "l2": 1.0},
        (job("j1", 0.6, 0.4, "l1"), job("j2", 0.6, 0.4, "l1", "l2"), job("j3", 0.6, 0.4, "l2")),
    )
    decision = cassini(cluster, SchedulerOptions())
    assert sorted(decision.grid_s) == ["j1", "j2", "j3"]
    report = play(cluster, decision, 200.0)
    for result in report.jobs.values():
        assert result.mean_iteration_s == pytest.approx(1.0, rel=1e-2)


def test_a_job_that_others_on_the_link_would_make_miss_its_grid_is_not_paced() -> None:
    cluster = Cluster(
        {"l": 1.0}, (job("a", 0.03, 0.01), job("b", 0.04, 0.02), job("c", 0.099, 0.02))
    )
    shifted = play(cluster, cassini(cluster, SchedulerOptions()), 200.0).gpu_utilization
    plain = play(cluster, ecmp(cluster, SchedulerOptions()), 200.0).gpu_utilization
    assert shifted >= plain * 0.99


@settings(max_examples=60)
@given(clusters())
def test_shifts_are_within_their_grid(cluster) -> None:
    decision = cassini(cluster, SchedulerOptions())
    assert decision.shift_s.keys() == decision.grid_s.keys()
    for name, shift_s in decision.shift_s.items():
        assert 0 <= shift_s < decision.grid_s[name]
