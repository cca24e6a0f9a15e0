"""Small cases, their enumerated optimum, and what schedulers reach of it."""

from __future__ import annotations

import json
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.default.cap import SlowdownCap
from crux_torch.schedule.default.rehearsal import Length, Rehearsal
from crux_torch.schedule.default.search import Assignment, dense
from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job
from crux_torch.sim.play import play
from evaluation.__main__ import evaluation
from evaluation.optimality import (
    COMPRESSIONS,
    LEVELS,
    MECHANISMS,
    ORDERS,
    PATHS,
    Table,
    judge,
    summarise,
)
from evaluation.small_case import HOSTS, JOBS, TORS, draw_case

SHORT = Length(phases=1, iterations=100, rounds=5)


def _job(name: str, compute_s: float, link_s: float, *paths: str, gpus: int = 8) -> Job:
    """A job that sends for ``link_s`` after half of its computation over a link of 1 B/s."""
    flow = Flow(link_s, tuple((path,) for path in paths))
    return Job(name, gpus, compute_s * gpus, compute_s, (flow,), (Burst(0.5, 1.0),))


def test_two_jobs_take_a_link_each_and_run_as_if_alone() -> None:
    """Alone an iteration takes 0.5 + 0.9 s; one link can't carry 1.8 s of data in these 1.4 s."""
    jobs = (_job("a", 1.0, 0.9, "x", "y"), _job("b", 1.0, 0.9, "x", "y"))
    table = Table(Cluster({"x": 1.0, "y": 1.0}, jobs), 2, SHORT)
    assert table.screened.shape == (4, 4)
    assert table.best_path["a"] != table.best_path["b"]
    assert table.optimum == pytest.approx(1.0 / 1.4)
    # On one link the first leaves 0.5 s of every 1.4 s: the second needs two such gaps.
    shared = table.of_paths({"a": (0,), "b": (0,)})
    assert shared == pytest.approx((1.0 / 1.4 + 1.0 / 2.8) / 2)


def test_one_link_that_is_too_small_belongs_to_the_larger_job() -> None:
    """Each alone keeps the link busy for 1 s of 1.5 s; the first job runs as if alone."""
    jobs = (_job("large", 1.0, 1.0, "x", gpus=80), _job("small", 1.0, 1.0, "x", gpus=8))
    table = Table(Cluster({"x": 1.0}, jobs), 2, SHORT)
    assert list(table.best_levels) == [1, 0]
    assert table.best_order == ("large", "small")
    # The large one computes 1 s of every 1.5 s. The small one gets 0.5 s of link in 1.5 s, so that
    # an iteration takes 3 s.
    expected = (80 * (1 / 1.5) + 8 * (1 / 3)) / 88
    assert table.optimum == pytest.approx(expected, rel=1e-6)
    assert table.of_order(("large", "small")) == pytest.approx(table.optimum)
    assert table.of_levels({"large": 7, "small": 3}) == pytest.approx(table.optimum)
    assert table.of_levels({"large": 0, "small": 2}) < table.optimum


def test_the_best_order_compresses_to_the_optimum() -> None:
    for seed in range(4):
        table = Table(draw_case(seed).cluster, len(LEVELS), SHORT)
        assert table.of_order(table.best_order) == table.optimum
        assert all(table.of_order(o) <= table.optimum for o in permutations(table.names))


def test_the_optimum_is_what_a_play_of_the_whole_cluster_shows() -> None:
    """Parts, symmetry, equal relations and screening are shortcuts: against plays without any."""
    case = draw_case(0)
    table = Table(case.cluster)

    def played(path: dict[str, tuple[int, ...]], level: list[int]) -> float:
        decision = Decision(path, dict(zip(table.names, level, strict=True)))
        return play(case.cluster, decision, 400.0).gpu_utilization

    assert table.optimum == pytest.approx(
        played(table.best_path, table.best_levels.tolist()), abs=5e-3
    )
    rng = np.random.default_rng(1)
    for _ in range(12):
        row, column = rng.integers(len(table.paths)), rng.integers(len(table.levels))
        path = dict(zip(table.names, table.paths[row], strict=True))
        found = played(path, table.levels[column].tolist())
        assert table.screened[row, column] == pytest.approx(found, abs=0.03)
        assert found <= table.optimum + 5e-3


