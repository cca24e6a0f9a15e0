"""Joint path, priority and time shift: Crux's decision, and shifts where they gain.

Crux has few levels, and within one level jobs share fairly and stay in each other's way. Given
Crux's paths and levels, jobs whose communication can be interleaved are shifted and paced as by
CASSINI, with three differences: a job waits only for its own level and for those above; what
counts is the GPU time that it keeps busy; and the shifts of jobs that a chain of links joins are
adopted only if those jobs, played in the fluid engine (a pure function), are busier with
them than without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from crux_torch import _fluid
from crux_torch.schedule.arrays import FloatArray, arrays_of, choice_of, row_max, traffic_matrix
from crux_torch.schedule.cassini import DRIFT, Shifts, interleave
from crux_torch.schedule.crux import crux_full
from crux_torch.schedule.dag import components_of
from crux_torch.schedule.intensity import link_traffic, solo_periods_s
from crux_torch.schedule.model import Cluster, Decision, Job, Link
from crux_torch.schedule.options import SchedulerOptions

#: Sets of start times that each plan is played from.
_PHASES = 3
#: A play lasts for this many iterations of the slowest job; the first part is not counted.
_ROUNDS, _WARM_UP = 30, 0.25
#: By how much more GPU time shifts must win, so that the ends of a play decide nothing.
_GAIN = 0.002

_Traffic = Mapping[str, Mapping[Link, float]]


def crux_joint(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux's paths and levels, and the shifts of :func:`interleave` where a play shows a gain."""
    decision = crux_full(cluster, options)
    arrays = arrays_of(cluster)
    traffic = traffic_matrix(arrays, choice_of(arrays, decision.path))
    period_s = solo_periods_s(arrays, row_max(traffic, 1.0 / arrays.capacity_Bps))
    computing_s = np.array([job.gpus * job.compute_s for job in arrays.jobs], np.float64)
    busy = np.divide(computing_s, period_s, out=np.zeros(len(period_s)), where=period_s > 0)
    level = np.array([decision.level[job.name] for job in arrays.jobs], np.int64)
    offered = interleave(arrays, traffic, level, busy)
    if not offered.grid_s:
        return decision

    on_links = {job.name: link_traffic(job, decision.path[job.name]) for job in arrays.jobs}
    start = np.random.default_rng(options.seed).random((_PHASES, len(arrays.jobs))) * period_s
    component = components_of(traffic)
    adopted = Shifts({}, {})
    for number in np.unique(component).tolist():
        members = np.flatnonzero(component == number)
        jobs = [arrays.jobs[j] for j in members.tolist()]
        shifts = _of(offered, jobs)
        if not shifts.grid_s:
            continue
        horizon_s = _ROUNDS * float(period_s[members].max())
        plain, shifted = (
            _busy_gpu_s(cluster, jobs, on_links, decision, plan, start[:, members], horizon_s)
            for plan in (Shifts({}, {}), shifts)
        )
        if shifted > plain * (1 + _GAIN):
            adopted.shift_s.update(shifts.shift_s)
            adopted.grid_s.update(shifts.grid_s)
    return replace(decision, shift_s=adopted.shift_s, grid_s=adopted.grid_s)


def _of(shifts: Shifts, jobs: list[Job]) -> Shifts:
    names = [job.name for job in jobs if job.name in shifts.grid_s]
    return Shifts(
        {name: shifts.shift_s[name] for name in names},
        {name: shifts.grid_s[name] for name in names},
    )


def _busy_gpu_s(
    cluster: Cluster,
    jobs: list[Job],
    on_links: _Traffic,
    decision: Decision,
    shifts: Shifts,
    start_s: FloatArray,
    horizon_s: float,
) -> float:
    """GPU seconds computed in ``horizon_s``, over all starts; a paced job starts at its shift."""
    links = sorted({link for job in jobs for link, m in on_links[job.name].items() if m > 0})
    links = [link for link in links if np.isfinite(cluster.capacity_Bps[link])]
    total = 0.0
    for starts in start_s.tolist():
        engine = _fluid.Engine([(link, cluster.capacity_Bps[link], 0.0) for link in links])
        for job, at_s in zip(jobs, starts, strict=True):
            moved = {link: m for link in links if (m := on_links[job.name].get(link, 0.0)) > 0}
            engine.add_job(
                job.name,
                compute_s=job.compute_s,
                bursts=[
                    (b.at, {link: b.share * m for link, m in moved.items()}) for b in job.bursts
                ],
                gpus=job.gpus,
                level=decision.level[job.name],
                start_s=shifts.shift_s.get(job.name, at_s),
            )
            if job.name in shifts.grid_s:
                engine.set_pace(
                    job.name,
                    origin_s=shifts.shift_s[job.name],
                    period_s=shifts.grid_s[job.name],
                    tolerance=DRIFT,
                )
        engine.run_until(_WARM_UP * horizon_s)
        before = engine.results()
        engine.run_until((1 + _WARM_UP) * horizon_s)
        after = engine.results()
        total += sum(
            job.gpus * (after[job.name]["compute_s"] - before[job.name]["compute_s"])
            for job in jobs
        )
    return total
