"""Decision time: paths, priorities and compression for many jobs on a two-layer Clos.

    python benchmarks/decision.py [--jobs 100,1000,5000,50000] [--repeats 9] [--out DIR]

With ``--append`` rows of other sizes that DIR has are kept; ``--jobs ""`` times components only.

Hosts of four NICs stand in groups of 16 under a ToR switch, and every ToR switch has one uplink to
each of 16 aggregation switches; there are as many hosts as the jobs need and a tenth more. A job
has 2 to 12 hosts, and a ring over them on each NIC: 8 to 48 flows. A flow between two ToR switches
has 16 candidate paths of two links; flows between the same two switches share the tuple of these,
and flows under one switch have an empty path. Jobs get hosts one after the other, except that one
job in five is scattered at random. The pattern of each job (computation, bytes, FLOPs) is its own:
no two jobs of a cluster have a correction factor in common.

``nics`` makes the NICs' links part of every path, so that no two flows have the same candidates,
as where paths are told from NIC to NIC.

Each row is a process of its own, held to one thread. A time is that of one call, from the
``Cluster`` to the ``Decision``, with the collector off as ``timeit`` has it. *cold* is a decision
by a process that has made none for such jobs; *warm* is one that follows a decision for the same
jobs but one: what is kept between decisions is the correction factors of pairs of jobs that were
met before, and nothing else. Steps are timed cold by calling them one after the other as the
scheduler does. All of that is ``crux-paper``. *crux* is the default policy's decision, by a process
that remembers no component. After the rows come components: jobs of the paper's models that all
meet on an oversubscribed Clos, decided by the default policy with and without the paths of the
network's hash (a live cluster does not know them). Memory is resident: the cluster's own (with the
interpreter and its libraries), and what one decision adds to it at its peak.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path as FilePath
from typing import Any

import click

from crux_torch.cli.results import Result, publish
from crux_torch.network.builders import two_layer_clos
from crux_torch.schedule.arrays import arrays_of, traffic_matrix
from crux_torch.schedule.default.crux import crux, crux_first
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, Memory, Path, SchedulerOptions
from crux_torch.schedule.papers.crux import assign_priorities, crux_paper, levels_of, select_paths

sys.path.insert(0, str(FilePath(__file__).resolve().parents[1]))
from evaluation.beyond import place_models

HOSTS_PER_TOR = 16
AGGREGATIONS = 16
NICS = 4
LINK_BPS = 25e9
OPTIONS = SchedulerOptions()
#: Goal for the first plan of 5,000 jobs.
GOAL_S = 0.3
#: Goals for the better plan of a component of so many jobs.
COMPONENT_GOALS_S = {10: 0.02, 40: 0.3, 100: 1.0}
STEPS = ("read", "paths", "priorities", "compression")


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

    arrays = arrays_of(cluster, OPTIONS.memory)
    lap("read")
    choice = select_paths(arrays)
    lap("paths")
    traffic = traffic_matrix(arrays, choice)
    priorities = assign_priorities(arrays, traffic)
    lap("priorities")
    levels_of(traffic, priorities, OPTIONS)
    lap("compression")
    return laps


def forgetful() -> SchedulerOptions:
    """Options that remember no job and no component; links and paths that were read stay."""
    memory = Memory()
    memory.reader = OPTIONS.memory.reader
    return replace(OPTIONS, memory=memory)


def timed_s(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def one_job_later(cluster: Cluster, j: int) -> Cluster:
    """The cluster after job ``j`` has ended and another of its shape, but twice as fast, began."""
    jobs = list(cluster.jobs)
    ended = jobs.pop(j % len(jobs))
    jobs.append(replace(ended, name=f"{ended.name}-next", compute_s=ended.compute_s / 2))
    return replace(cluster, jobs=tuple(jobs))


def resident_MiB(field: str) -> float:
    """This process's memory: ``VmRSS`` now, ``VmHWM`` at its peak since :func:`reset_peak`."""
    status = FilePath("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found, status
    return int(found[1]) / 1024


def reset_peak() -> None:
    """Sets the peak of resident memory to what it is now (proc(5), clear_refs)."""
    FilePath("/proc/self/clear_refs").write_text("5")


def row_of(jobs: int, nics: bool, repeats: int) -> dict[str, Any]:
    """One row: times and memory of decisions for that many jobs."""
    gc.disable()
    cluster = synthetic_cluster(jobs, nics)
    gc.freeze()
    before_MiB = resident_MiB("VmRSS")
    reset_peak()
    first_s, _ = timed_s(lambda: crux_paper(cluster, OPTIONS))
    added_MiB = resident_MiB("VmHWM") - before_MiB
    cold, warm, laps, default, begun = [], [], [], [], []
    for repeat in range(repeats):
        begun.append(timed_s(partial(crux_first, cluster, forgetful())))
        default.append(timed_s(partial(crux, cluster, forgetful())))
        options = forgetful()
        cold.append(timed_s(partial(crux_paper, cluster, options)))
        warm.append(timed_s(partial(crux_paper, one_job_later(cluster, repeat * 7919), options)))
        laps.append(steps_s(cluster))
    flows = [flow for job in cluster.jobs for flow in job.flows]
    return {
        "jobs": jobs,
        "links": "ToR and NIC" if nics else "ToR",
        "flows": len(flows),
        "candidate_sets": len({id(flow.candidates) for flow in flows}),
        "first_s": first_s,
        "cold_s": [wall for wall, _ in cold],
        "cold_cpu_s": [cpu for _, cpu in cold],
        "warm_s": [wall for wall, _ in warm],
        "begun_s": [wall for wall, _ in begun],
        "begun_cpu_s": [cpu for _, cpu in begun],
        "default_s": [wall for wall, _ in default],
        "default_cpu_s": [cpu for _, cpu in default],
        **{f"{step}_s": [lap[step] for lap in laps] for step in STEPS},
        "cluster_MiB": before_MiB,
        "decision_MiB": added_MiB,
    }


def component_of(jobs: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of the default policy's decisions for components of that many jobs."""
    found: dict[str, Any] = {"component": jobs, "known_cpu_s": [], "live_cpu_s": []}
    sizes = [(8, 8, 16, 16, 24, 32)[j % 6] for j in range(jobs)]
    tors = -(-sum(sizes) * 5 // 64)
    topology = two_layer_clos(2 * tors, tors, 4, oversubscription=2.0)
    for seed in range(repeats + 1):
        cluster, hashed = place_models("component", seed, topology, sizes)
        for column, path in (("known_cpu_s", hashed), ("live_cpu_s", None)):
            options = SchedulerOptions(seed=seed, default_path=path)
            _, cpu_s = timed_s(partial(crux, cluster, options))
            if seed:  # the first loads libraries
                found[column].append(cpu_s)
    return found


def component_table(rows: list[dict[str, Any]]) -> str:
    """The components as text: medians, and the least and the most in brackets."""
    lines = [f"{'component':>9} {'goal ms':>8} {'paths known, CPU ms':>25} {'live, CPU ms':>25}"]
    for row in rows:
        known, live = (_spread(row[f"{column}_cpu_s"]) for column in ("known", "live"))
        goal = f"{COMPONENT_GOALS_S[row['component']] * 1e3:.0f}"
        lines.append(f"{row['component']:>9} {goal:>8} {known:>25} {live:>25}")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median * 1e3:.1f} [{least * 1e3:.1f}-{most * 1e3:.1f}]"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text: medians, and the least and the most in brackets."""

    lines = [
        f"{'jobs':>6} {'links':>11} {'flows':>9} {'sets':>9} {'first ms':>8} {'cold ms':>25} "
        f"{'cold CPU':>9} {'warm ms':>25} {'read':>7} {'paths':>7} {'prior.':>7} {'compr.':>7} "
        f"{'cluster MiB':>11} {'+ MiB':>6} {'crux CPU':>8}"
    ]
    for row in rows:
        steps = " ".join(f"{statistics.median(row[f'{s}_s']) * 1e3:>7.1f}" for s in STEPS)
        lines.append(
            f"{row['jobs']:>6} {row['links']:>11} {row['flows']:>9} {row['candidate_sets']:>9} "
            f"{row['first_s'] * 1e3:>8.1f} {_spread(row['cold_s']):>25} "
            f"{statistics.median(row['cold_cpu_s']) * 1e3:>9.1f} "
            f"{_spread(row['warm_s']):>25} {steps} "
            f"{row['cluster_MiB']:>11.0f} {row['decision_MiB']:>6.0f} "
            f"{statistics.median(row['default_cpu_s']) * 1e3:>8.1f}"
        )
    for row in rows:
        if row["jobs"] == 5000:
            begun_s, cpu_s = (statistics.median(row[key]) for key in ("begun_s", "begun_cpu_s"))
            lines.append(
                f"5,000 jobs, {row['links']} links: the default's first plan in {begun_s:.3f} s "
                f"({cpu_s:.3f} s of CPU), {begun_s / GOAL_S:.2f} of the goal of {GOAL_S} s"
            )
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--jobs", default="100,200,1000,5000,50000", help="Numbers of jobs, with commas.")
@click.option("--repeats", default=9, help="Decisions timed, of each kind.")
@click.option("--append", is_flag=True, help="Keep the rows of other sizes that DIR has.")
@click.option("--json", "json_path", type=click.Path(path_type=FilePath), help="Write this file.")
@click.option("--out", type=click.Path(path_type=FilePath), help="Write DIR/decision.{json,txt}.")
def main(
    jobs: str, repeats: int, append: bool, json_path: FilePath | None, out: FilePath | None
) -> None:
    """Times Crux's whole decision on synthetic clusters."""
    # Read by the libraries when a row's process imports them.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for count in (int(part) for part in jobs.split(",") if part):
        for nics in (False, True):
            with spawn.Pool(1) as alone:
                rows.append(alone.apply(row_of, (count, nics, repeats)))
    with spawn.Pool(1) as alone:
        parts = [alone.apply(component_of, (count, repeats)) for count in COMPONENT_GOALS_S]
    if append and out is not None and (out / "decision.json").exists():
        new = {(row["jobs"], row["links"]) for row in rows}
        earlier = json.loads((out / "decision.json").read_text())["rows"]
        kept = [r for r in earlier if "jobs" in r and (r["jobs"], r["links"]) not in new]
        rows = sorted((*kept, *rows), key=lambda row: row["jobs"])
    text = f"{table(rows)}\n{component_table(parts)}"
    settings = {"repeats": repeats, "levels": len(OPTIONS.levels), "threads": 1, "goal_s": GOAL_S}
    result = Result("decision", settings, [*rows, *parts])
    publish(result, text, json_path, out)


if __name__ == "__main__":
    main()
