"""Dispatching beside running jobs: what the cluster's GPUs do with a newcomer placed by each rule.

A cluster has sixteen hosts of the four kinds of LiteGD's Appendix A in a leaf-spine network, with
half as much capacity above the leaves as below. Jobs of published models hold a part of it. The
dispatcher sees their records, as the live system publishes them. What its choice leads to is judged
by playing all jobs for longer, from other start times, and with what the records don't tell: the
running jobs' bandwidth within their hosts.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import click
import msgspec
import numpy as np

from crux_torch.agreement.inputs import plan_inputs
from crux_torch.agreement.records import JobRecord
from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, json_option, publish, workers_option
from crux_torch.dispatch.cluster import DispatchCluster, Ints, count
from crux_torch.dispatch.contention import Contention, Newcomer, like, uplinks_Bps
from crux_torch.dispatch.search import alternatives, strongest
from crux_torch.measure.profile import HostFlow, JobProfile, ProfileBurst
from crux_torch.network.builders import GpuServer, two_layer_clos
from crux_torch.network.topology import Topology
from crux_torch.schedule.default.crux import crux
from crux_torch.schedule.default.rehearsal import Length, Rehearsal
from crux_torch.schedule.model import Burst, Cluster, Job, Link, SchedulerOptions
from crux_torch.schedule.papers.crux import alone
from crux_torch.sim.catalogue import MODELS
from crux_torch.sim.placement import Allocation, Request, cells, place_hived
from crux_torch.sim.workers import Workers, mapped
from evaluation.dispatch import MIXED
from evaluation.litegd import at_random, host_table

HOSTS, TORS, AGGREGATIONS = 16, 4, 2
NIC_BPS = 12.5e9
#: Data-parallel models whose communication takes about as long as their computation.
TRAINED = ("bert", "nmt", "llama-7b", "transformer-nlp", "resnet-152")
#: Share of the GPUs that running jobs hold, and GPUs of a job.
HELD, SIZES = 0.6, (4, 6, 8, 12, 16, 24)
#: What judges a choice: longer than the dispatcher's rehearsal, and from other start times.
JUDGED, JUDGE_SEED = Length(phases=8, iterations=1200, rounds=40), 1_000_003
RULES = ("bandwidth alone", "compactness", "at random", "virtual merge", "contention-aware")
#: Sets of hosts that the virtual merge looks at, by bandwidth, and choices at random beside them.
LOOKED_AT, DRAWN = 64, 64


@dataclass(frozen=True, eq=False)
class Scene:
    """A cluster with running jobs, and a newcomer that wants ``k`` GPUs.

    Attributes:
        jobs: the running jobs as they are, with links of their own within hosts.
        held: devices of each running job.
        records: what the live system publishes of them.
    """

    cluster: DispatchCluster
    topology: Topology
    free: Ints
    jobs: tuple[Job, ...]
    held: tuple[Ints, ...]
    own_Bps: Mapping[Link, float]
    records: tuple[JobRecord, ...]
    newcomer: Newcomer
    k: int


def scene(seed: int) -> Scene:
    """A cluster whose jobs came one after the other, each compactly or anywhere."""
    rng = Random(seed)
    server = GpuServer(nics=1, pcie_switches=1, nic_Bps=NIC_BPS, pcie_Bps=4 * NIC_BPS, nvlink_Bps=0)
    topology = two_layer_clos(HOSTS, TORS, AGGREGATIONS, server, oversubscription=2.0)
    kinds = [rng.choice(MIXED) for _ in topology.hosts]
    tables = [
        msgspec.structs.replace(host_table(kind), host=host)
        for kind, host in zip(kinds, topology.hosts, strict=True)
    ]
    uplinks = uplinks_Bps(topology, topology.hosts)
    cluster = DispatchCluster(tables, np.array([uplinks[host] for host in topology.hosts]))
    free = cluster.everything
    jobs: list[Job] = []
    held: list[Ints] = []
    own_Bps: dict[Link, float] = {}
    records: list[JobRecord] = []
    while count(free) > (1 - HELD) * 8 * HOSTS:
        k = min(rng.choice(SIZES), int(count(free)))
        choice = compact(topology, free, k) if rng.random() < 0.5 else at_random(free, k, rng)
        job, own = trains(rng.choice(TRAINED)).job(f"job{len(jobs)}", cluster, choice, topology)
        free = free & ~choice
        jobs.append(job)
        held.append(choice)
        own_Bps |= own
        records.append(record_of(job, cluster, choice, topology))
    between = [one for one in records if one.profile and one.profile.flows]
    k = min(rng.choice(SIZES[2:]), int(count(free)))
    return Scene(
        *(cluster, topology, free, tuple(jobs), tuple(held), own_Bps, tuple(records)),
        *(like(rng.choice(between)), k),
    )


def trains(name: str) -> Newcomer:
    """A job of a model of the catalogue that reduces its gradients during the backward pass."""
    model = MODELS[name]
    bursts = (Burst(1 / 3, 0.5), Burst(2 / 3, 0.5))
    return Newcomer(model.gradient_bytes, model.compute_s, model.flops_per_gpu, bursts)


def compact(topology: Topology, free: Ints, k: int) -> Ints:
    """HiveD's buddy allocation, by the topology alone."""
    allocation = Allocation(cells(topology))
    gpus = {host: topology.gpus(host) for host in topology.hosts}
    taken = [
        gpu
        for members, host in zip(free.tolist(), topology.hosts, strict=True)
        for i, gpu in enumerate(gpus[host])
        if not members >> i & 1
    ]
    if taken:
        allocation.take(Request("taken", len(taken)), taken)
    chosen = place_hived(Request("newcomer", k), allocation, Random(0))
    assert chosen is not None, "the request is for no more than what is free"
    mine = set(chosen)
    return np.array([sum((g in mine) << i for i, g in enumerate(gpus[h])) for h in topology.hosts])


