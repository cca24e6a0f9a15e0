"""The network on which a replay's jobs run, shared or one for each job, and its measurements."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from crux_torch import _fluid
from crux_torch.network.topology import Topology
from crux_torch.schedule.arrays import Arrays, traffic_entries
from crux_torch.schedule.model import Decision, Link
from crux_torch.schedule.papers.cassini_grid import DRIFT
from crux_torch.sim.placement import PlacedJob
from crux_torch.sim.play import burst_entries, by_part
from crux_torch.sim.traces import DAY_S

#: A job of this many simulated iterations or more may end half of one early or late.
MANY = 20


class Progress(NamedTuple):
    """Progress of a job: iterations ended, seconds in which it computed."""

    completed: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Grain:
    """Simulated iterations of a job: ``count`` of them, each as long as ``size`` real ones.

    One of size s computes and sends s times as much; ``docs/research/simulator.md`` says what that
    changes.
    """

    count: int
    size: float


def grain_of(iterations: int, size: int) -> Grain:
    """The grain of a job of ``iterations`` if ``size`` of them are simulated as one.

    A job of ``MANY`` or more simulated iterations has exactly this size, so that periods keep their
    ratios, and rounds their number. A shorter one has a smaller size, so that its work stays exact.
    """
    count = round(iterations / size)
    if count >= MANY:
        return Grain(count, float(size))
    count = -(-iterations // size)
    return Grain(count, iterations / count)


@dataclass(slots=True)
class _Followed:
    """Paths, level and pace of a running job; ``flows`` have the bytes of a simulated iteration."""

    placed: PlacedJob
    grain: Grain
    flows: Arrays
    path: tuple[int, ...]
    level: int
    shift_s: float = 0.0
    grid_s: float | None = None


class SharedNetwork:
    """Jobs meet on the links of a topology, in the fluid engine.

    The delays of links are left out: microseconds, where transfers take milliseconds.
    """

    meets = True

    def __init__(self, topology: Topology, steady_tolerance: float = 0.0) -> None:
        links = [(name, c, 0.0) for name, c in topology.capacity_Bps.items()]
        self._engine = _fluid.Engine(links, steady_tolerance=steady_tolerance)
        self._follows: dict[str, _Followed] = {}
        idle = never_full(topology)
        # The engine's links have the numbers of the topology's, as in the arrays of placed jobs.
        given = (np.inf if name in idle else c for name, c in topology.capacity_Bps.items())
        self._capacity_Bps = np.array([*given, np.inf])

    @property
    def now_s(self) -> float:
        return self._engine.now_s

    @property
    def events(self) -> int:
        return self._engine.events

    def add(self, placed: PlacedJob, grain: Grain, level: int) -> None:
        """A job starts now, on its default paths, and ends after all of its ``grain``."""
        job = placed.job
        flows = replace(
            by_part(placed.arrays),
            flow_bytes=placed.arrays.flow_bytes * grain.size,
            capacity_Bps=self._capacity_Bps,
        )
        follows = _Followed(placed, grain, flows, placed.default_path, level)
        self._follows[job.name] = follows
        starts = [burst.at for burst in job.bursts]
        least_s = [burst.least_s * grain.size for burst in job.bursts]
        self._engine.add_job(
            job.name,
            compute_s=job.compute_s * grain.size,
            bursts=zip(starts, _traffic(follows), least_s, strict=True),
            gpus=job.gpus,
            level=level,
            iterations=grain.count,
        )

    def apply(self, decision: Decision) -> None:
        """The jobs named in ``decision`` follow it from now on."""
        for name, path in decision.path.items():
            now = self._follows[name]
            if path != now.path:
                now.path = path
                self._engine.set_traffic(name, _traffic(now))
            if decision.level[name] != now.level:
                now.level = decision.level[name]
                self._engine.set_level(name, now.level)
            # Grids have the start of the replay as their common origin, so that they stay valid.
            shift_s, grid_s = decision.shift_s.get(name, 0.0), decision.grid_s.get(name)
            if (shift_s, grid_s) != (now.shift_s, now.grid_s):
                now.shift_s, now.grid_s = shift_s, grid_s
                origin_s = shift_s * now.grain.size
                period_s = None if grid_s is None else grid_s * now.grain.size
                self._engine.set_pace(name, origin_s=origin_s, period_s=period_s, tolerance=DRIFT)

    def run_until_end_of_any(self, until_s: float) -> list[str]:
        """Lets time pass until ``until_s`` or the end of a job. Returns the jobs that ended."""
        return self._engine.run_until_end_of_any(until_s)

    def progress(self, name: str) -> Progress:
        """Progress of a job by now."""
        result = self._engine.result(name)
        size = self._follows[name].grain.size
        return Progress(result["completed"] * size, result["compute_s"])

    def result(self, name: str) -> _fluid.JobResult:
        """The engine's measures of a job by now; its iterations are the simulated ones."""
        return self._engine.result(name)

    def forget(self, name: str) -> None:
        """A job has ended or leaves, and nobody asks for it again."""
        del self._follows[name]
        self._engine.remove_job(name)


