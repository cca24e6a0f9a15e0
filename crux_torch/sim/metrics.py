"""What a replay measures: utilisation, job completion times, and traffic on the network."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from crux_torch.fabric.topology import Topology
from crux_torch.sim.networks import Progress
from crux_torch.sim.placed import PlacedJob
from crux_torch.sim.traces import DAY_S

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
    """What became of one job: from arrival and the start on its GPUs to its last iteration's end.

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