def contended_Bps(cluster: DispatchCluster, choice: Ints, held: Sequence[Ints]) -> float:
    """Bandwidth of a choice beside running jobs, as BandPilot predicts it (arXiv 2506.15595v4).

    The jobs that cross hosts and share one with the choice merge with it virtually. What the merged
    devices would reach is the capacity of the links that they share. The jobs' parts of it are
    equal here; the abstract, all of the paper that was at hand, does not say how it is divided.

    Args:
        held: devices of each running job.
    """
    alone_Bps = float(cluster.weakest_link_Bps(choice[None])[0])
    if np.count_nonzero(choice) < 2:
        return alone_Bps
    beside = [h for h in held if np.count_nonzero(h) > 1 and np.any((h > 0) & (choice > 0))]
    merged = np.bitwise_or.reduce([choice, *beside])
    shared_Bps = float(cluster.weakest_link_Bps(merged[None])[0])
    return min(alone_Bps, shared_Bps / (1 + len(beside)))


def merged_best(one: Scene, rng: Random) -> Ints:
    """The choice of most bandwidth beside the running jobs, of equals the one alone."""
    by_bandwidth = islice(alternatives(one.cluster, one.free, one.k), LOOKED_AT)
    proposed = [found.devices for found in by_bandwidth]
    proposed.append(compact(one.topology, one.free, one.k))
    proposed += [at_random(one.free, one.k, rng) for _ in range(DRAWN)]

    def worth(choice: Ints) -> tuple[float, float]:
        alone_Bps = float(one.cluster.weakest_link_Bps(choice[None])[0])
        return contended_Bps(one.cluster, choice, one.held), alone_Bps

    return max(proposed, key=worth)


def record_of(job: Job, cluster: DispatchCluster, choice: Ints, topology: Topology) -> JobRecord:
    """Record that Crux measures of a job: bytes from host to host, and its computation."""
    moved: Counter[tuple[str, str]] = Counter()
    for flow in job.flows:
        path = flow.candidates[0]
        if path[0] in topology.capacity_Bps:
            src, dst = topology.ends(path[0])[0], topology.ends(path[-1])[1]
            moved[topology.host_of(src) or "", topology.host_of(dst) or ""] += flow.bytes  # type: ignore[assignment]
    crossed = {e for flow in job.flows for path in flow.candidates for e in path}
    own = {e: topology.capacity_Bps.get(e, np.inf) for e in crossed}
    network = alone(job, {e: min(c, 1e15) for e, c in own.items()})
    profile = JobProfile(
        period_s=max(job.compute_s, network.period_s),
        period_source="both",
        compute_s=job.compute_s,
        flops=job.flops,
        flops_source="counted",
        gpus=job.gpus,
        flows=tuple(HostFlow(src, dst, size) for (src, dst), size in moved.items()),
        bursts=tuple(ProfileBurst(b.at, b.share) for b in job.bursts),
        t_s=network.t_s if moved else 0.0,
        t_source="topology",
        t_measured_s=network.t_s if moved else 0.0,
        overlap=0.0,
        exposed_s=0.0,
        iterations=12,
        measured_alone=True,
    )
    return JobRecord(
        job=job.name,
        incarnation="1",
        hosts=tuple(cluster.names(choice)),
        gpus=job.gpus,
        state="running",
        profile=profile,
    )


