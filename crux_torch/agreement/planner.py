"""From job records to a plan's entries: pure, deterministic, so that all leaders agree.

:class:`PlanComputer` does that beside the leader's thread, because it may take seconds.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from crux_torch.agreement.inputs import (
    UNLOCATED,
    Agree,
    TopologyReader,
    agreed,
    candidate_limit,
    paths_taken,
    plan_inputs,
)
from crux_torch.agreement.operator import ComputeEntries, operated
from crux_torch.agreement.records import (
    MAX_GRID_S,
    MAX_RECORD_BYTES,
    Grid,
    JobRecord,
    OnTrial,
    PlanEntry,
)
from crux_torch.agreement.snapshot import Snapshot, admitted_trials
from crux_torch.errors import SettingsError
from crux_torch.logs import WarnOnce
from crux_torch.measure.profile import JobProfile
from crux_torch.network.routes import PlannedPath, planned_paths
from crux_torch.network.topology import Path, Topology
from crux_torch.schedule.model import Decision, Job, Memory, SchedulerOptions
from crux_torch.schedule.schedulers import FIRST, FIRST_NAME, LIVE, SCHEDULERS
from crux_torch.settings import PATH_POLICIES

_PATH_POLICIES = {*PATH_POLICIES, *(FIRST_NAME[p] for p in PATH_POLICIES if p in FIRST_NAME)}
#: JSON has no infinity: the priority of a job without traffic is this.
MAX_FINITE = sys.float_info.max
#: Bytes of a stored entry beside the entry.
MAX_AROUND_BYTES = 4096
#: Results that a :class:`PlanWorker` keeps.
MAX_RESULTS = 8
#: Seconds of work in a row, and the share of the time that work takes in the long run. Python runs
#: one thread at a time, so training gets slower meanwhile.
BURST_S = 10.0
SHARE = 0.1


def compute_entries(
    records: Sequence[JobRecord],
    topology: Topology | None,
    *,
    policy: str,
    levels: Sequence[int],
    max_slowdown: float = 3.0,
    guard: bool = False,
    weights: Mapping[str, float] = MappingProxyType({}),
    memory: Memory | None = None,
) -> tuple[PlanEntry, ...]:
    """Return the plan's entries, one for each profiled job, in the order of the names.

    A policy that leaves paths to the network gives entries without any. Without a topology the
    default policy gives all jobs one level.

    Args:
        policy: the scheduler, a key of ``LIVE`` or ``FIRST``.
        levels: that may be assigned, ascending.
        max_slowdown: see ``SchedulerOptions``.
        guard: a component gets a plan that is not the safe one only after its judge has let it be
            tried, and until the judge finds it worse (:mod:`crux_torch.agreement.trials`).
        weights: see :func:`plan_inputs`.
        memory: results of earlier plans; saves time.

    Raises:
        SettingsError: an unknown policy, or no level.
        CruxError: records or a topology that contradict themselves.
    """
    check_policy(policy, levels)
    limit = candidate_limit(records)
    cluster = plan_inputs(records, topology, limit, weights)
    if not cluster.jobs:
        return ()
    tried = frozenset(admitted_trials(records)) if guard else None
    # The default may keep a component's paths: only where it knows all of them.
    whole = policy in FIRST_NAME
    options = SchedulerOptions(
        tuple(levels),
        unknown_links=frozenset((UNLOCATED,))
        if topology is not None and not topology.is_given
        else frozenset(),
        default_path=paths_taken(cluster, records, topology, limit, whole=whole),
        max_slowdown=max_slowdown,
        tried=tried,
        memory=memory or Memory(),
    )
    if topology is None:
        # Who meets whom is not known: levels would lose as often as they gain
        # (docs/understand/policies.md).
        policy = FIRST_NAME.get(policy, policy)
    decision = (LIVE | FIRST)[policy](cluster, options)
    level = _usable(decision.level, levels) if policy == "crux-pa" else decision.level
    profiles = {r.job: r.profile for r in records if r.profile is not None}

    def paths(job: Job) -> tuple[PlannedPath, ...]:
        if topology is None or policy not in _PATH_POLICIES:
            return ()
        chosen = decision.path.get(job.name, ())
        view = topology.as_seen_by(job.name)
        return planned_paths(_chosen(profiles[job.name], job, chosen, topology), view, limit)

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
    records: Sequence[JobRecord], topology: Topology | None, **options: Any
) -> tuple[PlanEntry, ...]:
    """Call :func:`compute_entries` with the levels that the jobs' DSCP maps leave to a plan."""
    levels = agreed(records, topology).levels
    return compute_entries(records, topology, levels=levels, **options)


def check_policy(policy: str, levels: Sequence[int]) -> None:
    """Raise a SettingsError for a policy that can't be carried out, or without a level."""
    if policy not in LIVE | FIRST:
        known = "only the simulator can carry it out, " if policy in SCHEDULERS else ""
        raise SettingsError(f"policy {policy!r}: {known}expected one of {', '.join(sorted(LIVE))}")
    if not levels:
        raise SettingsError("no priority level is left to plan with")


