"""Is a policy safe to leave on? Seeded clusters of many kinds, each played from many phases.

    python -m benchmarks.safety [--clusters 100] [--policies ecmp,crux] [--out DIR]

With ``--append`` the rows join those that DIR has, so that many clusters can be played in parts:
equal seeds give equal clusters, and each row is of one seed and one policy. The constants of the
default policy were chosen on the seeds ``TUNED``, so these count in a line of their own only.

Each cluster is played under every policy, from the same start times. A policy *loses* where it
keeps fewer GPUs busy than a baseline, by more than 1%. There are two baselines: what the network
does by itself (``ecmp``), and Crux's paths with fair sharing (``one-level``). A job's slowdown is
its mean iteration over its iteration alone on Crux's paths; a cluster counts its worst job, in the
mean of the phases. A job is *beyond the cap* where that is more than the cap and more than 1% above
what either baseline gives to it.

Policies with ``-shifted`` have CASSINI's shifts on the paths and levels of the one that they are
named after. Policies with ``-blind`` know no topology, as in a cluster without one: they see all
jobs on one link, each with its transfer time, and the network's hash chooses the paths.

With ``--rings-apart`` the rings and groups of a job move each on its own while a cluster is played.
The default policy's rehearsal lets them, too; other schedulers take a job for one transfer. Of the
seeds only the kinds with several rings a job are played, both ways; *from rings together* is how
far the utilisation is from that of rings that move together.

The kinds are: ``small`` (five jobs, §4.4 of Crux), ``testbed`` (eight jobs on Crux's), ``clos``
and ``double-sided`` (twelve jobs), ``torus`` (4 by 4 hosts), ``periods`` (two to six jobs of few
periods that meet on one or two links, as in CASSINI) and ``heavy`` (rings over a few links that
are asked for up to twice what they carry).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from crux_torch import _fluid
from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, publish, workers_option
from crux_torch.network.builders import GBPS, crux_testbed, double_sided, two_layer_clos
from crux_torch.schedule.arrays import arrays_of, choice_of, paths_of, traffic_matrix
from crux_torch.schedule.default.crux import crux
from crux_torch.schedule.model import (
    Burst,
    Cluster,
    Decision,
    Flow,
    Job,
    Scheduler,
    SchedulerOptions,
)
from crux_torch.schedule.papers.cassini import cassini
from crux_torch.schedule.papers.crux import crux_paper
from crux_torch.schedule.papers.intensity import solo_periods_s, transfer_times_s
from crux_torch.schedule.schedulers import SCHEDULERS
from crux_torch.sim.play import engine_of
from crux_torch.sim.workers import Workers, mapped

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from evaluation.beyond import place_models
from evaluation.small_case import draw_case
from evaluation.torus import Placement, torus_case

#: A difference that counts.
NOTICED = 0.01
CAP = 3.0
#: A play lasts for this many iterations of the slowest job alone, unless all jobs together would
#: do more than so many; a share of it runs before the count begins.
ROUNDS, ITERATIONS, WARM_UP = 60, 12_000, 0.2
POLICIES = (
    "ecmp",
    "one-level",
    "crux",
    "crux-paper",
    "sincronia",
    "varys",
    "taccl",
    "cassini",
    "one-level-shifted",
    "crux-shifted",
    "crux-blind",
    "crux-paper-blind",
)
BASELINES = ("ecmp", "one-level")
#: GPUs of the jobs on the Clos and on the double-sided network.
TWELVE = (8,) * 5 + (16,) * 4 + (24, 24, 32)
#: Seeds that the default policy was tuned on.
TUNED = range(42)


class Case(NamedTuple):
    """A cluster and how it is to be scheduled."""

    cluster: Cluster
    options: SchedulerOptions


def small(seed: int) -> Case:
    """Five jobs of one ring on three levels, as in §4.4."""
    found = draw_case(seed)
    options = SchedulerOptions((0, 1, 2), seed, found.default_path)
    return Case(found.cluster, options)


def paper_testbed(seed: int, *, rings_apart: bool = False) -> Case:
    """Eight jobs of 8 or 16 GPUs."""
    sizes = (8, 8, 8, 8, 16, 16, 16, 16)
    return _placed("testbed", seed, crux_testbed(), sizes, rings_apart)


def clos(seed: int, *, rings_apart: bool = False) -> Case:
    """Twelve jobs on 24 hosts under 12 ToR switches, oversubscribed by up to 2."""
    network = two_layer_clos(24, 12, 4, oversubscription=1.0 + seed % 3 / 2)
    return _placed("safe clos", seed, network, TWELVE, rings_apart)


def two_sided(seed: int, *, rings_apart: bool = False) -> Case:
    """Twelve jobs on a double-sided network of 24 hosts."""
    network = double_sided(24, pods=3, cores=8)
    return _placed("safe double-sided", seed, network, TWELVE, rings_apart)


def torus(seed: int, *, rings_apart: bool = False) -> Case:
    """Jobs on a torus of 4 by 4 hosts, packed or scattered."""
    placement: Placement = "packed" if seed % 2 else "scattered"
    found = torus_case((4, 4), placement, seed, rings_apart=rings_apart)
    options = SchedulerOptions(seed=seed, default_path=found.hashed)
    return Case(_used(found.cluster), options)


def periods(seed: int) -> Case:
    """Jobs whose periods are a few multiples of each other, on one or two links."""
    rng = random.Random(f"periods {seed}")
    unit_s = rng.choice((0.04, 0.08, 0.16))
    capacity_Bps = {"x": 50 * GBPS, "y": 50 * GBPS}
    jobs = []
    for j in range(rng.randint(2, 6)):
        period_s = unit_s * rng.choice((1, 2, 2, 3, 4)) * rng.choice((1.0, 1.0, 1.03))
        sends = rng.uniform(0.2, 0.7)
        gpus = rng.choice((2, 4, 8, 16))
        jobs.append(
            Job(
                name=f"j{j}",
                gpus=gpus,
                flops=gpus * period_s * (1 - sends) * rng.uniform(0.5e14, 1.5e14),
                compute_s=period_s * (1 - sends),
                flows=(Flow(period_s * sends * 50 * GBPS, (("x",), ("y",))),),
                bursts=(Burst(rng.choice((0.5, 1.0, 1.0)), 1.0),),
            )
        )
    cluster = Cluster(capacity_Bps, tuple(jobs))
    return Case(cluster, SchedulerOptions(tuple(range(8)), seed, _hashed(cluster, rng)))


def heavy(seed: int) -> Case:
    """Rings over one to three of a few links, which are asked for up to twice what they carry."""
    rng = random.Random(f"heavy {seed}")
    links = [f"l{i}" for i in range(rng.randint(2, 6))]
    capacity_Bps = {link: rng.choice((25.0, 50.0, 100.0)) * GBPS for link in links}
    jobs = []
    for j in range(rng.randint(3, 10)):
        width = rng.randint(1, min(3, len(links)))
        paths = rng.sample(list(combinations(links, width)), 2 if width < len(links) else 1)
        period_s = 10 ** rng.uniform(-1.5, 0.5)
        sends = rng.uniform(0.2, 0.8)
        gpus = rng.choice((8, 8, 16, 32, 64))
        slowest_Bps = min(capacity_Bps[link] for path in paths for link in path)
        at = sorted(rng.uniform(0.2, 1.0) for _ in range(rng.choice((1, 1, 2, 4))))
        jobs.append(
            Job(
                name=f"j{j}",
                gpus=gpus,
                flops=gpus * period_s * 10 ** rng.uniform(13, 14.5),
                compute_s=period_s * (1 - sends / 2),
                flows=(Flow(period_s * sends * slowest_Bps, tuple(paths)),),
                bursts=tuple(Burst(a, 1 / len(at)) for a in at),
            )
        )
    cluster = Cluster(capacity_Bps, tuple(jobs))
    levels = tuple(range(rng.choice((3, 7, 8))))
    return Case(cluster, SchedulerOptions(levels, seed, _hashed(cluster, rng)))


#: By name; each is drawn in turn, the cheap ones more often.
KINDS: dict[str, Callable[..., Case]] = {
    "small": small,
    "periods": periods,
    "heavy": heavy,
    "testbed": paper_testbed,
    "clos": clos,
    "double-sided": two_sided,
    "torus": torus,
}
#: Kinds whose jobs have several rings.
OF_RINGS = ("testbed", "clos", "double-sided", "torus")
TURNS = (*("small", "periods", "heavy") * 3, "testbed", "clos", "double-sided", "torus", "small")


def _placed(kind: str, seed: int, topology: Any, sizes: Sequence[int], rings_apart: bool) -> Case:
    cluster, hashed = place_models(kind, seed, topology, sizes, rings_apart=rings_apart)
    return Case(cluster, SchedulerOptions(tuple(range(8)), seed, hashed))


def _used(cluster: Cluster) -> Cluster:
    links = {link for job in cluster.jobs for f in job.flows for p in f.candidates for link in p}
    return replace(cluster, capacity_Bps={e: cluster.capacity_Bps[e] for e in sorted(links)})


def _hashed(cluster: Cluster, rng: random.Random) -> dict[str, tuple[int, ...]]:
    return {
        job.name: tuple(rng.randrange(len(flow.candidates)) for flow in job.flows)
        for job in cluster.jobs
    }


def one_level(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux's paths with fair sharing."""
    return crux_paper(cluster, replace(options, levels=options.levels[:1]))


