"""The contest's scenario heavy-3 as a store has it: four measured jobs, two leaves, two spines.

:func:`world` is what the jobs do, as a scenario of the simulator that knows nothing of records; the
records say what Crux measures of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from functools import lru_cache
from statistics import fmean

import msgspec
from places import ROOT

from crux_torch.agreement.audit import AuditEntry
from crux_torch.agreement.inputs import agreed
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import JobRecord, Plan, PlanEntry, StepTimes
from crux_torch.agreement.registry import Registry, StoredEntry, StoredPlan
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import ClusterStatus
from crux_torch.report.step_times import steps_of
from crux_torch.settings import Marks
from crux_torch.sim.play import run_scenario
from crux_torch.sim.scenario import Scenario, ScenarioJob, ScenarioLink, TrafficBurst
from lab.contest_scenarios import SCENARIOS

MARKS = Marks(tcp=tuple(range(8)), usable=tuple(range(8)))
JOBS = ("A", "B", "C", "D")
HORIZON_S, SEEDS = 120.0, (7, 8, 9)


@lru_cache
def rows() -> tuple[dict, ...]:
    """The contest's results of this scenario."""
    found = json.loads((ROOT / "benchmarks/results/contest.json").read_text())["rows"]
    return tuple(row for row in found if row["scenario"] == "heavy-3")


def topology() -> Topology:
    return parse_yaml(topology_yaml())


def topology_yaml() -> str:
    return SCENARIOS["heavy-3"].fabric().topology_yaml()


def measured() -> tuple[JobRecord, ...]:
    """The records of the contest, with a DSCP map."""
    found = next(row["records"] for row in rows() if "records" in row)
    records = msgspec.convert(found, tuple[JobRecord, ...])
    return tuple(msgspec.structs.replace(record, marks=MARKS) for record in records)


def plan(policy: str, records: Iterable[JobRecord]) -> Plan:
    """The plan of a policy, without a trial."""
    records = tuple(records)
    levels = agreed(records, topology()).levels
    entries = compute_entries(records, topology(), policy=policy, levels=levels)
    return plan_of_entries(policy, entries)


def plan_of_entries(policy: str, entries: tuple[PlanEntry, ...]) -> Plan:
    return Plan(
        epoch=3, fingerprint="f", valid_s=15.0, author="A", policy=policy, digest="d",
        entries=entries,
    )  # fmt: skip


def one_level(spines: Mapping[str, int], records: Iterable[JobRecord]) -> Plan:
    """A plan of one level, with every job on the spine of this number."""
    entries = []
    for entry in plan("taccl", records).entries:
        paths = tuple(
            msgspec.structs.replace(
                path,
                hops=tuple(
                    msgspec.structs.replace(hop, router=f"spine{spines[entry.job]}")
                    if hop.router.startswith("spine")
                    else hop
                    for hop in path.hops
                ),
            )
            for path in entry.paths
        )
        entries.append(msgspec.structs.replace(entry, paths=paths, level=6))
    return plan_of_entries("taccl", tuple(entries))


def links_of(entry: PlanEntry) -> tuple[str, ...]:
    """The links of a job of two hosts, both ways, by the one spine that its plan names."""
    spine = next(
        hop.router for path in entry.paths for hop in path.hops if hop.router.startswith("spine")
    )
    return tuple(
        f"{a}->{b}" for leaf in ("leaf0", "leaf1") for a, b in ((leaf, spine), (spine, leaf))
    )


def steps_s(plan: Plan, records: Iterable[JobRecord], without: str = "") -> dict[str, float]:
    """Mean steps of the jobs in the simulator's engine, as :func:`world` has them."""
    found = []
    for seed in SEEDS:
        rng = random.Random(seed)
        start_s = {record.job: rng.uniform(0.0, 2.0) for record in records}
        report = run_scenario(world(plan, records, start_s, without))
        found.append({name: job.mean_iteration_s for name, job in report.jobs.items()})
    return {name: fmean(means[name] for means in found) for name in found[0]}


def world(
    plan: Plan, records: Iterable[JobRecord], start_s: Mapping[str, float], without: str = ""
) -> Scenario:
    """What the jobs do under ``plan``; ``without`` one of them."""
    fabric = topology()
    jobs = {}
    for record in records:
        profile, entry = record.profile, plan.entry(record.job)
        if record.job == without:
            continue
        moved = dict.fromkeys(links_of(entry), profile.flows[0].bytes)
        bursts = [
            TrafficBurst(at=b.at, traffic={link: b.share * m for link, m in moved.items()})
            for b in profile.bursts
        ]
        jobs[record.job] = ScenarioJob(
            gpus=record.gpus, compute_s=profile.compute_s, bursts=bursts, level=entry.level,
            start_s=start_s[record.job],
        )  # fmt: skip
    links = {name: ScenarioLink(capacity_Bps=rate) for name, rate in fabric.capacity_Bps.items()}
    return Scenario(links=links, jobs=jobs, horizon_s=HORIZON_S)


def as_measured_in(plan: Plan) -> tuple[JobRecord, ...]:
    """The records of jobs whose steps alone are those of :func:`world`."""
    found = []
    for record in measured():
        (period_s,) = steps_s(plan, [record]).values()
        profile = msgspec.structs.replace(record.profile, period_s=period_s, measured_alone=True)
        found.append(msgspec.structs.replace(record, profile=profile))
    return tuple(found)


def status_of(
    records: tuple[JobRecord, ...],
    plan: Plan | None,
    now_s: Mapping[str, float],
    operator: OperatorSettings | None = None,
) -> ClusterStatus:
    """The state of the cluster when the jobs' steps take ``now_s``."""
    told = {
        name: StepTimes(step_s=step_s, iterations=40, age_s=0.5, profile_age_s=720.0)
        for name, step_s in now_s.items()
    }
    return ClusterStatus(
        "unix:", "lab", records, plan, None, operator or OperatorSettings(), (),
        steps_of(records, told),
    )  # fmt: skip


def fill(registry: Registry) -> None:
    """Put the jobs into a store, all on one spine."""
    records = measured()
    made = one_level(dict.fromkeys(JOBS, 1), records)
    registry.publish_topology(topology_yaml().encode())
    registry.swap_plan(registry.look().plan, StoredPlan(renewal=1, plan=made.head))
    steps = {"A": 0.70, "B": 0.77, "C": 0.84, "D": 0.59}
    for record in records:
        registry.publish_job(record, 60.0)
        entry = made.entry(record.job)
        assert entry is not None
        registry.publish_follows(record.job, StoredEntry(digest="d", entry=entry))
        told = StepTimes(step_s=steps[record.job], iterations=40, age_s=0.5, profile_age_s=720.0)
        registry.publish_steps(record.job, told, 60.0)
    registry.append_audit(
        AuditEntry(
            kind="plan", at_s=1.8e9, who="A", before=2, after=3, why=("C started",),
            changes=("A: level default -> 6",),
        )
    )  # fmt: skip
