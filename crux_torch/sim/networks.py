"""The network on which a replay's jobs run: one that they share, or one for each job."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from crux_torch import _fluid
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.arrays import Arrays, Reader, traffic_entries
from crux_torch.schedule.model import Cluster, Decision, Link
from crux_torch.schedule.pace import DRIFT
from crux_torch.sim.placed import PlacedJob

#: A job of this many simulated iterations or more may end half of one early or late.
MANY = 20


class Progress(NamedTuple):
    """What a job has done so far: iterations ended, seconds in which it computed."""

    completed: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Grain:
    """How iterations are simulated: ``count`` of them, each as long as ``size`` real ones.

    One of size s computes and sends s times as much; ``docs/trace.md`` says what that changes.
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
    """What a running job follows; ``flows`` hold the bytes of a simulated iteration."""

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
        # The engine's links in its order, so that both have the same numbers.
        self._capacity_Bps = MappingProxyType(
            {name: np.inf if name in idle else c for name, c in topology.capacity_Bps.items()}
        )
        self._reader = Reader()

    @property
    def now_s(self) -> float:
        return self._engine.now_s

    @property
    def events(self) -> int:
        return self._engine.events

    def add(self, placed: PlacedJob, grain: Grain, level: int) -> None:
        """A job starts now, on its default paths, and ends after all of its ``grain``."""
        job = placed.job
        flows = self._reader.read(Cluster(self._capacity_Bps, (job,)))
        # The parts of a job follow each other. What stands for a job here is one of them.
        ends = np.flatnonzero(np.diff(job.parts or (0,) * len(job.flows), append=-1)) + 1
        flows = replace(
            flows,
            flow_bytes=flows.flow_bytes * grain.size,
            flow_start=np.concatenate(([0], ends)),
        )
        follows = _Followed(placed, grain, flows, placed.default_path, level)
        self._follows[job.name] = follows
        starts = [burst.at for burst in job.bursts]
        self._engine.add_job(
            job.name,
            compute_s=job.compute_s * grain.size,
            bursts=zip(starts, _traffic(follows), strict=True),
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
        """How far a job has come by now."""
        result = self._engine.result(name)
        size = self._follows[name].grain.size
        return Progress(result["completed"] * size, result["compute_s"])

    def forget(self, name: str) -> None:
        """A job has ended, and nobody asks for it again."""
        del self._follows[name]


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
    """What each part of each burst moves on the job's path, less the links that are never full."""
    moved, links, start = traffic_entries(follows.flows, np.array(follows.path, np.int64))
    parts = [slice(*ends) for ends in pairwise(start.tolist())]
    return [
        [(links[part], burst.share * moved[part]) for part in parts]
        for burst in follows.placed.job.bursts
    ]


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