def shifted(paths: Scheduler, *, keep_levels: bool) -> Scheduler:
    """CASSINI's shifts on the paths of another scheduler, with its levels or with one for all."""

    def decide(cluster: Cluster, options: SchedulerOptions) -> Decision:
        found = paths(cluster, options)
        on_these = cassini(cluster, replace(options, default_path=found.path))
        level = found.level if keep_levels else on_these.level
        return replace(found, level=level, shift_s=on_these.shift_s, grid_s=on_these.grid_s)

    return decide


def blind(scheduler: Scheduler) -> Scheduler:
    """Levels of ``scheduler`` where no topology is known, on the network's own paths."""

    def decide(cluster: Cluster, options: SchedulerOptions) -> Decision:
        arrays = arrays_of(cluster)
        choice = choice_of(arrays, options.default_path)
        t_s = transfer_times_s(arrays, traffic_matrix(arrays, choice)).tolist()
        jobs = tuple(
            replace(job, flows=(Flow(t, (("core",),)),))
            for job, t in zip(arrays.jobs, t_s, strict=True)
        )
        told = scheduler(Cluster({"core": 1.0}, jobs), replace(options, default_path=None))
        return replace(told, path=paths_of(arrays, choice))

    return decide


PLAYED: dict[str, Scheduler] = {
    **SCHEDULERS,
    "one-level": one_level,
    "one-level-shifted": shifted(one_level, keep_levels=False),
    "crux-shifted": shifted(crux, keep_levels=True),
    "crux-blind": blind(crux),
    "crux-paper-blind": blind(crux_paper),
}


