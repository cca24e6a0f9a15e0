"""Leaders of one simulated cluster: how tests make them, drive them and see that they agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from control_fakes import FakeClock, by_name, record

from crux_torch.agreement.leader import Leader
from crux_torch.agreement.records import JobRecord, OnTrial, Plan, PlanEntry
from crux_torch.network.topology import Topology


def leader_of(
    store: Any, job: str, clock: Any, seed: int = 0, incarnation: str = "i0", **options: Any
) -> Leader:
    options = {"compute": by_name, "clock": clock, "rng": random.Random(seed), **options}
    return Leader(store, "c", record(job, incarnation), **options)


def leaders_of(store: Any, count: int, clock: Any, **options: Any) -> list[Leader]:
    return [leader_of(store, f"j{n}", clock, n, **options) for n in range(count)]


def run(leaders: Sequence[Leader], clock: FakeClock, seconds: float, step_s: float = 0.1) -> None:
    for _ in range(round(seconds / step_s)):
        for leader in leaders:
            leader.tick()
        clock.advance(step_s)


def agreed(leaders: Sequence[Leader]) -> Plan:
    plans = [leader.plan for leader in leaders]
    assert plans[0] is not None
    assert all(plan == plans[0] for plan in plans)
    assert [e.job for e in plans[0].entries] == sorted(lead.record.job for lead in leaders)
    return plans[0]


def entries_of(
    records: Sequence[JobRecord],
    _topology: Topology | None,
    /,
    *,
    policy: str = "",
    weights: object = None,
) -> tuple[PlanEntry, ...]:
    """A planner of which all profiled jobs are one component with something to try, always."""
    jobs = sorted(r.job for r in records if r.profile is not None)
    states = {(r.job, t.name): t.state for r in records for t in r.trials}
    name = "of " + " ".join(jobs)
    on = states.get((jobs[0], name), "worse") != "worse"
    trial = OnTrial(name=name, judge=jobs[0], jobs=len(jobs), on=on)
    return tuple(
        PlanEntry(
            job=job, level=n if on else 7, priority=1.0, intensity=1.0, correction=1.0,
            trial=trial if len(jobs) > 1 else msgspec.UNSET,
        )
        for n, job in enumerate(jobs)
    )  # fmt: skip
