"""Trace-driven simulation (paper §6.3): jobs arrive, wait, are placed, scheduled, run and end.

``docs/research/simulator.md`` describes each step. :func:`run_rows` plays replays as rows of a
table.
"""

from __future__ import annotations

import ctypes
import gc
import heapq
import math
import os
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crux_torch.network.builders import RAIL_SERVER, crux_testbed, double_sided, two_layer_clos
from crux_torch.network.loaders import load_topology
from crux_torch.network.topology import Topology
from crux_torch.schedule.model import Cluster, Memory, Scheduler, SchedulerOptions
from crux_torch.schedule.papers.cassini import Candidate, ranked
from crux_torch.schedule.schedulers import SCHEDULERS
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.networks import (
    INTENSITY_EDGES,
    Grain,
    JobOutcome,
    PrivateNetworks,
    Series,
    SharedNetwork,
    Summary,
    Tally,
    grain_of,
    per_day,
    summarise,
)
from crux_torch.sim.placement import (
    PLACEMENTS,
    RANKED,
    Allocation,
    PlacedJob,
    Placer,
    Request,
    candidates,
)
from crux_torch.sim.traces import Trace, TraceJob, Workload
from crux_torch.sim.workers import Workers, mapped


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay.

    Attributes:
        placement: a name of ``PLACEMENTS``, or ``RANKED``.
        levels: priority levels, ascending; the paper's simulator has 8 (§6.1).
        max_slowdown: what the policy crux keeps to, see ``SchedulerOptions``.
        seed: of placement and of the scheduler.
        replan_s: the least time between two plans; the changes within it are planned for together,
            as the paper allows itself up to a minute for each (§5).
        grid_s: length of the spans of the series.
        iterations_as_one: see :class:`crux_torch.sim.networks.Grain`; 1 is exact.
        steady_tolerance: relative error that the engine's extrapolation may have.
        rings_apart: the rings and groups of a job move each on its own.
        fixed_durations: a job leaves after the trace's duration, however far it got. Otherwise it
            stays until its work is done, and one that starves keeps its GPUs.
    """

    placement: str = "none"
    levels: tuple[int, ...] = tuple(range(8))
    max_slowdown: float = 3.0
    seed: int = 0
    replan_s: float = 60.0
    grid_s: float = 3600.0
    iterations_as_one: int = 1
    steady_tolerance: float = 0.0
    rings_apart: bool = True
    fixed_durations: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a replay: a summary, a series over time, and the jobs in the order of their ends.

    ``plan_wall_s`` is the real seconds that the scheduler took for all ``plans``.
    """

    summary: Summary
    series: Series
    records: tuple[JobOutcome, ...]
    plans: int
    plan_wall_s: float
    events: int


def replay(
    trace: Trace, placer: Placer, scheduler: Scheduler, options: ReplayOptions = ReplayOptions()
) -> Outcome:
    """Plays ``trace`` until its last job has ended.

    Args:
        placer: of the topology to run on; replays of one topology may share it.
        scheduler: asked whenever a job that uses the network starts or ends.

    Raises:
        WorkloadError: a job that the cluster can never hold, or no jobs.
    """
    return _Replay(trace, placer, scheduler, options).run()


