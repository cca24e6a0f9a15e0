"""A job that comes, goes or changes has its own component planned anew, and nobody else's."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from control_fakes import FakeClock, MemoryStore, profile, record
from hypothesis import given
from hypothesis import strategies as st
from leaders import leader_of, run

from crux_torch.agreement import inputs
from crux_torch.agreement.inputs import Agreed
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.plan_author import PLANS_AT_ONCE, PLANS_PER_MINUTE
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import JobRecord, PlanEntry
from crux_torch.measure.profile import HostFlow, JobProfile, ProfileBurst
from crux_torch.network.loaders import dump_yaml
from crux_torch.network.topology import Link, Topology, TopologyBuilder
from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.default import crux as policy
from crux_torch.schedule.default.crux import Component
from crux_torch.schedule.model import Cluster, Job, Memory, SchedulerOptions
from crux_torch.schedule.papers.intensity import unrouted_transfer_times_s

#: Hosts of each pod.
PODS = [tuple(f"h{pod}{n}" for n in range(4)) for pod in range(4)]


def fabric() -> Topology:
    """Pods of two leaves below two spines, all spines below one core."""
    builder = TopologyBuilder()
    core = builder.node("core", "core")
    for pod, hosts in enumerate(PODS):
        spines = [builder.node(f"spine{pod}{n}", "aggregation") for n in range(2)]
        leaves = [builder.node(f"leaf{pod}{n}", "tor") for n in range(2)]
        for n, host in enumerate(hosts):
            builder.cable(builder.node(host, "host"), leaves[n % 2], Link(1e9))
        for spine in spines:
            builder.cable(spine, core, Link(1e9))
            for leaf in leaves:
                builder.cable(leaf, spine, Link(1e9))
    return builder.build()


FABRIC = fabric()


def planned(records: Sequence[JobRecord], memory: Memory | None = None) -> list[PlanEntry]:
    entries = compute_entries(records, FABRIC, policy="crux", levels=(0, 1, 2), memory=memory)
    assert [e.job for e in entries] == sorted(r.job for r in records)
    return list(entries)


def drawn(name: str, pod: int, rng: random.Random) -> JobRecord:
    """A job within one pod, of a shape for which levels may gain."""
    hosts = PODS[pod][rng.randint(0, 1)], PODS[pod][rng.randint(2, 3)]
    t_s, compute_s = rng.uniform(0.3, 0.5), rng.uniform(0.1, 0.6)
    told = profile(
        flops=1e14,
        t_s=t_s,
        compute_s=compute_s,
        period_s=compute_s + t_s,
        flows=(HostFlow(*hosts, 4e8),),
        bursts=(ProfileBurst(1.0, 1.0),),
    )
    return record(name, hosts=hosts, gpus=2 ** rng.randint(1, 6), profile=told)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The jobs of each component that was decided and not looked up."""
    found: list[set[str]] = []
    decide = policy.decide

    def noted(component: Component, options: SchedulerOptions) -> object:
        found.append({job.name for job in component.jobs})
        return decide(component, options)

    monkeypatch.setattr(policy, "FEW_WORK", 2_000_000)
    monkeypatch.setattr(policy, "decide", noted)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_only_the_component_of_a_change_is_computed_and_changes(
    decided: list[set[str]], seed: int
) -> None:
    rng = random.Random(seed)
    pod_of = {f"j{n:02}": n % 4 for n in range(16)}
    records = {job: drawn(job, pod, rng) for job, pod in pod_of.items()}
    memory = Memory()
    before = planned(list(records.values()), memory)
    levels = {e.level for e in before}
    for step in range(6):
        what = rng.choice(("come", "go", "change"))
        job = f"k{step:02}" if what == "come" else rng.choice(sorted(records))
        pod = pod_of.setdefault(job, rng.randrange(4))
        concerned = {name for name in records if pod_of[name] == pod} | {job}
        if what == "go":
            del records[job]
        else:
            records[job] = drawn(job, pod, rng)
        decided.clear()
        after = planned(list(records.values()), memory)
        assert len(decided) <= 1
        assert all(those <= concerned for those in decided)
        others = [[e for e in entries if e.job not in concerned] for entries in (before, after)]
        assert msgspec.json.encode(others[0]) == msgspec.json.encode(others[1])
        decided.clear()
        assert planned(rng.sample(list(records.values()), len(records)), memory) == after
        assert not decided, "nothing has changed"
        anew = planned(list(records.values()))
        assert msgspec.json.encode(anew) == msgspec.json.encode(after), "bit for bit"
        before = after
        levels |= {e.level for e in after}
    assert len(levels) > 1, "there was something to decide"


