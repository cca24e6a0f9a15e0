"""Decision time: paths, priorities and compression for many jobs on a two-layer Clos.

    python benchmarks/decision.py [--jobs 100,1000,5000,50000] [--repeats 5] [--json FILE]

Hosts of four NICs stand in groups of 16 under a ToR switch, and every ToR switch has one uplink to
each of 16 aggregation switches; there are as many hosts as the jobs need and a tenth more. A job
has 2 to 12 hosts, and a ring over them on each NIC: 8 to 48 flows. A flow between two ToR switches
has 16 candidate paths of two links; flows between the same two switches share the tuple of these,
and flows under one switch have an empty path. Jobs get hosts one after the other, except that one
job in five is scattered at random. The pattern of each job (computation, bytes, FLOPs) is its own:
nothing is shared between jobs that could be cached.

``--nics`` makes the NICs' links part of every path, so that no two flows have the same candidates:
each of several million links in them is then read by name, which takes most of the time.

The time is that of one call, from the ``Cluster`` to the ``Decision``, with the collector off as
``timeit`` has it. Steps are timed by calling them one after the other as the scheduler does.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path as FilePath

import click

from crux_torch.schedule.arrays import arrays_of, traffic_matrix
from crux_torch.schedule.compression import compress_ranked
from crux_torch.schedule.crux import crux
from crux_torch.schedule.intensity import by_descending, intensities, unrouted_transfer_times_s
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, Path
from crux_torch.schedule.paths import place
from crux_torch.schedule.priority import assign_priorities

HOSTS_PER_TOR = 16
AGGREGATIONS = 16
NICS = 4
LINK_BPS = 25e9
LEVELS = tuple(range(8))


def synthetic_cluster(jobs: int, nics: bool = False, seed: int = 0) -> Cluster:
    """The cluster of this module's description."""
    draw = random.Random(seed)
    sizes = [draw.randint(2, 12) for _ in range(jobs)]
    hosts = list(range(int(sum(sizes) * 1.1) + 1))
    scattered = {j for j in range(jobs) if draw.random() < 0.2}
    taken = set(draw.sample(hosts, sum(sizes[j] for j in scattered)))
    apart = sorted(taken)
    draw.shuffle(apart)
    rest = [host for host in hosts if host not in taken]
    given, together = iter(apart), iter(rest)

    capacity = {}
    for host in hosts if nics else ():
        for nic in range(NICS):
            capacity[f"h{host}.{nic}>"] = capacity[f">h{host}.{nic}"] = LINK_BPS
    for tor in range(hosts[-1] // HOSTS_PER_TOR + 1):
        for aggregation in range(AGGREGATIONS):
            capacity[f"t{tor}>a{aggregation}"] = capacity[f"a{aggregation}>t{tor}"] = LINK_BPS
    name = {link: link for link in capacity}

    @cache
    def between(a: int, b: int) -> tuple[Path, ...]:
        if a == b:
            return ((),)
        return tuple((name[f"t{a}>a{k}"], name[f"a{k}>t{b}"]) for k in range(AGGREGATIONS))

    def candidates(source: int, target: int, nic: int) -> tuple[Path, ...]:
        middle = between(source // HOSTS_PER_TOR, target // HOSTS_PER_TOR)
        if not nics:
            return middle
        up, down = name[f"h{source}.{nic}>"], name[f">h{target}.{nic}"]
        return tuple((up, *path, down) for path in middle)

    result = []
    for j, size in enumerate(sizes):
        ring = sorted(next(given if j in scattered else together) for _ in range(size))
        compute_s = draw.uniform(0.1, 2.0)
        moved = compute_s * LINK_BPS * draw.uniform(0.05, 0.8)
        result.append(
            Job(
                name=f"job-{j:05d}",
                gpus=8 * size,
                flops=8 * size * compute_s * draw.uniform(0.5e14, 1.5e14),
                compute_s=compute_s,
                flows=tuple(
                    Flow(moved, candidates(source, target, nic))
                    for source, target in zip(ring, ring[1:] + ring[:1], strict=True)
                    for nic in range(NICS)
                ),
                bursts=(Burst(draw.choice((0.3, 0.5, 1.0)), 1.0),),
            )
        )
    return Cluster(capacity, tuple(result))


def steps_s(cluster: Cluster) -> dict[str, float]:
    """Seconds of each step of one decision."""
    laps: dict[str, float] = {}
    last = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal last
        now = time.perf_counter()
        laps[step] = now - last
        last = now

    arrays = arrays_of(cluster)
    lap("read")
    t_s = unrouted_transfer_times_s(arrays)
    choice = place(arrays, by_descending(intensities(arrays, t_s)), t_s)
    lap("paths")
    traffic = traffic_matrix(arrays, choice)
    priorities = assign_priorities(arrays, traffic)
    lap("priorities")
    order = by_descending(priorities.priority)
    compress_ranked(traffic[order], priorities.intensity[order], LEVELS, seed=0)
    lap("compression")
    return laps


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of ``repeats`` calls."""
    laps = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        laps.append(time.perf_counter() - begin)
    return statistics.median(laps)


def peak_MiB(work: Callable[[], object]) -> float:
    """Memory that one call allocates at its peak."""
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20


@click.command()
@click.option("--jobs", default="100,1000,5000,50000", help="Numbers of jobs, with commas.")
@click.option("--repeats", default=5, help="Decisions timed; the median counts.")
@click.option("--nics/--no-nics", default=False, help="Paths include the links of the NICs.")
@click.option("--memory/--no-memory", default=False, help="Also take the peak of one more call.")
@click.option("--json", "out", type=click.Path(path_type=FilePath), help="Also write this file.")
def main(jobs: str, repeats: int, nics: bool, memory: bool, out: FilePath | None) -> None:
    """Times Crux's whole decision on synthetic clusters."""
    rows = []
    steps = ("read", "paths", "priorities", "compression")
    head = ("jobs", "flows", "decision_s", *(f"{step}_s" for step in steps))
    click.echo("  ".join(f"{column:>13}" for column in head))
    for count in (int(part) for part in jobs.split(",")):
        cluster = synthetic_cluster(count, nics)
        gc.collect()
        gc.disable()
        decision_s = median_s(lambda cluster=cluster: crux(cluster, LEVELS), repeats)
        laps = [steps_s(cluster) for _ in range(repeats)]
        gc.enable()
        row: dict[str, float] = {
            "jobs": count,
            "flows": sum(len(job.flows) for job in cluster.jobs),
            "decision_s": decision_s,
            **{f"{step}_s": statistics.median(lap[step] for lap in laps) for step in steps},
        }
        if memory:
            row["peak_MiB"] = peak_MiB(lambda cluster=cluster: crux(cluster, LEVELS))
        cells = [f"{v:13.4f}" if isinstance(v, float) else f"{v:13d}" for v in row.values()]
        click.echo("  ".join(cells))
        rows.append(row)
    if out:
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
