"""Replays: times by hand, nothing lost, first come first served, nobody beats an empty network."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from trace_data import PHILLY, SIZES, needs_data

from crux_torch.network.builders import (
    crux_testbed,
    double_sided,
    fat_tree,
    rail_optimised,
    torus,
    two_layer_clos,
)
from crux_torch.network.topology import Topology
from crux_torch.schedule.papers.cassini import compatibility, ranked
from crux_torch.schedule.schedulers import IN_TRACES, SCHEDULERS
from crux_torch.sim.catalogue import MODELS, Collective, WorkloadError
from crux_torch.sim.collectives import JoinedPaths, transfers
from crux_torch.sim.networks import Grain, Series, grain_of, per_day
from crux_torch.sim.placement import PLACEMENTS, RANKED, Placer
from crux_torch.sim.replay import Outcome, ReplayOptions, non_blocking, replay
from crux_torch.sim.traces import Trace, TraceJob, load_hybrid


@pytest.fixture(scope="module")
def testbed() -> Placer:
    return Placer(crux_testbed())


def trace_of(*jobs: tuple[str, int, float, float]) -> Trace:
    """From (model, GPUs, arrival, duration) in the order of arrival, named a, b, c and so on."""
    return Trace("csv", tuple(TraceJob(chr(97 + i), *job) for i, job in enumerate(jobs)))


def test_a_placer_takes_the_models_that_it_is_given() -> None:
    slow = structs.replace(MODELS["bert"], name="slow", samples_per_gpu=64.0)
    placer = Placer(crux_testbed(), models={"slow": slow}.__getitem__)
    assert placer.reference("slow", 16).compute_s == pytest.approx(slow.compute_s)
    assert slow.compute_s == pytest.approx(4 * MODELS["bert"].compute_s)


def ends(outcome: Outcome) -> dict[str, float]:
    return {r.name: r.end_s for r in outcome.records}


def busy_trace(jobs: int, seed: int) -> Trace:
    """Short jobs that want about one and a half times the testbed's 96 GPUs."""
    rng = random.Random(seed)
    models = ["bert", "gpt", "resnet", "nmt", "transformer-nlp", "llama-7b", "multi-interests"]
    made = []
    for _ in range(jobs):
        gpus = rng.choice([1, 4, 8, 16, 24, 48])
        made.append((rng.choice(models), gpus, rng.uniform(0, 40.0 * jobs), rng.uniform(5, 600)))
    return trace_of(*sorted(made, key=lambda job: job[2]))


def test_a_job_alone_takes_its_duration_to_the_last_iteration(testbed: Placer) -> None:
    alone_s = testbed.reference("bert", 16).alone_s
    trace = trace_of(("bert", 16, 5.0, 100 * alone_s))
    hived = ReplayOptions(placement="hived")
    outcome = replay(trace, testbed, SCHEDULERS["crux-paper"], hived)
    assert ends(outcome) == {"a": pytest.approx(5.0 + 100 * alone_s, rel=1e-9)}
    (record,) = outcome.records
    assert record.iterations == 100
    assert record.slowdown == pytest.approx(1.0, rel=1e-9)


def test_with_fixed_durations_all_schedulers_hold_the_same_gpus_at_all_times(
    testbed: Placer,
) -> None:
    trace = busy_trace(40, 5)
    asked_s = {job.name: job.duration_s for job in trace.jobs}
    options = ReplayOptions(fixed_durations=True, grid_s=500.0)
    found = {
        name: replay(trace, testbed, SCHEDULERS[name], options)
        for name in ("ecmp", "crux-pa", "crux-paper", "ideal")
    }
    for outcome in found.values():
        for record in outcome.records:
            assert record.end_s - record.start_s == pytest.approx(asked_s[record.name])
            assert record.slowdown >= 1.0 - 1.0 / record.iterations - 1e-9
        assert len(outcome.records) == len(trace.jobs)
        assert outcome.series.held == pytest.approx(found["ideal"].series.held)
        assert (np.array(outcome.series.gpu_utilization) <= np.array(outcome.series.held)).all()
    used = {name: outcome.summary.gpu_utilization for name, outcome in found.items()}
    assert used["ideal"] == max(used.values())
    assert found["ideal"].summary.makespan_s == pytest.approx(found["ecmp"].summary.makespan_s)


