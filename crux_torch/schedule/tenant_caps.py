"""What an operator lets the jobs of each tenant have of the priority levels."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol


class Cap(Protocol):
    """What one tenant may have.

    Attributes:
        highest: level that none of its jobs exceeds.
        above, share: at most this share of its jobs (0 to 1, rounded down to whole jobs) is above
            this level.
    """

    @property
    def highest(self) -> int: ...

    @property
    def above(self) -> int: ...

    @property
    def share(self) -> float: ...


class Standing(NamedTuple):
    """Where a schedule puts a job: its level, and its priority P_j."""

    level: int
    priority: float


def tenant_of(job: str, caps: Collection[str]) -> str | None:
    """The longest of the prefixes ``caps`` with which the job's name begins; None: no such one."""
    return max((prefix for prefix in caps if job.startswith(prefix)), key=len, default=None)


def highest_usable(most: int, levels: Collection[int]) -> int:
    """The highest of ``levels`` up to ``most``, or the lowest of all."""
    return max((level for level in levels if level <= most), default=min(levels))


def capped(
    standings: Mapping[str, Standing], levels: Collection[int], caps: Mapping[str, Cap]
) -> dict[str, int]:
    """Levels of the jobs, each tenant's within its cap.

    No job rises, and no two jobs of a tenant change their order. Of those that a share leaves above
    a level, the ones with the highest level stay there, then those with the highest priority, then
    the first by name.

    Args:
        standings: of all jobs of the cluster, by name.
        levels: that may be assigned, at least one.
        caps: by tenant: the beginning of its jobs' names.
    """
    found = {job: standing.level for job, standing in standings.items()}
    jobs_of: dict[str, list[str]] = {}
    for job in standings:
        if (tenant := tenant_of(job, caps)) is not None:
            jobs_of.setdefault(tenant, []).append(job)
    for tenant, jobs in jobs_of.items():
        cap = caps[tenant]
        ranked = sorted(jobs, key=lambda job: (*(-x for x in standings[job]), job))
        may_be_above = math.floor(cap.share * len(jobs) + 1e-9)
        for place, job in enumerate(ranked):
            most = cap.highest if place < may_be_above else min(cap.highest, cap.above)
            if found[job] > most:
                found[job] = min(found[job], highest_usable(most, levels))
    return found
