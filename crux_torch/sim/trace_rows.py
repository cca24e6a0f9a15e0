"""Replays as rows of a table: a trace on a network, under a placement and a scheduler."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crux_torch.fabric.builders.clos import crux_testbed, double_sided, two_layer_clos
from crux_torch.fabric.builders.rail import RAIL_SERVER
from crux_torch.fabric.loaders import load_csv as load_topology_csv
from crux_torch.fabric.loaders import load_topology
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.scheduler import SCHEDULERS
from crux_torch.sim import traces
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.metrics import INTENSITY_EDGES, Series, per_day
from crux_torch.sim.placed import Placer
from crux_torch.sim.replay import ReplayOptions, replay
from crux_torch.sim.traces import Trace

PHILLY, SIZES = "philly.csv.gz", "lingjun_job_sizes.csv"
LINGJUN_FILES = ("job.csv", "worker.csv")


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
class Workload:
    """Which trace is replayed.

    Attributes:
        kind: ``hybrid``, ``generated``, ``lingjun``, or the path of a CSV of one's own.
        data: folder with the public files, for ``hybrid`` and ``lingjun``.
        jobs: how many arrive; None: as many as there are.
    """

    kind: str
    data: str | None = None
    jobs: int | None = 5000
    days: int = 14
    seed: int = 0

    def load(self) -> Trace:
        """The trace.

        Raises:
            WorkloadError: what is wrong with which file.
        """
        if self.kind == "generated":
            return traces.generate(self.seed, self.jobs or 5000, self.days)
        if self.kind == "hybrid":
            folder = self._folder((PHILLY, SIZES))
            return traces.load_hybrid(
                folder / PHILLY, folder / SIZES, days=self.days, jobs=self.jobs, seed=self.seed
            )
        if self.kind == "lingjun":
            folder = self._folder(LINGJUN_FILES)
            whole = traces.load_lingjun(folder / LINGJUN_FILES[0], folder / LINGJUN_FILES[1])
        else:
            whole = traces.load_csv(self.kind)
        inside = [job for job in whole.jobs if job.submit_s < self.days * traces.DAY_S]
        if not inside:
            raise WorkloadError(f"{self.kind}: no job arrives within --days {self.days}")
        kept = inside[: self.jobs]
        cut = {
            f"after --days {self.days}": len(whole.jobs) - len(inside),
            f"beyond --jobs {self.jobs}": len(inside) - len(kept),
        }
        dropped = {**whole.dropped, **{why: count for why, count in cut.items() if count}}
        return Trace(whole.kind, tuple(kept), dropped)

    def _folder(self, files: Sequence[str]) -> Path:
        folder = Path(self.data or ".")
        for name in files:
            if not (folder / name).exists():
                raise WorkloadError(f"{folder / name} is missing; the {self.kind} trace needs it")
        return folder


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
    return load_topology_csv(name) if name.endswith(".csv") else load_topology(name)


def run_row(run: Run) -> dict[str, Any]:
    """Plays one row; the time includes building the network, not reading the trace.

    Raises:
        WorkloadError, TopologyError: as the parts do.
    """
    trace = run.workload.load()
    wall, cpu = time.perf_counter(), time.process_time()
    with _uncollected():
        placer = Placer(topology_of(run.topology), rings_apart=run.options.rings_apart)
        outcome = replay(trace, placer, SCHEDULERS[run.scheduler], run.options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "topology": run.topology,
        "placement": run.options.placement,
        "scheduler": run.scheduler,
        "gpus": len(placer.cells.gpus),
        **asdict(outcome.summary),
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


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cycle collector, which would walk the many paths of a row in vain."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def run_rows(runs: Sequence[Run], threads: int = 1) -> Iterator[dict[str, Any]]:
    """Plays rows, each in a process of its own, so that its memory is its own; in their order."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(threads, len(runs)) or 1, maxtasksperchild=1) as pool:
        yield from pool.imap(run_row, runs)


def settings_of(workload: Workload, options: ReplayOptions, trace: Trace) -> dict[str, Any]:
    """What a result file says about how it came to be."""
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

    def short(values: Sequence[float]) -> list[float]:
        return [float(f"{v:.4g}") for v in values]

    return {
        "time_s": short(series.time_s),
        "gpu_utilization": short(series.gpu_utilization),
        "held": short(series.held),
        "waiting": list(series.waiting),
        "carried": {k: [short(span) for span in v] for k, v in series.carried.items()},
    }