def test_a_job_of_one_gpu_computes_all_the_time(testbed: Placer) -> None:
    compute_s = MODELS["resnet"].compute_s
    trace = trace_of(("resnet", 1, 0.0, 50 * compute_s))
    outcome = replay(trace, testbed, SCHEDULERS["ecmp"], ReplayOptions())
    assert ends(outcome) == {"a": pytest.approx(50 * compute_s)}
    assert outcome.summary.held_utilization == pytest.approx(1.0)
    assert outcome.summary.gpu_utilization == pytest.approx(1 / 96)
    assert outcome.plans == 0, "nobody meets"


def test_a_job_waits_until_the_gpus_that_it_needs_are_free(testbed: Placer) -> None:
    compute_s = MODELS["resnet"].compute_s
    # No flows within a host with NVLink: times are those of computation alone.
    trace = trace_of(
        ("resnet", 8, 0.0, 100 * compute_s),
        *[("resnet", 8, 1.0, 1000 * compute_s)] * 11,
        ("resnet", 8, 2.0, 10 * compute_s),
        ("resnet", 1, 3.0, 10 * compute_s),
    )
    outcome = replay(trace, testbed, SCHEDULERS["ecmp"], ReplayOptions(placement="hived"))
    last = {r.name: r for r in outcome.records}
    assert last["a"].end_s == pytest.approx(100 * compute_s)
    assert last["m"].start_s == pytest.approx(100 * compute_s)
    assert last["m"].end_s == pytest.approx(110 * compute_s)
    # Eight GPUs were taken at once, so the one behind waits for them.
    assert last["n"].start_s == pytest.approx(110 * compute_s)
    assert outcome.summary.queued_mean_s == pytest.approx(
        (100 * compute_s - 2 + 110 * compute_s - 3) / 14
    )


CHOICES = [(name, "none", 25) for name in sorted(IN_TRACES)]
CHOICES += [("crux-paper", placement, 60) for placement in sorted((*PLACEMENTS, RANKED))]


@pytest.mark.parametrize(("scheduler", "placement", "jobs"), CHOICES)
def test_every_job_ends_once_starts_in_turn_and_no_gpu_is_held_twice(
    testbed: Placer, scheduler: str, placement: str, jobs: int
) -> None:
    trace = busy_trace(jobs, seed=1)
    options = ReplayOptions(placement=placement, iterations_as_one=20)
    outcome = replay(trace, testbed, SCHEDULERS[scheduler], options)
    assert sorted(r.name for r in outcome.records) == sorted(j.name for j in trace.jobs)
    by_start = sorted(outcome.records, key=lambda r: (r.start_s, r.submit_s))
    assert [r.submit_s for r in by_start] == [j.submit_s for j in trace.jobs]
    assert all(r.submit_s <= r.start_s < r.end_s for r in outcome.records)
    assert all(0 <= held <= 1 + 1e-9 for held in outcome.series.held)
    # At one instant those that end make room for those that start.
    changes = [(r.start_s, r.gpus) for r in outcome.records]
    changes += [(r.end_s, -r.gpus) for r in outcome.records]
    held = list(accumulate(change for _, change in sorted(changes)))
    assert 0 <= min(held) <= max(held) <= 96
    assert held[-1] == 0