def test_a_job_that_joins_two_components_makes_them_one(decided: list[set[str]]) -> None:
    rng = random.Random(5)
    jobs = [drawn(f"{n}{pod}", pod, rng) for n in "ab" for pod in range(3)]
    memory = Memory()
    before = {e.job: e for e in planned(jobs, memory)}
    decided.clear()
    hosts = PODS[0][0], PODS[0][1], PODS[1][0], PODS[1][1]
    flows = tuple(HostFlow(a, b, 1e9) for a, b in itertools.pairwise(hosts))
    bridge = record("bridge", hosts=hosts, profile=profile(flows=flows))
    after = {e.job: e for e in planned([*jobs, bridge], memory)}
    assert decided == [{"a0", "a1", "b0", "b1", "bridge"}]
    assert [after[job] for job in ("a2", "b2")] == [before[job] for job in ("a2", "b2")]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(FABRIC.hosts), st.sampled_from(FABRIC.hosts), st.floats(1.0, 1e12)
        ),
        min_size=1,
        max_size=6,
    ),
    st.floats(1e-3, 10.0),
)
def test_what_a_job_needs_alone_follows_from_its_own_links(
    told: list[tuple[str, str, float]], t_s: float
) -> None:
    flows = tuple(HostFlow(a, b, size) for a, b, size in told)

    def on_all_links(job: Job, capacity_Bps: dict[str, float], *_: float) -> float:
        arrays = arrays_of(Cluster(capacity_Bps, (job,)))
        return float(unrouted_transfer_times_s(arrays)[0])

    seen: list[tuple[Job, dict[str, float], float, float]] = []
    scaled = inputs._scaled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_scaled", lambda *args: seen.append(args) or scaled(*args))
        (job,) = inputs.plan_inputs(
            [record("a", profile=profile(t_s=t_s, flows=flows))], FABRIC
        ).jobs
    ((bare, capacity_Bps, told_s, least_s),) = seen
    alone_s = on_all_links(bare, capacity_Bps)
    wanted_s = max(told_s or alone_s, least_s)
    factor = wanted_s / alone_s if alone_s > 0 else 1.0
    assert [f.bytes for f in job.flows] == [f.bytes * factor for f in bare.flows]


def test_one_job_that_flaps_changes_few_entries_and_none_of_other_components(
    decided: list[set[str]], clock: FakeClock, store: MemoryStore
) -> None:
    compute = partial(compute_entries, levels=(0, 1, 2), guard=True, memory=Memory())
    published = dump_yaml(FABRIC).encode()

    def leader(number: int, job: str, pod: int) -> Leader:
        options: dict[str, Any] = {"compute": compute, "published": published}
        one = leader_of(store, job, clock, number, agree=lambda *_: Agreed((0, 1, 2)), **options)
        one.update(hosts=PODS[pod], profile=told(pod, 1e15))
        return one

    def told(pod: int, flops: float) -> JobProfile:
        return profile(flops=flops, flows=(HostFlow(PODS[pod][0], PODS[pod][3], 4e8),))

    flapping = leader(0, "flapping", 0)
    near = [leader(n, f"near{n}", 0) for n in (1, 2)]
    far = [leader(n, f"far{n}", 1) for n in (3, 4)]
    leaders = [flapping, *near, *far]
    run(leaders, clock, 60)
    changes: Counter[str] = Counter()

    def followed() -> dict[str, tuple[object, ...]]:
        found = {}
        for one in leaders:
            entry = one.plan.entry(one.record.job) if one.plan is not None else None
            assert entry is not None
            found[one.record.job] = entry.level, entry.paths, entry.trial and entry.trial.on
        return found

    before, epoch = followed(), flapping.status()["epoch"]
    minutes = 2
    for n in range(60 * minutes):
        flapping.update(profile=told(0, 1e15 * (n % 2 * 2 + 0.5 + n / 1e4)))
        decided.clear()
        run(leaders, clock, 1)
        assert all("far3" not in those for those in decided)
        now = followed()
        changes.update(job for job in now if now[job] != before[job])
        before = now
    plans = flapping.status()["epoch"] - epoch
    assert PLANS_PER_MINUTE < plans <= PLANS_AT_ONCE + PLANS_PER_MINUTE * minutes
    assert changes.keys() <= {"flapping", "near1", "near2"}
    assert 0 < max(changes.values()) <= plans
    # It stands still: what it settles on stays.
    run(leaders, clock, 10)
    settled, epoch = followed(), flapping.status()["epoch"]
    run(leaders, clock, 60)
    assert (followed(), flapping.status()["epoch"]) == (settled, epoch)
