"""Crux on a torus: jobs of the catalogue whose rings cross routers that everybody's flows cross.

On a torus a flow has many shortest paths, and almost every link of the network is an alternative
to almost every other. A ring crosses many links and meets other jobs on each, where on a Clos it
meets them at a few uplinks. That has two consequences, which the schedulers here tell apart:

* Paths matter more. ``crux-paths`` are Crux's without its priorities; in ``crux-sweeps`` every
  flow chooses again, ``SWEEPS`` times, with all others in place.
* Strict priority can cost more than it gives: a ring moves at the pace of its slowest hop, so one
  that meets two more intense jobs on two links moves only while both are silent, whereas with fair
  sharing it always moves. Correction factors, which look at two jobs on one link, don't see that.
  ``crux`` plays its plans, with and without levels and sweeps among them, and sees it.

A case is a torus of hosts and the jobs on them, drawn at random: a model of §6.3 and 2 to 16 whole
hosts each, until hardly any host is free; iterations start at random times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, islice, pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import click

from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, chosen, json_option, publish, workers_option
from crux_torch.network.builders import GBPS
from crux_torch.network.builders import torus as torus_topology
from crux_torch.network.topology import Path as LinkPath
from crux_torch.network.topology import Topology
from crux_torch.schedule.arrays import arrays_of, paths_of, traffic_matrix
from crux_torch.schedule.model import Cluster, Decision, Job, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.schedule.papers.crux import assign_priorities, crux_paper, levels_of, select_paths
from crux_torch.schedule.schedulers import SCHEDULERS
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.collectives import build_job, hashed_paths
from crux_torch.sim.play import play
from crux_torch.sim.workers import Workers, mapped
from evaluation.small_case import PAPER_MODELS

Placement = Literal["scattered", "packed"]
#: Hosts of a job: drawn from these, each as likely as any other.
HOSTS = (2, 4, 8, 16)
#: Seconds within which jobs start.
STARTS_S = 5.0
#: Times that flows choose again in ``crux-sweeps``.
SWEEPS = 4
LEVELS = tuple(range(8))
#: What a case is played under, in the order of the tables.
SCHEDULERS_PLAYED = (
    "dimension-order",
    "ecmp",
    "taccl",
    "crux-pa",
    "crux-paths",
    "crux-paper",
    "crux-sweeps",
    "crux",
    "ideal",
)


@dataclass(frozen=True, slots=True)
class TorusCase:
    """Jobs on a torus.

    Attributes:
        topology: the torus.
        cluster: jobs and links.
        hashed: the candidates that ECMP's hash gives to each job.
        start_s: when each job starts.
    """

    topology: Topology
    cluster: Cluster
    hashed: Mapping[str, tuple[int, ...]]
    start_s: Mapping[str, float]


def torus_case(
    shape: tuple[int, ...],
    placement: Placement,
    seed: int,
    *,
    link_Bps: float = 100 * GBPS,
    topology: Topology | None = None,
    rings_apart: bool = True,
) -> TorusCase:
    """A case of this module's description.

    Args:
        shape: hosts along each dimension.
        placement: ``scattered``, over hosts drawn at random; ``packed``, over hosts that follow
            each other along the last dimension first, but for one job in four, which is scattered.
        seed: of everything that is drawn.
        link_Bps: bytes per second of a link between routers.
        topology: the torus of this shape and rate, where it is at hand.
        rings_apart: whether each ring of a job moves on its own.

    Raises:
        WorkloadError: an unknown placement.
    """
    if placement not in ("scattered", "packed"):
        raise WorkloadError(f"placement is {placement!r}; expected scattered or packed")
    topology = topology or torus_topology(shape, link_Bps=link_Bps)
    draw = random.Random(f"{shape} {placement} {seed}")
    free = list(topology.hosts)
    jobs: list[Job] = []
    while len(free) >= HOSTS[0]:
        size = draw.choice([hosts for hosts in HOSTS if hosts <= len(free)])
        apart = placement == "scattered" or draw.random() < 0.25
        hosts = draw.sample(free, size) if apart else free[:size]
        free = [host for host in free if host not in set(hosts)]
        gpus = [gpu for host in hosts for gpu in topology.gpus(host)]
        name = f"job-{len(jobs):02d}"
        model = draw.choice(PAPER_MODELS)
        jobs.append(build_job(name, model, gpus, topology, apart=rings_apart))
    hashed = {job.name: hashed_paths(job, topology, seed=seed) for job in jobs}
    start_s = {job.name: draw.uniform(0.0, STARTS_S) for job in jobs}
    return TorusCase(topology, Cluster(topology.capacity_Bps, tuple(jobs)), hashed, start_s)


def decide(case: TorusCase, scheduler: str) -> Decision:
    """Plays a case under ``scheduler``, one of ``SCHEDULERS_PLAYED``.

    ``dimension-order`` is ECMP's fair sharing on the paths that a torus commonly routes by: one
    dimension after the other. Schedulers that choose no paths have the hash's.

    Raises:
        WorkloadError: no such scheduler.
    """
    cluster = case.cluster
    if scheduler == "crux-paths":
        return crux_paper(cluster, SchedulerOptions(LEVELS[:1]))
    if scheduler == "crux-sweeps":
        return _crux_with_sweeps(cluster)
    paths = case.hashed
    if scheduler == "dimension-order":
        paths = {job.name: dimension_ordered(case.topology, job) for job in cluster.jobs}
        return ecmp(cluster, SchedulerOptions(default_path=paths))
    if scheduler not in SCHEDULERS:
        raise WorkloadError(f"scheduler {scheduler!r} is unknown on a torus")
    return SCHEDULERS[scheduler](cluster, SchedulerOptions(LEVELS, default_path=paths))


def _crux_with_sweeps(cluster: Cluster) -> Decision:
    """The paper's Crux, but every flow chooses again, with all others in place."""
    arrays = arrays_of(cluster)
    choice = select_paths(arrays, sweeps=SWEEPS)
    traffic = traffic_matrix(arrays, choice)
    priorities = assign_priorities(arrays, traffic)
    level, _ = levels_of(traffic, priorities, SchedulerOptions(LEVELS))
    return Decision(
        path=paths_of(arrays, choice),
        level=arrays.by_name(level),
        priority=arrays.by_name(priorities.priority),
    )


