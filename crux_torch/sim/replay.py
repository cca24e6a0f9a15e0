"""Trace-driven simulation (paper §6.3): jobs arrive, wait, are placed, scheduled, run and end.

``docs/trace.md`` describes each step.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from crux_torch.schedule.compatibility import Candidate, ranked
from crux_torch.schedule.model import Cluster, Scheduler, SchedulerOptions
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.metrics import JobOutcome, Series, Summary, Tally, summarise
from crux_torch.sim.networks import Grain, PrivateNetworks, SharedNetwork, grain_of
from crux_torch.sim.placed import PlacedJob, Placer
from crux_torch.sim.placement import PLACEMENTS, RANKED, Allocation, Request, candidates
from crux_torch.sim.traces import Trace, TraceJob


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is replayed.

    Attributes:
        placement: a name of ``PLACEMENTS``, or ``RANKED``.
        levels: priority levels, ascending; the paper's simulator has 8 (§6.1).
        max_slowdown: what the policy crux keeps to, see ``SchedulerOptions``.
        seed: of placement and of the scheduler.
        replan_s: the least time between two plans; the changes within it are planned for together,
            as the paper allows itself up to a minute for each (§5).
        grid_s: length of the spans of the series.
        iterations_as_one: see :class:`crux_torch.sim.networks.Grain`; 1 is exact.
        steady_tolerance: how exact the engine's extrapolation of steady stretches must be.
        rings_apart: whether the rings and groups of a job move each on its own.
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to: in a few numbers, over time, and for every job as they ended.

    ``plan_wall_s`` is the real seconds that the scheduler took for all ``plans``.
    """

    summary: Summary
    series: Series
    records: tuple[JobOutcome, ...]
    plans: int
    plan_wall_s: float
    events: int


def replay(
    trace: Trace,
    placer: Placer,
    scheduler: Scheduler,
    options: ReplayOptions = ReplayOptions(),
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
        self._allocation = Allocation(placer.cells)
        self._free = len(placer.cells.gpus)
        _check(trace, self._free)
        self._arrivals = list(reversed(trace.jobs))
        self._window_s = trace.jobs[-1].submit_s
        self._queue: deque[TraceJob] = deque()
        self._running: dict[str, tuple[TraceJob, PlacedJob, Grain, float]] = {}
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
            until_s = min(next_arrival_s, self._plan_due_s, span_end_s)
            for name in self._network.run_until_end_of_any(until_s):
                self._end(name)
            now_s = self._network.now_s
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
        return choices[next(iter(ranked(found, job.name)), 0)]

    def _end(self, name: str) -> None:
        job, placed, grain, start_s = self._running.pop(name)
        self._allocation.release(name)
        self._free += job.gpus
        asked = job.name, job.model, job.gpus, job.submit_s
        times_s = start_s, self._network.now_s
        record = JobOutcome(*asked, *times_s, grain.count * grain.size, placed.alone_s)
        self._tally.finish(record, self._network.progress(name))
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
