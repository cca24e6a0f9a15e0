"""Scenarios, and clusters under a scheduler's decision, played in the fluid engine.

The engine moves all links of a part together, at the pace of the slowest, so the flows of a ring
already keep each other's pace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, repeat

import numpy as np

from crux_torch import _fluid
from crux_torch.schedule.arrays import Arrays, FloatArray, IntArray, LinkArray, traffic_entries
from crux_torch.schedule.default.rehearsal import played_alone_s
from crux_torch.schedule.model import Burst, Cluster, Decision, Flow, Job, Path
from crux_torch.schedule.papers.cassini_grid import DRIFT
from crux_torch.schedule.papers.intensity import bursts_of_parts, part_traffic
from crux_torch.sim.course import Watch
from crux_torch.sim.host_rates import run_by_sent, run_in_slots
from crux_torch.sim.scenario import Scenario, ScenarioError

#: Bytes on each link of a transfer, or of each of its parts that move on their own.
Moved = dict[str, float] | list[dict[str, float]]
#: Of an iteration: the share of the compute after which it begins, its bytes, its least seconds.
Sent = tuple[float, Moved, float]
#: A burst is cut into no more pieces than this.
MAX_PIECES = 64


@dataclass(frozen=True, slots=True)
class JobReport:
    """Results of one job within the horizon; the mean is of the iterations that ended.

    ``comm_s`` is the seconds that the data it sent would have taken at its links' full rate.
    """

    completed: int
    compute_s: float
    comm_s: float
    mean_iteration_s: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Results of ``horizon_s`` simulated seconds: the jobs by name, and the network.

    ``gpu_utilization`` is the sum of compute_s times GPUs over the jobs, by horizon times all GPUs.
    ``events`` are those that the engine handled; stretches it skipped have none.
    """

    horizon_s: float
    gpu_utilization: float
    jobs: dict[str, JobReport]
    link_bytes: dict[str, float]
    events: int


def run_scenario(
    scenario: Scenario,
    *,
    skip_repeats: bool = True,
    repeat_tolerance: float = 1e-9,
    watch: Watch | None = None,
) -> Report:
    """Plays one scenario to its horizon; Ctrl-C interrupts it.

    Args:
        skip_repeats: count stretches that provably repeat instead of playing them.
        repeat_tolerance: states are the same when no time in them differs by more than this share
            of the period; a skip over T seconds displaces a job by at most this share of T.
        watch: takes measures on the way.

    Raises:
        ScenarioError: the clock can't resolve the shortest iteration at the horizon, or a scenario
            that was not read from a file can't be simulated.
    """
    try:
        engine = _fluid.Engine(
            [(name, link.capacity_Bps, link.delay_s) for name, link in scenario.links.items()],
            skip_repeats=skip_repeats,
            repeat_tolerance=repeat_tolerance,
        )
        for name, job in scenario.jobs.items():
            engine.add_job(
                name,
                compute_s=job.compute_s,
                bursts=with_slack(
                    [(burst.at, burst.traffic, burst.least_s) for burst in job.sent],
                    scenario.slack_bytes,
                ),
                gpus=job.gpus,
                level=job.level,
                weight=job.weight,
                start_s=job.start_s,
                iterations=job.iterations,
            )
    except _fluid.SpecError as error:
        raise ScenarioError(str(error)) from None
    _run_to_horizon(engine, scenario.horizon_s, watch)
    return report_of(engine, scenario.horizon_s)


def with_slack(bursts: Sequence[Sent], slack_bytes: float | None) -> list[Sent]:
    """The engine's bursts of a job whose links may be ahead of each other.

    Each link carries its bytes at its own pace, in pieces. A piece begins when all links have
    carried the one before it.

    Args:
        bursts: of a job. The pieces of one share its least time.
        slack_bytes: about what the busiest link may be ahead, so the size of a piece; None: all
            links of a burst, or of each of its parts, move together.
    """
    if slack_bytes is None:
        return list(bursts)
    cut: list[Sent] = []
    for at, moved, least_s in bursts:
        loads = [
            (link, amount)
            for traffic in (moved if isinstance(moved, list) else [moved])
            for link, amount in traffic.items()
            if amount > 0
        ]
        busiest = max((amount for _, amount in loads), default=0.0)
        pieces = min(max(round(busiest / slack_bytes), 1), MAX_PIECES)
        part: Moved = [{link: amount / pieces} for link, amount in loads]
        cut += [(at, part, least_s / pieces)] * pieces
    return cut


