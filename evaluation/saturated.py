"""A cluster whose GPUs are all held, in the order of the paper's Figures 23 and 25.

A snapshot: jobs of the trace arrive in random order until they hold ``HELD`` of the GPUs; each
scheduler plans once, and the jobs are played for some seconds. Nobody waits in a queue, so a job
that starves counts as what it is, a job that computes nothing, and holds nobody up.

The paper says neither where "no job scheduler" puts a job, nor how much narrower its networks get
towards the top. Both are assumptions here, and every combination is printed. Doubling all traffic
is the same as halving all links, so the oversubscription stands for the traffic, too.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, json_option, names_option, publish, workers_option
from crux_torch.network.builders import double_sided, two_layer_clos
from crux_torch.network.topology import Topology
from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.default.rehearsal import played_alone_s
from crux_torch.schedule.model import Burst, Cluster, Decision, SchedulerOptions
from crux_torch.schedule.papers.intensity import link_traffic
from crux_torch.schedule.schedulers import IN_TRACES
from crux_torch.sim.placement import (
    PLACEMENTS,
    Allocation,
    PlacedJob,
    Placer,
    Request,
    interleaving_efficiency,
)
from crux_torch.sim.play import engine_of, play
from crux_torch.sim.traces import TraceJob, Workload
from crux_torch.sim.workers import Workers, mapped
from evaluation.trace import PAPER

NETWORKS: dict[str, Callable[..., Topology]] = {
    "clos": two_layer_clos,
    "double-sided": double_sided,
}
#: Rate below a layer of the network over the rate above it.
OVERSUBSCRIPTION = (1, 2, 4)
#: What stands for the paper's "no job scheduler", and its job schedulers.
UNSCHEDULED = ("hosts", "none")
PLACED = (*UNSCHEDULED, "hived", "muri")
#: Muri as published: two jobs on the same GPUs, in turns.
SHARED = "muri-shared"
#: Share of the GPUs that jobs hold in the end, and arrivals in a row that may find no room.
HELD, MISSES = 0.98, 200
#: Flows that each hop of a ring is split into.
CONNECTIONS = 4
#: Share of an iteration alone below which a job counts as starved.
STARVED = 0.02
#: Crux's §2.2: shares of the jobs and of the GPUs that meet contention.
PAPER_MEETS = (0.363, 0.51)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs that run at one moment, and the GPUs of the whole cluster."""

    topology: Topology
    jobs: tuple[PlacedJob, ...]
    gpus: int
    start_s: Mapping[str, float]

    @property
    def held(self) -> float:
        """Share of the GPUs that jobs hold."""
        return sum(placed.job.gpus for placed in self.jobs) / self.gpus


def snapshot(topology: Topology, placement: str, workload: Workload, seed: int) -> Snapshot:
    """Fills a cluster with jobs of the trace.

    Args:
        placement: a name of ``PLACEMENTS``, or ``SHARED``.
        seed: of the order of arrivals, of placement, and of the times at which iterations start.

    Raises:
        WorkloadError: the trace can't be read.
    """
    rng = random.Random(f"saturated {seed}")
    shares = placement == SHARED
    place = PLACEMENTS["muri" if shares else placement]
    arrivals = list(workload.load().jobs)
    rng.shuffle(arrivals)
    waiting: dict[int, list[TraceJob]] = defaultdict(list)
    placer = Placer(topology, connections=CONNECTIONS)
    allocation = Allocation(placer.cells)
    gpus = left = len(placer.cells.gpus)
    placed: list[PlacedJob] = []
    misses = 0
    for arrival in arrivals:
        full = left <= (1.0 - HELD) * gpus or misses >= MISSES
        if full and not shares:
            break
        if full or arrival.gpus > left:
            misses += 1
            waiting[arrival.gpus].append(arrival)
            continue
        request = _request(placer, arrival)
        choice = place(request, allocation, rng)
        assert choice is not None, "a job fits wherever as many GPUs are free"
        allocation.take(request, choice)
        left -= arrival.gpus
        misses = 0
        placed.append(placer.place(arrival.name, arrival.model, choice))
    if shares:
        placed = [_beside_another(one, waiting, placer, allocation) for one in placed]
    start_s = {each.job.name: rng.uniform(0.0, each.alone_s) for each in placed}
    return Snapshot(topology, tuple(placed), gpus, start_s)