@dataclass(frozen=True, slots=True)
class Played:
    """One cluster under one policy.

    Attributes:
        busy: GPUs that compute, as a share of all.
        slowdown: of each job.
        cpu_s: that the decision took.
    """

    busy: float
    slowdown: Mapping[str, float]
    cpu_s: float


def measure(case: Case, policies: Sequence[str], phases: int) -> dict[str, Played]:
    """What becomes of a cluster under each policy."""
    arrays = arrays_of(case.cluster)
    base = one_level(case.cluster, case.options)
    t_s = transfer_times_s(arrays, traffic_matrix(arrays, choice_of(arrays, base.path)))
    alone_s = dict(zip((j.name for j in arrays.jobs), solo_periods_s(arrays, t_s), strict=True))
    rate = sum(1 / s for s in alone_s.values())
    until_s = min(ROUNDS * max(alone_s.values()), ITERATIONS / rate)
    rng = random.Random(f"phases {case.options.seed}")
    starts = [{name: rng.random() * s for name, s in alone_s.items()} for _ in range(phases)]
    found = {}
    for name in policies:
        scheduler = PLAYED[name]
        began_s = time.process_time()  # the engine plays in threads of its own
        decision = scheduler(case.cluster, case.options)
        cpu_s = time.process_time() - began_s
        engines = [engine_of(case.cluster, decision, start_s=start) for start in starts]
        computed_s = []
        for end_s in (WARM_UP * until_s, (1 + WARM_UP) * until_s):
            _fluid.run_all(engines, [end_s] * phases)
            results = [engine.results() for engine in engines]
            computed_s.append(
                {n: sum(r[n]["compute_s"] for r in results) / phases for n in alone_s}
            )
        share = {n: (computed_s[1][n] - computed_s[0][n]) / until_s for n in alone_s}
        gpus = {job.name: job.gpus for job in case.cluster.jobs}
        compute_s = {job.name: job.compute_s for job in case.cluster.jobs}
        found[name] = Played(
            busy=sum(share[n] * gpus[n] for n in share) / sum(gpus.values()),
            slowdown={
                n: compute_s[n] / s / alone_s[n] if s > 0 else float("inf")
                for n, s in share.items()
            },
            cpu_s=cpu_s,
        )
    return found


