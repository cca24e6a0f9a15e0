"""From a snapshot of job records to a plan: pure and deterministic, so all leaders agree."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec

from crux_torch.control.agreed_marks import agreed
from crux_torch.control.inputs import UNLOCATED, candidate_limit, plan_inputs
from crux_torch.control.records import MAX_GRID_S, Grid, JobRecord, OnTrial, PlanEntry
from crux_torch.errors import SettingsError
from crux_torch.fabric.route import PlannedPath, planned_paths
from crux_torch.fabric.topology import Path, Topology
from crux_torch.measure.job_profile import JobProfile
from crux_torch.schedule.model import Decision, Job, SchedulerOptions
from crux_torch.schedule.scheduler import FIRST, FIRST_NAME, LIVE, SCHEDULERS
from crux_torch.settings import PATH_POLICIES

#: Everything in a profile that a plan follows from.
_READ = attrgetter("period_s", "compute_s", "flops", "flows", "inside", "bursts", "t_s", "t_source")
_PATH_POLICIES = {*PATH_POLICIES, *(FIRST_NAME[p] for p in PATH_POLICIES if p in FIRST_NAME)}
#: JSON has no infinity: the priority of a job without traffic is this.
MAX_FINITE = sys.float_info.max


def compute_entries(
    records: Sequence[JobRecord],
    topology: Topology | None,
    *,
    policy: str,
    levels: Sequence[int],
    max_slowdown: float = 3.0,
    guard: bool = False,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> tuple[PlanEntry, ...]:
    """The plan's entries, one for each profiled job, in the order of the names.

    A policy that leaves paths to the network gives entries without any. Without a topology the
    default policy gives all jobs one level.

    Args:
        records, topology: see :func:`plan_inputs`.
        policy: the scheduler, a key of ``LIVE`` or ``FIRST``.
        levels: that may be assigned, ascending.
        max_slowdown: what the policy crux keeps to, see ``SchedulerOptions``.
        guard: whether a component gets a plan that is not the safe one only after its judge has let
            it be tried, and until the judge finds it worse (:mod:`crux_torch.control.trials`).
        weights: see :func:`plan_inputs`.

    Raises:
        SettingsError: an unknown policy, or no level.
        CruxError: records or a topology that contradict themselves.
    """
    check_policy(policy, levels)
    limit = candidate_limit(records)
    cluster = plan_inputs(records, topology, limit, weights)
    if not cluster.jobs:
        return ()
    tried = frozenset(_admitted(records)) if guard else None
    options = SchedulerOptions(tuple(levels), max_slowdown=max_slowdown, tried=tried)
    if topology is None:
        # Who meets whom is not known: levels would lose as often as they gain (docs/policies.md).
        policy = FIRST_NAME.get(policy, policy)
    decision = (LIVE | FIRST)[policy](cluster, options)
    level = _usable(decision.level, levels) if policy == "crux-pa" else decision.level
    profiles = {r.job: r.profile for r in records if r.profile is not None}

    def paths(job: Job) -> tuple[PlannedPath, ...]:
        if topology is None or policy not in _PATH_POLICIES:
            return ()
        chosen = decision.path.get(job.name, ())
        return planned_paths(_chosen(profiles[job.name], job, chosen, topology), topology, limit)

    on_trial = {
        job: OnTrial(name=trial.name, judge=trial.jobs[0], jobs=len(trial.jobs), on=trial.on)
        for trial in decision.trials
        for job in trial.jobs
    }
    return tuple(
        PlanEntry(
            job=job.name,
            level=level[job.name],
            priority=_finite(decision.priority.get(job.name, 0.0)),
            intensity=_finite(decision.intensity.get(job.name, 0.0)),
            correction=_finite(decision.correction.get(job.name, 1.0)),
            paths=paths(job),
            grid=_grid(decision, job.name),
            trial=on_trial.get(job.name, msgspec.UNSET),
        )
        for job in sorted(cluster.jobs, key=lambda j: j.name)
    )


def entries_of_agreed_levels(
    records: Sequence[JobRecord], topology: Topology | None, **given: Any
) -> tuple[PlanEntry, ...]:
    """:func:`compute_entries` with the levels that the jobs' DSCP maps leave to a plan."""
    levels = agreed(records, topology).levels
    return compute_entries(records, topology, levels=levels, **given)


