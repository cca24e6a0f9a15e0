"""A cluster's state as metrics for Prometheus (docs/operate/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crux_torch.agreement.records import JobRecord, Plan, PlanEntry
from crux_torch.report.cluster_status import ClusterStatus
from crux_torch.report.live_cluster import LinkLoad
from crux_torch.report.step_times import JobSteps
from crux_torch.words import BOUNDLESS, safe

#: Jobs and links that have series, so that no tenant can fill a Prometheus.
MAX_JOBS, MAX_LINKS = 2000, 5000
#: Letters of a label's value.
MAX_LETTERS = 256
TRIAL_STATES = ("trying", "kept", "worse")

Value = Callable[[JobRecord, JobSteps, PlanEntry | None], float | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """A cluster as it was read last.

    Attributes:
        status: None before the first reading.
        loads: of links, by name; None without a topology.
        store_up: True if the last reading succeeded.
        renewed_s: seconds since the plan was seen to be renewed; None without a plan.
        errors: times that something failed, by what.
        job: the only one that is asked about; empty: all.
    """

    status: ClusterStatus | None = None
    loads: Mapping[str, LinkLoad] | None = None
    store_up: bool = False
    renewed_s: float | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    job: str = ""

    @property
    def jobs(self) -> tuple[JobRecord, ...]:
        """The jobs that are asked about, by name."""
        jobs = self.status.jobs if self.status is not None else ()
        wanted = (job for job in jobs if self.job in ("", job.job))
        return tuple(sorted(wanted, key=lambda job: job.job))


def _level(job: JobRecord, _: JobSteps, entry: PlanEntry | None) -> float | None:
    # Of a job that marks nothing it has no effect.
    return entry.level if entry is not None and job.marks else None


def _intensity(job: JobRecord, _: JobSteps, entry: PlanEntry | None) -> float | None:
    profile = job.profile
    found = entry.intensity if entry is not None else profile.intensity if profile else None
    return float("inf") if found is not None and found >= BOUNDLESS else found


def _exposed(job: JobRecord, _: JobSteps, __: PlanEntry | None) -> float | None:
    profile = job.profile
    if profile is None or profile.period_s <= 0:
        return None
    return min(1.0, profile.exposed_s / profile.period_s)


#: The gauges that have one value for each job: name, HELP, value.
JOB_GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("crux_job_gpus", "Devices that the job occupies.", lambda job, _, __: job.gpus),
    (
        "crux_job_intensity_flops_per_second",
        "GPU intensity: FLOPs of an iteration over the time its traffic needs on its slowest link.",
        _intensity,
    ),
    (
        "crux_job_iteration_seconds",
        "Mean iteration of the last 30 seconds in which there were any.",
        lambda _, steps, __: steps.step_s,
    ),
    (
        "crux_job_iteration_age_seconds",
        "Seconds since the last iteration ended, when the job wrote it.",
        lambda _, steps, __: steps.step_age_s,
    ),
    (
        "crux_job_alone_iteration_seconds",
        "Iteration without other jobs, measured or computed; an upper bound where neither was "
        "possible.",
        lambda _, steps, __: steps.alone_s,
    ),
    (
        "crux_job_exposed_communication_ratio",
        "Share of an iteration in which the devices waited for communication, when measured last.",
        _exposed,
    ),
    ("crux_job_level", "Priority level of its traffic; a higher one goes first.", _level),
)


def families(reading: Reading) -> Iterator[Metric]:
    """Yields all metric families of a reading; those of jobs and links are bounded in number."""
    yield _gauge("crux_store_up", "1 if the store was read the last time, else 0.",
                 float(reading.store_up))  # fmt: skip
    errors = CounterMetricFamily("crux_errors", "Times that something failed.", labels=["what"])
    for what, count in sorted(reading.errors.items()):
        errors.add_metric([what], count)
    yield errors
    status = reading.status
    # Values that nobody confirms any more are left out: Prometheus shows gaps, not old numbers.
    if status is None or not reading.store_up:
        return
    yield from _of_plan(status.plan, reading.renewed_s)
    yield _gauge("crux_jobs", "Jobs in the cluster.", len(status.jobs))
    yield from _of_jobs(reading.jobs[:MAX_JOBS], status)
    loads = reading.loads or {}
    wanted = {name: load for name, load in loads.items() if reading.job in ("", *load.jobs)}
    by_load = sorted(wanted.items(), key=lambda each: (-each[1].planned_ratio, each[0]))
    yield _of_links(dict(islice(by_load, MAX_LINKS)))
    left_out = GaugeMetricFamily(
        "crux_series_left_out", "Jobs or links beyond the bound, which have no series.",
        labels=["kind"],
    )  # fmt: skip
    left_out.add_metric(["job"], max(0, len(reading.jobs) - MAX_JOBS))
    left_out.add_metric(["link"], max(0, len(wanted) - MAX_LINKS))
    yield left_out


def _of_plan(plan: Plan | None, renewed_s: float | None) -> Iterator[Metric]:
    if plan is None:
        return
    yield _gauge("crux_plan_epoch", "Number of the plan in the store.", plan.epoch)
    yield _gauge(
        "crux_plan_valid_seconds",
        "Seconds without a renewal after which jobs drop the plan.",
        plan.valid_s,
    )
    if renewed_s is not None:
        text = "Seconds since the plan was seen to be renewed."
        yield _gauge("crux_plan_age_seconds", text, renewed_s)


def _of_jobs(jobs: Sequence[JobRecord], status: ClusterStatus) -> Iterator[Metric]:
    plan = status.plan
    entries = {job.job: plan.entry(job.job) if plan is not None else None for job in jobs}
    info = GaugeMetricFamily(
        "crux_job_info", "The job's names elsewhere, and its state.",
        labels=["job_name", "state", "slurm_job_id", "namespace", "pod"],
    )  # fmt: skip
    paths = GaugeMetricFamily(
        "crux_job_paths", "Connections that have a planned path, by where they were seen.",
        labels=["job_name", "state"],
    )  # fmt: skip
    trials = GaugeMetricFamily(
        "crux_trial_state", "1 for the state of the trial of the plan of the job's component.",
        labels=["job_name", "state"],
    )  # fmt: skip
    said = {(job.job, tried.name): tried.state for job in status.jobs for tried in job.trials}
    for job in jobs:
        name, run = _text(job.job), job.run or None
        elsewhere = (run.slurm_job_id, run.namespace, run.pod) if run else ("", "", "")
        info.add_metric([name, job.state, *map(_text, elsewhere)], 1)
        if job.paths is not None:
            for state in ("as_planned", "elsewhere", "unknown"):
                paths.add_metric([name, state], getattr(job.paths, state))
        entry = entries[job.job]
        trial = entry.trial if entry is not None else None
        now = said.get((trial.judge, trial.name)) if trial else None
        if now is not None:
            for state in TRIAL_STATES:
                trials.add_metric([name, state], float(state == now))
    yield from (info, paths, trials)
    for metric, text, value in JOB_GAUGES:
        family = GaugeMetricFamily(metric, text, labels=["job_name"])
        for job in jobs:
            found = value(job, status.steps.get(job.job, JobSteps()), entries[job.job])
            if found is not None:
                family.add_metric([_text(job.job)], found)
        yield family


def _of_links(loads: Mapping[str, LinkLoad]) -> Metric:
    family = GaugeMetricFamily(
        "crux_link_planned_load_ratio",
        "Bytes a second that its jobs would send if each ran as alone, over the link's capacity.",
        labels=["link"],
    )
    for name, load in loads.items():
        family.add_metric([_text(name)], load.planned_ratio)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _text(name: str) -> str:
    return safe(name)[:MAX_LETTERS]


class ClusterCollector(Collector):
    """Collects the metrics of what ``reading`` returns at each scrape."""

    def __init__(self, reading: Callable[[], Reading]) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        """Yields the families of now."""
        return families(self._reading())

    def describe(self) -> list[Metric]:
        """Names nothing in advance, so that registering reads nothing."""
        return []


def registry_of(reading: Callable[[], Reading]) -> CollectorRegistry:
    """Returns a registry with the cluster's metrics and nothing of this process."""
    registry = CollectorRegistry()
    registry.register(ClusterCollector(reading))
    return registry
