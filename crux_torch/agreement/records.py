"""Schemas of the shared store: versioned, bounded JSON, validated by every reader."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Literal

import msgspec

from crux_torch.agreement import SCHEMA_VERSION, Level
from crux_torch.errors import CruxError
from crux_torch.measure.profile import MAX_FLOWS, JobProfile, Name, NonNegative
from crux_torch.network.discover.fragment import SeenPair
from crux_torch.network.routes import PlannedPath
from crux_torch.schedule.default.guard import Sample
from crux_torch.settings import Marks
from crux_torch.store import MAX_VALUE_BYTES

MAX_RECORD_BYTES = MAX_VALUE_BYTES
MAX_JOBS = 50_000
#: After the last epoch comes 1 again.
MAX_EPOCH = (1 << 62) - 1

#: Plans of which a job's record speaks, and jobs of one component.
MAX_TRIED, MAX_TRIED_JOBS = 4, 1024

#: Pairs of addresses whose paths a job's record has, and the bytes of all of them.
MAX_SEEN_PAIRS, MAX_SEEN_BYTES = 8192, 1 << 18

#: Groups of a plan's entries of which each has a digest of its own, and the digits of one.
GROUPS, GROUP_DIGITS = 32, 16

#: The longest time for which a job is held back at once, and so the longest grid.
MAX_GRID_S = 60.0
#: The most by which a plan's grid moves, in all.
MAX_MOVED_S = 1e9

Finite = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
GridSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_GRID_S)]


class RecordError(CruxError, ValueError):
    """A record that can't be used: where it was found, and what is wrong with it."""


class PathCounts(msgspec.Struct, frozen=True):
    """Counts of a job's connections: on the planned path, on another one, and not seen.

    Attributes:
        missed: of ``elsewhere`` and ``unknown``, those whose port was picked by the end that
            counts them: another try may find a better one.
    """

    as_planned: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    elsewhere: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    unknown: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    missed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0


class TriedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's word about a plan that it lets its component try.

    Attributes:
        name: of the component and its plan.
        state: ``kept`` if it did no worse than the plan before the trial; ``worse``: taken back.
        change, low, high: share by which the component's busy GPUs changed, and its bounds.
        iterations: under the plan on trial, of the job that had the fewest.
        slowed: a job that was slowed down beyond the cap; empty if none was.
    """

    name: Name
    jobs: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_TRIED_JOBS)]
    state: Literal["trying", "kept", "worse"]
    change: Finite = 0.0
    low: Finite = 0.0
    high: Finite = 0.0
    iterations: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    slowed: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Grid(msgspec.Struct, frozen=True):
    """Begins of a job's iterations: ``shift_s + n period_s`` on the clock of the store."""

    shift_s: GridSeconds
    period_s: GridSeconds


class Moved(msgspec.Struct, frozen=True):
    """Delay of a job that does not catch up with its grid.

    Attributes:
        grid: as the plan has it. With another one, this is void.
        by_s: seconds later than in the plan, in all.
        from_s: begin of the delay, on the clock of the store.
    """

    grid: Grid
    by_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_MOVED_S)]
    from_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class RunLabels(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names of a job in the system that started it; empty where that is another one."""

    slurm_job_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    namespace: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pod: Annotated[str, msgspec.Meta(max_length=256)] = ""

    def __bool__(self) -> bool:
        return bool(self.slurm_job_id or self.pod)


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One running job, rewritten by its leader before its lease ends.

    Attributes:
        job: unique name of the job in the cluster.
        incarnation: random and new at each start, so that a restarted job is another one.
        hosts: in the order of their first rank.
        gpus: devices that it occupies.
        state: ``starting`` (not measured yet), ``profiling`` or ``running``.
        peak_flops: FLOP/s that its devices could do at most, 0 if unknown; bounds its claim.
        profile: absent while starting.
        paths: absent if the plan has none for the job.
        corrections_per_minute: times in the last minute that the job had fallen behind its grid;
            absent if it keeps to none.
        tried: plans that this job has judged, the last one last; unset takes no room.
        moved: unset if the job keeps up with its grid.
        marks: DSCP values that it may send with; unset if it marks nothing.
        dry_run: True if it only measures; unset if it also follows the plan.
        seen: paths of its connections that were left to the network; unset if none was seen.
        run: of the rank that leads; unset outside of Slurm and Kubernetes.
    """

    version: int = SCHEMA_VERSION
    job: Name
    incarnation: Name
    hosts: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=65536)]
    gpus: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    state: Literal["starting", "profiling", "running"]
    peak_flops: Annotated[float, msgspec.Meta(ge=0.0, le=1e30)] = 0.0
    profile: JobProfile | None = None
    paths: PathCounts | None = None
    corrections_per_minute: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None
    tried: (
        Annotated[tuple[TriedPlan, ...], msgspec.Meta(max_length=MAX_TRIED)] | msgspec.UnsetType
    ) = msgspec.UNSET
    moved: Moved | msgspec.UnsetType = msgspec.UNSET
    marks: Marks | msgspec.UnsetType = msgspec.UNSET
    dry_run: bool | msgspec.UnsetType = msgspec.UNSET
    seen: (
        Annotated[tuple[SeenPair, ...], msgspec.Meta(max_length=MAX_SEEN_PAIRS)] | msgspec.UnsetType
    ) = msgspec.UNSET
    run: RunLabels | msgspec.UnsetType = msgspec.UNSET

    @property
    def trials(self) -> tuple[TriedPlan, ...]:
        """:attr:`tried`, or none."""
        return self.tried or ()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A job's iteration times while its component has a plan to try.

    Attributes:
        name: of the component and its plan.
        before, after: under the safe plan, and under the one on trial.
        waiting_s: seconds since its last iteration under the plan on trial, if they are many.
    """

    version: int = SCHEMA_VERSION
    name: Name
    before: Sample
    after: Sample
    waiting_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e30)] = 0.0


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A job's step time now, for status commands. No plan follows from it.

    Attributes:
        step_s, iterations: mean of the last iterations, and their number.
        age_s: since the last of them ended, when this was written.
        fastest_s: least ``step_s`` since the job's profile was measured; absent before.
        profile_age_s: age of the profile, when this was written; absent before.
    """

    version: int = SCHEMA_VERSION
    step_s: NonNegative
    iterations: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    age_s: NonNegative
    fastest_s: NonNegative | None = None
    profile_age_s: NonNegative | None = None


class OnTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Trial of a plan of the job's component.

    Attributes:
        name: of the component and its plan.
        judge: the job of the component that begins and ends the trial.
        jobs: number of jobs of the component.
        on: True if the plan is in force; otherwise the safe one is.
    """

    name: Name
    judge: Name
    jobs: Annotated[int, msgspec.Meta(ge=2, le=MAX_TRIED_JOBS)]
    on: bool


class PlanEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one job.

    Attributes:
        level: priority level of its connections; a higher level goes first.
        priority, intensity, correction: P_j = k_j I_j, with I_j in FLOP/s.
        paths: of its pairs of hosts that have a choice; empty if the network decides.
        grid: unset: iterations begin whenever they are ready.
        trial: unset if there is nothing to be tried.
    """

    job: Name
    level: Level
    priority: float
    intensity: float
    correction: float
    paths: Annotated[tuple[PlannedPath, ...], msgspec.Meta(max_length=MAX_FLOWS)] = ()
    grid: Grid | msgspec.UnsetType = msgspec.UNSET
    trial: OnTrial | msgspec.UnsetType = msgspec.UNSET


class PlanHead(msgspec.Struct, frozen=True, kw_only=True):
    """All of a plan but its entries: the leaders agree on it.

    Attributes:
        epoch: grows by one with every plan.
        fingerprint: of its inputs: one snapshot has the same fingerprint on every leader.
        valid_s: seconds without a renewal after which its author returns to the default; every
            leader goes by its own setting.
        author: the job whose leader wrote it.
        digest: of its entries.
        parts: digests of the groups of entries, one after the other, if each entry also lies
            apart; unset where every leader computes all.
    """

    version: int = SCHEMA_VERSION
    epoch: Annotated[int, msgspec.Meta(ge=1, le=MAX_EPOCH)]
    fingerprint: Name
    valid_s: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)]
    author: Name
    policy: Name
    digest: Name
    parts: (
        Annotated[
            str,
            msgspec.Meta(min_length=GROUPS * GROUP_DIGITS, max_length=GROUPS * GROUP_DIGITS),
        ]
        | msgspec.UnsetType
    ) = msgspec.UNSET

    def digest_for(self, job: str) -> str:
        """Return the digest of the group of ``job``, or that of all entries."""
        if not self.parts:
            return self.digest
        at = _group_of(job) * GROUP_DIGITS
        return self.parts[at : at + GROUP_DIGITS]


class Plan(PlanHead, frozen=True, kw_only=True):
    """The schedule in force, with its entries.

    Attributes:
        entries: one for each job that was profiled, or as many of them as are known here, in the
            order of the names.
    """

    entries: Annotated[tuple[PlanEntry, ...], msgspec.Meta(max_length=MAX_JOBS)]

    @property
    def head(self) -> PlanHead:
        """The plan without its entries."""
        return PlanHead(**{name: getattr(self, name) for name in PlanHead.__struct_fields__})

    def entry(self, job: str) -> PlanEntry | None:
        """Return the entry of ``job``; None if the plan has none, or it is not known here."""
        at = bisect_left(self.entries, job, key=attrgetter("job"))
        return self.entries[at] if at < len(self.entries) and self.entries[at].job == job else None


def plan_of(head: PlanHead, entries: tuple[PlanEntry, ...]) -> Plan:
    """Return the plan of that head with these entries."""
    return Plan(**msgspec.structs.asdict(head), entries=entries)


def digest_of(entries: Sequence[PlanEntry]) -> str:
    """Return the digest of entries.

    A new field of an entry is unset by default, so that releases which know it agree with others.
    """
    return hashlib.sha256(msgspec.json.encode(entries)).hexdigest()


def parts_of(entries: Sequence[PlanEntry]) -> str:
    """Return the digests of the groups of entries. A change of an entry changes one."""
    groups: list[list[PlanEntry]] = [[] for _ in range(GROUPS)]
    for entry in entries:
        groups[_group_of(entry.job)].append(entry)
    return "".join(digest_of(group)[:GROUP_DIGITS] for group in groups)


#: The digest of a group without entries.
NO_ENTRIES = digest_of(())[:GROUP_DIGITS]


def _group_of(job: str) -> int:
    return int.from_bytes(hashlib.sha256(job.encode(errors="replace")).digest()[:4], "big") % GROUPS
