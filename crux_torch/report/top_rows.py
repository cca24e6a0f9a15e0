"""Contents of ``crux top``: a row for each job, a row for each link, and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crux_torch.agreement.audit import AuditEntry
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import ClusterStatus, job_cells
from crux_torch.report.live_cluster import LinkLoad, link_loads, live_cluster
from crux_torch.report.step_times import JobSteps
from crux_torch.schedule.model import Link
from crux_torch.words import age, safe

#: Columns of jobs and of links, with their widths; others fit on a wide terminal only.
JOB_COLUMNS = {
    "job": 14, "level": 5, "step now": 8, "alone": 10, "slowdown": 9, "waits": 5, "paths": 13,
    "trial": 16, "state": 9, "t s": 8, "W FLOP": 7, "I FLOP/s": 8, "period s": 8, "hosts": 20,
}  # fmt: skip
LINK_COLUMNS = {"link": 30, "planned": 8, "now": 6, "capacity": 10, "jobs": 22}
#: Bits of a gigabit per second.
GBIT = 1e9
#: Jobs of a link that its row names.
JOBS_NAMED = 3

#: A sort key: a number, else the text; what is not known comes last.
Key = tuple[int, float, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the cells by heading, and what each column sorts it by."""

    name: str
    cells: Mapping[str, str]
    keys: Mapping[str, Key]


@dataclass(frozen=True, slots=True)
class TopView:
    """All that is on the screen.

    Attributes:
        head: lines about the cluster and its plan.
        why: why the plan changed last; empty if the audit log does not say.
    """

    head: tuple[str, ...]
    why: str
    jobs: tuple[Row, ...]
    links: tuple[Row, ...]
    loads: Mapping[Link, LinkLoad]


def top_view(
    status: ClusterStatus,
    topology: Topology | None,
    audit: Sequence[AuditEntry],
    now_s: float,
    *,
    loads: Mapping[Link, LinkLoad] | None = None,
) -> TopView:
    """Returns the screen's content.

    Args:
        now_s: seconds since 1970.
        loads: of the links, if they are known already.
    """
    if loads is None:
        loads = loads_of(status, topology)
    head, why = _head(status, audit, now_s)
    by_name = {job.job: job for job in status.jobs}
    jobs = []
    for record in status.jobs:
        steps = status.steps.get(record.job, JobSteps())
        entry = status.plan.entry(record.job) if status.plan is not None else None
        cells = job_cells(record, by_name, status)
        profile, paths = record.profile, record.paths
        waits = None
        if profile is not None and steps.step_s:
            waits = max(0.0, 1.0 - profile.compute_s / steps.step_s)
        cells["waits"] = "" if waits is None else f"{waits:.0%}"
        numbers = {
            "level": entry.level if entry is not None and record.marks else None,
            "step now": steps.step_s,
            "alone": steps.alone_s,
            "slowdown": steps.slowdown,
            "waits": waits,
            "paths": paths.elsewhere if paths is not None else None,
            "t s": profile.t_s if profile is not None else None,
            "W FLOP": profile.flops if profile is not None else None,
            "I FLOP/s": entry.intensity if entry is not None else None,
            "period s": profile.period_s if profile is not None else None,
        }
        keys = {name: _key(numbers.get(name), cells[name]) for name in JOB_COLUMNS}
        jobs.append(Row(record.job, cells, keys))
    return TopView(head, why, tuple(jobs), tuple(map(_link_row, loads.items())), loads)


def loads_of(status: ClusterStatus, topology: Topology | None) -> dict[Link, LinkLoad]:
    """Returns the load of each link of the topology that a job sends over."""
    if topology is None:
        return {}
    live = live_cluster(status.jobs, status.plan, topology, status.operator)
    loads = link_loads(live.taken, live.now, status.steps)
    return {link: load for link, load in loads.items() if link in topology.capacity_Bps}


def _key(number: float | None, text: str) -> Key:
    if number is not None:
        return 0, -float(number), ""
    return (1, 0.0, text) if text else (2, 0.0, "")


def _link_row(item: tuple[Link, LinkLoad]) -> Row:
    link, load = item
    now = None if load.now_Bps is None else load.now_Bps / load.capacity_Bps
    more = len(load.jobs) - JOBS_NAMED
    cells = {
        "link": safe(link),
        "planned": f"{load.planned_ratio:.0%}",
        "now": "" if now is None else f"{now:.0%}",
        "capacity": f"{8 * load.capacity_Bps / GBIT:.3g} Gb/s",
        "jobs": ", ".join(map(safe, load.jobs[:JOBS_NAMED])) + (f" +{more}" if more > 0 else ""),
    }
    numbers = {
        "planned": load.planned_ratio, "now": now, "capacity": load.capacity_Bps,
        "jobs": len(load.jobs),
    }  # fmt: skip
    return Row(link, cells, {name: _key(numbers.get(name), cells[name]) for name in LINK_COLUMNS})


def _head(
    status: ClusterStatus, audit: Sequence[AuditEntry], now_s: float
) -> tuple[tuple[str, ...], str]:
    plan = status.plan
    off = ", dry run" if status.operator.observe else ""
    off += ", disabled" if status.operator.disabled else ""
    count = "1 job" if len(status.jobs) == 1 else f"{len(status.jobs)} jobs"
    first = f"cluster {safe(status.cluster)}{off}: {count}"
    if plan is None:
        return (first, "no plan"), ""
    made = next((e for e in reversed(audit) if e.kind == "plan" and e.after == plan.epoch), None)
    old = f", {age(max(0.0, now_s - made.at_s))} old" if made is not None else ""
    renewed = {True: "renewed", False: "NOT renewed", None: ""}[status.plan_renewed]
    second = f"plan {plan.epoch} by {safe(plan.author)}, policy {safe(plan.policy)}{old}"
    why = safe("; ".join(made.why)) if made is not None else ""
    return (first, f"{second}, {renewed}" if renewed else second), why


def ordered(rows: Sequence[Row], column: str, backwards: bool, filtered: str) -> list[Row]:
    """Returns the rows whose cells contain ``filtered``, by a column.

    Args:
        column: numbers are largest first; what is not known comes last either way.
        backwards: smallest first.
    """
    word = filtered.casefold()
    shown = [
        row for row in rows if not word or any(word in c.casefold() for c in row.cells.values())
    ]
    known = [row for row in shown if row.keys[column][0] < 2]
    known.sort(key=lambda row: row.name)
    known.sort(key=lambda row: row.keys[column], reverse=backwards)
    return known + [row for row in shown if row.keys[column][0] == 2]
