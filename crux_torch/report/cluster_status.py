"""The state of a cluster, read once from its store: ``crux status``, ``crux cluster``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from crux_torch.files import size_text
from crux_torch.report.step_times import JobSteps, steps_of
from crux_torch.report.tables import Grid, console, json_text, say
from crux_torch.words import age, listed, safe, seconds, si

if TYPE_CHECKING:
    from crux_torch.agreement.audit import AuditEntry
    from crux_torch.agreement.bounds import ContestedHost
    from crux_torch.agreement.operator import OperatorSettings
    from crux_torch.agreement.programs import ProgramRecord
    from crux_torch.agreement.records import JobRecord, PathCounts, Plan, PlanEntry, TriedPlan
    from crux_torch.agreement.registry import StoredPlan
    from crux_torch.network.topology import Topology
    from crux_torch.settings import Settings

#: Seconds for which a command waits for an answer: a busy store takes some.
TIMEOUT_S = 10.0
HOSTS_SHOWN = 2
#: Jobs that are named whose view of the network does not count.
MAX_BEYOND = 8
#: Columns of text; the others are numbers.
TEXT = ("job", "hosts", "state", "trial", "operator")
#: Columns that are left out where no job has anything in them.
SELDOM = ("trial", "operator")
#: The columns that are shown if none are asked for.
COLUMNS = ("job", "state", "step now", "alone", "slowdown", "age")
#: Headings of the columns.
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
BESIDE_OTHERS = (
    "jobs were measured beside others, so what they take alone is not known well: a topology "
    "(docs/operate/topology.md) or a class above the others' (docs/operate/classes.md) tells"
)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """State of a cluster, as read from its store.

    Attributes:
        plan: the plan in the store, with the entries that live jobs say they follow; None if there
            is none, or none that can be used.
        plan_renewed: True if the plan was renewed between two looks; None after a single look.
        operator: the operator's settings.
        contested: hosts of which records claim more devices than there are.
        steps: step times now and alone, by job.
        left_out: reasons why the plan prioritises nothing, or chooses no paths.
        network: facts about the network that the plan is made for, and what contradicts them.
        history: the audit log, if it was asked for.
        programs: those that run under ``crux exec``.
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
    network: tuple[str, ...] = ()
    history: tuple[AuditEntry, ...] = ()
    programs: tuple[ProgramRecord, ...] = ()


class ClusterReader:
    """Reads one cluster's records again and again; what has not changed is not decoded again.

    Args:
        settings: name the store, its secret and group, and the cluster.

    Raises:
        StoreError: the store can't be reached or does not answer in time; every method raises it.
        SettingsError: one of the settings can't be used.
    """

    def __init__(self, settings: Settings) -> None:
        from crux_torch.agreement.inputs import TopologyReader
        from crux_torch.agreement.registry import Registry
        from crux_torch.agreement.seen_network import SeenNetwork
        from crux_torch.store.endpoint import LOAD_S, open_store

        self._endpoint, self._cluster = settings.store, settings.cluster
        given = settings.store, settings.store_secret, settings.store_group
        self._store = open_store(*given, timeout_s=TIMEOUT_S, load_s=LOAD_S)
        self._registry = Registry(self._store, settings.cluster)
        self._topologies, self._seen_network = TopologyReader(), SeenNetwork()
        self._seen: StoredPlan | None = None
        self._looked = False
        #: The cluster's topology at the last reading; None without one.
        self.topology: Topology | None = None

    def __enter__(self) -> ClusterReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def read(self) -> ClusterStatus:
        """Returns the state now; from the second reading on it says if the plan was renewed."""
        from crux_torch.agreement.bounds import holdings
        from crux_torch.agreement.records import plan_of

        registry, view = self._registry, self._registry.look()
        stored = view.plan.stored
        renewed = None
        if self._looked:
            renewed = stored is not None and stored != self._seen
        self._seen, self._looked = stored, True
        found = None
        if stored is not None:
            follows = registry.follows(stored.plan)
            entries = (follows[job.job] for job in view.jobs if job.job in follows)
            found = plan_of(stored.plan, tuple(entries))
        raw, beyond = view.topology, tuple[str, ...]()
        if raw is None:
            raw = self._seen_network.bytes_of(view.fragments, view.jobs)
            beyond = self._seen_network.left_out
        self.topology = self._topologies.read(raw)
        contested, _ = holdings(view.jobs, self.topology)
        return ClusterStatus(
            self._endpoint,
            self._cluster,
            view.jobs,
            found,
            renewed,
            view.operator,
            contested,
            steps_of(view.jobs, registry.steps()),
            _left_out(view.jobs, found, self.topology),
            _network(view.jobs, self.topology, beyond),
            programs=registry.programs(),
        )

    def audit(self) -> tuple[AuditEntry, ...]:
        """Returns the audit log, the oldest entry first."""
        return self._registry.audit()


