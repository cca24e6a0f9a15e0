"""Jobs with parameter servers, flow by flow: what Algorithm 2 keeps together, and what it frees."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.schedule.papers.mlcc import SLOT_S
from crux_torch.sim.play import run_scenario
from crux_torch.sim.scenario import parse_scenario
from crux_torch.sim.served import LOOKS, Pair, Rule, ServedJob, iteration_s

STEP_S = SLOT_S / LOOKS
RULES: tuple[Rule, ...] = ("fair", "start-after", "initial", "mlcc")


def served(
    name: str, compute_s: float, moved: float, workers: str = "ab", server: str = "s"
) -> ServedJob:
    pairs = (
        Pair(w, server, moved, (f"{w}>", f">{server}"), (f"{server}>", f">{w}")) for w in workers
    )
    return ServedJob(name, compute_s, tuple(pairs))


def cluster(**slow: float) -> dict[str, float]:
    hosts = "abcds"
    return {f"{h}>": slow.get(h, 1.0) for h in hosts} | {f">{h}": 1.0 for h in hosts}


@pytest.mark.parametrize("rule", RULES)
def test_a_job_alone_moves_both_ways_at_once_unless_broadcasts_wait(rule: Rule) -> None:
    # Two workers' bytes need 0.6 s of the server's link, each way.
    found = iteration_s(cluster(), [served("j", 0.3, 0.3)], rule, 12.0)["j"]
    least = 0.3 + 0.6 * (2 if rule == "start-after" else 1)
    assert found == pytest.approx(least, abs=2.5 * STEP_S)


def test_two_jobs_with_one_server_are_staggered() -> None:
    jobs = [served("j", 1.4, 0.42), served("k", 1.41, 0.42)]
    fair, mlcc = (iteration_s(cluster(), jobs, rule, 24.0) for rule in ("fair", "mlcc"))
    assert all(mlcc[name] < 0.8 * fair[name] for name in ("j", "k"))
    # Their first iterations collide.
    assert max(mlcc.values()) < 1.08 * (1.4 + 0.84)


def test_what_a_slow_worker_does_not_bring_others_may_send() -> None:
    # The first worker of j has a quarter of its link, and k's flows leave the same server.
    jobs = [served("j", 0.4, 0.42), served("k", 0.43, 0.42, workers="bc")]
    without, released = (iteration_s(cluster(a=0.25), jobs, r, 24.0) for r in ("initial", "mlcc"))
    assert released["k"] < without["k"]
    assert released["j"] == pytest.approx(without["j"], rel=0.005)


def test_two_servers_share_a_model() -> None:
    # Each server has half of the bytes, and both links work.
    halves = (*served("j", 0.3, 0.15).pairs, *served("j", 0.3, 0.15, server="d").pairs)
    found = iteration_s(cluster(), [ServedJob("j", 0.3, halves)], "mlcc", 12.0)["j"]
    assert found == pytest.approx(0.6, abs=2.5 * STEP_S)


def test_a_job_that_ends_no_iteration_has_no_time() -> None:
    assert iteration_s(cluster(), [served("j", 5.0, 0.3)], "mlcc", 1.0) == {"j": None}


@settings(max_examples=25, deadline=None)
@given(
    moved=st.lists(st.floats(0.1, 0.5), min_size=1, max_size=4),
    ups=st.lists(st.floats(0.3, 1.0), min_size=4, max_size=4),
    others=st.integers(1, 2),
)
def test_a_scenario_file_has_such_jobs(moved: list[float], ups: list[float], others: int) -> None:
    """Pushes are the parts of one burst, pulls those of the next."""
    links = cluster(**dict(zip("abcd", ups, strict=True)))
    pairs = [
        Pair(w, "s", m, (f"{w}>", ">s"), ("s>", f">{w}"))
        for w, m in zip("abcd", moved, strict=False)
    ]
    jobs = [ServedJob(f"j{n}", 0.4, tuple(pairs)) for n in range(others)]
    expected_s = iteration_s(links, jobs, "start-after", 24.0)
    pushes = [dict.fromkeys(pair.push, pair.bytes) for pair in pairs]
    pulls = [dict.fromkeys(pair.pull, pair.bytes) for pair in pairs]
    bursts = [{"at": 1, "traffic": pushes}, {"at": 1, "traffic": pulls}]
    scenario = {
        "links": {name: {"capacity_Bps": rate} for name, rate in links.items()},
        "jobs": {job.name: {"gpus": 1, "compute_s": 0.4, "bursts": bursts} for job in jobs},
        "horizon_s": 24.0,
    }
    report = run_scenario(parse_scenario(json.dumps(scenario)))
    for name, expected in expected_s.items():
        assert report.jobs[name].mean_iteration_s == pytest.approx(expected, abs=4 * STEP_S)