def _request(placer: Placer, arrival: TraceJob) -> Request:
    reference = placer.reference(arrival.model, arrival.gpus)
    network_s = reference.alone_s - reference.compute_s
    return Request(arrival.name, arrival.gpus, reference.compute_s, network_s)


def _beside_another(
    one: PlacedJob, waiting: Mapping[int, list[TraceJob]], placer: Placer, allocation: Allocation
) -> PlacedJob:
    """The job and the waiting one that it interleaves with best, on the same GPUs.

    Both are one job here, as Muri runs a group: each computes while the other one sends, in turns.
    """
    request, gpus = allocation.running[one.job.name]
    among = waiting[len(gpus)][:MISSES]
    if not among:
        return one
    efficiency = [interleaving_efficiency(request, _request(placer, other)) for other in among]
    second = waiting[len(gpus)].pop(efficiency.index(max(efficiency)))
    return in_turns(one, placer.place(second.name, second.model, gpus), placer)


def in_turns(one: PlacedJob, other: PlacedJob, placer: Placer) -> PlacedJob:
    """Two jobs that take turns on the same GPUs, as one job."""
    computing_s = one.job.compute_s + other.job.compute_s
    sent = [sum(flow.bytes for flow in each.job.flows) for each in (one, other)]
    share = sent[1] / sum(sent) if any(sent) else 0.5
    turn = one.job.compute_s / computing_s
    first, second = (each.job.parts or (0,) * len(each.job.flows) for each in (one, other))
    parts = (*first, *(max(first, default=-1) + 1 + part for part in second))
    job = replace(
        one.job,
        flops=one.job.flops + other.job.flops,
        compute_s=computing_s,
        flows=(*one.job.flows, *other.job.flows),
        parts=parts,
        bursts=(Burst(0.0, share), Burst(turn, 1.0 - share)),
    )
    path = (*one.default_path, *other.default_path)
    least_s = max(computing_s, one.alone_s, other.alone_s)
    cluster = Cluster(placer.topology.capacity_Bps, (job,))
    engine = engine_of(cluster, Decision(path={job.name: path}, level={job.name: 0}))
    alone_s = played_alone_s(engine, job.name, least_s)
    return replace(one, job=job, default_path=path, alone_s=alone_s, arrays=arrays_of(cluster))


def meeting(jobs: Sequence[PlacedJob]) -> tuple[float, float]:
    """Shares of the jobs, and of their GPUs, that share a link with another job under ECMP."""
    on_link: dict[str, set[str]] = defaultdict(set)
    for placed in jobs:
        for link, moved in link_traffic(placed.job, placed.default_path).items():
            if moved > 0:
                on_link[link].add(placed.job.name)
    met = set().union(*(names for names in on_link.values() if len(names) > 1))
    gpus = {placed.job.name: placed.job.gpus for placed in jobs}
    return len(met) / len(gpus), sum(gpus[name] for name in met) / sum(gpus.values())


def cell(
    network: str,
    oversubscription: int,
    placement: str,
    seed: int,
    workload: Workload,
    schedulers: Sequence[str],
    horizon_s: float,
) -> list[dict[str, Any]]:
    """A row for each scheduler on one snapshot."""
    topology = NETWORKS[network](oversubscription=float(oversubscription))
    seen = snapshot(topology, placement, workload, seed)
    cluster = Cluster(topology.capacity_Bps, tuple(placed.job for placed in seen.jobs))
    default_path = {placed.job.name: placed.default_path for placed in seen.jobs}
    options = SchedulerOptions(seed=seed, default_path=default_path)
    jobs_met, gpus_met = meeting(seen.jobs)
    about = {"network": network, "oversubscription": oversubscription, "placement": placement}
    about |= {"seed": seed, "jobs": len(seen.jobs), "held": seen.held}
    about |= {"jobs_met": jobs_met, "gpus_met": gpus_met}
    rows = []
    for name in schedulers:
        decision = IN_TRACES[name](cluster, options)
        report = play(cluster, decision, horizon_s, start_s=seen.start_s)
        shares = []
        for placed in seen.jobs:
            found = report.jobs[placed.job.name]
            shares.append(found.compute_s / placed.job.compute_s * placed.alone_s / horizon_s)
        rows.append(
            {
                **about,
                "scheduler": name,
                "gpu_utilization": report.gpu_utilization * seen.held,
                "held_utilization": report.gpu_utilization,
                "starved": sum(share < STARVED for share in shares),
                "paper_gpu_utilization": _paper(network, placement, name),
            }
        )
    return rows