def check_policy(policy: str, levels: Sequence[int]) -> None:
    """Raise a SettingsError for a policy that can't be carried out, or without a level."""
    if policy not in LIVE | FIRST:
        known = "only the simulator can carry it out, " if policy in SCHEDULERS else ""
        raise SettingsError(f"policy {policy!r}: {known}expected one of {', '.join(sorted(LIVE))}")
    if not levels:
        raise SettingsError("no priority level is left to plan with")


def within(entries: Sequence[PlanEntry], limit_bytes: int) -> tuple[tuple[PlanEntry, ...], int]:
    """``entries``, each in ``limit_bytes`` of JSON: those over it go without paths.

    Returns:
        the entries, and how many jobs lost their paths.
    """
    kept = [
        msgspec.structs.replace(entry, paths=())
        if len(msgspec.json.encode(entry)) > limit_bytes
        else entry
        for entry in entries
    ]
    return tuple(kept), sum(a is not b for a, b in zip(entries, kept, strict=True))


def canonical(record: JobRecord) -> bytes:
    """What :func:`fingerprint` hashes of one record; empty without a profile."""
    if record.profile is None:
        return b""
    r = record
    told = [r.job, r.incarnation, r.hosts, r.gpus, r.peak_flops, _READ(record.profile)]
    if r.marks:
        told.append(r.marks)
    return msgspec.json.encode(told, order="deterministic")


def fingerprint(
    records: Sequence[JobRecord],
    topology: bytes | None,
    operator: bytes = b"",
    canonical: Callable[[JobRecord], bytes] = canonical,
) -> str:
    """Hash of all that a plan follows from and that is the same for all leaders.

    That is each profiled job's name, incarnation, hosts, devices, DSCP values, and the fields of
    its profile that :func:`plan_inputs` reads, the bytes of the topology,
    ``OperatorSettings.effect``, and the plans that judges admit. A field that only a newer release
    knows is not part of it, nor are a leader's own settings (policy; docs/agreement.md).

    Args:
        canonical: :func:`canonical`, or what gives the same and remembers it.
    """
    ordered = sorted(records, key=attrgetter("job", "incarnation"))
    digest = hashlib.sha256(b"[" + b",".join(filter(None, map(canonical, ordered))) + b"]")
    digest.update(b"-" if topology is None else b"+" + topology)
    digest.update(operator and b"#" + operator)
    admitted = sorted(_admitted(records))
    digest.update(b"!" + msgspec.json.encode(admitted) if admitted else b"")
    return digest.hexdigest()


def _admitted(records: Sequence[JobRecord]) -> Iterator[tuple[str, str]]:
    """The plans that are on trial or stay, each with the job that says so."""
    for record in records:
        for tried in record.trials:
            if record.profile is not None and tried.state != "worse":
                yield tried.name, record.job


def _chosen(
    profile: JobProfile, job: Job, chosen: Sequence[int], topology: Topology
) -> dict[tuple[str, str], Path]:
    """The path that the scheduler chose for each pair of hosts; a pair's first flow counts.

    The job's flows begin with the profile's; those inside a host, which follow, have no choice.
    """
    known = frozenset(topology.hosts)
    paths: dict[tuple[str, str], Path] = {}
    for told, flow, candidate in zip(profile.flows, job.flows, chosen, strict=False):
        pair = told.src, told.dst
        path = flow.candidates[candidate]
        if told.src != told.dst and known.issuperset(pair) and path != (UNLOCATED,):
            paths.setdefault(pair, path)
    return paths


def _usable(level: Mapping[str, int], levels: Sequence[int]) -> dict[str, int]:
    """A level for every job, from the top of ``levels`` down; what is left shares the lowest."""
    below = len(levels) - len(level)
    return {job: levels[max(0, place + below)] for job, place in level.items()}


def _grid(decision: Decision, job: str) -> Grid | msgspec.UnsetType:
    period_s = decision.grid_s.get(job, 0.0)
    if not 0.0 < period_s <= MAX_GRID_S:
        return msgspec.UNSET
    return Grid(decision.shift_s[job] % period_s, period_s)


def _finite(value: float) -> float:
    if math.isnan(value):
        return 0.0
    return max(-MAX_FINITE, min(MAX_FINITE, float(value)))