def test_plans_that_order_contending_jobs_alike_are_played_once() -> None:
    jobs = (_job("a", 1.0, 1.0, "x"), _job("b", 1.0, 0.7, "x"), _job("c", 1.0, 0.5, "y"))
    rehearsal = Rehearsal(Cluster({"x": 1.0, "y": 1.0}, jobs), SHORT)
    routes = [rehearsal.route(j, (0,)) for j in range(3)]
    busy = rehearsal.busy_gpus([(routes, np.array(list(product(range(3), repeat=3))))])[0]
    assert rehearsal.plays == 3, "a before b, b before a, both alike; c meets nobody"
    assert len(set(busy.round(9))) == 3


@pytest.mark.parametrize("seed", range(4))
def test_the_capped_optimum_is_the_best_of_the_plans_that_keep_the_cap(seed: int) -> None:
    cluster = draw_case(seed).cluster
    table = Table(cluster, 2, SHORT)
    arrays = arrays_of(cluster)
    cap = SlowdownCap(arrays, 1.5)
    for row, path in enumerate(table.paths):
        kept = [cap.keeps(Assignment(path, dense(level.tolist()))) for level in table.levels]
        best = table.screened[row, kept].max()
        by_name = dict(zip(table.names, path, strict=True))
        assert table.of_capped_paths(by_name, cap) == pytest.approx(best, abs=0.02)
        assert table.of_capped_paths(by_name, cap) <= table.capped_optimum(cap) + 0.02
    assert table.capped_optimum(cap) <= table.optimum
    assert table.capped_optimum(SlowdownCap(arrays, np.inf)) == table.optimum


@pytest.mark.parametrize("seed", [16, 98, 127, 176, 243])
def test_a_race_does_not_lose_what_the_search_has_found(seed: int) -> None:
    """In these, slow jobs end few iterations while fast ones end many."""
    verdicts = judge(draw_case(seed)).verdicts
    assert verdicts["capped", "crux"].share >= 0.995


def test_cases_are_as_in_the_paper_and_the_same_each_time() -> None:
    for seed in range(40):
        case = draw_case(seed)
        assert case == draw_case(seed)
        assert case.hosts in HOSTS
        assert case.tors in TORS
        names = [job.name for job in case.cluster.jobs]
        assert len(set(names)) == JOBS
        assert sum(job.gpus for job in case.cluster.jobs) == 8 * case.hosts
        switches = {link.split("->")[i] for link in case.cluster.capacity_Bps for i in (0, 1)}
        assert sum(name.startswith("agg") for name in switches) == 2
        assert sum(name.startswith("tor") for name in switches) <= case.tors


def test_nothing_is_better_than_the_optimum_and_verdicts_repeat() -> None:
    for seed in range(6):
        outcome = judge(draw_case(seed), length=SHORT)
        again = judge(draw_case(seed), length=SHORT)
        for place, verdict in outcome.verdicts.items():
            assert 0 < verdict.share <= 1 + 1e-12, place
            assert verdict.share == again.verdicts[place].share
            assert verdict.cpu_s > 0
        assert outcome.optimum == again.optimum


@pytest.mark.slow
def test_the_papers_crux_and_the_default_reach_what_they_are_held_to() -> None:
    """Of 20 cases; the benchmark judges 1,500 by longer plays."""
    rows = summarise([judge(draw_case(s), length=Length(2, 200, 8)) for s in range(500, 520)])
    mean = {(row["mechanism"], row["scheduler"]): row["share_mean"] for row in rows}
    for mechanism in MECHANISMS:
        assert mean[mechanism, "crux-paper"] >= 0.965
    assert mean["paths", "crux"] >= 0.99
    assert mean["capped", "crux"] >= 0.995
    assert mean["paths", "crux-paper"] > mean["paths", "ecmp"]
    assert mean["priority", "crux-paper"] > mean["priority", "sincronia"]


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        evaluation, ["optimality", "--cases", "2", "--workers", "2", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "optimality.txt").read_text() in result.output
    written = json.loads((tmp_path / "optimality.json").read_text())
    assert written["benchmark"] == "optimality"
    assert written["settings"]["cases"] == 2
    expected = {(mechanism, name) for mechanism in ("paths", "capped") for name in PATHS}
    expected |= {("priority", name) for name in ORDERS}
    expected |= {("compression", name) for name in COMPRESSIONS}
    assert {(row["mechanism"], row["scheduler"]) for row in written["rows"]} == expected
    for row in written["rows"]:
        errors, fractions = zip(*row["error_cdf"], strict=True)
        assert list(errors) == sorted(errors)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)
        assert row["share_min"] == pytest.approx(1 - errors[-1])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = CliRunner().invoke(
        evaluation, ["optimality", "--cases", "1", "--out", str(file / "sub")]
    )
    assert result.exit_code == 1
    assert str(file) in result.output
