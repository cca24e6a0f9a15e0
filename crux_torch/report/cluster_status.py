"""The state of a cluster, read once from its store: ``crux status``, ``crux cluster``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from crux_torch.report.job_steps import JobSteps, steps_of
from crux_torch.report.json_text import json_text
from crux_torch.report.tables import Grid, console, say

if TYPE_CHECKING:
    from crux_torch.control.contested_hosts import ContestedHost
    from crux_torch.control.operator import OperatorSettings
    from crux_torch.control.records import JobRecord, PathCounts, Plan, PlanEntry, TriedPlan
    from crux_torch.fabric.topology import Topology

#: Seconds for which a command waits for an answer: a busy store takes some.
TIMEOUT_S = 10.0
HOSTS_SHOWN = 2
#: Columns of text; the others are numbers.
TEXT = ("job", "hosts", "state", "trial", "operator")
#: Columns that are left out where no job has anything in them.
SELDOM = ("trial", "operator")
#: The columns that are shown if none are asked for.
COLUMNS = ("job", "state", "step now", "alone", "slowdown", "age")
#: What the columns say.
LEGEND = {
    "state": "starting: not measured yet; profiling: being measured; running",
    "step now": "mean of the steps in the last 30 s; empty: no optimizer has stepped",
    "alone": "a step without other jobs: measured while none was in the way, or computed from its "
    "compute time, its bytes and the topology; a range where neither was possible; never more than "
    "in the fastest 30 s since",
    "slowdown": "step now over alone",
    "age": "time since the last step of step now, and since the measurement behind alone",
    "W FLOP": "FLOPs of a step, all devices together",
    "MFU": "share of the devices' FLOP/s that the job achieves",
    "t s": "seconds that the traffic of a step needs on its slowest link",
    "period s": "seconds of a step while it was measured",
    "overlap": "share of the communication that computation hides",
    "I FLOP/s": "intensity, W over t; inf: it sends nothing over the network",
    "k": "correction of the intensity",
    "P": "priority, k times I",
    "level": "priority level of its traffic; a higher one goes first",
    "paths": "connections seen on their planned path, and how many have one",
    "grid s": "period of the slots in which it may send",
    "late/min": "times in the last minute that it had fallen behind its slots",
    "trial": "of the plan of the jobs that it meets",
    "operator": "what the operator has set for it",
}
#: Larger values stand for infinity.
BOUNDLESS = 1e30
BESIDE_OTHERS = (
    "jobs were measured beside others, so what they take alone is not known well: a topology "
    "(docs/topology.md) or a class above the others' (docs/classes.md) tells"
)
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What was read of a cluster, and where.

    Attributes:
        plan: the plan in the store, with the entries that live jobs say they follow; None if there
            is none, or none that can be used.
        plan_renewed: whether the plan was renewed between two looks; None after a single look.
        operator: the operator's settings.
        contested: hosts of which records claim more devices than there are.
        steps: how long steps take now and alone, by job.
        left_out: why the plan prioritises nothing, or chooses no paths; empty without a plan.
    """

    store: str
    cluster: str
    jobs: tuple[JobRecord, ...]
    plan: Plan | None
    plan_renewed: bool | None
    operator: OperatorSettings
    contested: tuple[ContestedHost, ...] = ()
    steps: Mapping[str, JobSteps] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def read_status(
    endpoint: str, secret: str, cluster: str, settle_s: float = 0.0, *, group: str = ""
) -> ClusterStatus:
    """Read a cluster's records.

    Args:
        endpoint, secret, group: the settings ``store``, ``store_secret`` and ``store_group``.
        settle_s: seconds until a second look; 0: only one. One look may find the record of a job
            that has died. A second look after its lease does not.

    Raises:
        StoreError: the store can't be reached or does not answer in time.
        SettingsError: one of the settings can't be used.
    """
    from crux_torch.control.contested_hosts import holdings
    from crux_torch.control.records import plan_of
    from crux_torch.control.registry import Registry
    from crux_torch.control.topology_reader import TopologyReader
    from crux_torch.store.endpoint import LOAD_S, open_store

    store = open_store(endpoint, secret, group, timeout_s=TIMEOUT_S, load_s=LOAD_S)
    try:
        registry = Registry(store, cluster)
        before = view = registry.look()
        if settle_s:
            time.sleep(settle_s)
            view = registry.look()
        stored = view.plan.stored
        renewed = stored is not None and before.plan.stored != stored if settle_s else None
        found = None
        if stored is not None:
            follows = registry.follows(stored.plan)
            entries = (follows[job.job] for job in view.jobs if job.job in follows)
            found = plan_of(stored.plan, tuple(entries))
        topology = TopologyReader().read(view.topology)
        contested, _ = holdings(view.jobs, topology)
        return ClusterStatus(
            endpoint,
            cluster,
            view.jobs,
            found,
            renewed,
            view.operator,
            contested,
            steps_of(view.jobs, registry.steps()),
            _left_out(view.jobs, found, topology),
        )
    finally:
        store.close()


