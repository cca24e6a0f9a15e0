"""What leaders write to the shared store: versioned, bounded JSON, validated when it is read."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from crux_torch.errors import CruxError
from crux_torch.profile.job_profile import JobProfile, Name

#: Raised when a field changes its meaning; records of another version are ignored with a warning.
SCHEMA_VERSION = 1
MAX_RECORD_BYTES = 1 << 20
MAX_JOBS = 50_000

Level = Annotated[int, msgspec.Meta(ge=0, le=63)]


class RecordError(CruxError, ValueError):
    """A record that can't be used: what is wrong with it, and where it was found."""


class PathCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many of a job's connections take the path that the plan has for them.

    Attributes:
        as_planned: seen on the planned path.
        elsewhere: seen on another one.
        unknown: not seen.
        missed: of the last two, those whose port the end that counts them picked: a next try may
            find a better one.
    """

    as_planned: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    elsewhere: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    unknown: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    missed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0


class JobRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One running job, rewritten by its leader before its lease ends.

    Attributes:
        job: unique name of the job in the cluster.
        incarnation: random, new at each start of the job: a restarted job is another one.
        hosts: where its ranks run, in the order of their first rank.
        gpus: devices that it occupies.
        state: ``starting`` (not measured yet), ``profiling`` or ``running``.
        peak_flops: FLOP/s that its devices could do at most, 0 where unknown; bounds its claim.
        profile: what was measured; absent while starting.
        paths: what became of the plan's paths; absent where it has none for the job.
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


class PlanEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the plan says about one job; ``path`` has a candidate's index for each of its flows."""

    job: Name
    level: Level
    priority: float
    intensity: float
    correction: float
    path: Annotated[tuple[int, ...], msgspec.Meta(max_length=65536)] = ()


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The schedule in force.

    Attributes:
        epoch: grows by one with every plan; appliers reject an older one.
        fingerprint: of the inputs; the same snapshot gives the same fingerprint on every leader.
        valid_s: seconds after its last renewal at which appliers fall back to the default.
        author: the job whose leader wrote it.
        policy: the scheduler that computed it.
        entries: one for each job that was profiled.
    """

    version: int = SCHEMA_VERSION
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    fingerprint: Name
    valid_s: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)]
    author: Name
    policy: Name
    entries: Annotated[tuple[PlanEntry, ...], msgspec.Meta(max_length=MAX_JOBS)]

    def entry(self, job: str) -> PlanEntry | None:
        """The entry of ``job``, or None where the plan does not speak of it."""
        return next((e for e in self.entries if e.job == job), None)
