"""Scenario files: what is read, and what is said about those that can't be."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.cli.sim import sim
from crux_torch.schedule.model import Burst, Decision
from crux_torch.sim.play import play, run_scenario
from crux_torch.sim.scenario import ScenarioError, cluster_of, parse_scenario, read_scenario


def example() -> dict[str, Any]:
    job = {"gpus": 8, "flops": 1e12, "compute_s": 0.5, "comm_start": 0.5, "traffic": {"l0": 2.5e8}}
    job |= {"level": 7, "start_s": 0, "iterations": None}
    links = {"l0": {"capacity_Bps": 1e9, "delay_s": 0}}
    return {"links": links, "jobs": {"a": job}, "horizon_s": 100}


def changed(path: str, value: Any) -> str:
    data = example()
    at: Any = data
    *parents, last = path.split(".")
    for key in parents:
        at = at[key]
    if value is KeyError:
        del at[last]
    else:
        at[last] = value
    return json.dumps(data)


BARE = {"gpus": 8, "compute_s": 0}
UNORDERED = [{"at": 0.8, "traffic": {}}, {"at": 0.2, "traffic": {}}]


def rings(*traffic: dict[str, float]) -> list[dict]:
    return [{"at": 0.5, "traffic": list(traffic)}]


def least(least_s: Any, moved: float = 1e8) -> list[dict[str, Any]]:
    return [{"at": 0.5, "traffic": {"l0": moved}, "least_s": least_s}]


def test_reads_the_documented_example():
    scenario = parse_scenario(json.dumps(example()))
    report = run_scenario(scenario)
    job = report.jobs["a"]
    assert job.completed == 200
    assert (job.compute_s, job.comm_s, job.mean_iteration_s) == (100.0, 50.0, 0.5)
    assert report.gpu_utilization == 1.0
    assert report.link_bytes == {"l0": 5e10}


def test_utilization_counts_gpus():
    data = example()
    data["jobs"]["b"] = {"gpus": 24, "compute_s": 1.0, "traffic": {"l0": 1e9}, "start_s": 50}
    report = run_scenario(parse_scenario(json.dumps(data)))
    expected = (100 * 8 + report.jobs["b"].compute_s * 24) / (100 * 32)
    assert report.gpu_utilization == pytest.approx(expected, rel=1e-12)


def test_the_path_in_use_or_the_bursts_replace_the_traffic() -> None:
    data = example()
    data["links"]["l1"] = {"capacity_Bps": 5e8}
    data["jobs"]["a"] |= {"paths": {"x": {"l0": 1e8}, "y": {"l1": 1e8}}, "path": "y"}
    (burst,) = parse_scenario(json.dumps(data)).jobs["a"].sent
    assert (burst.at, burst.traffic) == (0.5, {"l1": 1e8})
    bursts = [{"at": 0.2, "traffic": {"l0": 1e8}}, {"at": 0.8, "traffic": {"l0": 2e8}}]
    data["jobs"]["a"] = {"gpus": 8, "compute_s": 0.5, "bursts": bursts}
    assert [b.at for b in parse_scenario(json.dumps(data)).jobs["a"].sent] == [0.2, 0.8]


def test_a_burst_may_take_longer_than_its_links_need() -> None:
    job = {"gpus": 8, "compute_s": 0.5, "bursts": least(0.75)}
    scenario = parse_scenario(changed("jobs.a", job))
    assert parse_scenario(msgspec.json.encode(scenario).decode()) == scenario
    assert run_scenario(scenario).jobs["a"].mean_iteration_s == pytest.approx(1.0)
    cluster, _ = cluster_of(scenario)
    assert cluster.jobs[0].bursts == (Burst(0.5, 1.0, 0.75),)
    decision = Decision(path={"a": (0,)}, level={"a": 0})
    assert play(cluster, decision, 100.0).jobs == run_scenario(scenario).jobs
    for slack_bytes in (1e6, 3e7):
        cut = msgspec.structs.replace(scenario, slack_bytes=slack_bytes)
        assert run_scenario(cut).jobs["a"].mean_iteration_s == pytest.approx(1.0)


def test_parts_of_a_burst_move_on_their_own() -> None:
    """A ring on l0 waits for a job above it; the ring on l1 goes on."""
    data = example()
    data["links"] = {"l0": {"capacity_Bps": 1e9}, "l1": {"capacity_Bps": 1e9}}
    rings = [{"l0": 1e9}, {"l1": 1.5e9}]
    above = {"gpus": 8, "compute_s": 1.0, "traffic": {"l0": 1e9}, "level": 1}
    data["jobs"] = {
        "a": {"gpus": 8, "compute_s": 1.0, "bursts": [{"at": 0.0, "traffic": rings}]},
        "b": {**above, "comm_start": 0.0, "iterations": 1},
    }
    scenario = parse_scenario(json.dumps({**data, "horizon_s": 2.0}))
    assert parse_scenario(msgspec.json.encode(scenario).decode()) == scenario
    # l0 is free after a second: its ring ends at 2 s, the other one at 1.5 s.
    assert run_scenario(scenario).jobs["a"].mean_iteration_s == pytest.approx(2.0)
    together = {"l0": 1e9, "l1": 1.5e9}
    data["jobs"]["a"]["bursts"][0]["traffic"] = together
    as_one = parse_scenario(json.dumps({**data, "horizon_s": 2.5}))
    assert run_scenario(as_one).jobs["a"].mean_iteration_s == pytest.approx(2.5)

    del data["jobs"]["b"]["iterations"]
    data["jobs"]["a"]["bursts"] = [
        {"at": at, "traffic": [{"l0": share * 1e9}, {"l1": share * 1.5e9}]}
        for at, share in ((0.2, 0.25), (0.6, 0.75))
    ]
    scenario = parse_scenario(json.dumps(data))
    cluster, path = cluster_of(scenario)
    assert [job.parts for job in cluster.jobs] == [(0, 1), ()]
    decision = Decision(path, level={"a": 0, "b": 1})
    played = play(cluster, decision, scenario.horizon_s)
    assert played.jobs == run_scenario(scenario).jobs
    data["jobs"]["a"]["bursts"][1]["traffic"][1]["l1"] = 1.0
    with pytest.raises(ScenarioError, match="the same share of every link's bytes"):
        cluster_of(parse_scenario(json.dumps(data)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("horizon_s", KeyError, "horizon_s"),
        ("horizon_s", 0, "horizon_s: got 0, Expected `float` > 0.0"),
        ("horizon_s", "x", "horizon_s: Expected `float`, got `str`"),
        ("links.l0.capacity_Bps", -1, "links.l0.capacity_Bps: got -1, Expected `float` > 0.0"),
        ("links.l0.capacity_Bps", None, "links.l0.capacity_Bps: Expected `float`, got `null`"),
        ("links.l0.delay_s", -1e-3, "links.l0.delay_s: got -0.001"),
        ("links.l0.speed", 1, "links.l0: Object contains unknown field `speed`"),
        ("jobs.a.gpus", 0, "jobs.a.gpus: got 0"),
        ("jobs.a.gpus", KeyError, "jobs.a: Object missing required field `gpus`"),
        ("jobs.a.level", 1.5, "jobs.a.level: got 1.5, Expected `int"),
        ("jobs.a.level", 2**40, "jobs.a.level: got"),
        ("jobs.a.weight", 0, "jobs.a.weight: got 0"),
        ("jobs.a.weight", 1e15, "jobs.a.weight: got 1000000000000000.0"),
        ("jobs.a.weight", 1e-15, "jobs.a.weight: got 1e-15"),
        ("jobs.a.iterations", 0, "jobs.a.iterations: got 0"),
        ("jobs.a.start_s", -1, "jobs.a.start_s: got -1"),
        ("jobs.a.comm_start", 1.1, "jobs.a.comm_start: got 1.1, Expected `float` <= 1.0"),
        ("jobs.a.traffic", {"l9": 1}, "jobs.a.traffic: no link 'l9', expected one that `links`"),
        ("jobs.a.traffic", {"l0": -1}, "jobs.a.traffic.l0: got -1.0"),
        ("jobs.a.path", "p", "jobs.a.path: no path 'p', expected one of: none are given"),
        ("jobs.a.paths", {"p": {"l9": 1}}, "jobs.a.paths.p: no link 'l9'"),
        ("jobs.a.bursts", [], "jobs.a: has bursts and comm_start"),
    ],
)
def test_says_what_is_wrong_and_where(path, value, message):
    with pytest.raises(ScenarioError) as error:
        parse_scenario(changed(path, value))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1"),
        ('{"links": {},\n "jobs": }', "line 2, column 10"),
        ('{"links": {}, "links": {}, "jobs": {}, "horizon_s": 1}', "'links' appears twice"),
        ('{"links": {}, "jobs": {}, "horizon_s": NaN}', "NaN is not a number"),
        ('{"links": {}, "jobs": {}, "horizon_s": 1e999}', "1e999 is too large"),
        ("[]", "Expected `object`, got `array`"),
        ("[" * 100_000, "expected JSON"),
        (changed("jobs.a", {**BARE, "bursts": UNORDERED}), "bursts[1].at: got 0.2, expected no"),
        (changed("jobs.a", {**BARE, "bursts": []}), "an iteration takes no time"),
        (changed("jobs.a", {**BARE, "bursts": rings({"l0": 1}, {"l9": 1})}), "traffic[1]: no link"),
        (changed("jobs.a", {**BARE, "bursts": rings({"l0": -1})}), "traffic[0].l0: got -1"),
        (changed("jobs.a", {**BARE, "bursts": rings()}), "jobs.a.bursts[0].traffic: "),
        (changed("jobs.a", {**BARE, "bursts": rings({}, {"l0": 0})}), "takes no time"),
        (changed("jobs.a", {**BARE, "bursts": least(-1.0)}), "jobs.a.bursts[0].least_s: "),
        (changed("jobs.a", {**BARE, "bursts": least(1e10)}), "jobs.a.bursts[0].least_s: "),
        (changed("jobs.a", {**BARE, "bursts": least("1 s")}), "jobs.a.bursts[0].least_s: "),
        (
            changed("jobs.a", {**BARE, "bursts": least(1.0, 0.0)}),
            "expected 0 where the burst moves",
        ),
        (changed("jobs.a", {**BARE, "paths": {"p": {}}}), "expected `path` to name the one in use"),
        (changed("horizon_s", 10**400), "Number out of range"),
    ],
    ids=lambda value: value[:20],
)
def test_says_what_is_wrong_with_the_text(text, message):
    with pytest.raises(ScenarioError) as error:
        parse_scenario(text)
    assert message in str(error.value)


def test_clock_that_cannot_resolve_an_iteration_is_refused():
    data = example()
    data["jobs"]["a"] |= {"compute_s": 1e-8, "traffic": {}}
    data["horizon_s"] = 1e6
    with pytest.raises(ScenarioError, match=r"horizon_s: .* can't resolve"):
        run_scenario(parse_scenario(json.dumps(data)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


PLACES = ["horizon_s", "links", "links.l0", "links.l0.capacity_Bps", "links.l0.delay_s", "jobs"]
JOB_KEYS = (*example()["jobs"]["a"], "weight", "bursts", "paths", "path")
PLACES += ["jobs.a", *(f"jobs.a.{key}" for key in JOB_KEYS)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text() | json_values.map(json.dumps))
def test_anything_else_is_refused_in_words(text):
    with pytest.raises(ScenarioError):
        parse_scenario(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(PLACES), json_values)
def test_a_file_with_one_odd_value_runs_or_is_refused_in_words(place, value):
    try:
        scenario = parse_scenario(changed(place, value))
        report = run_scenario(scenario)
    except ScenarioError:
        return
    assert 0.0 <= report.gpu_utilization <= 1.0 + 1e-9


def test_command_writes_results(tmp_path):
    file, out = tmp_path / "scenario.json", tmp_path / "out.json"
    file.write_text(json.dumps(example()))
    result = CliRunner().invoke(sim, ["run", str(file), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "100.0%" in result.output
    written = json.loads(out.read_text())
    assert written["gpu_utilization"] == 1.0
    done = {"completed": 200, "compute_s": 100.0, "comm_s": 50.0, "mean_iteration_s": 0.5}
    assert written["jobs"]["a"] == done


def test_command_names_the_file_and_key(tmp_path):
    file = tmp_path / "scenario.json"
    file.write_text(changed("jobs.a.gpus", -1))
    result = CliRunner().invoke(sim, ["run", str(file)])
    assert result.exit_code == 1
    assert "scenario.json: jobs.a.gpus: got -1" in result.output.replace("\n", "")
    with pytest.raises(ScenarioError, match="can't be read"):
        read_scenario(tmp_path / "absent.json")