def choices(one: Scene, seed: int) -> dict[str, Ints]:
    """Choices by rule."""
    running = plan_inputs(one.records, one.topology)
    contention = Contention(one.cluster, one.topology, running, one.newcomer)
    return {
        "bandwidth alone": strongest(one.cluster, one.free, one.k),
        "compactness": compact(one.topology, one.free, one.k),
        "at random": at_random(one.free, one.k, Random(seed)),
        "virtual merge": merged_best(one, Random(seed)),
        "contention-aware": contention.best(one.free, one.k)[0].devices,
    }


def judged(one: Scene, choice: Ints, length: Length = JUDGED) -> float:
    """Share of the time in which the GPUs of all jobs compute, the newcomer's included."""
    job, own = one.newcomer.job("newcomer", one.cluster, choice, one.topology)
    capacity_Bps = {**one.topology.capacity_Bps, **one.own_Bps, **own}
    cluster = Cluster(capacity_Bps, (*one.jobs, job))
    decision = crux(cluster, SchedulerOptions())
    played = Rehearsal(cluster, length, seed=JUDGE_SEED)
    routes = [played.route(i, decision.path[j.name]) for i, j in enumerate(played.jobs)]
    levels = np.array([[decision.level[j.name] for j in played.jobs]])
    (busy,) = played.busy_gpus([(routes, levels)])
    return float(busy[0]) / sum(j.gpus for j in cluster.jobs)


def contention_row(seed: int) -> dict[str, Any]:
    """Utilisation of a seeded cluster by each rule."""
    one = scene(seed)
    begin_s = time.perf_counter()
    chosen = choices(one, seed)
    took_s = time.perf_counter() - begin_s
    return {
        "seed": seed,
        "jobs": len(one.jobs),
        "gpus": one.k,
        "hosts": {n: int(np.count_nonzero(choice)) for n, choice in chosen.items()},
        "utilisation": {name: judged(one, choice) for name, choice in chosen.items()},
        "took_s": took_s,
    }


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """One line a cluster, and what it comes to."""
    lines = [
        "Share of the time in which the GPUs of all jobs compute, in %",
        f"{'cluster':>7} {'jobs':>5} {'GPUs':>5}" + "".join(f"{rule:>18}" for rule in RULES),
    ]
    for row in rows:
        cells = "".join(f"{100 * row['utilisation'][rule]:18.2f}" for rule in RULES)
        lines.append(f"{row['seed']:>7} {row['jobs']:>5} {row['gpus']:>5}{cells}")
    means = [statistics.fmean(row["utilisation"][rule] for row in rows) for rule in RULES]
    lines.append(f"{'mean':<19}" + "".join(f"{100 * mean:18.2f}" for mean in means))
    *others, aware = RULES
    margins = [
        row["utilisation"][aware] - max(row["utilisation"][rule] for rule in others) for row in rows
    ]
    good, better = sum(m >= -1e-9 for m in margins), sum(m > 1e-9 for m in margins)
    lines.append(
        f"{aware}: the best, or as good, in {good} of {len(rows)}; better than all in {better}; "
        f"over the best other {100 * statistics.fmean(margins):+.2f} points on average, from "
        f"{100 * min(margins):+.2f} to {100 * max(margins):+.2f}"
    )
    lines.append(f"longest choice by all five rules: {max(row['took_s'] for row in rows):.1f} s")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--seeds", default=20, show_default=True, help="Clusters.")
@workers_option
@json_option
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write DIR/dispatch_contention.{json,txt}."
)
def dispatch_contention(
    seeds: int, workers: Workers, json_path: Path | None, out: Path | None
) -> None:
    """Places a newcomer beside running jobs by each rule, and plays what comes of it."""
    found = mapped(contention_row, [(seed,) for seed in range(seeds)], workers)
    rows = list(tracked(found, "clusters", seeds))
    result = Result("dispatch_contention", {"seeds": seeds}, rows)
    publish(result, text_of(rows), json_path, out)