def test_the_ranked_placement_takes_the_most_compatible_choice(monkeypatch) -> None:
    placer, asked, placed = Placer(crux_testbed()), {}, {}
    place = placer.place

    def ranked_and_kept(found, name, memory):
        asked[name] = found, (order := ranked(found, name, memory))
        return order

    def placed_and_kept(name, model, gpus):
        placed[name] = place(name, model, gpus)
        return placed[name]

    monkeypatch.setattr("crux_torch.sim.replay.ranked", ranked_and_kept)
    monkeypatch.setattr(placer, "place", placed_and_kept)
    options = ReplayOptions(placement=RANKED, iterations_as_one=20)
    replay(busy_trace(60, seed=2), placer, SCHEDULERS["ecmp"], options)
    better = 0
    for name, (found, order) in asked.items():
        chosen = found[order[0] if order else 0]
        assert placed[name].job in chosen.cluster.jobs
        # Where each closes a loop, the first is HiveD's own.
        first, best = compatibility(found[0], name), compatibility(chosen, name)
        better += bool(order) and (first.loop or best.score > first.score)
    assert better


@pytest.mark.parametrize(("apart", "better"), [(False, 1e-6), (True, 1e-3)])
@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_nobody_does_better_than_on_an_empty_network(
    placement: str, apart: bool, better: float
) -> None:
    """Rings on their own share the links of their job in equal shares, which is not the best."""
    testbed = Placer(crux_testbed(), rings_apart=apart)
    trace = busy_trace(30, seed=3)
    options = ReplayOptions(placement=placement)
    # Arrivals far apart: all schedulers place the jobs on the same GPUs.
    rare = Trace("csv", tuple(replace(j, submit_s=i * 1e5) for i, j in enumerate(trace.jobs[:10])))
    ideal = replay(trace, testbed, SCHEDULERS["ideal"], options)
    assert ideal.summary.slowdown_worst == pytest.approx(1.0)
    best = ends(replay(rare, testbed, SCHEDULERS["ideal"], options))
    for name in ("ecmp", "crux-paper", "sincronia"):
        other = replay(rare, testbed, SCHEDULERS[name], options)
        assert all(end >= best[job] * (1 - better) for job, end in ends(other).items())
        busy = replay(trace, testbed, SCHEDULERS[name], options)
        assert min(r.slowdown for r in busy.records) >= 1 - better


def test_jobs_do_the_same_work_whether_their_rings_move_together_or_not() -> None:
    trace = busy_trace(20, seed=5)
    found = [
        replay(trace, Placer(crux_testbed(), rings_apart=apart), SCHEDULERS["ecmp"])
        for apart in (False, True)
    ]
    work = [{r.name: r.iterations for r in outcome.records} for outcome in found]
    assert work[0].keys() == work[1].keys()
    assert all(work[1][name] == pytest.approx(n, rel=0.05) for name, n in work[0].items())
    assert ends(found[0]) != ends(found[1])


def test_the_same_replay_gives_the_same_result(testbed: Placer) -> None:
    trace, options = busy_trace(30, seed=4), ReplayOptions(seed=5)
    first, second = (
        replay(trace, Placer(crux_testbed()), SCHEDULERS["crux-paper"], options) for _ in range(2)
    )
    assert (first.records, first.series, first.summary) == (
        second.records,
        second.series,
        second.summary,
    )


def test_without_shared_links_all_schedulers_are_the_same() -> None:
    trace = busy_trace(40, seed=6)
    placer = Placer(non_blocking())
    found = {
        name: ends(replay(trace, placer, SCHEDULERS[name], ReplayOptions()))
        for name in ("ideal", "ecmp", "crux-paper")
    }
    for name in ("ecmp", "crux-paper"):
        assert found[name] == pytest.approx(found["ideal"], rel=1e-9)


def test_many_iterations_as_one_change_little(testbed: Placer) -> None:
    models = ("transformer-nlp", "llama-7b", "transformer-nlp", "llama-7b")
    trace = trace_of(*((name, 24, 100.0 * i, 20000.0) for i, name in enumerate(models)))
    found = [
        replay(trace, testbed, SCHEDULERS["ecmp"], ReplayOptions(iterations_as_one=n)).summary
        for n in (1, 20)
    ]
    assert found[0].slowdown_mean > 1.05, "they contend"
    assert found[1].slowdown_mean == pytest.approx(found[0].slowdown_mean, rel=0.03)
    assert found[1].jct_mean_s == pytest.approx(found[0].jct_mean_s, rel=0.03)