def read_status(
    settings: Settings, settle_s: float = 0.0, *, history: bool = False
) -> ClusterStatus:
    """Read a cluster's records once; raises the errors of :class:`ClusterReader`.

    Args:
        settle_s: seconds until a second look; 0: only one. One look may find the record of a job
            that has died. A second look after its lease does not.
        history: read the audit log, too.
    """
    with ClusterReader(settings) as reader:
        found = reader.read()
        if settle_s:
            time.sleep(settle_s)
            found = reader.read()
        return replace(found, history=reader.audit()) if history else found


def _left_out(
    jobs: Sequence[JobRecord], plan: Plan | None, topology: Topology | None
) -> tuple[str, ...]:
    if plan is None:
        return ()
    from crux_torch.agreement.inputs import agreed
    from crux_torch.agreement.problems import left_out_of_plan, network_of

    levels = agreed(jobs, topology)
    return left_out_of_plan(plan.policy, levels.levels, levels.why, network_of(topology))


def _network(
    jobs: Sequence[JobRecord], topology: Topology | None, beyond: Sequence[str]
) -> tuple[str, ...]:
    from crux_torch.agreement.seen_network import MAX_BYTES, contradicted
    from crux_torch.network.discover.seen_topology import SeenTopology

    if not isinstance(topology, SeenTopology):
        return tuple(
            f"{sentence} ({job} saw it)" for sentence, job in contradicted(jobs, topology).items()
        )
    pairs = {
        (job.job, flow.src, flow.dst)
        for job in jobs
        for flow in (job.profile.flows if job.profile is not None else ())
        if flow.src != flow.dst
    }
    unseen = sum(not topology.as_seen_by(job).sees(src, dst) for job, src, dst in pairs)
    links = f"{len(topology.links)} links"
    rest = f", without the paths of {unseen} of {len(pairs)} pairs of hosts" if unseen else ""
    lines = [f"nobody gives a topology: the network is as its jobs saw it, {links}{rest}"]
    if beyond:
        lines.append(
            f"what jobs saw is over {size_text(MAX_BYTES)}: the largest parts do not count, so "
            f"these have no paths: {listed(beyond, MAX_BEYOND)}"
        )
    if topology.left_out:
        lines.append(
            "what jobs saw has more links than a network may have: the parts of most links do not "
            f"count, so these have no paths: {listed(topology.left_out, MAX_BEYOND)}"
        )
    return tuple(lines)


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
    first, *others = head_lines(status)
    say(to, first)
    for line in others:
        say(to, line, fold=True)
    if status.jobs:
        _print_jobs(to, status, columns)
    else:
        to.print("no jobs")
    if status.programs:
        rows = [_program_cells(program) for program in status.programs]
        shown = [name for name in rows[0] if any(row[name] for row in rows)]
        whole = [{name: row[name] for name in shown} for row in rows]
        text = [name for name in shown if name not in ("level", "pid")]
        Grid(whole, text=text, title="programs under crux exec").print(to)


def _print_jobs(to: Console, status: ClusterStatus, columns: Sequence[str]) -> None:
    whole = table_rows(status, columns)
    full = [name for name in whole[0] if name == "job" or any(row[name] for row in whole)]
    shown = [name for name in columns or full if name in full or name not in SELDOM]
    Grid([{name: row[name] for name in shown} for row in whole], text=TEXT).print(to)
    if columns == COLUMNS:
        for row in whole:
            for name in ("trial", "operator"):
                if row[name]:
                    say(to, f"{row['job']}: {name}: {row[name]}")
    for line in foot_lines(status):
        say(to, line)
    _print_legend(to, shown)


def _program_cells(program: ProgramRecord) -> dict[str, str]:
    tcp, rdma = program.dscp, program.qp_dscp
    classes = ([] if tcp is None else [f"TCP {tcp}"]) + ([] if rdma is None else [f"RDMA {rdma}"])
    return {
        "program": safe(program.name),
        "host": safe(program.host),
        "level": str(program.level),
        "DSCP": ", ".join(classes),
        "through": safe(program.through),
        "user": safe(program.user),
        "pid": str(program.pid),
    }