class _Replay:
    def __init__(
        self, trace: Trace, placer: Placer, scheduler: Scheduler, options: ReplayOptions
    ) -> None:
        self._placer = placer
        self._scheduler = scheduler
        self._options = options
        self._memory = Memory()
        self._allocation = Allocation(placer.cells)
        self._free = len(placer.cells.gpus)
        _check(trace, self._free)
        self._arrivals = list(reversed(trace.jobs))
        self._window_s = trace.jobs[-1].submit_s
        self._queue: deque[TraceJob] = deque()
        self._running: dict[str, tuple[TraceJob, PlacedJob, Grain, float]] = {}
        self._leaves: list[tuple[float, str]] = []
        self._tally = Tally(placer.topology)
        self._network: SharedNetwork | PrivateNetworks = PrivateNetworks()
        # A scheduler that can't be carried out says so by isolating the jobs.
        if not scheduler(Cluster({}, ()), SchedulerOptions(options.levels)).isolated:
            self._network = SharedNetwork(placer.topology, options.steady_tolerance)
        self._plan_due_s = math.inf
        self._planned_s = -math.inf
        self._plans = 0
        self._plan_wall_s = 0.0

    def run(self) -> Outcome:
        while self._arrivals or self._queue or self._running:
            span_end_s = self._span_end_s()
            next_arrival_s = self._arrivals[-1].submit_s if self._arrivals else math.inf
            next_leave_s = self._leaves[0][0] if self._leaves else math.inf
            until_s = min(next_arrival_s, self._plan_due_s, span_end_s, next_leave_s)
            for name in self._network.run_until_end_of_any(until_s):
                self._end(name)
            now_s = self._network.now_s
            while self._leaves and self._leaves[0][0] <= now_s:
                self._end(heapq.heappop(self._leaves)[1])
            while self._arrivals and self._arrivals[-1].submit_s <= now_s:
                self._queue.append(self._arrivals.pop())
            # First come, first served: nobody overtakes a job that does not fit yet. So the order
            # of starts is the same for all schedulers, and no job starves.
            while self._queue and self._queue[0].gpus <= self._free:
                self._start(self._queue.popleft())
            if now_s >= self._plan_due_s:
                self._plan()
            if now_s >= span_end_s or not (self._arrivals or self._queue or self._running):
                progress = {name: self._network.progress(name) for name in self._running}
                self._tally.close_span(now_s, progress, len(self._queue))
        return Outcome(
            summary=summarise(self._tally, self._window_s or math.inf),
            series=self._tally.series,
            records=tuple(self._tally.records),
            plans=self._plans,
            plan_wall_s=self._plan_wall_s,
            events=self._network.events,
        )

    def _span_end_s(self) -> float:
        """The next point of the grid; the last arrival, where the window ends, is one too."""
        last_s = self._tally.series.time_s[-1]
        grid_s = self._options.grid_s
        end_s = (math.floor(last_s / grid_s + 1e-9) + 1) * grid_s
        return self._window_s if last_s < self._window_s < end_s else end_s

    def _start(self, job: TraceJob) -> None:
        reference = self._placer.reference(job.model, job.gpus)
        # Muri looks at how much of an iteration is communication.
        network_s = reference.alone_s - reference.compute_s
        request = Request(job.name, job.gpus, reference.compute_s, network_s)
        # By name: what a job draws does not depend on how many drew before it.
        rng = random.Random(f"{self._options.seed}: {job.name}")
        if self._options.placement == RANKED:
            gpus = self._most_compatible(job, candidates(request, self._allocation, rng))
        else:
            chosen = PLACEMENTS[self._options.placement](request, self._allocation, rng)
            assert chosen is not None, "a job fits wherever as many GPUs are free"
            gpus = chosen
        self._allocation.take(request, gpus)
        self._free -= job.gpus
        placed = self._placer.place(job.name, job.model, gpus)
        iterations = max(1, round(job.duration_s / reference.alone_s))
        if self._options.fixed_durations:
            # More than it can end: what ends it is its duration.
            iterations = 2 * iterations + 2 * self._options.iterations_as_one
            heapq.heappush(self._leaves, (self._network.now_s + job.duration_s, job.name))
        grain = grain_of(iterations, self._options.iterations_as_one)
        self._network.add(placed, grain, self._options.levels[0])
        self._running[job.name] = (job, placed, grain, self._network.now_s)
        self._tally.start(placed, self._network.now_s)
        self._changed(placed)

    def _most_compatible(
        self, job: TraceJob, choices: Sequence[tuple[str, ...]]
    ) -> tuple[str, ...]:
        """The choice that lets the jobs take turns best; the first where each closes a loop."""
        running = [placed for _, placed, _, _ in self._running.values() if placed.job.flows]
        if len(choices) == 1 or not running:
            return choices[0]
        found = []
        for gpus in choices:
            everyone = [*running, self._placer.place(job.name, job.model, gpus)]
            if not everyone[-1].job.flows:
                return gpus
            cluster = Cluster(self._placer.topology.capacity_Bps, tuple(p.job for p in everyone))
            found.append(Candidate(cluster, {p.job.name: p.default_path for p in everyone}))
        return choices[next(iter(ranked(found, job.name, self._memory)), 0)]

    def _end(self, name: str) -> None:
        job, placed, grain, start_s = self._running.pop(name)
        self._allocation.release(name)
        self._free += job.gpus
        asked = job.name, job.model, job.gpus, job.submit_s
        times_s = start_s, self._network.now_s
        progress = self._network.progress(name)
        iterations = grain.count * grain.size
        if self._options.fixed_durations:
            iterations = progress.compute_s / placed.job.compute_s
        record = JobOutcome(*asked, *times_s, iterations, placed.alone_s)
        self._tally.finish(record, progress)
        self._network.forget(name)
        self._changed(placed)

    def _changed(self, placed: PlacedJob) -> None:
        """A job that meets nobody needs no plan."""
        if placed.job.flows and self._network.meets:
            due_s = max(self._network.now_s, self._planned_s + self._options.replan_s)
            self._plan_due_s = min(self._plan_due_s, due_s)

    def _plan(self) -> None:
        self._plan_due_s = math.inf
        self._planned_s = self._network.now_s
        placed = [p for _, p, _, _ in self._running.values() if p.job.flows]
        if not placed:
            return
        began = time.perf_counter()
        cluster = Cluster(self._placer.topology.capacity_Bps, tuple(p.job for p in placed))
        options = SchedulerOptions(
            self._options.levels,
            self._options.seed,
            {p.job.name: p.default_path for p in placed},
            max_slowdown=self._options.max_slowdown,
            memory=self._memory,
        )
        decision = self._scheduler(cluster, options)
        self._plan_wall_s += time.perf_counter() - began
        self._plans += 1
        self._network.apply(decision)


