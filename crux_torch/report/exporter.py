"""Metrics of a cluster, or of one job, over HTTP or in a file of node_exporter's; and the page.

A rank starts the exporter of its own job:

    python -m crux_torch.report.exporter --fd N --parent PID --port PORT JOB
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import islice
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    generate_latest,
    write_to_textfile,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crux_torch.agreement.audit import AuditEntry
from crux_torch.agreement.leader_process import stand_back
from crux_torch.agreement.records import JobRecord, Plan, PlanEntry
from crux_torch.errors import CruxError, StoreError
from crux_torch.logs import WarnOnce
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import ClusterReader, ClusterStatus
from crux_torch.report.live_cluster import LinkLoad
from crux_torch.report.page.operator_page import PERIOD_S, Answer, OperatorPage, Query
from crux_torch.report.page.server import PageServer, Routes
from crux_torch.report.step_times import JobSteps
from crux_torch.settings import process_settings
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


_log = logging.getLogger(__name__)

#: Name of the file for node_exporter.
TEXTFILE = "crux.prom"
#: Seconds without a reading, failed ones included, after which the exporter is not healthy.
STUCK_S = 60.0
#: Things that may fail: reading the store, and making the page of what was read.
STORE, STATE = "store", "state"


class Watched:
    """Reads a cluster again and again, through store outages, and sees when its plan is renewed.

    Args:
        open_reader: may raise CruxError, as every reading may.
    """

    def __init__(
        self, open_reader: Callable[[], ClusterReader], clock: Callable[[], float]
    ) -> None:
        self._open, self._clock = open_reader, clock
        self._reader: ClusterReader | None = None
        self.errors = Counter({STORE: 0, STATE: 0})
        self.is_up = False
        self.renewed_at_s: float | None = None

    @property
    def topology(self) -> Topology | None:
        """The cluster's topology at the last reading; None without one."""
        return self._reader.topology if self._reader is not None else None

    def read(self) -> ClusterStatus:
        """Returns the state now.

        Raises:
            CruxError: the store can't be read; the next call begins anew.
        """
        try:
            if self._reader is None:
                self._reader = self._open()
            found = self._reader.read()
        except CruxError:
            self.errors[STORE] += 1
            self.is_up = False
            self.close()
            raise
        self.is_up = True
        if found.plan is None:
            self.renewed_at_s = None
        elif found.plan_renewed or self.renewed_at_s is None:
            self.renewed_at_s = self._clock()
        return found

    def audit(self) -> tuple[AuditEntry, ...]:
        """Returns the audit log, the oldest entry first."""
        return self._reader.audit() if self._reader is not None else ()

    def close(self) -> None:
        """Closes the connection to the store."""
        if self._reader is not None:
            with contextlib.suppress(StoreError):
                self._reader.__exit__()
            self._reader = None


class Exporter:
    """Serves what it reads in a thread of its own: no request waits for the store.

    Args:
        open_reader: returns a reader of the cluster.
        job: the only job whose metrics are wanted, and no page; empty: all.
    """

    def __init__(
        self,
        open_reader: Callable[[], ClusterReader],
        job: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._job = clock, job
        self._watched = Watched(open_reader, clock)
        self._page = OperatorPage(self._watched)
        self._registry = registry_of(self.reading)
        self._warn = WarnOnce(_log)
        self._stop = threading.Event()
        self._tried_at_s = clock()

    def reading(self) -> Reading:
        """Returns what was read last."""
        snapshot, watched = self._page.snapshot, self._watched
        renewed_at_s = watched.renewed_at_s
        return Reading(
            status=snapshot.status if snapshot is not None else None,
            loads=snapshot.loads if snapshot is not None else None,
            store_up=watched.is_up,
            renewed_s=None if renewed_at_s is None else self._clock() - renewed_at_s,
            errors=dict(watched.errors),
            job=self._job,
        )

    def refresh(self) -> None:
        """Reads the cluster once; raises nothing."""
        try:
            self._page.refresh()
        except Exception as error:
            self._watched.errors[STATE] += 1
            self._warn("state", f"the state can't be shown: {type(error).__name__}: {error}")
        self._tried_at_s = self._clock()

    def run(self, textfile: Path | None = None) -> None:
        """Refreshes until :meth:`end` is called.

        Args:
            textfile: folder that gets a file of the metrics after each reading.

        Raises:
            OSError: the first file can't be written.
        """
        written = False
        while not self._stop.is_set():
            self.refresh()
            if textfile is not None:
                try:
                    write_to_textfile(str(textfile / TEXTFILE), self._registry)
                    written = True
                except OSError as error:
                    if not written:
                        raise
                    self._warn("textfile", f"{textfile / TEXTFILE}: {error.strerror}")
            self._stop.wait(PERIOD_S)

    def end(self) -> None:
        """Ends :meth:`run` and all streams of the page."""
        self._stop.set()
        self._page.end()

    def routes(self) -> Routes:
        """Returns what answers requests: the metrics, signs of life, and the page."""
        own: Routes = {"/metrics": self._metrics, "/healthz": self._health}
        return own if self._job else {**self._page.routes(), **own}

    def _metrics(self, _: Query) -> Answer:
        return Answer(CONTENT_TYPE_LATEST, generate_latest(self._registry))

    def _health(self, _: Query) -> Answer | HTTPStatus:
        if self._clock() - self._tried_at_s > STUCK_S:
            return HTTPStatus.SERVICE_UNAVAILABLE
        return Answer("text/plain; charset=utf-8", b"ok\n")


def main() -> None:
    """The exporter of one job: it ends with the rank that has started it."""
    parser = argparse.ArgumentParser(prog="crux-metrics")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret", default="")
    parser.add_argument("job")
    args = parser.parse_args()
    told = socket.socket(fileno=args.fd)
    try:
        stand_back(args.parent)
        settings = replace(process_settings(), store_secret=args.secret)
        exporter = Exporter(lambda: ClusterReader(settings), args.job)
        server = PageServer(exporter.routes(), ("127.0.0.1", args.port))
        threading.Thread(target=exporter.run, daemon=True).start()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told.sendall(b"\n")
        told.recv(1)  # until the rank ends
    except Exception as error:
        with contextlib.suppress(OSError):
            told.sendall(f"{error}\n".encode(errors="replace"))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
