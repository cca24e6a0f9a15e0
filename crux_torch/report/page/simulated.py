"""Charts of what the simulator played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from crux_torch.report.page.charts import (
    Chart,
    Lane,
    Span,
    distribution,
    over_time,
    slowdowns,
    timeline,
)
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.sim.advice import JobAdvice
from crux_torch.sim.course import Course, Values, Watch, change
from crux_torch.sim.play import Report, play, run_scenario
from crux_torch.sim.scenario import Scenario, cluster_of

#: Jobs in a timeline and in a chart of slowdowns; links in a chart of utilisation.
LANES, JOBS, LINKS = 12, 40, 4
#: Iterations of the slowest job that a timeline shows, and its points.
ITERATIONS, POINTS = 3, 900
#: Spans of a chart over the whole simulation.
SPANS = 120

Times = Mapping[str, float | None]
SENDING = "the rate at which it sends, as a share of the rate that it would have alone"


def run_charts(scenario: Scenario, report: Report) -> list[Chart]:
    """Returns the charts of a scenario that was played, which is played again to draw it."""
    now_s = {name: job.mean_iteration_s for name, job in report.jobs.items()}
    alone_s = {}
    for name, job in scenario.jobs.items():
        alone = run_scenario(replace(scenario, jobs={name: job}))
        alone_s[name] = alone.jobs[name].mean_iteration_s
    times = slowdowns_of(now_s, alone_s)
    window_s = window_of(now_s, scenario.horizon_s)
    watch = Watch(times_of(scenario.horizon_s, window_s))
    run_scenario(scenario, watch=watch)
    course = watch.course()
    gpus = {name: job.gpus for name, job in scenario.jobs.items()}
    return [
        timeline_chart(course, window_s, times),
        utilisation_chart({"": course}, gpus, _capacities(scenario)),
        slowdown_chart({"as in the file": times}, "the one without other jobs"),
    ]


def compare_charts(
    scenario: Scenario,
    cluster: Cluster,
    decisions: Mapping[str, Decision],
    rows: Sequence[Mapping[str, Any]],
) -> list[Chart]:
    """Returns the charts of a comparison, which is played again to draw it.

    Args:
        decisions: of each scheduler.
        rows: results of each scheduler.
    """
    times = {r["scheduler"]: {n: j["slowdown"] for n, j in r["jobs"].items()} for r in rows}
    iterations = [{n: j["mean_iteration_s"] for n, j in r["jobs"].items()} for r in rows]
    longest_s = {
        n: max((i[n] or 0.0 for i in iterations), default=0.0) or None for n in scenario.jobs
    }
    window_s = window_of(longest_s, scenario.horizon_s)
    courses = {
        name: _course(scenario, cluster, decision, window_s) for name, decision in decisions.items()
    }
    gpus = {job.name: float(job.gpus) for job in cluster.jobs}
    return [
        slowdown_chart(times, "the one under ideal"),
        utilisation_chart(courses, gpus, _capacities(scenario)),
        *(timeline_chart(courses[name], window_s, times[name], name) for name in decisions),
    ]


def advice_charts(scenario: Scenario, advice: Mapping[str, JobAdvice]) -> list[Chart]:
    """Returns the charts of who slows whom down, for which the scenario is played again."""
    cluster, default_path = cluster_of(scenario)
    now_s = {name: job.iteration_s for name, job in advice.items()}
    alone_s = {name: job.alone_s for name, job in advice.items()}
    under = dict.fromkeys(s for job in advice.values() for s in job.under_s)
    times = {"now": slowdowns_of(now_s, alone_s)} | {
        f"under {s}": slowdowns_of({n: job.under_s[s] for n, job in advice.items()}, alone_s)
        for s in under
    }
    window_s = window_of(now_s, scenario.horizon_s)
    decision = ecmp(cluster, SchedulerOptions((0,), 0, default_path))
    course = _course(scenario, cluster, decision, window_s)
    return [
        slowdown_chart(times, "the one alone on the same paths"),
        timeline_chart(course, window_s, times["now"], "now"),
        utilisation_chart(
            {"": course}, {job.name: float(job.gpus) for job in cluster.jobs}, _capacities(scenario)
        ),
    ]


def _course(scenario: Scenario, cluster: Cluster, decision: Decision, window_s: Span) -> Course:
    watch = Watch(times_of(scenario.horizon_s, window_s))
    play(
        cluster,
        decision,
        scenario.horizon_s,
        start_s={name: job.start_s for name, job in scenario.jobs.items()},
        slack_bytes=scenario.slack_bytes,
        watch=watch,
    )
    return watch.course()


def _capacities(scenario: Scenario) -> dict[str, float]:
    return {name: link.capacity_Bps for name, link in scenario.links.items()}


def times_of(horizon_s: float, window_s: Span) -> tuple[float, ...]:
    """Returns the times at which to take measures: all over the simulation, and in the window."""
    grid = (np.linspace(0.0, horizon_s, SPANS + 1), np.linspace(*window_s, POINTS + 1))
    return tuple(np.unique(np.concatenate(grid)).tolist())


def window_of(iteration_s: Times, horizon_s: float) -> Span:
    """Returns the last seconds of the simulation, some iterations of the slowest job."""
    longest_s = max((s for s in iteration_s.values() if s is not None), default=horizon_s)
    return max(0.0, horizon_s - ITERATIONS * longest_s), horizon_s


def slowdowns_of(iteration_s: Times, alone_s: Times) -> dict[str, float | None]:
    """Returns each job's mean iteration over the one alone; None: not known."""
    pairs = {job: (now_s, alone_s[job]) for job, now_s in iteration_s.items()}
    return {job: now / alone if now and alone else None for job, (now, alone) in pairs.items()}


