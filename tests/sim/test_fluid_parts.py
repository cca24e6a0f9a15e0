"""Bursts whose parts move on their own in the fluid engine, and in the simulator."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch._fluid import Engine, SpecError
from crux_torch.schedule.model import Cluster, Decision, Flow, Job
from crux_torch.sim.play import MAX_PIECES, Report, play, run_scenario, with_slack
from crux_torch.sim.scenario import ScenarioError, parse_scenario

LINKS = ("a", "b", "c")


def between_two(parts: object) -> Engine:
    """A job of the lower level whose two links are never free at the same time."""
    engine = Engine([("a", 1.0, 0.0), ("b", 1.0, 0.0)])
    engine.add_job("ring", compute_s=1.0, bursts=[(1.0, parts)], gpus=4)
    for name, start_s in (("a", 0.0), ("b", 1.0)):
        engine.add_job(
            "on " + name, compute_s=1.0, bursts=[(1.0, {name: 1.0})], level=1, start_s=start_s
        )
    engine.run_until(300.0)
    return engine


def test_a_job_that_needs_both_links_at_once_starves() -> None:
    assert between_two({"a": 1.0, "b": 1.0}).result("ring")["completed"] == 0


def test_parts_use_the_links_that_are_free() -> None:
    engine = between_two([{"a": 1.0}, {"b": 1.0}])
    found = engine.result("ring")
    assert (found["completed"], found["mean_iteration_s"]) == (100, pytest.approx(3.0))
    assert found["compute_s"] == pytest.approx(100.0)
    assert found["comm_s"] == pytest.approx(100.0)
    assert engine.results().keys() == {"ring", "on a", "on b"}
    assert engine.link_bytes()["a"] == pytest.approx(100.0 + 150.0)
    computing = 4 * 100.0 + 150.0 + 150.0
    assert engine.gpu_utilization() == pytest.approx(computing / (6 * 300.0), rel=1e-2)


def test_parts_of_one_job_share_a_link() -> None:
    engine = Engine([("a", 1.0, 0.0)])
    engine.add_job("j", compute_s=1.0, bursts=[(1.0, [{"a": 1.0}, {"a": 2.0}])], iterations=2)
    assert engine.run_until_end_of_any(100.0) == ["j"]
    assert engine.now_s == pytest.approx(8.0)


def test_what_changes_a_job_changes_all_its_parts() -> None:
    engine = Engine([("a", 1.0, 0.0), ("b", 1.0, 0.0)])
    engine.add_job("ring", compute_s=1.0, bursts=[(1.0, [{"a": 1.0}, {"b": 1.0}])])
    for name in ("a", "b"):
        engine.add_job("on " + name, compute_s=0.0, bursts=[(1.0, {name: 1.0})])
    engine.set_level("ring", 1)
    engine.run_until(20.0)
    assert engine.result("ring")["mean_iteration_s"] == pytest.approx(2.0)
    engine.set_pace("ring", origin_s=0.0, period_s=5.0, tolerance=0.05)
    engine.run_until(120.0)
    assert engine.result("ring")["completed"] == 10 + 20
    engine.remove_job("ring")
    before = engine.link_bytes()
    engine.run_until(130.0)
    after = engine.link_bytes()
    assert {link: after[link] - before[link] for link in after} == pytest.approx(
        {"a": 10.0, "b": 10.0}
    )


def test_each_part_has_a_limit_of_its_own() -> None:
    engine = Engine([("a", 1.0, 0.0), ("b", 1.0, 0.0)])
    engine.add_job("j", compute_s=1.0, bursts=[(1.0, [{"a": 1.0}, {"b": 2.0}])], iterations=1)
    engine.set_rate_limit("j", 0.25, part=1)
    engine.run_until(1.5)
    assert engine.bytes_left("j") == pytest.approx(0.5)
    assert engine.bytes_left("j", part=1) == pytest.approx(2.0 - 0.125)
    engine.set_rate_limit("j", None, part=1)
    engine.run_until(2.5)
    # The first has moved, and waits for the second.
    assert engine.bytes_left("j") is None
    assert engine.comm_s("j") == pytest.approx(1.0)
    assert engine.comm_s("j", part=1) == pytest.approx(0.125 + 1.0)
    assert engine.run_until_end_of_any(100.0) == ["j"]
    assert engine.now_s == pytest.approx(2.5 + 0.875)
    for act in (engine.bytes_left, engine.comm_s):
        with pytest.raises(SpecError, match="expected a part below 2"):
            act("j", part=2)


def test_each_part_has_a_weight_of_its_own() -> None:
    engine = Engine([("a", 1.0, 0.0)])
    engine.add_job("j", compute_s=1.0, bursts=[(1.0, [{"a": 1.0}, {"a": 1.0}])], iterations=1)
    engine.set_weight("j", 3.0, part=1)
    engine.run_until(2.0)
    assert engine.bytes_left("j") == pytest.approx(0.75)
    assert engine.bytes_left("j", part=1) == pytest.approx(0.25)
    engine.set_weight("j", 1.0)
    engine.run_until(2.25)
    assert engine.bytes_left("j") == pytest.approx(0.75 - 0.125)


def test_parts_take_other_paths_in_the_middle_of_a_burst() -> None:
    engine = Engine([(link, 1.0, 0.0) for link in LINKS])
    engine.add_job("j", compute_s=1.0, bursts=[(1.0, [{"a": 2.0}, {"b": 4.0}])], iterations=2)
    engine.run_until(2.0)  # half of the first part is sent, a quarter of the second
    engine.set_traffic("j", [[{"c": 2.0}, {"c": 4.0}]])
    assert engine.run_until_end_of_any(100.0) == ["j"]
    # One and three bytes are left for link c, then come six.
    assert engine.now_s == pytest.approx(2.0 + 4.0 + 1.0 + 6.0)
    assert engine.link_bytes() == pytest.approx({"a": 1.0, "b": 1.0, "c": 10.0})


def test_other_paths_that_are_refused_leave_all_parts_as_they_were() -> None:
    engine = Engine([(link, 1.0, 0.0) for link in LINKS])
    engine.add_job("j", compute_s=1.0, bursts=[(1.0, [{"a": 2.0}, {"b": 4.0}])], iterations=1)
    for traffic in ([[{"c": 1.0}, {"c": -1.0}]], [[{"c": 1.0}] * 3], [[{"c": 1.0}]] * 2):
        with pytest.raises(SpecError, match="job j"):
            engine.set_traffic("j", traffic)
    assert engine.run_until_end_of_any(100.0) == ["j"]
    assert engine.link_bytes() == pytest.approx({"a": 2.0, "b": 4.0, "c": 0.0})


@st.composite
def jobs(draw: st.DrawFn) -> list[dict]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        links = draw(st.lists(st.sampled_from(LINKS), min_size=1, max_size=3, unique=True))
        bursts = draw(st.integers(1, 3))
        found.append(
            {
                "compute_s": draw(st.integers(1, 6)) / 2,
                "level": draw(st.integers(0, 2)),
                "start_s": draw(st.integers(0, 3)) / 2,
                "bursts": [
                    (1.0, [{link: draw(st.integers(1, 4)) / 2} for link in links])
                    for _ in range(bursts)
                ],
            }
        )
    return found


def played(specs: list[dict], *, skip_repeats: bool) -> Engine:
    engine = Engine([(link, 1.0, 0.0) for link in LINKS], skip_repeats=skip_repeats)
    for i, spec in enumerate(specs):
        engine.add_job(str(i), **spec)
    engine.run_until(200.0)
    return engine


@given(jobs())
def test_skipping_what_repeats_changes_nothing(specs: list[dict]) -> None:
    slow, fast = played(specs, skip_repeats=False), played(specs, skip_repeats=True)
    assert fast.link_bytes() == pytest.approx(slow.link_bytes(), rel=1e-6, abs=1e-6)
    for name, result in slow.results().items():
        assert fast.result(name)["compute_s"] == pytest.approx(result["compute_s"], rel=1e-6)
        assert abs(fast.result(name)["completed"] - result["completed"]) <= 1


@given(jobs())
def test_every_iteration_sends_all_parts(specs: list[dict]) -> None:
    engine = played(specs, skip_repeats=True)
    least = dict.fromkeys(LINKS, 0.0)
    most = dict.fromkeys(LINKS, 0.0)
    for i, spec in enumerate(specs):
        done = engine.result(str(i))["completed"]
        for _, parts in spec["bursts"]:
            for link, amount in (item for part in parts for item in part.items()):
                least[link] += done * amount
                most[link] += (done + 1) * amount
    carried = engine.link_bytes()
    for link in LINKS:
        assert least[link] - 1e-6 <= carried[link] <= most[link] + 1e-6
        assert carried[link] <= 200.0 + 1e-6


@given(jobs())
def test_one_part_is_a_plain_burst(specs: list[dict]) -> None:
    whole = Engine([(link, 1.0, 0.0) for link in LINKS])
    parts = Engine([(link, 1.0, 0.0) for link in LINKS])
    for i, spec in enumerate(specs):
        merged = [(at, {k: v for part in of for k, v in part.items()}) for at, of in spec["bursts"]]
        whole.add_job(str(i), **spec | {"bursts": merged})
        parts.add_job(str(i), **spec | {"bursts": [(at, [one]) for at, one in merged]})
    whole.run_until(100.0)
    parts.run_until(100.0)
    assert whole.results() == parts.results()


@given(
    st.dictionaries(st.sampled_from(LINKS), st.floats(1e-3, 1e9), max_size=3),
    st.floats(1.0, 1e9) | st.just(math.inf),
)
def test_slack_moves_the_same_bytes(traffic: dict[str, float], slack_bytes: float) -> None:
    cut = with_slack([(0.5, traffic, 3.0)], slack_bytes)
    assert 1 <= len(cut) <= MAX_PIECES
    assert {at for at, _, _ in cut} == {0.5}
    assert math.fsum(least_s for _, _, least_s in cut) == pytest.approx(3.0)
    for link, amount in traffic.items():
        of = [part[link] for _, parts, _ in cut for part in parts if link in part]
        assert math.fsum(of) == pytest.approx(amount)
        if len(cut) < MAX_PIECES:
            assert max(of) <= 2 * slack_bytes


def test_slack_frees_a_ring_between_two_jobs() -> None:
    flows = {"ring": ("a", "b"), "on a": ("a",), "on b": ("b",)}
    cluster = Cluster(
        {"a": 1.0, "b": 1.0},
        tuple(Job(n, 1, 1.0, 1.0, (Flow(1.0, (path,)),)) for n, path in flows.items()),
    )
    decision = Decision(path=dict.fromkeys(flows, (0,)), level={"ring": 0, "on a": 1, "on b": 1})
    start_s = {"on b": 1.0}
    coupled = play(cluster, decision, 300.0, start_s=start_s)
    free = play(cluster, decision, 300.0, start_s=start_s, slack_bytes=1.0)
    assert coupled.jobs["ring"].completed == 0
    assert free.jobs["ring"].mean_iteration_s == pytest.approx(3.0)


def meeting(parts: tuple[int, ...], paths: list[tuple[str, ...]]) -> Cluster:
    """A job with a flow on each of the paths, and a job on each of two links."""
    flows = tuple(Flow(1.0, (path,)) for path in paths)
    above = tuple(Job("on " + link, 1, 1.0, 1.0, (Flow(1.0, ((link,),)),)) for link in ("a", "b"))
    return Cluster(
        dict.fromkeys(LINKS, 1.0), (Job("rings", 1, 1.0, 1.0, flows, parts=parts), *above)
    )


def played_below(cluster: Cluster, horizon_s: float) -> Report:
    """The jobs on links of their own go first, in turn."""
    decision = Decision(
        path={job.name: (0,) * len(job.flows) for job in cluster.jobs},
        level={"rings": 0, "on a": 1, "on b": 1},
    )
    return play(cluster, decision, horizon_s, start_s={"on b": 1.0})


def test_each_ring_uses_the_links_that_are_free() -> None:
    # Of two links one is always taken.
    whole = played_below(meeting((), [("a",), ("b",)]), 300.0)
    apart = played_below(meeting((0, 1), [("a",), ("b",)]), 300.0)
    assert (whole.jobs["rings"].completed, apart.jobs["rings"].completed) == (0, 100)


def test_a_ring_needs_all_its_links_at_once() -> None:
    apart = played_below(meeting((0, 0, 1), [("a",), ("b",), ("c",)]), 300.0)
    assert apart.jobs["rings"].completed == 0
    assert apart.link_bytes["c"] == pytest.approx(1.0)


@given(st.lists(st.sampled_from(LINKS), min_size=1, max_size=4))
def test_flows_of_one_part_are_a_plain_job(links: list[str]) -> None:
    paths = [(link,) for link in links]
    whole = played_below(meeting((), paths), 50.0)
    assert played_below(meeting((7,) * len(paths), paths), 50.0) == whole


@settings(deadline=None)
@given(jobs(), st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_rings_of_the_lowest_job_lose_nothing_by_moving_on_their_own(
    specs: list[dict], sizes: list[int]
) -> None:
    def completed(moved: object) -> int:
        engine = Engine([(link, 1.0, 0.0) for link in LINKS])
        for i, spec in enumerate(specs):
            engine.add_job(str(i), **spec)
        engine.add_job("lowest", compute_s=1.0, bursts=[(1.0, moved)], level=-1)
        engine.run_until(200.0)
        return engine.result("lowest")["completed"]

    parts = [{link: size / 2} for link, size in zip(LINKS, sizes, strict=True)]
    whole = {link: amount for part in parts for link, amount in part.items()}
    # An end that coincides with the horizon may fall on either side of it.
    assert completed(parts) >= completed(whole) - 1


@pytest.mark.parametrize(("parts", "on_time"), [((0, 1), 1), ((), 0)])
def test_a_ring_books_the_links_of_its_own_only(parts: tuple[int, ...], on_time: int) -> None:
    """Its other ring waits for three seconds, and takes no slot of link b meanwhile."""
    jobs = (
        Job("first", 1, 1.0, 0.01, (Flow(3.0, (("a",),)),)),
        Job("rings", 1, 1.0, 0.1, (Flow(0.5, (("a",),)), Flow(0.5, (("b",),))), parts=parts),
        Job("late", 1, 1.0, 3.0, (Flow(0.5, (("b",),)),)),
    )
    level = dict.fromkeys(("first", "rings", "late"), 0)
    path = {job.name: (0,) * len(job.flows) for job in jobs}
    decision = Decision(path=path, level=level, slot_s=0.05)
    report = play(Cluster({"a": 1.0, "b": 1.0}, jobs), decision, 3.6)
    assert report.jobs["late"].completed == on_time


def test_a_scenario_has_slack() -> None:
    scenario = {
        "links": {"a": {"capacity_Bps": 1.0}, "b": {"capacity_Bps": 1.0}},
        "jobs": {
            "ring": {"gpus": 1, "compute_s": 1.0, "traffic": {"a": 1.0, "b": 1.0}},
            "on a": {"gpus": 1, "compute_s": 1.0, "traffic": {"a": 1.0}, "level": 1},
            "on b": {
                "gpus": 1, "compute_s": 1.0, "traffic": {"b": 1.0}, "level": 1, "start_s": 1.0,
            },
        },
        "horizon_s": 300.0,
    }  # fmt: skip
    coupled = run_scenario(parse_scenario(json.dumps(scenario)))
    free = run_scenario(parse_scenario(json.dumps(scenario | {"slack_bytes": 1.0})))
    assert (coupled.jobs["ring"].completed, free.jobs["ring"].completed) == (0, 100)


@pytest.mark.parametrize("rates", [{"slot_s": 0.06}, {"weight_by_sent": True}])
def test_slack_is_refused_beside_rates_of_rings(rates: dict[str, object]) -> None:
    cluster = meeting((0, 1), [("a",), ("b",)])
    path = {job.name: (0,) * len(job.flows) for job in cluster.jobs}
    decision = Decision(path=path, level=dict.fromkeys(path, 0), **rates)
    with pytest.raises(ScenarioError, match="slack_bytes"):
        play(cluster, decision, 10.0, slack_bytes=1.0)


def test_slack_is_refused_beside_delays() -> None:
    text = '{"links": {"a": {"capacity_Bps": 1, "delay_s": 1}}, "jobs": {}, "horizon_s": 1, %s}'
    with pytest.raises(ScenarioError, match="slack_bytes"):
        parse_scenario(text % '"slack_bytes": 1')