def never_full(topology: Topology) -> frozenset[Link]:
    """Links between GPUs and NICs that can never be full, because the NICs' ports are slower.

    In a host with NVLink, data on PCIe leaves or enters by the nearest NICs. If all ports of these
    NICs together are no faster than one PCIe link, no transfer ever waits for a PCIe link, and none
    has to be simulated.
    """
    port_Bps: dict[str, dict[bool, float]] = {}
    for edge in topology.edges:
        for nic, other, out in ((edge.src, edge.dst, True), (edge.dst, edge.src, False)):
            if topology.nodes[nic].kind == "nic" and topology.nodes[other].host is None:
                rates = port_Bps.setdefault(nic, {True: 0.0, False: 0.0})
                rates[out] += edge.link.capacity_Bps
    found: set[Link] = set()
    for host in topology.hosts:
        if not topology.inside(host, "nvswitch"):
            continue
        for gpu in topology.gpus(host):
            nics = topology.nearest_nics(gpu)
            for out in (True, False):
                limit_Bps = sum(port_Bps[nic][out] for nic in nics)
                for nic in nics:
                    ends = (gpu, nic) if out else (nic, gpu)
                    for path in topology.candidate_paths(*ends, None):
                        found.update(x for x in path if topology.capacity_Bps[x] >= limit_Bps)
    return frozenset(found)


def _traffic(follows: _Followed) -> list[list[_fluid.Traffic]]:
    """Traffic of each part of each burst on the job's path, less the links that are never full."""
    entries = traffic_entries(follows.flows, np.array(follows.path, np.int64))
    return burst_entries(follows.placed.job.bursts, *entries)


@dataclass(slots=True)
class PrivateNetworks:
    """Every job has a network of its own, where it runs as it runs alone.

    No schedule can do better. Methods are as in :class:`SharedNetwork`.
    """

    now_s: float = 0.0
    events: int = 0
    meets: bool = False
    _jobs: dict[str, tuple[PlacedJob, Grain, float]] = field(default_factory=dict)
    _ends: list[tuple[float, str]] = field(default_factory=list)

    def add(self, placed: PlacedJob, grain: Grain, level: int) -> None:
        name = placed.job.name
        self._jobs[name] = placed, grain, self.now_s
        end_s = self.now_s + grain.count * grain.size * placed.alone_s
        heapq.heappush(self._ends, (end_s, name))

    def apply(self, decision: Decision) -> None:
        pass

    def run_until_end_of_any(self, until_s: float) -> list[str]:
        while self._ends and self._ends[0][1] not in self._jobs:
            heapq.heappop(self._ends)
        if not self._ends or self._ends[0][0] > until_s:
            self.now_s = until_s
            return []
        self.now_s = self._ends[0][0]
        ended = []
        while self._ends and self._ends[0][0] <= self.now_s:
            ended.append(heapq.heappop(self._ends)[1])
            self.events += 1
        return ended

    def progress(self, name: str) -> Progress:
        placed, grain, start_s = self._jobs[name]
        alone_s, compute_s = placed.alone_s * grain.size, placed.job.compute_s * grain.size
        passed_s = self.now_s - start_s
        # The end of the last iteration is a sum that carries rounding.
        done = min(grain.count, int(passed_s / alone_s + 1e-9))
        left_s = max(0.0, passed_s - done * alone_s) if done < grain.count else 0.0
        return Progress(done * grain.size, done * compute_s + min(left_s, compute_s))

    def forget(self, name: str) -> None:
        del self._jobs[name]