def _run_to_horizon(engine: _fluid.Engine, horizon_s: float, watch: Watch | None) -> None:
    try:
        (watch or Watch(())).run_until(engine, horizon_s)
    except _fluid.SpecError as error:
        raise ScenarioError(f"horizon_s: {error}") from None


def report_of(engine: _fluid.Engine, horizon_s: float) -> Report:
    """Report of an engine that has been played to ``horizon_s``."""
    jobs = {
        name: JobReport(r["completed"], r["compute_s"], r["comm_s"], r["mean_iteration_s"])
        for name, r in engine.results().items()
    }
    return Report(
        horizon_s=horizon_s,
        gpu_utilization=engine.gpu_utilization(),
        jobs=jobs,
        link_bytes=engine.link_bytes(),
        events=engine.events,
    )


def engine_of(
    cluster: Cluster,
    decision: Decision,
    *,
    start_s: Mapping[str, float] | None = None,
    slack_bytes: float | None = None,
) -> _fluid.Engine:
    """An engine at time 0 that holds the cluster's jobs on the paths and levels of a decision.

    Only links that a job uses are simulated. Jobs that ``start_s`` does not name start at 0. For
    ``slack_bytes`` see :func:`with_slack`.

    Raises:
        SpecError: a job or link that can't be simulated.
    """
    bursts: dict[str, list[Sent]] = {}
    capacity_Bps: dict[str, float] = {}
    for job in cluster.jobs:
        # Names a link that the job has to itself.
        own = f"@{job.name}" if decision.isolated else ""
        path = decision.path[job.name]
        parts = part_traffic(job, path)
        capacity_Bps |= {link + own: cluster.capacity_Bps[link] for part in parts for link in part}
        named = [{link + own: amount for link, amount in part.items()} for part in parts]
        bursts[job.name] = with_slack(bursts_of_parts(job, named), slack_bytes)
    engine = _fluid.Engine([(link, c, 0.0) for link, c in sorted(capacity_Bps.items())])
    for job in cluster.jobs:
        shift_s = decision.shift_s.get(job.name, 0.0)
        engine.add_job(
            job.name,
            compute_s=job.compute_s,
            bursts=bursts[job.name],
            gpus=job.gpus,
            level=decision.level[job.name],
            start_s=(start_s or {}).get(job.name, 0.0) + shift_s,
        )
        if job.name in decision.grid_s:
            period_s = decision.grid_s[job.name]
            engine.set_pace(job.name, origin_s=shift_s, period_s=period_s, tolerance=DRIFT)
    return engine


def by_part(arrays: Arrays) -> Arrays:
    """The arrays of one job, with each of its parts, which follow each other, in a job's place."""
    (job,) = arrays.jobs
    ends = np.flatnonzero(np.diff(job.parts or (0,) * len(job.flows), append=-1)) + 1
    return replace(arrays, flow_start=np.concatenate(([0], ends)))


def iteration_alone_s(
    arrays: Arrays, path: tuple[int, ...], least_s: float, rank: IntArray
) -> float:
    """Seconds of an iteration of the only job of ``arrays``, each of its parts on its own.

    One transfer would take ``least_s``. The engine has the links in the order of their ``rank``,
    which sets the rounding.
    """
    (job,) = arrays.jobs
    moved, links, start = traffic_entries(by_part(arrays), np.array(path, np.int64))
    _, first, places = np.unique(rank[links], return_index=True, return_inverse=True)
    given = arrays.capacity_Bps[links[first]], moved, places.astype(np.int32), start
    return _entries_alone_s(job.compute_s, job.bursts, least_s, *(each.tobytes() for each in given))


