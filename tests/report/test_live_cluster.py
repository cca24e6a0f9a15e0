"""The jobs that run now, as schedules see them: their paths, their levels, the load of links."""

from __future__ import annotations

import heavy3
import msgspec
import pytest

from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import Grid
from crux_torch.network.routes import candidate_of, planned_paths
from crux_torch.report.live_cluster import link_loads, live_cluster
from crux_torch.report.step_times import JobSteps

SPINES = {"A": 0, "B": 1, "C": 1, "D": 0}


@pytest.fixture
def jobs():
    records = heavy3.measured()
    return records, heavy3.one_level(SPINES, records), heavy3.topology()


def links_in(live, job: str) -> set[str]:
    found = next(each for each in live.taken.jobs if each.name == job)
    return {link for flow in found.flows for link in flow.candidates[0] if "spine" in link}


def test_flows_take_the_path_that_the_plan_names(jobs) -> None:
    records, plan, topology = jobs
    live = live_cluster(records, plan, topology, OperatorSettings())
    assert live.by_hash == frozenset()
    for job in heavy3.JOBS:
        assert links_in(live, job) == set(heavy3.links_of(plan.entry(job)))
    assert live.now.level == dict.fromkeys(heavy3.JOBS, 6)


@pytest.mark.parametrize("field", ["observe", "disabled"])
def test_nothing_of_the_plan_holds_in_a_dry_run_or_when_it_is_disabled(jobs, field) -> None:
    records, plan, topology = jobs
    live = live_cluster(records, plan, topology, OperatorSettings(**{field: True}))
    assert live.by_hash == set(heavy3.JOBS)
    assert set(live.now.level.values()) == {0}


def test_jobs_of_a_dry_run_and_jobs_without_marks_keep_the_default(jobs) -> None:
    records, plan, topology = jobs
    changes = {"A": {"dry_run": True}, "B": {"marks": msgspec.UNSET}}
    records = [msgspec.structs.replace(r, **changes.get(r.job, {})) for r in records]
    live = live_cluster(records, plan, topology, OperatorSettings())
    assert live.now.level == {"A": 0, "B": 0, "C": 6, "D": 6}
    assert live.by_hash == {"A"}
    assert links_in(live, "B") == set(heavy3.links_of(plan.entry("B")))


def test_grids_are_those_of_the_plan(jobs) -> None:
    records, plan, topology = jobs
    grid = Grid(0.1, 0.4)
    entries = [msgspec.structs.replace(e, grid=grid) if e.job == "C" else e for e in plan.entries]
    plan = msgspec.structs.replace(plan, entries=tuple(entries))
    now = live_cluster(records, plan, topology, OperatorSettings()).now
    assert (now.shift_s, now.grid_s) == ({"C": 0.1}, {"C": 0.4})


def test_bytes_that_the_hash_places_are_spread_and_none_get_lost(jobs) -> None:
    records, _, topology = jobs
    live = live_cluster(records, None, topology, OperatorSettings())
    for spread, job in zip(live.taken.jobs, live.choices.jobs, strict=True):
        assert sum(f.bytes for f in spread.flows) == pytest.approx(sum(f.bytes for f in job.flows))
        assert len(links_in(live, job.name)) == 8


def test_the_load_of_a_link_is_what_its_jobs_send_in_their_steps(jobs) -> None:
    records, plan, topology = jobs
    live = live_cluster(records, plan, topology, OperatorSettings())
    steps = {
        r.job: JobSteps(step_s=2 * r.profile.period_s, alone_s=r.profile.period_s) for r in records
    }
    loads = link_loads(live.taken, live.now, steps)
    by_job = {r.job: r.profile.flows[0].bytes / r.profile.period_s for r in records}
    load = loads["leaf0->spine0"]
    assert load.capacity_Bps == 12.5e6
    assert load.jobs == tuple(sorted("AD", key=lambda job: -by_job[job]))
    assert load.planned_Bps == pytest.approx(by_job["A"] + by_job["D"])
    assert load.now_Bps == pytest.approx(load.planned_Bps / 2)
    assert load.planned_ratio == load.planned_Bps / load.capacity_Bps
    del steps["D"]
    assert link_loads(live.taken, live.now, steps)["leaf0->spine0"].now_Bps is None
    bare = link_loads(live.taken, live.now)["leaf0->spine0"]
    assert bare.planned_Bps == pytest.approx(load.planned_Bps)


def test_without_a_topology_all_jobs_share_one_link(jobs) -> None:
    records, plan, _ = jobs
    live = live_cluster(records, plan, None, OperatorSettings())
    (load,) = link_loads(live.taken, live.now).values()
    assert set(load.jobs) == set(heavy3.JOBS)


def test_every_candidate_is_found_again_by_its_planned_path(jobs) -> None:
    topology = jobs[2]
    hosts = sorted(topology.hosts)
    for src in hosts:
        for dst in hosts:
            candidates = topology.candidate_paths(src, dst) if src != dst else ()
            for number, path in enumerate(candidates):
                for planned in planned_paths({(src, dst): path}, topology):
                    assert candidate_of(planned, candidates, topology) == number
                    other = msgspec.structs.replace(planned, dst="elsewhere")
                    assert candidate_of(other, candidates, topology) is None