#: Layers of the network proper; PCIe and NVLink belong to the hosts.
NETWORK_LAYERS = ("nic-tor", "tor-aggregation", "aggregation-core")
#: Layers of Figure 24, and the core of three-layer networks.
LAYERS = ("pcie-nic", *NETWORK_LAYERS)
#: Borders of the classes of GPU intensity in FLOP/s, half a decade apart. The lowest and the
#: highest class have no outer border.
INTENSITY_EDGES = tuple(10 ** (e / 2) for e in range(26, 40))
NOTHING = Progress(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Times of one job: arrival, start on its GPUs, and end of its last iteration.

    ``alone_s`` is seconds of one iteration on the same GPUs and an empty network.
    """

    name: str
    model: str
    gpus: int
    submit_s: float
    start_s: float
    end_s: float
    iterations: float
    alone_s: float

    @property
    def jct_s(self) -> float:
        """Job completion time, from arrival."""
        return self.end_s - self.submit_s

    @property
    def queued_s(self) -> float:
        return self.start_s - self.submit_s

    @property
    def slowdown(self) -> float:
        """Mean iteration time, divided by that of the job alone on the same GPUs."""
        return (self.end_s - self.start_s) / (self.iterations * self.alone_s)


@dataclass(slots=True)
class Series:
    """The replay over time. Entry i covers the span from ``time_s[i]`` to ``time_s[i + 1]``.

    Attributes:
        time_s: borders of the spans: one more than there are spans.
        gpu_utilization: share of all GPUs' time in which they computed.
        held: share of all GPUs' time in which a job held them.
        waiting: jobs in the queue at the end of the span.
        carried: for each layer and class of intensity, the share of the layer's capacity that
            carried data of jobs in that class.
    """

    time_s: list[float] = field(default_factory=lambda: [0.0])
    gpu_utilization: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    carried: dict[str, list[list[float]]] = field(default_factory=dict)

    def mean(self, values: Sequence[float], until_s: float = math.inf) -> float:
        """Mean of a series over the spans that end by ``until_s``, weighted by their length."""
        count = bisect_right(self.time_s, until_s) - 1
        lengths = np.diff(self.time_s[: count + 1])
        return float(np.average(values[:count], weights=lengths)) if count > 0 else 0.0


@dataclass(slots=True)
class _Running:
    placed: PlacedJob
    intensity_class: int
    start_s: float
    seen: Progress = NOTHING


class Tally:
    """Collects the series of a replay and the records of its jobs.

    Traffic is counted when an iteration ends, so a span may be wrong by one iteration of each job.
    """

    def __init__(self, topology: Topology) -> None:
        self.records: list[JobOutcome] = []
        self.series = Series()
        self.compute_gpu_s = 0.0
        self.held_gpu_s = 0.0
        self._gpus = len(topology.gpus())
        self.capacity_Bps = dict.fromkeys(LAYERS, 0.0)
        for link, capacity_Bps in topology.capacity_Bps.items():
            layer = topology.layer(link)
            if layer in self.capacity_Bps:
                self.capacity_Bps[layer] += capacity_Bps
        self.layers = [layer for layer in LAYERS if self.capacity_Bps[layer] > 0]
        self.series.carried = {layer: [] for layer in self.layers}
        self._running: dict[str, _Running] = {}
        self._open_span()

    def start(self, placed: PlacedJob, now_s: float) -> None:
        """A job has got its GPUs."""
        kind = bisect_right(INTENSITY_EDGES, placed.intensity)
        self._running[placed.job.name] = _Running(placed, kind, now_s)

    def finish(self, record: JobOutcome, progress: Progress) -> None:
        """A job has ended."""
        self._count(record.name, progress, record.end_s)
        del self._running[record.name]
        self.records.append(record)

    def close_span(self, now_s: float, progress: Mapping[str, Progress], waiting: int) -> None:
        """Ends the span that is open; ``progress`` of all running jobs."""
        for name in self._running:
            self._count(name, progress[name], now_s)
        series = self.series
        length_s = now_s - series.time_s[-1]
        if length_s > 0:
            series.time_s.append(now_s)
            series.gpu_utilization.append(self._span_compute / (length_s * self._gpus))
            series.held.append(self._span_held / (length_s * self._gpus))
            series.waiting.append(waiting)
            for layer, moved in self._span_bytes.items():
                whole = length_s * self.capacity_Bps[layer]
                series.carried[layer].append([m / whole for m in moved])
            self._open_span()

    def _open_span(self) -> None:
        self._span_compute = 0.0
        self._span_held = 0.0
        self._span_bytes = {layer: [0.0] * (len(INTENSITY_EDGES) + 1) for layer in self.layers}

    def _count(self, name: str, progress: Progress, now_s: float) -> None:
        """Adds what a job has done since it was last counted, or since the span began."""
        job = self._running[name]
        gpus = job.placed.job.gpus
        computed = (progress.compute_s - job.seen.compute_s) * gpus
        held = (now_s - max(job.start_s, self.series.time_s[-1])) * gpus
        self._span_compute += computed
        self._span_held += held
        self.compute_gpu_s += computed
        self.held_gpu_s += held
        for layer, moved in job.placed.layer_bytes.items():
            if layer in self._span_bytes:
                done = (progress.completed - job.seen.completed) * moved
                self._span_bytes[layer][job.intensity_class] += done
        job.seen = progress


@dataclass(frozen=True, slots=True)
class Summary:
    """The totals and means of a replay, of whose jobs all ran to their end.

    Attributes:
        gpu_utilization: share of all GPUs' time in which they computed, until the last arrival.
        held_utilization: share of the time that jobs held GPUs in which these computed, over the
            whole replay.
        network_utilization: share of the network's capacity that carried data, until the last
            arrival; PCIe and NVLink left out.
        slowdown_mean: of :attr:`JobOutcome.slowdown`, weighted by GPU time.
        makespan_s: end of the last job.
    """

    jobs: int
    gpu_utilization: float
    held_utilization: float
    network_utilization: float
    jct_mean_s: float
    jct_p99_s: float
    queued_mean_s: float
    slowdown_worst: float
    slowdown_p99: float
    slowdown_mean: float
    makespan_s: float


def summarise(tally: Tally, window_s: float) -> Summary:
    """The summary of a replay; its utilisations end at ``window_s``, a border of the series."""
    records, series = tally.records, tally.series
    jct = [r.jct_s for r in records]
    slowdowns = [r.slowdown for r in records]
    weights = [r.gpus * r.iterations * r.alone_s for r in records]
    layers = [layer for layer in tally.layers if layer in NETWORK_LAYERS]
    whole_Bps = sum(tally.capacity_Bps[layer] for layer in layers)
    carried = np.zeros(len(series.gpu_utilization))
    for layer in layers:
        share = tally.capacity_Bps[layer] / whole_Bps
        carried += share * np.array([sum(span) for span in series.carried[layer]])
    return Summary(
        jobs=len(records),
        gpu_utilization=series.mean(series.gpu_utilization, window_s),
        held_utilization=tally.compute_gpu_s / tally.held_gpu_s if tally.held_gpu_s else 0.0,
        network_utilization=series.mean(carried.tolist(), window_s),
        jct_mean_s=float(np.mean(jct)),
        jct_p99_s=float(np.percentile(jct, 99)),
        queued_mean_s=float(np.mean([r.queued_s for r in records])),
        slowdown_worst=max(slowdowns),
        slowdown_p99=float(np.percentile(slowdowns, 99)),
        slowdown_mean=float(np.average(slowdowns, weights=weights)),
        makespan_s=max(r.end_s for r in records),
    )


def per_day(series: Series, values: Iterable[float]) -> list[float]:
    """Mean of a series for each day. A span counts for the day in which it begins."""
    days: dict[int, list[tuple[float, float]]] = {}
    for start, end, value in zip(series.time_s, series.time_s[1:], values, strict=False):
        days.setdefault(int(start // DAY_S), []).append((end - start, value))
    return [
        sum(length * v for length, v in spans) / sum(length for length, _ in spans)
        for _, spans in sorted(days.items())
    ]