# Jobs of one model that are placed alike differ in nothing but the numbers of their links.
@lru_cache(maxsize=1 << 8)
def _entries_alone_s(
    compute_s: float,
    bursts: tuple[Burst, ...],
    least_s: float,
    capacity_Bps: bytes,
    moved: bytes,
    links: bytes,
    start: bytes,
) -> float:
    """:func:`iteration_alone_s` by what the arrays hold; links have places in ``capacity_Bps``."""
    engine = _fluid.Engine(
        [(str(link), c, 0.0) for link, c in enumerate(np.frombuffer(capacity_Bps).tolist())]
    )
    numbers = (np.frombuffer(each, np.int32) for each in (links, start))
    traffic = burst_entries(bursts, np.frombuffer(moved), *numbers)
    sent = [(b.at, each, b.least_s) for b, each in zip(bursts, traffic, strict=True)]
    engine.add_job("", compute_s=compute_s, bursts=sent)
    return played_alone_s(engine, "", least_s)


def burst_entries(
    bursts: Sequence[Burst], moved: FloatArray, links: LinkArray, start: LinkArray
) -> list[list[_fluid.Traffic]]:
    """The traffic of each part of each burst, as the engine takes it.

    In an iteration the parts put ``moved`` bytes on ``links``; ``start`` has the first of each.
    """
    parts = [slice(*ends) for ends in pairwise(start.tolist())]
    return [[(links[part], b.share * moved[part]) for part in parts] for b in bursts]


def play(
    cluster: Cluster,
    decision: Decision,
    horizon_s: float,
    *,
    start_s: Mapping[str, float] | None = None,
    foreign: Collection[str] = (),
    slack_bytes: float | None = None,
    least_Bps: float = 0.0,
    watch: Watch | None = None,
) -> Report:
    """Plays the cluster's jobs for ``horizon_s`` seconds, see :func:`engine_of`.

    Args:
        foreign: jobs that are not ours: where the decision has rates booked, theirs are not.
        slack_bytes: see :func:`with_slack`; not where hosts set rates (mlcc, MLTCP).
        least_Bps: where it has, the least limit of a job's rate on its busiest link.
        watch: takes measures on the way.

    Raises:
        SpecError: a job or link that can't be simulated.
        ScenarioError: the clock can't resolve the shortest iteration at the horizon, or rates and
            slack exclude each other.
    """
    if slack_bytes is not None and (decision.slot_s is not None or decision.weight_by_sent):
        raise ScenarioError(
            "slack_bytes: mlcc and mltcp set the rates of whole rings: leave it out"
        )
    engine = engine_of(cluster, decision, start_s=start_s, slack_bytes=slack_bytes)
    capacity_Bps, slot_s = cluster.capacity_Bps, decision.slot_s
    traffic = {job.name: part_traffic(job, decision.path[job.name]) for job in cluster.jobs}
    if slot_s is not None:
        run_in_slots(engine, capacity_Bps, traffic, slot_s, horizon_s, foreign, least_Bps, watch)
    elif decision.weight_by_sent:
        run_by_sent(engine, capacity_Bps, traffic, horizon_s, watch)
    else:
        _run_to_horizon(engine, horizon_s, watch)
    return report_of(engine, horizon_s)


def sprayed(cluster: Cluster) -> Cluster:
    """The cluster on a network that sprays packets: no flow has a path to choose.

    The bytes of each flow are spread evenly over its candidates. Schedulers then give classes,
    rates and shifts only. As everywhere in this simulator, a job moves at the pace of its slowest
    link, so a packet that is late holds up its flow.
    """
    return replace(cluster, jobs=tuple(map(_spread, cluster.jobs)))


def _spread(job: Job) -> Job:
    moved: dict[tuple[int, Path], float] = {}
    for part, flow in zip(job.parts or repeat(0), job.flows, strict=False):
        for path in flow.candidates:
            moved[part, path] = moved.get((part, path), 0.0) + flow.bytes / len(flow.candidates)
    return replace(
        job,
        flows=tuple(Flow(size, (path,)) for (_, path), size in moved.items()),
        parts=tuple(part for part, _ in moved) if job.parts else (),
    )
