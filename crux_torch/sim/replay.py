"""Trace-driven simulation (paper §6.3): jobs arrive, wait, are placed, scheduled, run and end.

A job's duration in a trace is what it takes undisturbed: it runs as many iterations as fit into
it when the job has the cluster to itself on GPUs as near to each other as can be. So the work of a
trace is the same for all schedulers and placements, and what contention or distance adds to an
iteration is added to the job's completion time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crux_torch.schedule.model import Cluster
from crux_torch.schedule.options import Scheduler, SchedulerOptions
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.metrics import JobRecord, Meter, Series, Summary, summarise
from crux_torch.sim.placed import PlacedJob, Placer
from crux_torch.sim.placement import PLACEMENTS, Allocation, Request
from crux_torch.sim.players import Grain, Player, PrivateNetworks, SharedNetwork, grain_of
from crux_torch.sim.traces import Trace, TraceJob
from crux_torch.sim.waiting import FifoQueue


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is replayed.

    Attributes:
        placement: a name of ``PLACEMENTS``.
        levels: priority levels, ascending; the paper's simulator has 8 (§6.1).
        max_slowdown: what crux-fair is to guarantee, see ``SchedulerOptions``.
        seed: of placement and of the scheduler.
        replan_s: the least time between two plans. A change in a quiet time is planned for at
            once; the changes of a busy one together, as the paper allows itself up to a minute
            for each (§5). Until its first plan a job takes the network's own paths and the lowest
            level.
        grid_s: length of the spans of the series.
        iterations_as_one: so many iterations of a job are simulated as one, as long and with as
            much to send as all of them, see :class:`crux_torch.sim.players.Grain`; 1 is exact.
        steady_tolerance: how exact the engine's extrapolation of steady stretches must be.
    """

    placement: str = "none"
    levels: tuple[int, ...] = tuple(range(8))
    max_slowdown: float | None = None
    seed: int = 0
    replan_s: float = 60.0
    grid_s: float = 3600.0
    iterations_as_one: int = 1
    steady_tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to.

    Attributes:
        summary: in a few numbers.
        series: over time.
        records: every job, in the order in which they ended.
        plans: how often the scheduler was asked.
        plan_wall_s: real seconds that it took for that.
        wall_s: real seconds of the whole replay.
        events: of the engine.
    """

    summary: Summary
    series: Series
    records: tuple[JobRecord, ...]
    plans: int
    plan_wall_s: float
    wall_s: float
    events: int


#: Called with the simulated time and the number of jobs that have ended.
OnProgress = Callable[[float, int], Any]


def replay(
    trace: Trace,
    placer: Placer,
    scheduler: Scheduler,
    options: ReplayOptions = ReplayOptions(),
    on_progress: OnProgress | None = None,
) -> Outcome:
    """Plays ``trace`` until its last job has ended.

    Args:
        trace: the jobs.
        placer: of the topology to run on; replays of one topology may share it.
        scheduler: asked whenever a job that uses the network starts or ends.
        options: see there.
        on_progress: called at the end of every span.

    Raises:
        WorkloadError: a job that the cluster can never hold, or no jobs.
    """
    return _Replay(trace, placer, scheduler, options).run(on_progress)


class _Replay:
    def __init__(
        self, trace: Trace, placer: Placer, scheduler: Scheduler, options: ReplayOptions
    ) -> None:
        self._placer = placer
        self._scheduler = scheduler
        self._options = options
        self._allocation = Allocation(placer.cells)
        self._free = len(placer.cells.gpus)
        _check(trace, self._free)
        self._arrivals = list(reversed(trace.jobs))
        self._window_s = trace.jobs[-1].submit_s
        self._queue = FifoQueue()
        self._running: dict[str, tuple[TraceJob, PlacedJob, Grain, float]] = {}
        self._meter = Meter(placer.topology)
        self._player = self._make_player()
        self._plan_due_s = math.inf
        self._planned_s = -math.inf
        self._plans = 0
        self._plan_wall_s = 0.0

    def run(self, on_progress: OnProgress | None) -> Outcome:
        began = time.perf_counter()
        while self._arrivals or self._queue or self._running:
            span_end_s = self._span_end_s()
            next_arrival_s = self._arrivals[-1].submit_s if self._arrivals else math.inf
            until_s = min(next_arrival_s, self._plan_due_s, span_end_s)
            for name in self._player.run_until_end_of_any(until_s):
                self._end(name)
            now_s = self._player.now_s
            while self._arrivals and self._arrivals[-1].submit_s <= now_s:
                self._queue.add(self._arrivals.pop())
            for job in self._queue.fitting(self._free):
                self._start(job)
            if now_s >= self._plan_due_s:
                self._plan()
            if now_s >= span_end_s or not (self._arrivals or self._queue or self._running):
                self._close_span()
                if on_progress:
                    on_progress(now_s, len(self._meter.records))
        return Outcome(
            summary=summarise(self._meter, self._window_s or math.inf),
            series=self._meter.series,
            records=tuple(self._meter.records),
            plans=self._plans,
            plan_wall_s=self._plan_wall_s,
            wall_s=time.perf_counter() - began,
            events=self._player.events,
        )

    def _make_player(self) -> Player:
        """Networks of their own for a scheduler that can't be carried out, else the topology."""
        probe = self._scheduler(Cluster({}, ()), SchedulerOptions(self._options.levels))
        if probe.isolated:
            return PrivateNetworks()
        return SharedNetwork(self._placer.topology, self._options.steady_tolerance)

    def _span_end_s(self) -> float:
        """The next point of the grid; the last arrival, where the window ends, is one too."""
        last_s = self._meter.series.time_s[-1]
        grid_s = self._options.grid_s
        end_s = (math.floor(last_s / grid_s + 1e-9) + 1) * grid_s
        return self._window_s if last_s < self._window_s < end_s else end_s

    def _start(self, job: TraceJob) -> None:
        reference = self._placer.reference(job.model, job.gpus)
        # Muri looks at how much of an iteration is communication.
        request = Request(
            job.name,
            job.gpus,
            reference.compute_s,
            reference.alone_s - reference.compute_s,
        )
        place = PLACEMENTS[self._options.placement]
        # By name: what a job draws does not depend on how many drew before it.
        rng = random.Random(f"{self._options.seed}: {job.name}")
        gpus = place(request, self._allocation, rng)
        assert gpus is not None, "a job fits wherever as many GPUs are free"
        self._allocation.take(request, gpus)
        self._free -= job.gpus
        placed = self._placer.place(job.name, job.model, gpus)
        iterations = max(1, round(job.duration_s / reference.alone_s))
        grain = grain_of(iterations, self._options.iterations_as_one)
        self._player.add(placed, grain, self._options.levels[0])
        self._running[job.name] = (job, placed, grain, self._player.now_s)
        self._meter.start(placed, self._player.now_s)
        self._changed(placed)

    def _end(self, name: str) -> None:
        job, placed, grain, start_s = self._running.pop(name)
        self._allocation.release(name)
        self._free += job.gpus
        record = JobRecord(
            job.name,
            job.model,
            job.gpus,
            job.submit_s,
            start_s,
            self._player.now_s,
            grain.count * grain.size,
            placed.alone_s,
        )
        self._meter.finish(record, self._player.progress(name))
        self._player.forget(name)
        self._changed(placed)

    def _changed(self, placed: PlacedJob) -> None:
        """A job that meets nobody needs no plan."""
        if placed.job.flows and self._player.meets:
            due_s = max(self._player.now_s, self._planned_s + self._options.replan_s)
            self._plan_due_s = min(self._plan_due_s, due_s)

    def _plan(self) -> None:
        self._plan_due_s = math.inf
        self._planned_s = self._player.now_s
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
        )
        decision = self._scheduler(cluster, options)
        self._plan_wall_s += time.perf_counter() - began
        self._plans += 1
        self._player.apply(decision)

    def _close_span(self) -> None:
        progress = {name: self._player.progress(name) for name in self._running}
        self._meter.close_span(self._player.now_s, progress, len(self._queue))


def _check(trace: Trace, gpus: int) -> None:
    if not trace.jobs:
        raise WorkloadError("the trace has no jobs")
    widest = max(trace.jobs, key=lambda job: job.gpus)
    if widest.gpus > gpus:
        raise WorkloadError(
            f"job {widest.name!r} asks for {widest.gpus} GPUs; the cluster has {gpus}"
        )