def _left_out(
    jobs: Sequence[JobRecord], plan: Plan | None, topology: Topology | None
) -> tuple[str, ...]:
    if plan is None:
        return ()
    from crux_torch.control.agreed_marks import agreed
    from crux_torch.control.left_out import left_out_of_plan, network_of

    levels = agreed(jobs, topology)
    return left_out_of_plan(plan.policy, levels.levels, levels.why, network_of(topology))


def as_json_text(status: ClusterStatus) -> str:
    """``status`` as JSON; records keep their schema, fields their units.

    An intensity or a priority without a bound is null, as is what is not known of a job's steps.
    """
    return json_text(msgspec.to_builtins(status))


def render(status: ClusterStatus, columns: Sequence[str] = COLUMNS) -> None:
    """Print ``status`` as a table, one row a job, and what its columns say.

    Args:
        columns: of these headings; none: all that hold something.
    """
    to = console()
    store = "this user's store" if status.store == "unix:" else status.store
    say(to, f"cluster {_safe(status.cluster)} at {store}: {_plan_line(status)}")
    if status.operator.observe:
        say(to, "dry run by the operator: jobs are planned, and keep the network's defaults")
    if status.operator.disabled:
        say(to, "disabled by the operator: all jobs keep the network's defaults")
    if not status.jobs:
        to.print("no jobs")
        return
    for sentence in status.left_out:
        say(to, sentence, fold=True)
    by_name = {job.job: job for job in status.jobs}
    whole = [_row(job, by_name, status) for job in status.jobs]
    if columns == COLUMNS:
        # Few columns: where there is a level, it says that the job runs.
        whole = [row | {"state": _state(row)} for row in whole]
    full = [name for name in whole[0] if name == "job" or any(row[name] for row in whole)]
    shown = [name for name in columns or full if name in full or name not in SELDOM]
    Grid([{name: row[name] for name in shown} for row in whole], text=TEXT).print(to)
    if columns == COLUMNS:
        for row in whole:
            for name in ("trial", "operator"):
                if row[name]:
                    say(to, f"{row['job']}: {name}: {row[name]}")
    if any(steps.alone_source == "bound" for steps in status.steps.values()):
        say(to, BESIDE_OTHERS)
    for host in status.contested:
        say(to, _safe(host))
    from crux_torch.control.audit import about_trial

    for job in status.jobs:
        for tried in job.trials:
            if tried.state == "worse" and _is_current(tried, status.plan):
                say(to, _safe(about_trial(tried)))
    _print_legend(to, shown)


def _print_legend(to: Console, shown: Sequence[str]) -> None:
    told = [name for name in shown if name in LEGEND]
    width = max(map(len, told), default=0) + 2
    for name in told:
        about = LEGEND[name]
        if name == "state" and tuple(shown) == COLUMNS:
            about += ", or the priority level that the plan gives its traffic"
        say(to, f"{name:{width}}{about}", indent=width, fold=True)


def _state(row: Mapping[str, str]) -> str:
    return f"level {row['level']}" if row["level"] and row["state"] == "running" else row["state"]


def _plan_line(status: ClusterStatus) -> str:
    plan = status.plan
    if plan is None:
        return "no plan"
    confirmed = {None: "", True: ", renewed", False: ", NOT renewed while looked at"}
    return (
        f"plan {plan.epoch} by {_safe(plan.author)}, policy {_safe(plan.policy)}, "
        f"valid {plan.valid_s:g} s after a renewal{confirmed[status.plan_renewed]}"
    )