def head_lines(status: ClusterStatus) -> list[str]:
    """Returns what holds for the whole cluster: the plan first, and what it leaves out."""
    store = "this user's store" if status.store == "unix:" else status.store
    lines = [f"cluster {safe(status.cluster)} at {store}: {_plan_line(status)}"]
    if status.operator.observe:
        lines.append("dry run by the operator: jobs are planned, and keep the network's defaults")
    if status.operator.disabled:
        lines.append("disabled by the operator: all jobs keep the network's defaults")
    if not status.jobs:
        return lines
    return [*lines, *status.left_out, *map(safe, status.network)]


def foot_lines(status: ClusterStatus) -> list[str]:
    """Returns what is to be known of single jobs and hosts."""
    from crux_torch.agreement.audit import about_trial

    lines = []
    if any(steps.alone_source == "bound" for steps in status.steps.values()):
        lines.append(BESIDE_OTHERS)
    lines += [safe(host) for host in status.contested]
    tried = (each for job in status.jobs for each in job.trials if each.state == "worse")
    return lines + [safe(about_trial(t)) for t in tried if _is_current(t, status.plan)]


def table_rows(status: ClusterStatus, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """Returns the cells of each job by heading, all that there are.

    Args:
        columns: that are to be shown.
    """
    by_name = {job.job: job for job in status.jobs}
    whole = [job_cells(job, by_name, status) for job in status.jobs]
    if columns == COLUMNS:
        # Few columns: where there is a level, it says that the job runs.
        whole = [row | {"state": _state(row)} for row in whole]
    return whole


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
        f"plan {plan.epoch} by {safe(plan.author)}, policy {safe(plan.policy)}, "
        f"valid {plan.valid_s:g} s after a renewal{confirmed[status.plan_renewed]}"
    )


def job_cells(
    job: JobRecord, jobs: Mapping[str, JobRecord], status: ClusterStatus
) -> dict[str, str]:
    """Returns one job's cells by heading."""
    profile, plan, operator = job.profile, status.plan, status.operator
    steps = status.steps.get(job.job, JobSteps())
    alone = seconds(steps.least_alone_s), seconds(steps.alone_s)
    slowdown = _times(steps.slowdown), _times(steps.most_slowdown)
    ages = (age(steps.step_age_s), age(steps.alone_age_s))
    entry = plan.entry(job.job) if plan else None
    more = len(job.hosts) - HOSTS_SHOWN
    intensity = entry.intensity if entry else profile.intensity if profile else None
    mfu = profile.utilization if profile else None
    return {
        "job": safe(job.job),
        "hosts": ",".join(map(safe, job.hosts[:HOSTS_SHOWN])) + (f" +{more}" if more > 0 else ""),
        "GPUs": str(job.gpus),
        "state": f"{job.state}, dry run" if job.dry_run else job.state,
        "step now": seconds(steps.step_s),
        "alone": _range(*alone),
        "slowdown": _range(*slowdown),
        "age": ", ".join(filter(None, ages)),
        "W FLOP": si(profile.flops) if profile else "",
        "MFU": "" if mfu is None else f"{mfu:.1%}",
        "t s": f"{profile.t_s:.4g}" if profile else "",
        "period s": f"{profile.period_s:.4g}" if profile else "",
        "overlap": f"{profile.overlap:.0%}" if profile else "",
        "I FLOP/s": "" if intensity is None else si(intensity),
        "k": f"{entry.correction:.3g}" if entry else "",
        "P": si(entry.priority) if entry else "",
        # Of a job that marks nothing it has no effect.
        "level": str(entry.level) if entry and job.marks else "",
        "paths": _paths(job.paths),
        "grid s": f"{entry.grid.period_s:.4g}" if entry and entry.grid else "",
        "late/min": _count(job.corrections_per_minute),
        "trial": _trial(entry, jobs),
        "operator": operator.about(job.job),
    }


def _trial(entry: PlanEntry | None, jobs: Mapping[str, JobRecord]) -> str:
    """State of the trial of the plan of the job's component, and its effect."""
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
    """True if a component of ``plan`` has this trial."""
    entries = plan.entries if plan is not None else ()
    return any(e.trial.name == tried.name for e in entries if e.trial)


def _range(low: str, high: str) -> str:
    if low == high:
        return high
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low}-{high}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _paths(paths: PathCounts | None) -> str:
    """Connections on their planned path / with a planned path, and those seen on another."""
    if paths is None:
        return ""
    total = paths.as_planned + paths.elsewhere + paths.unknown
    astray = f", {paths.elsewhere} astray" if paths.elsewhere else ""
    return f"{paths.as_planned}/{total}{astray}"
