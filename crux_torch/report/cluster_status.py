"""The state of a cluster as its store has it, once: for ``crux status``."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from crux_torch.control.records import JobRecord, PathCounts, Plan

TIMEOUT_S = 2.0
HOSTS_SHOWN = 2
#: Columns of a job's profile; MFU is what its devices achieve of their peak.
MEASURED = ("W FLOP", "MFU", "t s", "period s", "overlap")
#: Where the output is no terminal nothing should be cut off.
PIPE_WIDTH = 200
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What was read.

    Attributes:
        store: where it was read.
        cluster: the cluster's name.
        jobs: the valid records, in the order of their names.
        plan: the plan in the store, None where there is none or none that can be used.
        plan_renewed: whether the plan was renewed while it was looked at; None where that was not
            waited for.
    """

    store: str
    cluster: str
    jobs: tuple[JobRecord, ...]
    plan: Plan | None
    plan_renewed: bool | None


def read_status(endpoint: str, cluster: str, settle_s: float = 0.0) -> ClusterStatus:
    """Read a cluster's records.

    Args:
        endpoint: ``tcp://HOST:PORT`` of the store.
        cluster: the cluster's name.
        settle_s: seconds between a first and a second look. The store has no clock: what one look
            finds may be the record of a job that died, until its lease is over by our clock.

    Raises:
        StoreError: the store can't be reached or does not answer in time.
        SettingsError: ``endpoint`` can't be used.
    """
    from crux_torch.control.host import parse_endpoint
    from crux_torch.control.registry import Registry
    from crux_torch.control.tcp_store import TcpStore

    host, port = parse_endpoint(endpoint)
    store = TcpStore(host, port, timeout_s=TIMEOUT_S)
    try:
        registry = Registry(store, cluster)
        jobs, plan = registry.jobs(), registry.plan().stored
        renewed: bool | None = None
        if settle_s:
            before = plan
            time.sleep(settle_s)
            jobs, plan = registry.jobs(), registry.plan().stored
            renewed = plan is not None and before != plan
        return ClusterStatus(endpoint, cluster, jobs, plan.plan if plan else None, renewed)
    finally:
        store.close()


def as_json_text(status: ClusterStatus) -> str:
    """``status`` as JSON; records keep their schema, fields their units."""
    fields = {
        "store": status.store,
        "cluster": status.cluster,
        "jobs": msgspec.to_builtins(status.jobs),
        "plan": msgspec.to_builtins(status.plan),
        "plan_renewed": status.plan_renewed,
    }
    return json.dumps(fields, indent=2)


def render(status: ClusterStatus, console: Console | None = None) -> None:
    """Print ``status`` as a table, one row a job."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    console.print(Text(f"cluster {_safe(status.cluster)} at {status.store}: {_plan_line(status)}"))
    if not status.jobs:
        console.print("no jobs")
        return
    table = Table(pad_edge=False)
    for heading in ("job", "hosts"):
        table.add_column(heading, overflow="fold")
    table.add_column("GPUs", justify="right")
    table.add_column("state")
    for heading in (*MEASURED, "I FLOP/s", "k", "P", "level", "paths"):
        table.add_column(heading, justify="right")
    for job in status.jobs:
        table.add_row(*(Text(cell) for cell in _row(job, status.plan)))
    console.print(table)


def _plan_line(status: ClusterStatus) -> str:
    plan = status.plan
    if plan is None:
        return "no plan"
    confirmed = {None: "", True: ", renewed", False: ", NOT renewed while looked at"}
    return (
        f"plan {plan.epoch} by {_safe(plan.author)}, policy {_safe(plan.policy)}, "
        f"valid {plan.valid_s:g} s after a renewal{confirmed[status.plan_renewed]}"
    )


def _row(job: JobRecord, plan: Plan | None) -> tuple[str, ...]:
    profile = job.profile
    entry = plan.entry(job.job) if plan else None
    more = len(job.hosts) - HOSTS_SHOWN
    hosts = ",".join(map(_safe, job.hosts[:HOSTS_SHOWN])) + (f" +{more}" if more > 0 else "")
    measured = ("",) * len(MEASURED)
    intensity = ""
    if profile is not None:
        measured = (
            _si(profile.flops),
            "" if profile.utilization is None else f"{profile.utilization:.1%}",
            f"{profile.t_s:.4g}",
            f"{profile.period_s:.4g}",
            f"{profile.overlap:.0%}",
        )
        intensity = _si(profile.intensity)
    if entry:
        intensity = _si(entry.intensity)
    return (
        _safe(job.job),
        hosts,
        str(job.gpus),
        job.state,
        *measured,
        intensity,
        f"{entry.correction:.3g}" if entry else "",
        _si(entry.priority) if entry else "",
        str(entry.level) if entry else "",
        _paths(job.paths),
    )


def _paths(paths: PathCounts | None) -> str:
    """Connections on their planned path, of those that have one; those seen on another."""
    if paths is None:
        return ""
    total = paths.as_planned + paths.elsewhere + paths.unknown
    return f"{paths.as_planned}/{total}" + (
        f", {paths.elsewhere} astray" if paths.elsewhere else ""
    )


def _si(value: float) -> str:
    for size, prefix in _PREFIXES:
        if size <= abs(value) < float("inf"):
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def _safe(name: Any) -> str:
    """``name`` without what could steer a terminal: it comes from another tenant."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