@given(st.integers(1, 10**6), st.integers(1, 500))
def test_grains_hold_the_work(iterations: int, size: int) -> None:
    grain = grain_of(iterations, size)
    assert grain.size <= size
    assert grain.count * grain.size == pytest.approx(iterations, rel=0.5 / 19.5)
    assert grain_of(iterations, 1) == Grain(iterations, 1.0)


def test_series_add_up_to_the_summary(testbed: Placer) -> None:
    outcome = replay(
        busy_trace(40, seed=7), testbed, SCHEDULERS["crux-paper"], ReplayOptions(grid_s=100.0)
    )
    series = outcome.series
    lengths = np.diff(series.time_s)
    computed, held = 96 * lengths @ series.gpu_utilization, 96 * lengths @ series.held
    assert held == pytest.approx(sum(r.gpus * (r.end_s - r.start_s) for r in outcome.records))
    assert computed / held == pytest.approx(outcome.summary.held_utilization)
    # All iterations of all jobs, and nothing else, are in the computed time.
    assert computed == pytest.approx(
        sum(
            r.gpus * r.iterations * testbed.reference(r.model, r.gpus).compute_s
            for r in outcome.records
        )
    )
    assert all(0 <= share <= 1 + 1e-9 for share in series.gpu_utilization)


def test_days_are_weighted_by_length() -> None:
    series = Series(time_s=[0.0, 43200.0, 86400.0, 100000.0])
    assert per_day(series, [1.0, 0.0, 0.25]) == [0.5, 0.25]
    assert series.mean([1.0, 0.0, 0.25], 86400.0) == 0.5


def test_a_job_that_never_fits_is_an_error(testbed: Placer) -> None:
    with pytest.raises(WorkloadError, match="job 'a' asks for 97 GPUs; the cluster has 96"):
        replay(trace_of(("bert", 97, 0.0, 1.0)), testbed, SCHEDULERS["ecmp"])
    with pytest.raises(WorkloadError, match="no jobs"):
        replay(Trace("csv", ()), testbed, SCHEDULERS["ecmp"])


BUILDS: list[Callable[[], Topology]] = [
    crux_testbed,
    lambda: two_layer_clos(20, 5, 4),
    lambda: double_sided(24),
    lambda: fat_tree(4),
    rail_optimised,
    torus,
]


@pytest.mark.parametrize("build", BUILDS)
def test_joined_paths_are_the_topology_s(build: Callable[[], Topology]) -> None:
    topology = build()
    every, some = JoinedPaths(topology, None), JoinedPaths(topology, 5)
    rng = random.Random(0)
    for _ in range(40):
        src, dst = rng.sample(topology.gpus(), 2)
        paths = topology.candidate_paths(src, dst, None)
        assert sorted(every(src, dst)) == sorted(paths)
        assert len(some(src, dst)) == min(5, len(paths))
        assert set(some(src, dst)) <= set(paths)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(2, 96))
def test_a_bounded_alltoall_leaves_every_host_with_all_its_bytes(peers: int, ranks: int) -> None:
    topology = two_layer_clos(12, 6, 2)
    gpus = topology.gpus()[:ranks]
    collective = Collective("alltoall", 8e6, (tuple(range(ranks)),), 0.0)

    def sent(limit: int | None) -> dict[str, float]:
        total: dict[str, float] = {}
        for (src, dst), moved in transfers(collective, gpus, topology, limit).items():
            home, away = topology.host_of(src), topology.host_of(dst)
            if home and home != away:
                total[home] = total.get(home, 0.0) + moved
        return total

    assert sent(peers) == pytest.approx(sent(None))


@pytest.mark.slow
@needs_data
def test_a_day_of_the_hybrid_trace_is_played_to_its_end() -> None:
    trace = load_hybrid(PHILLY, SIZES, days=1, jobs=60)
    options = ReplayOptions(placement="hived", iterations_as_one=50)
    outcome = replay(trace, Placer(two_layer_clos()), SCHEDULERS["crux-paper"], options)
    assert outcome.summary.jobs == 60
    assert math.isfinite(outcome.summary.jct_p99_s)
