"""Crux-full beside schedulers beyond the paper: bounded slowdown, bursts."""

from __future__ import annotations

import io
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, json_option, publish, workers_option
from crux_torch.network.builders import crux_testbed, two_layer_clos
from crux_torch.network.topology import Topology
from crux_torch.schedule.arrays import FloatArray, arrays_of
from crux_torch.schedule.default.cap import bounds
from crux_torch.schedule.model import Burst, Cluster, Decision, Job, SchedulerOptions
from crux_torch.schedule.papers.intensity import solo_periods_s, unrouted_transfer_times_s
from crux_torch.schedule.schedulers import SCHEDULERS
from crux_torch.sim.collectives import build_job, hashed_paths
from crux_torch.sim.placement import Allocation, Request, cells, place_random
from crux_torch.sim.play import play
from crux_torch.sim.workers import Workers, mapped
from evaluation.small_case import PAPER_MODELS, draw_case

#: Caps of the frontier.
LIMITS = (1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
BASE = "crux-paper"
#: Gradients are reduced in this many bursts, as frameworks do in buckets.
BUCKETS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster to be scheduled, and how it is played.

    Attributes:
        kind: the set that it belongs to.
        seed: that it was drawn from.
        options: levels and the default paths.
        start_s: when each job starts.
    """

    kind: str
    seed: int
    cluster: Cluster
    options: SchedulerOptions
    start_s: Mapping[str, float]


def _case(
    kind: str, seed: int, cluster: Cluster, levels: int, default: Mapping[str, tuple[int, ...]]
) -> Case:
    rng = random.Random(f"{kind} start {seed}")
    options = SchedulerOptions(levels=tuple(range(levels)), seed=seed, default_path=default)
    start_s = {job.name: rng.uniform(0.0, 10.0) for job in cluster.jobs}
    return Case(kind, seed, cluster, options, start_s)


def small(seed: int) -> Case:
    """A case of §4.4: five jobs, three levels."""
    case = draw_case(seed)
    return _case("small", seed, case.cluster, 3, case.default_path)


def testbed(seed: int) -> Case:
    """Eight jobs of 8 or 16 GPUs on the paper's testbed, eight levels."""
    return _placed("testbed", seed, crux_testbed(), (8, 8, 8, 8, 16, 16, 16, 16))


def clos(seed: int) -> Case:
    """Forty jobs on 80 hosts of a two-layer Clos without oversubscription; eight levels."""
    topology = two_layer_clos(hosts=80, tors=40, aggregations=8)
    return _placed("clos", seed, topology, (8,) * 20 + (16,) * 15 + (32,) * 5)


KINDS: dict[str, Callable[[int], Case]] = {"small": small, "testbed": testbed, "clos": clos}


def _placed(kind: str, seed: int, topology: Topology, sizes: Sequence[int]) -> Case:
    cluster, hashed = place_models(kind, seed, topology, sizes)
    return _case(kind, seed, cluster, 8, hashed)


def place_models(
    kind: str, seed: int, topology: Topology, sizes: Sequence[int], *, rings_apart: bool = True
) -> tuple[Cluster, dict[str, tuple[int, ...]]]:
    """Models of §6.3, drawn evenly of those whose layout fits, on GPUs drawn at random.

    Args:
        kind, seed: what is drawn depends on both.
        sizes: GPUs of each job.
        rings_apart: whether each ring of a job moves on its own.

    Returns:
        the cluster, and the paths that ECMP's hash gives.
    """
    rng = random.Random(f"{kind} {seed}")
    allocation = Allocation(cells(topology))
    jobs = []
    for i, size in enumerate(sizes):
        model = rng.choice([m for m in PAPER_MODELS if size % (m.tensor * m.pipeline) == 0])
        request = Request(f"{i}-{model.name}", size)
        gpus = place_random(request, allocation, rng)
        assert gpus is not None, "the cluster is too small for its jobs"
        allocation.take(request, gpus)
        jobs.append(
            build_job(
                request.name,
                model,
                gpus,
                topology,
                buckets=BUCKETS,
                paths=partial(topology.candidate_paths, limit=8),
                alltoall_peers=4,
                apart=rings_apart,
            )
        )
    links = {link for job in jobs for f in job.flows for path in f.candidates for link in path}
    capacity_Bps = {link: topology.capacity_Bps[link] for link in sorted(links)}
    hashed = {job.name: hashed_paths(job, topology, seed=seed) for job in jobs}
    return Cluster(capacity_Bps, tuple(jobs)), hashed


def _one_level(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Fair sharing on the paths that Crux-full selects."""
    decision = SCHEDULERS[BASE](cluster, options)
    return replace(decision, level=dict.fromkeys(decision.level, options.levels[-1]))


def _one_burst(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-full where every job shows it one burst an iteration."""
    return SCHEDULERS[BASE](single_bursts(cluster), options)


@dataclass(frozen=True, slots=True)
class Plan:
    """A scheduler and what its options are changed to."""

    name: str
    scheduler: Callable[[Cluster, SchedulerOptions], Decision]
    options: Mapping[str, Any]


def plans() -> tuple[Plan, ...]:
    """All that are compared; a scheduler that is not registered is left out."""

    def registered(*names: str) -> list[Plan]:
        return [Plan(name, SCHEDULERS[name], {}) for name in names if name in SCHEDULERS]

    return (
        *registered(BASE, "ecmp"),
        Plan("crux paths, fair", _one_level, {}),
        *(
            Plan(capped_name(limit), SCHEDULERS["crux"], {"max_slowdown": limit})
            for limit in LIMITS
        ),
        Plan("crux, one burst", _one_burst, {}),
        *registered("ideal"),
    )


def capped_name(limit: float) -> str:
    """Name of the default policy with this cap in the results."""
    return f"crux {'uncapped' if limit == math.inf else limit}"


def _measured(kind: str, seed: int, horizon_s: float) -> list[dict[str, Any]]:
    return list(measure(KINDS[kind](seed), horizon_s))


def measure(case: Case, horizon_s: float) -> Iterator[dict[str, Any]]:
    """One row for each plan.

    ``worst_slowdown`` is the largest mean iteration of a job over its iteration alone on the paths
    of Crux-full; it is None where a job ended no iteration. ``certified`` is the largest bound of
    a job under the plan, None where a job has none, on the plan's own paths and for levels alone:
    plans with time shifts have none.
    """
    base = SCHEDULERS[BASE](case.cluster, case.options)
    alone_s = {name: b.alone_s for name, b in bounds(case.cluster, base).items()}
    for plan in plans():
        options = replace(case.options, **plan.options)
        began = time.perf_counter()
        decision = plan.scheduler(case.cluster, options)
        decision_s = time.perf_counter() - began
        report = play(case.cluster, decision, horizon_s, start_s=case.start_s)
        slowdown = {
            name: job.mean_iteration_s / alone_s[name]
            for name, job in report.jobs.items()
            if job.mean_iteration_s is not None
        }
        shifted = decision.shift_s or decision.grid_s or decision.isolated
        certain = {} if shifted else bounds(case.cluster, decision)
        certified = max((b.slowdown for b in certain.values()), default=np.inf)
        yield {
            "case": case.kind,
            "seed": case.seed,
            "plan": plan.name,
            "gpu_utilization": report.gpu_utilization,
            "flops_per_s": sum(
                report.jobs[job.name].compute_s / job.compute_s * job.flops / horizon_s
                for job in case.cluster.jobs
            ),
            "worst_slowdown": max(slowdown.values()) if len(slowdown) == len(alone_s) else None,
            "certified": float(certified) if np.isfinite(certified) else None,
            "decision_s": decision_s,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """One plan on all cases of a kind, over Crux-full on the same case.

    Attributes:
        ratio: utilisation over Crux-full's, of each case.
        flops_ratio: FLOPs done over Crux-full's, of each case.
        worst: worst slowdown of each case; infinite where a job ended no iteration.
        certified: bound of each case; infinite where there is none.
        decision_s: median time of a decision.
    """

    kind: str
    plan: str
    ratio: FloatArray
    flops_ratio: FloatArray
    worst: FloatArray
    certified: FloatArray
    decision_s: float

    @property
    def better(self) -> float:
        """Share of the cases in which it is better than Crux-full by more than 0.1%."""
        return float((self.ratio > 1.001).mean())

    @property
    def worse(self) -> float:
        """Share of the cases in which it is worse than Crux-full by more than 0.1%."""
        return float((self.ratio < 0.999).mean())


def summaries(rows: Sequence[Mapping[str, Any]]) -> list[Summary]:
    """The rows of all cases, by kind and plan, in their order."""
    base = {(r["case"], r["seed"]): r for r in rows if r["plan"] == BASE}
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["case"], row["plan"]), []).append(row)

    def over(mine: Sequence[Mapping[str, Any]], key: str) -> FloatArray:
        return np.array([row[key] / base[row["case"], row["seed"]][key] for row in mine])

    def column(mine: Sequence[Mapping[str, Any]], key: str) -> Any:
        return np.array([np.inf if row[key] is None else row[key] for row in mine])

    return [
        Summary(
            kind,
            plan,
            over(mine, "gpu_utilization"),
            over(mine, "flops_per_s"),
            column(mine, "worst_slowdown"),
            column(mine, "certified"),
            float(np.median(column(mine, "decision_s"))),
        )
        for (kind, plan), mine in found.items()
    ]


#: The paper's jobs of the lowest priority lose 55.5% of their throughput (§7.2): 1 / (1 - 0.555).
PAPER_WORST = 2.25


def single_bursts(cluster: Cluster) -> Cluster:
    """``cluster`` with the bursts of every job replaced by one that has the same overlap.

    That one carries all bytes and ends when the last burst does alone, so that an iteration alone
    takes as long and hides as much of its communication behind computation. Where all of it is
    hidden it starts when the bytes start on average, or earlier if it would not be hidden then.
    Transfer times are those of :func:`unrouted_transfer_times_s`, as no path is chosen yet.

    Raises:
        ClusterError: a cluster that contradicts itself.
    """
    arrays = arrays_of(cluster)
    t_s = unrouted_transfer_times_s(arrays)
    period_s = solo_periods_s(arrays, t_s)
    return replace(
        cluster,
        jobs=tuple(
            _single(job, t, period)
            for job, t, period in zip(arrays.jobs, t_s.tolist(), period_s.tolist(), strict=True)
        ),
    )


def _single(job: Job, t_s: float, period_s: float) -> Job:
    if len(job.bursts) < 2 or not job.compute_s > 0:
        return job
    # Of a burst that ends with the iteration, or with the computation, the latest start.
    latest = (period_s - t_s) / job.compute_s
    mean = sum(burst.at * burst.share for burst in job.bursts)
    at = min(latest, mean) if period_s <= job.compute_s else latest
    return replace(job, bursts=(Burst(min(max(at, 0.0), 1.0), 1.0),))


@click.command()
@click.option("--small", "smalls", type=click.IntRange(0), default=100, show_default=True)
@click.option("--testbed", "testbeds", type=click.IntRange(0), default=8, show_default=True)
@click.option("--clos", "closes", type=click.IntRange(0), default=3, show_default=True)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first case."
)
@click.option(
    "--horizon", "horizon_s", type=click.FloatRange(10.0), default=120.0, show_default=True
)
@workers_option
@json_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write beyond.json, beyond.txt and beyond.png to this folder.",
)
def beyond(
    smalls: int,
    testbeds: int,
    closes: int,
    seed: int,
    horizon_s: float,
    workers: Workers,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """Compare extensions of Crux with Crux-full: GPU utilisation and worst slowdown."""
    counts = {"small": smalls, "testbed": testbeds, "clos": closes}
    tasks = [
        (kind, s, horizon_s) for kind, count in counts.items() for s in range(seed, seed + count)
    ]
    found = tracked(mapped(_measured, tasks, workers), "clusters", len(tasks))
    rows = [row for of_cluster in found for row in of_cluster]
    settings = {
        "cases": counts,
        "seed": seed,
        "horizon_s": horizon_s,
        "buckets": BUCKETS,
        "paper_worst_slowdown": PAPER_WORST,
    }
    result = Result("beyond", settings, rows)
    shown = summaries(rows)
    text = table(shown)
    publish(result, text, json_path, out)
    if out is not None:
        from evaluation.figures.optimality import draw_beyond

        draw_beyond(shown).savefig(out / "beyond.png", dpi=120)


def table(found: Sequence[Summary]) -> str:
    """Ratios to Crux-full, worst slowdowns and bounds, as text."""
    console = Console(file=io.StringIO(), width=160)
    for kind in dict.fromkeys(s.kind for s in found):
        mine = [s for s in found if s.kind == kind]
        shown = Table(
            title=f"{kind}: {len(mine[0].ratio)} clusters; utilisation and FLOPs over Crux-full's",
            title_justify="left",
            box=box.SIMPLE,
        )
        for head in ("plan", "use / crux", "quartiles", "least, most", "better, worse", "FLOPs"):
            shown.add_column(head, justify="left" if head == "plan" else "right")
        for head in ("worst slowdown", "p90, max", "certified", "p90, max", "decision"):
            shown.add_column(head, justify="right")
        for s in mine:
            q = np.quantile(s.ratio, (0.25, 0.5, 0.75))
            shown.add_row(
                s.plan,
                f"{q[1]:.3f}",
                f"{q[0]:.3f} {q[2]:.3f}",
                f"{s.ratio.min():.3f} {s.ratio.max():.3f}",
                f"{s.better:.0%} {s.worse:.0%}",
                f"{np.median(s.flops_ratio):.3f}",
                *_spread(s.worst),
                *_spread(s.certified),
                f"{s.decision_s * 1e3:.1f} ms",
            )
        console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _spread(values: np.ndarray) -> tuple[str, str]:
    """Median; 90th percentile and largest: not interpolated, since some are infinite."""
    median, high = np.quantile(values, (0.5, 0.9), method="higher")

    def shown(value: float) -> str:
        return f"{value:.2f}" if np.isfinite(value) else "none"

    return shown(median), f"{shown(high)} {shown(values.max())}"
