"""``crux explain``: what it says a job costs another is what leaving that job out gives."""

from __future__ import annotations

from dataclasses import replace

import heavy3
import msgspec
import pytest

from crux_torch.agreement.audit import AuditEntry
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import OnTrial, PathCounts, TriedPlan
from crux_torch.report.explain_text import sections
from crux_torch.report.explanation import OTHERS, explain

NOW_S = 1_800_000_000.0
#: Tolerance of a cost, and what of a step is too little to be compared.
WITHIN, LITTLE = 0.20, 0.01


def on(*spines: int) -> dict[str, int]:
    """The spine of each job."""
    return dict(zip(heavy3.JOBS, spines, strict=True))


PLANS = {
    "crux": lambda records: heavy3.plan("crux", records),
    "crux-paper": lambda records: heavy3.plan("crux-paper", records),
    "two on each spine": lambda records: heavy3.one_level(on(0, 1, 0, 1), records),
    "three on one": lambda records: heavy3.one_level(on(0, 0, 1, 0), records),
    "all on one": lambda records: heavy3.one_level(on(1, 1, 1, 1), records),
}


def text_of(found) -> str:
    return "\n".join(
        line for heading, lines in sections(found, NOW_S) for line in (heading, *lines)
    )


@pytest.mark.parametrize("name", PLANS)
def test_costs_links_and_jobs_are_those_of_the_world_without_each_job(name: str) -> None:
    plan = PLANS[name](heavy3.measured())
    records = heavy3.as_measured_in(plan)
    now_s = heavy3.steps_s(plan, records)
    without_s = {job: heavy3.steps_s(plan, records, job) for job in heavy3.JOBS}
    links = {job: set(heavy3.links_of(plan.entry(job))) for job in heavy3.JOBS}
    status = heavy3.status_of(records, plan, now_s)
    for job in heavy3.JOBS:
        found = explain(status, heavy3.topology(), (), job)
        assert found.played_s == pytest.approx(now_s[job], rel=0.03)
        assert found.unexplained_s == pytest.approx(0.0, abs=0.03 * now_s[job])
        met = {other for other in heavy3.JOBS if other != job and links[other] & links[job]}
        assert {rival.job for rival in found.rivals} == met
        for rival in found.rivals:
            assert set(rival.links) == links[job] & links[rival.job]
            cost_s = now_s[job] - without_s[rival.job][job]
            assert rival.costs_s == pytest.approx(cost_s, rel=WITHIN, abs=LITTLE * now_s[job])
            assert rival.costs_share == pytest.approx(rival.costs_s / now_s[job])


def test_the_contest_s_measured_steps_are_explained() -> None:
    # All four jobs on one spine, as the kernels had them without Crux.
    turn = [r for r in heavy3.rows() if r.get("policy") == "none" and r.get("job")]
    first = [row for row in turn if row["round"] == 0]
    assert {row["spine"] for row in first} == {1}
    plan = heavy3.one_level(dict.fromkeys(heavy3.JOBS, 1), heavy3.measured())
    now_s = {row["job"]: row["step_s"] for row in first}
    for job in heavy3.JOBS:
        found = explain(
            heavy3.status_of(heavy3.measured(), plan, now_s), heavy3.topology(), (), job
        )
        assert found.played_s == pytest.approx(now_s[job], rel=0.15)
        assert len(found.rivals) == 3
        assert all(rival.costs_share > 0.1 for rival in found.rivals)


@pytest.fixture
def crowd():
    """All jobs on one spine and level: (status, topology)."""
    records = heavy3.measured()
    plan = heavy3.one_level(dict.fromkeys(heavy3.JOBS, 1), records)
    now_s = {"A": 0.70, "B": 0.77, "C": 0.84, "D": 0.59}
    return heavy3.status_of(records, plan, now_s), heavy3.topology()


