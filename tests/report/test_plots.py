"""Pictures and pages of what the simulator played."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from crux_torch.cli.sim import sim
from crux_torch.report.page.charts import Lane, file_of, timeline
from crux_torch.report.page.simulated import most_slowed, timeline_chart, utilisation_chart
from crux_torch.sim.course import Watch, change
from crux_torch.sim.play import run_scenario
from crux_torch.sim.scenario import Scenario, ScenarioJob, ScenarioLink

#: Each computes for 1 s, and then sends for 1 s alone; the second begins as the first sends.
TURNS = {
    name: ScenarioJob(gpus=2, compute_s=1.0, traffic={"l": 1e9}, start_s=start_s)
    for name, start_s in (("first", 0.0), ("second", 1.0))
}
SCENARIO = Scenario(links={"l": ScenarioLink(capacity_Bps=1e9)}, jobs=TURNS, horizon_s=8.0)


def written(tmp_path: Path, *words: str, jobs: int = 2) -> Path:
    """The file that a command draws of a scenario of so many jobs on one link."""
    job = {"gpus": 8, "flops": 1e12, "compute_s": 0.05}
    paths = {"x": {"l0": 5e7}, "y": {"l1": 5e7}}
    named = {"<b>&$_^": {**job, "paths": paths, "path": "x"}}
    named |= {f"job-{n}": {**job, "paths": paths, "path": "x"} for n in range(1, jobs)}
    links = {"l0": {"capacity_Bps": 1e9}, "l1": {"capacity_Bps": 1e9}}
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"links": links, "jobs": named, "horizon_s": 2}))
    command, *flags = words
    found = CliRunner().invoke(sim, [command, str(file), *flags])
    assert found.exit_code == 0, found.output
    return Path(flags[-1])


def test_measures_are_taken_at_the_times_asked_for() -> None:
    watch = Watch((0.5, 1.5, 2.5, 99.0))
    report = run_scenario(SCENARIO, watch=watch)
    assert report == run_scenario(SCENARIO), "the same, whoever watches"
    course = watch.course()
    assert course.time_s.tolist() == [0.5, 1.5, 2.5]
    assert course.compute_s["first"] == pytest.approx(np.array([0.5, 1.0, 1.5]))
    assert course.comm_s["second"] == pytest.approx(np.array([0.0, 0.0, 0.5]))
    assert change(course.link_bytes["l"], course.time_s) == pytest.approx(np.array([5e8, 1e9]))


def lanes_of(chart: object) -> dict[str, Lane]:
    """The lanes that a timeline's chart draws."""
    cells = chart.draw.__closure__  # type: ignore[attr-defined]
    found = next(c.cell_contents for c in cells if isinstance(c.cell_contents, list))
    return {lane.title: lane for lane in found}


def test_jobs_that_take_turns_compute_while_the_other_sends() -> None:
    watch = Watch(np.linspace(0.0, 8.0, 81).tolist())
    run_scenario(SCENARIO, watch=watch)
    chart = timeline_chart(watch.course(), (4.0, 8.0), {"first": 1.0, "second": 1.0})
    lanes = lanes_of(chart)
    for name, computing, waiting in (
        ("first", [(4, 5), (6, 7)], [(5, 6), (7, 8)]),
        ("second", [(5, 6), (7, 8)], [(4, 5), (6, 7)]),
    ):
        assert lanes[name].computing == pytest.approx(np.array(computing))
        assert lanes[name].waiting == pytest.approx(np.array(waiting))
        rates = dict(lanes[name].sending)
        assert set(rates.values()) == {0.0, 1.0}
    assert "of 2 jobs" not in chart.title


def test_utilisation_is_of_all_gpus_and_names_the_busiest_links() -> None:
    watch = Watch(np.linspace(0.0, 8.0, 121).tolist())
    run_scenario(SCENARIO, watch=watch)
    gpus = {name: job.gpus for name, job in TURNS.items()}
    chart = utilisation_chart({"": watch.course()}, gpus, {"l": 1e9})
    assert ">link l<" in chart.svg
    assert ">GPUs<" in chart.svg


def test_of_many_jobs_the_most_slowed_are_drawn_and_that_is_said(tmp_path: Path) -> None:
    jobs, which = most_slowed({"a": {"x": 1.0, "y": None}, "b": {"x": 1.0, "y": 3.0, "z": 2.0}}, 2)
    assert (jobs, which) == (["y", "z"], " (2 of 3 jobs: the most slowed)")
    text = written(tmp_path, "run", "--plot", str(tmp_path / "out.svg"), jobs=100).read_text()
    assert "(12 of 100 jobs: the most slowed)" in text
    assert "(40 of 100 jobs: the most slowed)" in text
    assert len(text) < 500_000


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_picture_is_well_formed_whatever_jobs_are_called(tmp_path: Path, command: str) -> None:
    text = written(tmp_path, command, "--plot", str(tmp_path / "out.svg")).read_text()
    words = {node.text for node in ElementTree.fromstring(text).iter() if node.text}
    assert "<b>&$_^" in words
    assert "Who computes and sends when" in " ".join(words)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("run", "--plot"), ("iteration s", "Utilisation over time", "job-1")),
        (("compare", "--schedulers", "ecmp,crux", "--plot"), ("mean slowdown", "when: crux")),
        (("advise", "--schedulers", "ecmp", "--html"), ("without job-1", "Slowdown of each job")),
    ],
)
def test_a_page_has_tables_and_charts_and_loads_nothing(tmp_path, words, shown) -> None:
    text = written(tmp_path, *words, str(tmp_path / "out.html")).read_text()
    for each in shown:
        assert each in text
    assert "<b>&" not in text
    assert text.count("<svg") == text.count('role="img"') >= 3
    assert not re.search(r"<script|<link|@import|(src|href)=\"(?!#)", text)


@pytest.mark.slow
def test_a_trace_is_drawn_with_its_slowdowns(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("name,model,gpus,submit_s,duration_s\n" + "a,bert,16,0,600\nb,bert,16,0,600\n")
    file = tmp_path / "out.html"
    flags = ["--trace", str(trace), "--schedulers", "ecmp,crux", "--plot", str(file)]
    found = CliRunner().invoke(sim, ["trace", *flags])
    assert found.exit_code == 0, found.output
    text = file.read_text()
    for each in ("util. of held", "Utilisation over time: clos", "Slowdown of the jobs: clos"):
        assert each in text


def test_what_cannot_be_drawn_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    found = CliRunner().invoke(sim, ["trace", "--plot", "out.pdf"])
    assert found.exit_code == 2
    assert "ends in .svg or .html, not 'out.pdf'" in found.output
    program = (
        "import sys; sys.modules['matplotlib'] = None; from crux_torch.cli.sim import sim; "
        "sim(['trace', '--plot', 'out.svg'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "Error: drawing needs matplotlib: pip install 'crux-torch[plots]'\n"


def test_names_of_any_length_and_letters_have_room() -> None:
    lane = Lane("x" * 1000 + "\x00\n", [(0, 1)], [], [])
    text = file_of([timeline("t", [lane], (0, 1), "")])
    ElementTree.fromstring(text)
    assert "x" * 31 + "…<" in text
