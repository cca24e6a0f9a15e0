"""The operator's settings: what holds for jobs, whatever they say of themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, Protocol

import msgspec

from crux_torch.agreement import SCHEMA_VERSION, Level
from crux_torch.agreement.inputs import Agreed
from crux_torch.agreement.records import MAX_JOBS, JobRecord, PlanEntry
from crux_torch.measure.profile import Name
from crux_torch.network.topology import Topology
from crux_torch.schedule.default.cap import Standing, capped, highest_usable, tenant_of
from crux_torch.schedule.model import Cluster, Decision, Scheduler, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.store import MAX_LEASE_S

MAX_WEIGHT = 1000.0
MAX_TENANTS = 1024
Text = Annotated[str, msgspec.Meta(max_length=256)]
Weight = Annotated[float, msgspec.Meta(ge=1 / MAX_WEIGHT, le=MAX_WEIGHT)]


class TenantCap(msgspec.Struct, frozen=True, kw_only=True):
    """Cap of a tenant's jobs, see :class:`~crux_torch.schedule.default.cap.Cap`."""

    highest: Level = 63
    above: Level = 63
    share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0

    def __str__(self) -> str:
        found = [f"level {self.highest} at most"] if self.highest < 63 else []
        if self.share < 1:
            found.append(f"{self.share:.0%} of its jobs above level {self.above}")
        return ", ".join(found)


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's settings of one cluster.

    Attributes:
        revision: counts the changes.
        disabled: there is no plan: all jobs keep the network's defaults.
        observe: jobs are measured and planned, and keep the network's defaults: a dry run of all.
        by, command: name that the author of the last change gives, and the command.
        ends_at_s: seconds since 1970 until which leaders write the settings again in a store that
            forgets; 0: they do not, so the settings end with their writer's lease.
        stays: leaders write them again for good.
        drained: jobs on the lowest level, without paths and without a say in the plan.
        weights: of jobs other than 1; a job's intensity is multiplied by it.
        pins: levels of jobs that the planner does not choose; the next usable one below counts.
        tenants: caps by the beginning of the names of a tenant's jobs. A job is of the tenant with
            the longest beginning. Pins go before caps.
    """

    version: int = SCHEMA_VERSION
    revision: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    disabled: bool = False
    observe: bool = False
    by: Text = ""
    command: Text = ""
    ends_at_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e11)] = 0.0
    stays: bool = False
    drained: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_JOBS)] = ()
    weights: Annotated[dict[Name, Weight], msgspec.Meta(max_length=MAX_JOBS)] = {}
    pins: Annotated[dict[Name, Level], msgspec.Meta(max_length=MAX_JOBS)] = {}
    tenants: Annotated[dict[Name, TenantCap], msgspec.Meta(max_length=MAX_TENANTS)] = {}

    @property
    def effect(self) -> bytes:
        """Bytes of all that plans follow from; empty where nothing is set.

        ``observe`` changes no plan. A release that knows no such settings agrees with one that does
        until they are used.
        """
        if not (self.disabled or self.drained or self.weights or self.pins or self.tenants):
            return b""
        found: list[Any] = [self.disabled, sorted(self.drained), self.weights, self.pins]
        if self.tenants:
            found.append(self.tenants)
        return msgspec.json.encode(found, order="deterministic")

    def changed(self, **changes: Any) -> OperatorSettings:
        """Return the next revision of these settings."""
        return msgspec.structs.replace(self, revision=self.revision + 1, **changes)

    def lease_s(self, now_s: float) -> float:
        """Return the lease with which to write them at ``now_s`` since 1970; 0: no more."""
        return MAX_LEASE_S if self.stays else min(MAX_LEASE_S, max(0.0, self.ends_at_s - now_s))

    def differences(self, before: OperatorSettings) -> list[str]:
        """Return the changes since ``before``, in words."""
        found = []
        if self.disabled != before.disabled:
            found.append("disabled" if self.disabled else "enabled")
        was, now = set(before.drained), set(self.drained)
        found += [f"{job}: drained" for job in sorted(now - was)]
        found += [f"{job}: no longer drained" for job in sorted(was - now)]
        for word, old, new in (
            ("weight", before.weights, self.weights),
            ("pin", before.pins, self.pins),
            ("tenant", before.tenants, self.tenants),
        ):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    found.append(f"{name}: {word} {old.get(name)} -> {new.get(name)}")
        return found

    def keeps_level(self, job: str) -> bool:
        """Return True if ``job`` may not leave its level, not even while it is measured."""
        return self.disabled or job in self.drained or job in self.pins

    def may_have(self, job: str, level: int, levels: Collection[int]) -> bool:
        """Return True if a plan of these ``levels`` may give ``job`` this one."""
        most = max(levels)
        if job in self.pins:
            most = self.pins[job]
        elif (tenant := tenant_of(job, self.tenants)) is not None:
            most = self.tenants[tenant].highest
        return level in levels and level <= highest_usable(most, levels)

    def about(self, job: str) -> str:
        """Return the settings of ``job``, in a few words."""
        found = ["drained"] if job in self.drained else []
        if job in self.weights:
            found.append(f"weight {self.weights[job]:g}")
        if job in self.pins:
            found.append(f"pinned to {self.pins[job]}")
        if (tenant := tenant_of(job, self.tenants)) is not None:
            found.append(f"tenant {tenant}: {self.tenants[tenant]}")
        return ", ".join(found)


class ComputeEntries(Protocol):
    """Entries from live records and the topology; pure, and equal on all leaders."""

    def __call__(
        self,
        records: Sequence[JobRecord],
        topology: Topology | None,
        /,
        *,
        policy: str,
        weights: Mapping[str, float],
    ) -> Sequence[PlanEntry]: ...


def operated(
    compute: ComputeEntries,
    records: Sequence[JobRecord],
    topology: Topology | None,
    *,
    policy: str,
    agreed: Agreed,
    settings: OperatorSettings,
) -> Sequence[PlanEntry]:
    """Return the entries that ``compute`` gives, within the operator's ``settings``.

    Args:
        agreed: the levels that the plan may use, and the jobs whose level has no effect.
    """
    if settings.disabled:
        return ()
    drained, usable = frozenset(settings.drained), sorted(agreed.levels)
    heard = [record for record in records if record.job not in drained]
    entries = list(compute(heard, topology, policy=policy, weights=settings.weights))
    entries += [
        PlanEntry(job=record.job, level=usable[0], priority=0.0, intensity=0.0, correction=1.0)
        for record in records
        if record.job in drained and record.profile is not None
    ]

    if settings.tenants or settings.pins or agreed.unmarked:
        standings = {entry.job: Standing(entry.level, entry.priority) for entry in entries}
        level = {**_settled(standings, usable, settings), **agreed.unmarked}
        entries = [
            entry
            if level[entry.job] == entry.level
            else msgspec.structs.replace(entry, level=level[entry.job])
            for entry in entries
        ]
    return sorted(entries, key=attrgetter("job"))


def heeding(scheduler: Scheduler, settings: OperatorSettings) -> Scheduler:
    """Return ``scheduler`` for the jobs that have a say, as :func:`operated` has it.

    Weights are the caller's, see :func:`~crux_torch.agreement.inputs.plan_inputs`.
    """

    def decide(cluster: Cluster, options: SchedulerOptions) -> Decision:
        default = ecmp(cluster, options)
        if settings.disabled:
            return default
        heard = tuple(job for job in cluster.jobs if job.name not in settings.drained)
        found = scheduler(Cluster(cluster.capacity_Bps, heard), options)
        standings = {
            name: Standing(level, found.priority.get(name, 0.0))
            for name, level in {**default.level, **found.level}.items()
        }
        return replace(
            found,
            path={**default.path, **found.path},
            level=_settled(standings, options.levels, settings),
        )

    return decide


def _settled(
    standings: Mapping[str, Standing], levels: Collection[int], settings: OperatorSettings
) -> dict[str, int]:
    """Return the levels within the tenants' caps, and those that are pinned."""
    pins = {
        job: highest_usable(most, levels) for job, most in settings.pins.items() if job in standings
    }
    return {**capped(standings, levels, settings.tenants), **pins}