def test_sentences_give_the_numbers(crowd) -> None:
    found = explain(*crowd, (), "A", schedulers=("crux", "sincronia"))
    text = text_of(found)
    assert "A: a step takes 700 ms now, and 367 ms alone (measured while" in text
    assert ": 1.91 times as long." in text
    # 700 ms less 248 ms of computation.
    assert "Of 700 ms, 452 ms (65%) is waiting for the network, and 248 ms is computation" in text
    assert "Alone, the job waits for 118 ms." in text
    for rival in found.rivals:
        shown = f"adds {1e3 * rival.costs_s:.3g} ms ({rival.costs_share:.0%}) to each step"
        assert shown in text
    assert text.count("on leaf0->spine1") == 1
    assert text.count("on the same links: adds") == 2
    assert "h0-0 <-> h1-0 over spine1." in text
    assert "level 6; a higher level goes first" in text
    best = next(r for r in found.remedies if r.scheduler == "crux")
    assert best.change < -0.2
    assert best.busy > found.busy
    assert f"Under crux a step would take {1e3 * best.step_s:.3g} ms" in text
    for busy, costs in ((0.49, True), (0.4998, False)):
        dearer = [replace(remedy, busy=busy) for remedy in found.remedies]
        shown = text_of(replace(found, busy=0.5, remedies=dearer))
        assert ("costs the other jobs more" in shown) == costs
    status, topology = crowd
    again = replace(status, plan=msgspec.structs.replace(status.plan, policy="crux"))
    text = text_of(explain(again, topology, (), "A", schedulers=("crux", "sincronia")))
    assert "Under another plan of crux a step would take" in text
    assert "Yes: the simulator predicts" in text


def test_steps_that_the_jobs_of_crux_do_not_explain_are_said_to_be_so(crowd) -> None:
    status, topology = crowd
    slow = {**status.steps, "A": replace(status.steps["A"], step_s=1.2)}
    played = explain(replace(status, steps=slow), topology, (), "A")
    assert played.unexplained_s == pytest.approx(1.2 - played.played_s)
    assert "traffic of no job that Crux knows" in text_of(played)
    assert played.scale == 1.0
    fast = {**status.steps, "A": replace(status.steps["A"], step_s=0.45)}
    found = explain(replace(status, steps=fast), topology, (), "A")
    assert found.unexplained_s == 0.0
    assert ", scaled to the measured step." in text_of(found)
    near = explain(status, topology, (), "A")
    for step_s, told in ((0.45, found), (0.70, near)):
        share = (step_s - told.steps.alone_s) / (told.played_s - told.played_alone_s)
        assert told.scale == pytest.approx(share)
        for rival, whole in zip(told.rivals, played.rivals, strict=True):
            assert rival.costs_s == pytest.approx(share * whole.costs_s)


def audit_of(at_s: float, after: int, why: tuple[str, ...], changes: tuple[str, ...]) -> AuditEntry:
    return AuditEntry(
        kind="plan", at_s=at_s, who="A", before=after - 1, after=after, why=why, changes=changes
    )


def test_the_plan_says_since_when_why_and_what_it_changed(crowd) -> None:
    status, topology = crowd
    trial = OnTrial(name="t", judge="A", jobs=4, on=True)
    entries = [
        msgspec.structs.replace(entry, trial=trial, level=5 if entry.job == "B" else 6)
        for entry in status.plan.entries
    ]
    tried = TriedPlan(
        name="t", jobs=heavy3.JOBS, state="kept", change=0.05, low=0.01, high=0.09, iterations=40
    )
    jobs = [
        msgspec.structs.replace(
            record,
            tried=(tried,) if record.job == "A" else msgspec.UNSET,
            paths=PathCounts(as_planned=3, elsewhere=1),
        )
        for record in status.jobs
    ]
    plan = msgspec.structs.replace(status.plan, entries=tuple(entries))
    status = replace(status, jobs=tuple(jobs), plan=plan)
    log = (
        audit_of(NOW_S - 7200, 2, ("B started",), ("B: level default -> 6",)),
        audit_of(
            NOW_S - 300, 3, ("C started",), ("B: level 6 -> 5, other paths", "A: other paths")
        ),
    )
    found = explain(status, topology, log, "B")
    assert {r.job: r.since_s for r in found.rivals} == {"A": None, "C": NOW_S - 300, "D": None}
    text = text_of(found)
    assert "Plan 3 (policy taccl) was made by job A at" in text
    assert "(5 min ago), because C started" in text
    assert "level 6 -> 5, other paths" in text
    assert text.index("level 6 -> 5") < text.index("level default -> 6")
    assert "A plan is" not in text
    assert "a plan is kept by A, B, C, D: +5.0% busy GPUs" in text
    assert "higher priority than this job (level 6 against 5)" in text
    assert "3 of 4 connections were seen on their planned path" in text
    assert "1 of its connections are not on their planned path" in text


