"""Plans are tried out before they stay: real leaders over a simulated store, clock and network."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from control_fakes import FakeClock, FaultyStore, MemoryStore, profile, record
from leaders import agreed, entries_of, run
from shared_core import shared_core

from crux_torch.agreement.audit import about_trial
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import JobRecord, Measured, TriedPlan
from crux_torch.agreement.registry import Registry
from crux_torch.agreement.snapshot import fingerprint
from crux_torch.agreement.trials import SETTLE_S, TAKEN_BACK_S
from crux_torch.measure.profile import HostFlow, ProfileBurst
from crux_torch.network.topology import Link, TopologyBuilder
from crux_torch.schedule.default import crux as policy
from crux_torch.schedule.default.guard import BATCH_ITERATIONS, MIN_BATCHES, Sample
from crux_torch.schedule.model import Memory, SchedulerOptions

#: A trial takes no shorter than this, in iterations of the slowest job.
SHORTEST = MIN_BATCHES * BATCH_ITERATIONS


class Jobs:
    """Jobs that train on a simulated clock, each slower or faster while it follows a trial.

    Args:
        factors: of each job's iterations under the plan on trial.
    """

    def __init__(
        self,
        store: Any,
        factors: Mapping[str, float],
        clock: FakeClock | None = None,
        **options: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        self.store = MemoryStore(self.clock) if store is None else store
        self.rng = random.Random(1)
        self.factors = dict(factors)
        self.leaders: dict[str, Leader] = {}
        self.ends_ns: dict[str, list[int]] = {}
        self._next_s: dict[str, float] = {}
        self.options = options
        for job in factors:
            self.start(job)

    def start(self, job: str) -> None:
        ends = self.ends_ns[job] = []
        self._next_s[job] = self.clock() + 0.5

        def since(since_ns: int) -> Sequence[int]:
            return [end for end in ends if end >= since_ns]

        options = {"compute": entries_of, "max_slowdown": 3.0, **self.options}
        told = record(job, profile=profile(period_s=0.4, compute_s=0.25))
        self.leaders[job] = Leader(
            self.store,
            "c",
            told,
            clock=self.clock,
            rng=random.Random(job),
            iteration_ends=since,
            **options,
        )

    def on(self, job: str) -> bool:
        plan = self.leaders[job].plan
        entry = plan.entry(job) if plan is not None else None
        return entry is not None and bool(entry.trial) and entry.trial.on

    def go_on(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(round(seconds / 0.1)):
            if until():
                return
            for job in self.leaders:
                while self._next_s[job] <= self.clock():
                    self.ends_ns[job].append(round(self._next_s[job] * 1e9))
                    factor = self.factors[job] if self.on(job) else 1.0
                    self._next_s[job] += 0.6 * factor * self.rng.uniform(0.95, 1.05)
            run(list(self.leaders.values()), self.clock, 0.1)

    def said(self) -> TriedPlan | None:
        judge = self.leaders[min(self.leaders)]
        return judge.record.trials[-1] if judge.record.trials else None

    def state(self) -> str | None:
        said = self.said()
        return said.state if said is not None else None

    def all_on(self) -> bool:
        return all(self.on(job) for job in self.leaders)

    def all_off(self) -> bool:
        return not any(self.on(job) for job in self.leaders)


def test_a_plan_is_tried_only_after_the_one_before_was_measured() -> None:
    jobs = Jobs(None, {"a": 0.8, "b": 0.8})
    jobs.go_on(0.6 * SHORTEST)
    assert jobs.all_off()
    assert jobs.said() is None
    jobs.go_on(60.0, jobs.all_on)
    assert jobs.all_on()
    agreed(list(jobs.leaders.values()))


def test_a_plan_that_does_better_is_kept_and_nothing_is_published_any_more() -> None:
    jobs = Jobs(None, {"a": 0.8, "b": 1.0})
    jobs.go_on(300.0, lambda: jobs.state() == "kept")
    jobs.go_on(5.0)
    said = jobs.said()
    assert said is not None
    assert (said.state, said.jobs, said.slowed) == ("kept", ("a", "b"), "")
    assert said.low < said.change < said.high
    assert jobs.all_on()
    assert not jobs.store.list("crux-plan/c/measured/")


def test_a_plan_that_does_worse_is_taken_back_within_few_iterations() -> None:
    jobs = Jobs(None, {"a": 0.9, "b": 2.0})
    jobs.go_on(200.0, jobs.all_on)
    began = len(jobs.ends_ns["b"])
    jobs.go_on(300.0, jobs.all_off)
    cost = len(jobs.ends_ns["b"]) - began
    said = jobs.said()
    assert said is not None
    assert said.state == "worse"
    assert said.high < 0
    # Those that do not count, and those until the judge looks, on top.
    assert cost <= SHORTEST + (SETTLE_S + 8.0) / 1.2
    agreed(list(jobs.leaders.values()))
    jobs.go_on(600.0)
    assert jobs.all_off()
    assert not jobs.store.list("crux-plan/c/measured/")


@pytest.mark.parametrize(("factor", "verdict"), [(0.8, "kept"), (6.0, "worse")])
def test_jobs_of_a_large_cluster_try_plans_too(factor: float, verdict: str) -> None:
    jobs = Jobs(None, dict.fromkeys("bcdef", 0.9) | {"g": factor}, max_verified=1)
    jobs.go_on(10.0)
    jobs.factors["a"] = 0.9
    jobs.start("a")
    jobs.go_on(200.0, jobs.all_on)
    roles = {job: leader.status()["role"] for job, leader in jobs.leaders.items()}
    assert roles["a"] == "follower", "the judge reads its company alone"
    jobs.go_on(300.0, lambda: jobs.state() == verdict)
    jobs.go_on(5.0)
    said = jobs.said()
    assert said is not None
    assert (said.state, said.jobs) == (verdict, tuple("abcdefg"))
    assert jobs.all_on() if verdict == "kept" else jobs.all_off()
    assert not jobs.store.list("crux-plan/c/measured/")


def test_why_a_plan_was_taken_back_is_in_the_audit_log() -> None:
    jobs = Jobs(None, {"a": 1.0, "b": 2.0})
    jobs.go_on(500.0, lambda: jobs.state() == "worse" and jobs.all_off())
    said = jobs.said()
    assert said is not None
    why = [line for entry in Registry(jobs.store, "c").audit() for line in entry.why]
    assert "a plan is tried by a, b" in why
    assert about_trial(said) in why
    assert "was taken back from a, b" in about_trial(said)


def test_a_job_that_ends_no_iteration_any_more_is_reason_enough() -> None:
    jobs = Jobs(None, {"a": 0.8, "b": 1e6})
    jobs.go_on(200.0, jobs.all_on)
    began_s = jobs.clock()
    jobs.go_on(300.0, jobs.all_off)
    said = jobs.said()
    assert said is not None
    assert (said.state, said.slowed) == ("worse", "b")
    assert jobs.clock() - began_s < 60.0


def test_a_plan_that_was_taken_back_is_tried_again_after_a_while_and_later_each_time() -> None:
    jobs = Jobs(None, {"a": 1.0, "b": 2.0})
    pauses = []
    for _ in range(2):
        jobs.go_on(500.0, jobs.all_on)
        jobs.go_on(300.0, jobs.all_off)
        began_s = jobs.clock()
        jobs.go_on(3 * TAKEN_BACK_S, jobs.all_on)
        pauses.append(jobs.clock() - began_s)
    assert pauses[0] >= TAKEN_BACK_S
    assert pauses[1] >= 2 * TAKEN_BACK_S


def test_another_component_is_tried_anew_and_the_old_one_is_remembered() -> None:
    jobs = Jobs(None, {"a": 1.0, "b": 2.0})
    jobs.go_on(500.0, lambda: jobs.state() == "worse")
    jobs.factors["c"] = 0.8
    jobs.factors["b"] = 0.8
    jobs.start("c")
    jobs.go_on(300.0, jobs.all_on)
    assert jobs.all_on()
    jobs.leaders.pop("c").close()
    jobs.go_on(300.0)
    assert jobs.all_off()


def test_iterations_do_not_count_while_a_job_of_the_component_is_measured() -> None:
    jobs = Jobs(None, {"a": 0.8, "b": 0.8})
    jobs.go_on(3.0)
    jobs.leaders["b"].update(state="profiling")
    jobs.go_on(120.0)
    assert jobs.said() is None
    jobs.leaders["b"].update(state="running")
    jobs.go_on(120.0, jobs.all_on)
    assert jobs.all_on()


def test_a_job_without_iterations_leaves_its_component_on_the_safe_plan() -> None:
    jobs = Jobs(None, {"a": 0.8, "b": 0.8})
    jobs.ends_ns["b"].clear()
    jobs._next_s["b"] = float("inf")
    jobs.go_on(900.0)
    assert jobs.all_off()
    assert jobs.said() is None


def test_trials_go_on_over_a_store_that_fails_and_forgets(clock: FakeClock) -> None:
    rng = random.Random(3)
    faulty = FaultyStore(MemoryStore(clock), rng)
    jobs = Jobs(faulty, {"a": 1.0, "b": 2.0, "c": 1.5}, clock)
    faulty.fail, faulty.lose = 0.05, 0.0002
    jobs.go_on(900.0, lambda: jobs.state() == "worse" and jobs.all_off())
    assert jobs.state() == "worse"
    faulty.fail = faulty.lose = 0.0
    jobs.go_on(30.0)
    assert jobs.all_off()
    agreed(list(jobs.leaders.values()))


def test_measurements_that_cannot_be_are_ignored() -> None:
    registry = Registry(MemoryStore(), "c")
    told = Measured(name="n", before=Sample(8, 40, 0.5, 0.01), after=Sample())
    registry.publish_measured("a", told)
    for job, changes in {
        "b": {"before": [8, 40, 0.5, -0.01]},
        "c": {"before": [-1, 40, 0.5, 0.01]},
        "d": {"after": [8, 40, "NaN", 0.01]},
        "e": {"waiting_s": -1},
        "f": {"version": 1},
    }.items():
        raw = msgspec.json.encode({**msgspec.to_builtins(told), **changes})
        registry.store.put(registry.measured_prefix + job, raw)
    assert registry.measured(None) == {"a": told}
    assert registry.measured(["a", "b", "x"]) == {"a": told}
    registry.publish_measured("a", None)
    assert registry.measured(None) == {}


def test_only_what_the_judge_admits_changes_the_fingerprint() -> None:
    def told(job: str, *states: str) -> JobRecord:
        tried = tuple(
            TriedPlan(name=f"n{i}", jobs=("a", "b"), state=state)  # type: ignore[arg-type]
            for i, state in enumerate(states)
        )
        return record(job, tried=tried or msgspec.UNSET)

    plain = fingerprint([told("a"), told("b")], None)
    assert fingerprint([told("a", "worse"), told("b")], None) == plain
    trying = fingerprint([told("a", "trying"), told("b")], None)
    assert trying != plain
    assert fingerprint([told("a", "kept"), told("b")], None) == trying
    assert fingerprint([told("a"), told("b", "trying")], None) not in (plain, trying)


def test_the_planner_gives_the_safe_plan_until_the_judge_admits_the_other() -> None:
    topology = shared_core(["h0", "h1"], 1e9)

    def job(name: str, gpus: int, compute_s: float, tried: tuple[TriedPlan, ...]) -> JobRecord:
        told = profile(
            flops=1e14,
            compute_s=compute_s,
            period_s=compute_s + 0.4,
            t_s=0.4,
            t_source="topology",
            flows=(HostFlow("h0", "h1", 4e8),),
            bursts=(ProfileBurst(1.0, 1.0),),
        )
        return record(name, gpus=gpus, profile=told, tried=tried or msgspec.UNSET)

    def jobs(*tried: TriedPlan) -> list[JobRecord]:
        return [job("a", 4, 0.2, tried), job("b", 32, 0.5, ())]

    def entries(records: Sequence[JobRecord], policy: str = "crux", guard: bool = True) -> Any:
        options = {"levels": (0, 1, 2), "guard": guard}
        return compute_entries(records, topology, policy=policy, **options)  # type: ignore[arg-type]

    better, safe = entries(jobs(), guard=False), entries(jobs(), "crux-first")
    assert [e.level for e in better] != [e.level for e in safe]
    before = entries(jobs())
    assert [(e.level, e.paths) for e in before] == [(e.level, e.paths) for e in safe]
    trial = before[0].trial
    assert (trial.judge, trial.jobs, trial.on) == ("a", 2, False)
    admitted = TriedPlan(name=trial.name, jobs=("a", "b"), state="trying")
    tried = entries(jobs(admitted))
    assert [(e.level, e.paths) for e in tried] == [(e.level, e.paths) for e in better]
    assert {(e.trial.name, e.trial.on) for e in tried} == {(trial.name, True)}
    worse = msgspec.structs.replace(admitted, state="worse")
    assert entries(jobs(worse)) == before
    # Nobody but the judge admits.
    other = jobs()
    other[1] = msgspec.structs.replace(other[1], tried=(admitted,))
    assert entries(other) == before


def test_a_job_that_comes_is_decided_with_those_that_it_meets_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = TopologyBuilder()
    for n in range(4):
        builder.node(f"h{n}", "host")
    for tor, hosts in {"t0": ("h0", "h1"), "t1": ("h2", "h3")}.items():
        builder.node(tor, "tor")
        for host in hosts:
            builder.arrow(host, tor, Link(1e9), name=f"{host}-{tor}")
            builder.arrow(tor, host, Link(1e9), name=f"{tor}-{host}")
    builder.arrow("t0", "t1", Link(1e9), name="t0-t1")
    builder.arrow("t1", "t0", Link(1e9), name="t1-t0")
    topology = builder.build()
    decided: list[tuple[str, ...]] = []

    def noted(component: policy.Component, options: SchedulerOptions) -> Any:
        decided.append(tuple(job.name for job in component.jobs))
        return decide(component, options)

    def job(name: str, src: str, dst: str) -> JobRecord:
        told = profile(flows=(HostFlow(src, dst, 4e8),), t_s=0.4, t_source="topology")
        return record(name, hosts=(src, dst), profile=told)

    decide = policy.decide
    compute = partial(compute_entries, policy="crux", levels=(0, 1, 2), guard=True, memory=Memory())
    monkeypatch.setattr(policy, "decide", noted)
    jobs = [job("a", "h0", "h1"), job("b", "h0", "h1"), job("c", "h2", "h3"), job("d", "h2", "h3")]
    compute(jobs, topology)
    assert sorted(decided) == [("a", "b"), ("c", "d")]
    decided.clear()
    jobs.append(job("e", "h2", "h3"))
    compute(jobs, topology)
    assert decided == [("c", "d", "e")]
    decided.clear()
    compute(jobs[:-1], topology)
    assert not decided
