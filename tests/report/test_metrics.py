"""Metrics of a cluster: names, values, bounds, and names of tenants that mean harm."""

from __future__ import annotations

from dataclasses import replace

import heavy3
import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from crux_torch.agent.join import run_labels
from crux_torch.agreement.records import OnTrial, PathCounts, RunLabels, TriedPlan
from crux_torch.report import exporter
from crux_torch.report.exporter import Reading, registry_of
from crux_torch.report.live_cluster import link_loads, live_cluster

NOW_S = dict.fromkeys(heavy3.JOBS, 2.5)
Sample = tuple[str, tuple[tuple[str, str], ...]]


def exposed(reading: Reading) -> dict[Sample, float]:
    text = generate_latest(registry_of(lambda: reading)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def reading(status, **fields) -> Reading:
    live = live_cluster(status.jobs, status.plan, heavy3.topology(), status.operator)
    loads = link_loads(live.taken, live.now, status.steps)
    found = {"loads": loads, "store_up": True, "renewed_s": 4.0, "errors": {"store": 2}}
    return Reading(status, **{**found, **fields})


def heavy():
    plan = heavy3.one_level(dict.fromkeys(heavy3.JOBS, 1), heavy3.measured())
    return heavy3.status_of(heavy3.measured(), plan, NOW_S)


def of(found: dict[Sample, float], name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def with_first(status, **changes):
    first, *others = status.jobs
    return replace(status, jobs=(msgspec.structs.replace(first, **changes), *others))


def test_each_value_is_that_of_the_status() -> None:
    status = heavy()
    found = exposed(reading(status))
    job = status.jobs[0]
    steps = status.steps[job.job]
    entry = status.plan.entry(job.job)
    assert of(found, "crux_job_iteration_seconds", job_name=job.job) == 2.5
    assert of(found, "crux_job_alone_iteration_seconds", job_name=job.job) == steps.alone_s
    ratio = job.profile.exposed_s / job.profile.period_s
    assert of(found, "crux_job_exposed_communication_ratio", job_name=job.job) == ratio
    rate = of(found, "crux_job_intensity_flops_per_second", job_name=job.job)
    assert rate == pytest.approx(entry.intensity)
    assert of(found, "crux_job_gpus", job_name=job.job) == job.gpus
    assert of(found, "crux_plan_epoch") == 3
    assert of(found, "crux_plan_age_seconds") == 4.0
    assert of(found, "crux_plan_valid_seconds") == 15.0
    assert of(found, "crux_store_up") == 1
    assert of(found, "crux_jobs") == 4
    assert of(found, "crux_errors_total", what="store") == 2
    assert of(found, "crux_series_left_out", kind="job") == 0
    loads = reading(status).loads
    for link, load in loads.items():
        assert of(found, "crux_link_planned_load_ratio", link=link) == load.planned_ratio
    assert max(load.planned_ratio for load in loads.values()) > 1


def test_levels_paths_trials_and_names_elsewhere() -> None:
    status = with_first(
        heavy(),
        paths=PathCounts(as_planned=3, elsewhere=1),
        run=RunLabels(slurm_job_id="77", namespace="team", pod="gpt-0"),
        tried=(TriedPlan(name="t", jobs=("A", "B"), state="worse"),),
    )
    name = status.jobs[0].job
    trial = OnTrial(name="t", judge=name, jobs=2, on=False)
    entries = [
        msgspec.structs.replace(e, trial=trial) if e.job == name else e for e in status.plan.entries
    ]
    plan = msgspec.structs.replace(status.plan, entries=tuple(entries))
    found = exposed(reading(replace(status, plan=plan)))
    counts = {
        state: of(found, "crux_job_paths", job_name=name, state=state)
        for state in ("as_planned", "elsewhere", "unknown")
    }
    assert counts == {"as_planned": 3, "elsewhere": 1, "unknown": 0}
    info = {"state": "running", "slurm_job_id": "77", "namespace": "team", "pod": "gpt-0"}
    assert of(found, "crux_job_info", job_name=name, **info) == 1
    states = {
        s: of(found, "crux_trial_state", job_name=name, state=s) for s in exporter.TRIAL_STATES
    }
    assert states == {"trying": 0, "kept": 0, "worse": 1}
    # Only jobs that mark something have a level that has an effect.
    has_level = {dict(labels)["job_name"] for n, labels in found if n == "crux_job_level"}
    assert has_level == {job.job for job in status.jobs if job.marks}


def test_no_old_numbers_while_the_store_is_away() -> None:
    found = exposed(reading(heavy(), store_up=False))
    assert {name for name, _ in found} == {"crux_store_up", "crux_errors_total"}
    assert of(found, "crux_store_up") == 0
    assert exposed(Reading()) == {("crux_store_up", ()): 0.0}
    without_plan = exposed(reading(replace(heavy(), plan=None), renewed_s=None))
    assert not any(name.startswith("crux_plan") for name, _ in without_plan)


def test_one_job_alone_has_its_own_links() -> None:
    status = heavy()
    wanted = status.jobs[0].job
    found = exposed(reading(status, job=wanted))
    jobs = {dict(labels).get("job_name") for _, labels in found} - {None}
    assert jobs == {wanted}
    links = {dict(labels)["link"] for n, labels in found if n == "crux_link_planned_load_ratio"}
    loads = reading(status).loads
    assert links == {name for name, load in loads.items() if wanted in load.jobs}


def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "MAX_JOBS", 1)
    monkeypatch.setattr(exporter, "MAX_LINKS", 2)
    found = exposed(reading(heavy()))
    assert sum(name == "crux_job_gpus" for name, _ in found) == 1
    links = [value for (n, _), value in found.items() if n == "crux_link_planned_load_ratio"]
    loads = sorted((load.planned_ratio for load in reading(heavy()).loads.values()), reverse=True)
    assert sorted(links, reverse=True) == loads[:2]
    assert of(found, "crux_series_left_out", kind="job") == 3
    assert of(found, "crux_series_left_out", kind="link") == len(loads) - 2


@pytest.mark.parametrize("name", ['a"} 1\ncrux_jobs 9', "\x1b[2J\\", "\ud800", "é" * 256])
def test_hostile_names_are_one_label_value(name: str) -> None:
    status = with_first(heavy(), job=name)
    found = exposed(reading(status, loads=None))
    assert of(found, "crux_jobs") == 4
    jobs = {dict(labels)["job_name"] for n, labels in found if n == "crux_job_gpus"}
    assert len(jobs) == 4
    assert all(len(job) <= 256 and job.isprintable() for job in jobs)


def test_every_metric_has_help_and_a_unit_in_base_units() -> None:
    text = generate_latest(registry_of(lambda: reading(heavy()))).decode()
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        assert not any(word in family.name for word in ("_ms", "_percent", "_mb"))
        assert all("rank" not in sample.labels for sample in family.samples)


def test_the_names_that_schedulers_give(tmp_path) -> None:
    namespace = tmp_path / "namespace"
    namespace.write_text("team-a\n")
    assert not run_labels({}, namespace)
    assert run_labels({"SLURM_JOB_ID": "42"}, namespace) == RunLabels(slurm_job_id="42")
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "gpt-0"}
    assert run_labels(pod, namespace) == RunLabels(namespace="team-a", pod="gpt-0")
    told = {**pod, "POD_NAME": "p", "POD_NAMESPACE": "n"}
    assert run_labels(told, tmp_path / "none") == RunLabels(namespace="n", pod="p")
    assert len(run_labels({"SLURM_JOB_ID": "9" * 999}).slurm_job_id) == 256