def dimension_ordered(topology: Topology, job: Job) -> tuple[int, ...]:
    """The candidate of each flow that turns least; of equals the one that crosses the first
    dimensions first, in the increasing direction."""

    @cache
    def order(path: LinkPath) -> tuple[int, tuple[int, ...], LinkPath]:
        crossed = axes(topology, path)
        return sum(one != other for one, other in pairwise(crossed)), crossed, path

    @cache
    def first(candidates: tuple[LinkPath, ...]) -> int:
        return min(range(len(candidates)), key=lambda c: order(candidates[c]))

    return tuple(first(flow.candidates) for flow in job.flows)


def axes(topology: Topology, path: LinkPath) -> tuple[int, ...]:
    """The dimension of each link between routers that ``path`` crosses."""
    crossed = []
    for link in path:
        src, dst = topology.ends(link)
        if topology.nodes[src].kind == topology.nodes[dst].kind == "router":
            places = (name.removeprefix("router").split("_") for name in (src, dst))
            differs = [a != b for a, b in zip(*places, strict=True)]
            crossed.append(differs.index(True))
    return tuple(crossed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one scheduler on a case.

    Attributes:
        gpu_utilization: of the GPUs of all jobs.
        busiest: the highest utilisation of a link between routers over the whole run.
        slowdown: of the job that suffered most: its mean iteration over its mean one in ``ideal``.
        decision_s: seconds that the decision took.
    """

    gpu_utilization: float
    busiest: float
    slowdown: float
    decision_s: float


def outcomes(
    case: TorusCase, horizon_s: float, schedulers: Sequence[str] = SCHEDULERS_PLAYED
) -> dict[str, Outcome]:
    """Plays a case under each of ``schedulers`` for ``horizon_s`` seconds."""
    alone = play(case.cluster, decide(case, "ideal"), horizon_s, start_s=case.start_s)
    found = {}
    for scheduler in schedulers:
        begin = time.perf_counter()
        decision = decide(case, scheduler)
        decision_s = time.perf_counter() - begin
        report = play(case.cluster, decision, horizon_s, start_s=case.start_s)
        busiest = max(
            (
                carried / (horizon_s * case.topology.capacity_Bps[link])
                for link, carried in report.link_bytes.items()
                if link in case.topology.links and case.topology.layer(link) == "router-router"
            ),
            default=0.0,
        )
        slowdowns = [
            (report.jobs[name].mean_iteration_s or horizon_s) / job.mean_iteration_s
            for name, job in alone.jobs.items()
            if job.mean_iteration_s
        ]
        found[scheduler] = Outcome(
            report.gpu_utilization, busiest, max(slowdowns, default=1.0), decision_s
        )
    return found


SHAPES = ((8, 8), (4, 4, 4))
LINK_GBPS = (100, 400)
PLACEMENTS: tuple[Placement, ...] = ("scattered", "packed")


def rows_of(
    schedulers: Sequence[str], seeds: int, horizon_s: float, workers: Workers
) -> list[dict[str, Any]]:
    """One row for every torus, rate, placement and scheduler; values of all seeds in order."""
    cells = list(product(SHAPES, LINK_GBPS, PLACEMENTS))
    tasks = [(*cell, seed, horizon_s, schedulers) for cell in cells for seed in range(seeds)]
    found = tracked(mapped(_outcomes, tasks, workers), "cases", len(tasks))
    rows = []
    for shape, gbps, placement in cells:
        played = list(islice(found, seeds))
        best = [of["ideal"].gpu_utilization for of in played]
        for scheduler in schedulers:
            mine = [of[scheduler] for of in played]
            rows.append(
                {
                    "shape": shape,
                    "link_Gbps": gbps,
                    "placement": placement,
                    "scheduler": scheduler,
                    "gpu_utilization": [o.gpu_utilization for o in mine],
                    "of_ideal": [o.gpu_utilization / b for o, b in zip(mine, best, strict=True)],
                    "busiest_link": [o.busiest for o in mine],
                    "slowdown": [o.slowdown for o in mine],
                    "decision_s": [o.decision_s for o in mine],
                }
            )
    return rows


def _outcomes(
    shape: tuple[int, ...],
    gbps: int,
    placement: Placement,
    seed: int,
    horizon_s: float,
    schedulers: Sequence[str],
) -> dict[str, Outcome]:
    case = torus_case(shape, placement, seed, topology=_topology(shape, gbps))
    return outcomes(case, horizon_s, schedulers)


@cache
def _topology(shape: tuple[int, ...], gbps: int) -> Topology:
    return torus_topology(shape, link_Bps=gbps * GBPS)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text: medians over seeds, the least and the most in brackets."""
    lines = []
    for _, group in groupby(rows, key=itemgetter("shape", "link_Gbps", "placement")):
        cell = list(group)
        first = cell[0]
        shape = "x".join(map(str, first["shape"]))
        by_name = {row["scheduler"]: row for row in cell}
        lines += [
            f"{shape} torus, links of {first['link_Gbps']} Gb/s, {first['placement']} jobs, "
            f"{len(first['of_ideal'])} seeds",
            f"  {'':<16} {'utilisation':>20} {'of ideal':>20} {'over ecmp':>9} {'beats it':>8} "
            f"{'busiest link':>12} {'worst slowdown':>14} {'decision ms':>11}",
        ]
        for row in cell:
            against = zip(row["of_ideal"], by_name["ecmp"]["of_ideal"], strict=True)
            gains = [mine / other for mine, other in against]
            lines.append(
                f"  {row['scheduler']:<16} {spread(row['gpu_utilization']):>20} "
                f"{spread(row['of_ideal']):>20} {statistics.median(gains) - 1:>+9.1%} "
                f"{sum(gain > 1 for gain in gains):>2} of {len(gains):>2} "
                f"{statistics.median(row['busiest_link']):>12.2f} "
                f"{statistics.median(row['slowdown']):>14.2f} "
                f"{statistics.median(row['decision_s']) * 1e3:>11.1f}"
            )
        lines.append("")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}-{max(values):.3f}]"


@click.command()
@click.option(
    "--schedulers",
    default=",".join(SCHEDULERS_PLAYED),
    show_default=True,
    help="Comma-separated. ecmp and ideal, which the others are compared with, are always played.",
)
@click.option("--seeds", default=6, show_default=True, help="Cases of each kind.")
@click.option(
    "--horizon",
    "horizon_s",
    type=click.FloatRange(min=2 * STARTS_S),
    default=30.0,
    show_default=True,
    help="Seconds played.",
)
@workers_option
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/torus.{json,txt}.")
def torus(
    schedulers: str,
    seeds: int,
    horizon_s: float,
    workers: Workers,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """Plays random jobs on tori under every scheduler."""
    wanted = {*chosen(schedulers, list(SCHEDULERS_PLAYED)), "ecmp", "ideal"}
    played = [scheduler for scheduler in SCHEDULERS_PLAYED if scheduler in wanted]
    rows = rows_of(played, seeds, horizon_s, workers)
    text = table(rows)
    settings = {"seeds": seeds, "horizon_s": horizon_s, "levels": len(LEVELS), "sweeps": SWEEPS}
    result = Result("torus", settings, rows)
    publish(result, text, json_path, out)