def test_names_of_other_tenants_are_left_out(crowd) -> None:
    status, topology = crowd
    names = {"A": "red-1", "B": "red-2", "C": "blue-secret", "D": "blue-hidden"}

    def renamed(records):
        return tuple(msgspec.structs.replace(r, job=names[r.job]) for r in records)

    trial = OnTrial(name="t", judge="blue-secret", jobs=4, on=True)
    tried = TriedPlan(
        name="t", jobs=tuple(sorted(names.values())), state="worse", slowed="blue-hidden"
    )
    jobs = [
        msgspec.structs.replace(r, tried=(tried,)) if r.job == "blue-secret" else r
        for r in renamed(status.jobs)
    ]
    entries = [msgspec.structs.replace(e, trial=trial) for e in renamed(status.plan.entries)]
    plan = msgspec.structs.replace(
        status.plan, author="blue-secret", entries=tuple(sorted(entries, key=lambda e: e.job))
    )
    status = replace(
        status,
        jobs=tuple(jobs),
        plan=plan,
        operator=OperatorSettings(tenants={"red-": {}}),
        steps={names[job]: steps for job, steps in status.steps.items()},
    )
    log = (audit_of(NOW_S, 3, ("blue-secret started",), ("red-1: level 6 -> 5",)),)
    found = explain(status, topology, log, "red-1", all_names=False)
    shown = text_of(found) + str(msgspec.to_builtins(found))
    assert "blue" not in shown
    assert "red-2" in shown
    assert [r.job for r in found.rivals].count("") == 2
    assert OTHERS in shown
    assert "blue-secret" in text_of(explain(status, topology, log, "red-1"))


def test_without_a_topology_or_a_profile_it_says_what_is_missing(crowd) -> None:
    status, _ = crowd
    found = explain(status, None, (), "A")
    assert "there is no topology" in text_of(found)
    assert {rival.job for rival in found.rivals} == {"B", "C", "D"}
    young = msgspec.structs.replace(status.jobs[0], profile=None, state="starting")
    bare = replace(status, jobs=(young, *status.jobs[1:]), plan=None, steps={})
    found = explain(bare, None, (), "A")
    text = text_of(found)
    assert "it is starting and was not measured yet" in text
    assert "No plan has this job" in text
    assert found.rivals == ()


def test_a_job_that_starves_is_said_to(crowd) -> None:
    status, topology = crowd
    levels = {"A": 0, "B": 5, "C": 6, "D": 5}
    entries = [msgspec.structs.replace(e, level=levels[e.job]) for e in status.plan.entries]
    plan = msgspec.structs.replace(status.plan, entries=tuple(entries))
    # Two of the others fill the link already.
    jobs = [
        msgspec.structs.replace(
            r, profile=msgspec.structs.replace(r.profile, compute_s=0.01, period_s=r.profile.t_s)
        )
        if r.job != "A"
        else r
        for r in status.jobs
    ]
    status = heavy3.status_of(tuple(jobs), plan, {"A": 5.0, "B": 0.5, "C": 0.5, "D": 0.5})
    found = explain(status, topology, (), "A")
    assert found.played_s is None
    assert "this job starves: no step ends" in text_of(found)


def test_paths_that_the_hash_chooses_are_spread_and_said_to_be(crowd) -> None:
    status, topology = crowd
    found = explain(replace(status, plan=None), topology, (), "A")
    assert any("hash" in doubt for doubt in found.doubts)
    spines = {link.split("->")[1] for link, _ in found.links if link.startswith("leaf0")}
    assert spines == {"spine0", "spine1"}


def test_a_hostile_name_controls_no_terminal(crowd) -> None:
    status, topology = crowd
    evil = "B\x1b[2J\n"
    jobs = [msgspec.structs.replace(r, job=evil) if r.job == "B" else r for r in status.jobs]
    entries = [
        msgspec.structs.replace(e, job=evil) if e.job == "B" else e for e in status.plan.entries
    ]
    plan = msgspec.structs.replace(status.plan, entries=tuple(entries))
    found = explain(replace(status, jobs=tuple(jobs), plan=plan), topology, (), "A")
    assert "\x1b" not in text_of(found)