def most_slowed(times: Mapping[str, Times], count: int) -> tuple[list[str], str]:
    """Returns the jobs that are slowed down most in any case, and which of all jobs these are.

    Args:
        times: slowdowns by case and job.
        count: how many jobs to return, at most.
    """
    worst: dict[str, float] = {}
    for found in times.values():
        for job, value in found.items():
            worst[job] = max(worst.get(job, 0.0), value or 0.0)
    jobs = sorted(worst, key=lambda job: -worst[job])[:count]
    return jobs, f" ({count} of {len(worst)} jobs: the most slowed)" if len(worst) > count else ""


def slowdown_chart(times: Mapping[str, Times], alone: str) -> Chart:
    """Returns the chart of slowdowns by case and job.

    Args:
        alone: what the slowdowns are relative to.
    """
    jobs, which = most_slowed(times, JOBS)
    shown = {case: {job: found.get(job) for job in jobs} for case, found in times.items()}
    caption = f"Each job's mean iteration over {alone}."
    return slowdowns(f"Slowdown of each job{which}", caption, shown)


def timeline_chart(course: Course, window_s: Span, times: Times, case: str = "") -> Chart:
    """Returns the chart of who computes and sends when.

    Args:
        window_s: first and last time to draw.
        times: slowdowns by job.
        case: what the title says about it.
    """
    jobs, which = most_slowed({case: times}, LANES)
    inside = (course.time_s >= window_s[0]) & (course.time_s <= window_s[1])
    time_s = course.time_s[inside]
    lanes = []
    for job in jobs:
        computing = change(course.compute_s[job][inside], time_s) > 0.5
        sending = change(course.comm_s[job][inside], time_s).clip(0.0, 1.0)
        present = _present(course.compute_s[job] + course.comm_s[job])[inside][:-1]
        lanes.append(
            Lane(
                job,
                _spans(computing, time_s),
                _spans(present & ~computing, time_s),
                _steps(sending, time_s),
            )
        )
    title = f"Who computes and sends when{': ' * bool(case)}{case}{which}"
    return timeline(title, lanes, window_s, SENDING)


def _present(total: Values) -> Any:
    """True from the last time before a job's first work to its last work."""
    begun = np.concatenate((total[1:] > 0, [True]))
    return begun & (total < total[-1])


def _spans(holds: Any, time_s: Values) -> list[Span]:
    """Returns where ``holds`` is true of the spans between ``time_s``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], holds, [False])).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    return [(float(time_s[a]), float(time_s[b])) for a, b in zip(starts, ends, strict=True)]


def _steps(shares: Values, time_s: Values) -> list[tuple[float, float]]:
    """Returns where a share changes, to two digits, and what it is from there on."""
    rounded = np.concatenate((shares.round(2), [0.0]))
    kept = np.flatnonzero(np.diff(rounded, prepend=-1.0))
    return [(float(time_s[at]), float(rounded[at])) for at in kept]


def utilisation_chart(
    courses: Mapping[str, Course], gpus: Mapping[str, float], capacity_Bps: Mapping[str, float]
) -> Chart:
    """Returns the chart of GPUs, and in a single case of the busiest links, over time.

    Args:
        courses: by case.
        gpus: of each job.
        capacity_Bps: of each link.
    """
    series: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    which = ""
    for case, course in courses.items():
        picked = np.searchsorted(course.time_s, np.linspace(0, course.time_s[-1], SPANS + 1))
        borders_s = course.time_s[picked]
        busy = sum(count * course.compute_s[job][picked] for job, count in gpus.items())
        shares = change(np.asarray(busy), borders_s) / sum(gpus.values())
        series[case or "GPUs"] = borders_s.tolist(), shares.tolist()
        if len(courses) == 1:
            load = {n: m[-1] / capacity_Bps[n] for n, m in course.link_bytes.items()}
            busiest = sorted(load, key=lambda link: -load[link])[:LINKS]
            for link in busiest:
                carried = change(course.link_bytes[link][picked], borders_s) / capacity_Bps[link]
                series[f"link {link}"] = borders_s.tolist(), carried.tolist()
            if len(load) > LINKS:
                which = f" Of {len(load)} links the {LINKS} busiest are drawn."
    caption = "The share of all GPUs' time in which they computed, and of a link's capacity in use."
    if len(courses) > 1:
        caption = "The share of all GPUs' time in which they computed."
    return over_time("Utilisation over time", caption + which, series)


def trace_charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Returns the charts of the rows of a trace, a set for each network and placement."""
    charts = []
    for topology, placement in dict.fromkeys((r["topology"], r["placement"]) for r in rows):
        mine = [r for r in rows if (r["topology"], r["placement"]) == (topology, placement)]
        about = f": {topology}, placement {placement}"
        spans = {r["scheduler"]: r["series"] for r in mine}
        shares = {n: (s["time_s"], s["gpu_utilization"]) for n, s in spans.items()}
        caption = "The share of all GPUs' time in which they computed."
        charts.append(over_time(f"Utilisation over time{about}", caption, shares))
        values = {r["scheduler"]: r["slowdown_percentiles"] for r in mine}
        charts.append(distribution(f"Slowdown of the jobs{about}", values))
    return charts