def within(entries: Sequence[PlanEntry], limit_bytes: int) -> tuple[tuple[PlanEntry, ...], int]:
    """Remove the paths of entries over ``limit_bytes`` of JSON.

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


def _chosen(
    profile: JobProfile, job: Job, chosen: Sequence[int], topology: Topology
) -> dict[tuple[str, str], Path]:
    """Return the path that the scheduler chose for each pair of hosts; its first flow counts.

    The job's flows begin with the profile's; those inside a host, which follow, have no choice.
    """
    known = frozenset(topology.hosts)
    paths: dict[tuple[str, str], Path] = {}
    for profiled, flow, candidate in zip(profile.flows, job.flows, chosen, strict=False):
        pair = profiled.src, profiled.dst
        path = flow.candidates[candidate]
        if profiled.src != profiled.dst and known.issuperset(pair) and path != (UNLOCATED,):
            paths.setdefault(pair, path)
    return paths


def _usable(level: Mapping[str, int], levels: Sequence[int]) -> dict[str, int]:
    """Give each job a level from the top of ``levels`` down; the rest share the lowest."""
    below = len(levels) - len(level)
    return {job: levels[max(0, place + below)] for job, place in level.items()}


def _grid(decision: Decision, job: str) -> Grid | msgspec.UnsetType:
    period_s = decision.grid_s.get(job, 0.0)
    if not 0.0 < period_s <= MAX_GRID_S:
        return msgspec.UNSET
    return Grid(decision.shift_s[job] % period_s, period_s)


def _finite(value: float) -> float:
    return 0.0 if math.isnan(value) else max(-MAX_FINITE, min(MAX_FINITE, float(value)))


class PlanWorker:
    """Does work beside the thread that asks: each key once, one at a time, in a share of the time.

    Thread safety: one thread asks; results pass from the worker's thread under a lock. Work must
    not raise.

    Args:
        in_thread: True: a thread of its own works; False: the one that asks.
    """

    def __init__(self, *, in_thread: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_thread = in_thread
        self._clock = clock
        self._lock = threading.Lock()
        self._results: dict[Hashable, Any] = {}
        self._thread: threading.Thread | None = None
        self._left_s, self._counted_s = BURST_S, clock()

    def ask(self, key: Hashable, work: Callable[[], Any]) -> tuple[bool, Any]:
        """Return (True, result of ``work``); or (False, None), and begin it when its turn comes."""
        with self._lock:
            if key in self._results:
                self._results[key] = self._results.pop(key)  # the last to be dropped
                return True, self._results[key]
        if not self._in_thread:
            self._run(key, work)
            return True, self._results[key]
        if self._thread is None or not self._thread.is_alive():
            now = self._clock()
            self._left_s = min(BURST_S, self._left_s + SHARE * (now - self._counted_s))
            self._counted_s = now
            if self._left_s > 0:
                self._thread = threading.Thread(
                    target=self._run, args=(key, work), name="crux-plan", daemon=True
                )
                self._thread.start()
        return False, None

    def is_pending(self, key: Hashable) -> bool:
        """Return True if whoever asks for ``key`` now has to come back for the result."""
        with self._lock:
            return self._in_thread and key not in self._results

    def _run(self, key: Hashable, work: Callable[[], Any]) -> None:
        began_s = self._clock()
        result = work()
        with self._lock:
            self._left_s -= self._clock() - began_s
            self._results[key] = result
            if len(self._results) > MAX_RESULTS:
                del self._results[next(iter(self._results))]


class PlanComputer:
    """Computes a leader's plans, and parses the topology for them, with a :class:`PlanWorker`.

    Thread safety: as a PlanWorker's.

    Args:
        compute: gives entries for records and a topology.
        agree: the levels that a plan of some records may assign.
    """

    def __init__(
        self,
        compute: ComputeEntries,
        agree: Agree,
        topologies: TopologyReader,
        warn: WarnOnce,
        *,
        in_thread: bool,
        clock: Callable[[], float],
    ) -> None:
        self._compute, self._agree = compute, agree
        self._topologies = topologies
        self._warn = warn
        self._worker = PlanWorker(in_thread=in_thread, clock=clock)
        #: First plans: they must not wait for a better one of a snapshot that is gone already.
        self._first_worker = PlanWorker(in_thread=in_thread, clock=clock)

    def topology(self, raw: bytes | None) -> tuple[bool, Topology | None]:
        """Return (True, the topology or None if there is none to use), or (False, None)."""
        if raw is None:
            return True, None
        return self._worker.ask(("topology", raw), lambda: self._topologies.read(raw))

    def entries(
        self, snapshot: Snapshot, fingerprint: str, policy: str
    ) -> tuple[bool, tuple[PlanEntry, ...] | None]:
        """Return (True, the entries or None if the planner failed), or (False, None).

        Args:
            fingerprint: of ``snapshot`` now or a moment ago.
        """
        jobs, raw = snapshot.jobs_of(fingerprint) or (), snapshot.topology
        settings = snapshot.operator

        def work() -> tuple[PlanEntry, ...] | None:
            try:
                topology = self._topologies.read(raw)
                computed = operated(
                    self._compute,
                    jobs,
                    topology,
                    policy=policy,
                    agreed=self._agree(jobs, topology),
                    settings=settings,
                )
                entries, without = within(computed, MAX_RECORD_BYTES - MAX_AROUND_BYTES)
            except Exception as error:
                self._warn("compute", f"no plan could be computed: {type(error).__name__}: {error}")
                return None
            if without:
                self._warn(
                    "size",
                    f"entries of the plan are over {MAX_RECORD_BYTES} bytes: the network chooses "
                    f"the paths of these {without} jobs",
                )
            return entries

        worker = self._first_worker if policy in FIRST_NAME.values() else self._worker
        return worker.ask((fingerprint, policy), work)

    def is_pending(self, fingerprint: str, policy: str) -> bool:
        """Return True if :meth:`entries` of the policy itself are not there yet."""
        return self._worker.is_pending((fingerprint, policy))
