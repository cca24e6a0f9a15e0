"""A cluster's state for pages: the contest's heavy-3 under any names and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import heavy3
import msgspec

from crux_torch.agreement.audit import AuditEntry
from crux_torch.errors import StoreError
from crux_torch.report.cluster_status import ClusterStatus

AUDIT = (
    AuditEntry(
        kind="plan", at_s=1.8e9, who="A", before=0, after=1, why=("B started",),
        changes=("A: level default -> 6",),
    ),
    AuditEntry(
        kind="operator", at_s=1.8e9 + 60, who="me@host", before=0, after=1, why=("pin A 5",),
        changes=("A: pin None -> 5",),
    ),
)  # fmt: skip
#: Steps of the jobs, in seconds.
STEPS_S = {"A": 1.0, "B": 0.8, "C": 0.4, "D": 0.9}


class FakeReader:
    """Gives the jobs of heavy-3 under the paths of ``crux``.

    Args:
        names: of the jobs, in the place of A to D.
        has_topology: False: the cluster has none.
        spines: the spine of each job; None: as planned.
    """

    def __init__(
        self,
        names: Sequence[str] = heavy3.JOBS,
        has_topology: bool = True,
        spines: Sequence[int] | None = None,
    ) -> None:
        self.topology = heavy3.topology() if has_topology else None
        self.steps_s: Mapping[str, float] = dict(zip(names, STEPS_S.values(), strict=True))
        self.is_away, self.has_plan = False, True
        given = dict(zip(heavy3.JOBS, names, strict=True))
        self._records = tuple(
            msgspec.structs.replace(record, job=given[record.job]) for record in heavy3.measured()
        )
        plan = heavy3.plan("crux", heavy3.measured())
        if spines is not None:
            numbers = dict(zip(heavy3.JOBS, spines, strict=True))
            plan = heavy3.one_level(numbers, heavy3.measured())
        entries = [msgspec.structs.replace(e, job=given[e.job]) for e in plan.entries]
        entries.sort(key=lambda entry: entry.job)
        self._plan = msgspec.structs.replace(plan, author=names[0], entries=tuple(entries))

    def read(self) -> ClusterStatus:
        if self.is_away:
            raise StoreError("nobody answers at unix:")
        return heavy3.status_of(self._records, self._plan if self.has_plan else None, self.steps_s)

    def audit(self) -> tuple[AuditEntry, ...]:
        return AUDIT