def row_of(task: tuple[int, tuple[str, ...], int, bool]) -> list[dict[str, Any]]:
    """The rows of one cluster, one for each policy."""
    seed, policies, phases, rings_apart = task
    kind = TURNS[seed % len(TURNS)]
    case = KINDS[kind](seed)
    together = None
    if rings_apart:
        together = measure(case, policies, phases)
        case = KINDS[kind](seed, rings_apart=True)
    played = measure(case, policies, phases)
    rows = []
    for name, one in played.items():
        worst = max(one.slowdown, key=lambda job: one.slowdown[job])
        beyond = [
            job
            for job, slowdown in one.slowdown.items()
            if slowdown > CAP
            and slowdown > (1 + NOTICED) * max(played[b].slowdown[job] for b in BASELINES)
        ]
        rows.append(
            {
                "kind": kind,
                "seed": seed,
                "jobs": len(case.cluster.jobs),
                "policy": name,
                "busy": one.busy,
                **{f"over_{b}": one.busy / played[b].busy - 1 for b in BASELINES},
                "worst_slowdown": min(one.slowdown[worst], 1e9),
                "beyond_cap": len(beyond),
                "cpu_s": one.cpu_s,
                **({"together": together[name].busy} if together else {}),
            }
        )
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each policy: over all kinds, for each kind, and over the seeds ``TUNED``."""
    lines = []
    for kind in ("all", *KINDS, "tuned on"):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            mine = [
                r
                for r in rows
                if r["policy"] == policy
                and (r["seed"] in TUNED) == (kind == "tuned on")
                and kind in ("all", "tuned on", r["kind"])
            ]
            if not mine:
                continue
            line: dict[str, Any] = {"kind": kind, "policy": policy, "clusters": len(mine)}
            for base in BASELINES:
                over = np.array([r[f"over_{base}"] for r in mine])
                line[f"loses_to_{base}"] = float((over < -NOTICED).mean())
                line[f"worst_over_{base}"] = float(over.min())
                line[f"mean_over_{base}"] = float(over.mean())
            line["worst_slowdown"] = max(r["worst_slowdown"] for r in mine)
            line["beyond_cap"] = sum(r["beyond_cap"] > 0 for r in mine) / len(mine)
            line["cpu_ms"] = float(np.median([r["cpu_s"] for r in mine])) * 1e3
            if "together" in mine[0]:
                off = [abs(r["busy"] / r["together"] - 1) for r in mine]
                line |= {"off_median": float(np.median(off)), "off_most": float(max(off))}
            lines.append(line)
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The lines as text."""
    text = [
        f"{'kind':<13} {'policy':<16} {'n':>5} | {'loses to ECMP':>13} {'worst':>7} {'mean':>7} | "
        f"{'to one level':>12} {'worst':>7} {'mean':>7} | {'worst job':>9} {'over cap':>8} "
        f"{'CPU ms':>7}"
    ]
    apart = "off_median" in lines[0]
    if apart:
        text[0] += f" | {'from rings together':>20} {'most':>6}"
    for line in lines:
        text.append(
            f"{line['kind']:<13} {line['policy']:<16} {line['clusters']:>5} | "
            f"{line['loses_to_ecmp']:>13.1%} {line['worst_over_ecmp']:>+7.1%} "
            f"{line['mean_over_ecmp']:>+7.1%} | {line['loses_to_one-level']:>12.1%} "
            f"{line['worst_over_one-level']:>+7.1%} {line['mean_over_one-level']:>+7.1%} | "
            f"{line['worst_slowdown']:>9.4g} {line['beyond_cap']:>8.1%} {line['cpu_ms']:>7.1f}"
        )
        if apart:
            text[-1] += f" | {line['off_median']:>20.1%} {line['off_most']:>6.1%}"
    return "\n".join(text) + "\n"


@click.command()
@click.option("--clusters", default=100, help="How many.")
@click.option("--first", default=0, help="Seed of the first one.")
@click.option("--phases", default=6, help="Sets of start times that each is played from.")
@click.option("--policies", default=",".join(POLICIES), help="With commas.")
@click.option("--rings-apart", is_flag=True, help="Rings of a job move on their own.")
@workers_option
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/NAME.{json,txt}.")
@click.option("--name", default="safety", help="Name of the result.")
@click.option("--append", is_flag=True, help="Keep the rows of other seeds that DIR has.")
def main(
    clusters: int,
    first: int,
    phases: int,
    policies: str,
    rings_apart: bool,
    workers: Workers,
    json_path: Path | None,
    out: Path | None,
    name: str,
    append: bool,
) -> None:
    """Plays seeded clusters under every policy."""
    # Read by the libraries when a process imports them.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    names = tuple(dict.fromkeys((*BASELINES, *policies.split(","))))
    seeds = [
        seed
        for seed in range(first, first + clusters)
        if not rings_apart or TURNS[seed % len(TURNS)] in OF_RINGS
    ]
    tasks = [(seed, names, phases, rings_apart) for seed in seeds]
    found = tracked(mapped(row_of, [(task,) for task in tasks], workers), "clusters", len(tasks))
    rows = [row for part in found for row in part]
    settings = {"phases": phases, "cap": CAP} | ({"rings_apart": True} if rings_apart else {})
    if append and out is not None and (out / f"{name}.json").exists():
        before = json.loads((out / f"{name}.json").read_text())
        if before["settings"] != settings:
            raise click.UsageError(f"{out} was played with {before['settings']}, not {settings}")
        new = {(row["seed"], row["policy"]) for row in rows}
        rows += [row for row in before["rows"] if (row["seed"], row["policy"]) not in new]
        rows.sort(key=lambda row: row["seed"])
    lines = summarise(rows)
    publish(Result(name, settings, rows), table(lines), json_path, out)


if __name__ == "__main__":
    main()