def rms_from_paper(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Root mean square of the differences from the paper's bars; None where it has none."""
    errors = [
        statistics.mean(each["gpu_utilization"] for each in mine) - paper
        for mine in _grouped(rows, "scheduler")
        if (paper := mine[0]["paper_gpu_utilization"]) is not None
    ]
    return math.sqrt(statistics.fmean(e * e for e in errors)) if errors else None


def _paper(network: str, placement: str, scheduler: str) -> float | None:
    """The paper's bar; it has one placement without a job scheduler."""
    known = {SHARED: "muri", **dict.fromkeys(UNSCHEDULED, "none")}
    return PAPER.get((network, known.get(placement, placement), scheduler))


def _grouped(rows: Sequence[Mapping[str, Any]], *keys: str) -> Iterator[list[Mapping[str, Any]]]:
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    yield from found.values()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for each network, placement and oversubscription."""
    lines = []
    for mine in _grouped(rows, "network", "placement", "oversubscription"):
        first = mine[0]
        by_seed = {row["seed"]: row for row in mine}.values()
        jobs_met, gpus_met, held, jobs = (
            statistics.mean(row[key] for row in by_seed)
            for key in ("jobs_met", "gpus_met", "held", "jobs")
        )
        lines.append(
            f"{first['network']}, placement {first['placement']}, {first['oversubscription']}:1, "
            f"{len(by_seed)} seeds: {jobs:.0f} jobs hold {held:.1%} of the GPUs"
        )
        lines.append(
            f"  under ECMP {jobs_met:.1%} of the jobs, with {gpus_met:.1%} of the held GPUs, share "
            f"a link with another job (paper's trace: {PAPER_MEETS[0]:.1%}, {PAPER_MEETS[1]:.0%})"
        )
        lines.append(
            f"  {'scheduler':<11} {'of all GPUs':>11} {'lowest':>7} {'highest':>8} "
            f"{'of held':>8} {'starved jobs':>13} {'paper':>6}"
        )
        for group in _grouped(mine, "scheduler"):
            used = [row["gpu_utilization"] for row in group]
            of_held = statistics.mean(row["held_utilization"] for row in group)
            starved = statistics.mean(row["starved"] for row in group)
            paper = group[0]["paper_gpu_utilization"]
            lines.append(
                f"  {group[0]['scheduler']:<11} {statistics.mean(used):>11.3f} {min(used):>7.3f} "
                f"{max(used):>8.3f} {of_held:>8.3f} {starved:>13.1f} "
                f"{'-' if paper is None else f'{paper:.2f}':>6}"
            )
        rms = rms_from_paper(mine)
        lines.append("" if rms is None else f"  rms difference from the paper: {rms:.3f}\n")
    return "\n".join(lines)


@click.command()
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False),
    help="Folder with the public traces (docs/research/simulator.md); default: generated jobs.",
)
@names_option("--networks", "networks", NETWORKS, "all")
@names_option("--placements", "placements", (*PLACED, SHARED), ",".join(PLACED))
@names_option("--schedulers", "schedulers", IN_TRACES, "all")
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--horizon",
    "horizon_s",
    type=click.FloatRange(min=1.0),
    default=40.0,
    show_default=True,
    help="Seconds played.",
)
@workers_option
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/NAME.{json,txt}.")
@click.option("--name", default="saturated", help="Name of the result.")
def saturated(
    data: str | None,
    networks: Sequence[str],
    placements: Sequence[str],
    schedulers: Sequence[str],
    seeds: int,
    horizon_s: float,
    workers: Workers,
    json_path: Path | None,
    out: Path | None,
    name: str,
) -> None:
    """Plays jobs that hold all GPUs: which assumptions give the order of Figures 23 and 25."""
    workload = Workload("hybrid", data) if data else Workload("generated")
    cells = [
        (network, ratio, placement, seed, workload, schedulers, horizon_s)
        for network, placement, ratio, seed in product(
            networks, placements, OVERSUBSCRIPTION, range(seeds)
        )
    ]
    found = tracked(mapped(cell, cells, workers), "snapshots", len(cells))
    rows = [row for of_cell in found for row in of_cell]
    settings = {"trace": workload.kind, "seeds": seeds, "horizon_s": horizon_s, "held": HELD}
    settings["connections"] = CONNECTIONS
    publish(Result(name, settings, rows), table(rows), json_path, out)
