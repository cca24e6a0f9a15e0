"""Plays a cluster under a scheduler's decision in the fluid engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from crux_torch import _fluid
from crux_torch.schedule.model import Burst, Cluster, Decision, Job, Link
from crux_torch.sim.run import Report, report_of

#: Share of an iteration by which its start may leave the grid before it is held (CASSINI §4.2).
DRIFT = 0.05
#: What separates a link's name from that of the job which has it to itself.
_OWN = "@"


def job_traffic(job: Job, path: Sequence[int]) -> dict[Link, float]:
    """Bytes of one iteration on each link when flow i takes its candidate ``path[i]``."""
    traffic: defaultdict[Link, float] = defaultdict(float)
    for flow, chosen in zip(job.flows, path, strict=True):
        for link in flow.candidates[chosen]:
            traffic[link] += flow.bytes
    return {link: amount for link, amount in traffic.items() if amount > 0}


def burst_traffic(
    bursts: Sequence[Burst], traffic: Mapping[Link, float]
) -> list[tuple[float, dict[Link, float]]]:
    """The engine's bursts of a job that moves ``traffic`` in an iteration."""
    return [(b.at, {link: b.share * m for link, m in traffic.items()}) for b in bursts]


def engine_of(
    cluster: Cluster, decision: Decision, *, start_s: Mapping[str, float] | None = None
) -> _fluid.Engine:
    """An engine at time 0 that holds the cluster's jobs on the paths and levels of a decision.

    Args:
        cluster: jobs and links; only links that a job uses are simulated.
        decision: of any scheduler.
        start_s: when each job starts; jobs that are not named start at 0.

    Raises:
        SpecError: a job or link that can't be simulated.
    """
    traffic = {
        job.name: _renamed(job, job_traffic(job, decision.path[job.name]), decision.isolated)
        for job in cluster.jobs
    }
    capacity_Bps = {
        name: cluster.capacity_Bps[link]
        for mine in traffic.values()
        for name, (link, _) in mine.items()
    }
    engine = _fluid.Engine([(link, c, 0.0) for link, c in sorted(capacity_Bps.items())])
    for job in cluster.jobs:
        moved = {name: amount for name, (_, amount) in traffic[job.name].items()}
        start = (start_s or {}).get(job.name, 0.0)
        engine.add_job(
            job.name,
            compute_s=job.compute_s,
            bursts=burst_traffic(job.bursts, moved),
            gpus=job.gpus,
            level=decision.level[job.name],
            start_s=start + decision.shift_s.get(job.name, 0.0),
        )
        if job.name in decision.grid_s:
            engine.set_pace(
                job.name,
                origin_s=decision.shift_s.get(job.name, 0.0),
                period_s=decision.grid_s[job.name],
                tolerance=DRIFT,
            )
    return engine


def play(
    cluster: Cluster,
    decision: Decision,
    horizon_s: float,
    *,
    start_s: Mapping[str, float] | None = None,
) -> Report:
    """What becomes of the cluster's jobs in ``horizon_s`` seconds, see :func:`engine_of`."""
    engine = engine_of(cluster, decision, start_s=start_s)
    engine.run_until(horizon_s)
    return report_of(engine, horizon_s)


def _renamed(
    job: Job, traffic: Mapping[Link, float], isolated: bool
) -> dict[str, tuple[Link, float]]:
    """For each link in the simulation the link that it stands for, and the job's bytes there."""
    suffix = f"{_OWN}{job.name}" if isolated else ""
    return {link + suffix: (link, amount) for link, amount in traffic.items()}