def _check(trace: Trace, gpus: int) -> None:
    if not trace.jobs:
        raise WorkloadError("the trace has no jobs")
    widest = max(trace.jobs, key=lambda job: job.gpus)
    if widest.gpus > gpus:
        raise WorkloadError(
            f"job {widest.name!r} asks for {widest.gpus} GPUs; the cluster has {gpus}"
        )


def non_blocking() -> Topology:
    """346 hosts on one switch, a NIC and a PCIe link for every GPU: no two jobs share a link."""
    return two_layer_clos(hosts=346, tors=1, aggregations=1, server=RAIL_SERVER)


#: Networks by name: the paper's two clusters, its testbed, and one without contention.
TOPOLOGIES: dict[str, Callable[[], Topology]] = {
    "clos": two_layer_clos,
    "double-sided": double_sided,
    "testbed": crux_testbed,
    "non-blocking": non_blocking,
}


@dataclass(frozen=True, slots=True)
class Run:
    """One row: a trace on a network under a scheduler and a placement."""

    workload: Workload
    topology: str
    scheduler: str
    options: ReplayOptions


def topology_of(name: str) -> Topology:
    """The network of that name, or the one in the file of that name.

    Raises:
        TopologyError: the file can't be used.
    """
    if name in TOPOLOGIES:
        return TOPOLOGIES[name]()
    return load_topology(name)


def run_row(run: Run) -> dict[str, Any]:
    """Plays one row; the time includes building the network, not reading the trace.

    Raises:
        WorkloadError, TopologyError: as the parts do.
    """
    trace = run.workload.load()
    _forget_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    # Python's cycle collector would walk the many paths of a row in vain.
    collecting = gc.isenabled()
    gc.disable()
    try:
        placer = Placer(topology_of(run.topology), rings_apart=run.options.rings_apart)
        outcome = replay(trace, placer, SCHEDULERS[run.scheduler], run.options)
    finally:
        if collecting:
            gc.enable()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "topology": run.topology,
        "placement": run.options.placement,
        "scheduler": run.scheduler,
        "gpus": len(placer.cells.gpus),
        **asdict(outcome.summary),
        "slowdown_percentiles": _short(
            np.percentile([record.slowdown for record in outcome.records], range(101)).tolist()
        ),
        "plans": outcome.plans,
        "plan_wall_s": outcome.plan_wall_s,
        "events": outcome.events,
        "wall_s": wall,
        "cpu_s": cpu,
        "max_rss_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "by_day": {
            "gpu_utilization": per_day(outcome.series, outcome.series.gpu_utilization),
            "held": per_day(outcome.series, outcome.series.held),
        },
        "series": _compact(outcome.series),
    }


def _forget_peak() -> None:
    """From here on, the peak of this process's memory is not that of earlier rows."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def run_rows(runs: Sequence[Run], workers: Workers = 1) -> Iterator[dict[str, Any]]:
    """Plays rows, ``workers`` of :func:`crux_torch.sim.workers.mapped` at a time; in order."""
    return mapped(run_row, [(run,) for run in runs], workers)


def settings_of(workload: Workload, options: ReplayOptions, trace: Trace) -> dict[str, Any]:
    """Settings that a result file names."""
    gpu_s = sum(job.gpus * job.duration_s for job in trace.jobs)
    window_s = trace.jobs[-1].submit_s
    # Arrivals within less time than a job takes have no rate to speak of.
    spread = window_s >= sum(job.duration_s for job in trace.jobs) / len(trace.jobs)
    return {
        "trace": {
            **{k: v for k, v in asdict(workload).items() if k != "data"},
            "kind": trace.kind,
            "jobs": len(trace.jobs),
            "window_s": window_s,
            "mean_gpus_wanted": gpu_s / window_s if spread else None,
            "dropped": dict(trace.dropped),
        },
        "replay": {k: v for k, v in asdict(options).items() if k != "placement"},
        "intensity_edges": list(INTENSITY_EDGES),
        "cores": os.cpu_count(),
    }


def _compact(series: Series) -> dict[str, Any]:
    """The series with four digits, which a plot doesn't show more of."""
    return {
        "time_s": _short(series.time_s),
        "gpu_utilization": _short(series.gpu_utilization),
        "held": _short(series.held),
        "waiting": list(series.waiting),
        "carried": {k: [_short(span) for span in v] for k, v in series.carried.items()},
    }


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.4g}") for v in values]