def _row(job: JobRecord, jobs: Mapping[str, JobRecord], status: ClusterStatus) -> dict[str, str]:
    """One job's cells by heading."""
    profile, plan, operator = job.profile, status.plan, status.operator
    steps = status.steps.get(job.job, JobSteps())
    alone = _seconds(steps.least_alone_s), _seconds(steps.alone_s)
    slowdown = _times(steps.slowdown), _times(steps.most_slowdown)
    ages = (_age(steps.step_age_s), _age(steps.alone_age_s))
    entry = plan.entry(job.job) if plan else None
    more = len(job.hosts) - HOSTS_SHOWN
    intensity = entry.intensity if entry else profile.intensity if profile else None
    mfu = profile.utilization if profile else None
    return {
        "job": _safe(job.job),
        "hosts": ",".join(map(_safe, job.hosts[:HOSTS_SHOWN])) + (f" +{more}" if more > 0 else ""),
        "GPUs": str(job.gpus),
        "state": f"{job.state}, dry run" if job.dry_run else job.state,
        "step now": _seconds(steps.step_s),
        "alone": _range(*alone),
        "slowdown": _range(*slowdown),
        "age": ", ".join(filter(None, ages)),
        "W FLOP": _si(profile.flops) if profile else "",
        "MFU": "" if mfu is None else f"{mfu:.1%}",
        "t s": f"{profile.t_s:.4g}" if profile else "",
        "period s": f"{profile.period_s:.4g}" if profile else "",
        "overlap": f"{profile.overlap:.0%}" if profile else "",
        "I FLOP/s": "" if intensity is None else _si(intensity),
        "k": f"{entry.correction:.3g}" if entry else "",
        "P": _si(entry.priority) if entry else "",
        # Of a job that marks nothing it has no effect.
        "level": str(entry.level) if entry and job.marks else "",
        "paths": _paths(job.paths),
        "grid s": f"{entry.grid.period_s:.4g}" if entry and entry.grid else "",
        "late/min": _count(job.corrections_per_minute),
        "trial": _trial(entry, jobs),
        "operator": operator.about(job.job),
    }


def _trial(entry: PlanEntry | None, jobs: Mapping[str, JobRecord]) -> str:
    """Where the trial of the plan of the job's component stands, and what it changed."""
    if entry is None or not entry.trial:
        return ""
    judge = jobs.get(entry.trial.judge)
    said = {t.name: t for t in judge.trials} if judge is not None else {}
    tried = said.get(entry.trial.name)
    if tried is None:
        return "measured before"
    words = {"trying": "on trial", "kept": "kept", "worse": "taken back"}
    share = f" {tried.change:+.1%}" if tried.state != "trying" else ""
    return words[tried.state] + share


def _is_current(tried: TriedPlan, plan: Plan | None) -> bool:
    """Whether it is of a component as it is now."""
    entries = plan.entries if plan is not None else ()
    return any(e.trial.name == tried.name for e in entries if e.trial)


def _range(low: str, high: str) -> str:
    if low == high:
        return high
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low}-{high}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _seconds(value_s: float | None) -> str:
    if value_s is None:
        return ""
    return f"{value_s:.3g} s" if value_s >= 1 else f"{1e3 * value_s:.3g} ms"


def _age(value_s: float | None) -> str:
    if value_s is None:
        return ""
    for size_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value_s >= 2 * size_s:
            return f"{value_s / size_s:.0f} {unit}"
    return f"{value_s:.0f} s"


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _paths(paths: PathCounts | None) -> str:
    """Connections on their planned path / with a planned path, and those seen on another."""
    if paths is None:
        return ""
    total = paths.as_planned + paths.elsewhere + paths.unknown
    astray = f", {paths.elsewhere} astray" if paths.elsewhere else ""
    return f"{paths.as_planned}/{total}{astray}"


def _si(value: float) -> str:
    # A job that needs no time on the network has no finite intensity; plans hold the largest float.
    if abs(value) >= BOUNDLESS:
        return "inf"
    for size, prefix in _PREFIXES:
        if size <= abs(value):
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def _safe(name: Any) -> str:
    """``name``, which comes from another tenant, without what could control a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
