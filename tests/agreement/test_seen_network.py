"""Plans without a topology: from what jobs saw of the network, whatever else somebody claims."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import permutations

import msgspec
import pytest
from answering import AnsweringNetwork, clos3
from control_fakes import FakeClock, MemoryStore, record
from hypothesis import given, settings
from hypothesis import strategies as st
from leaders import run
from networks import LEAF_SPINE
from seen_fabric import Host, LINK_Bps, fragment, hops, host, ring, seen

from crux_torch.agreement.inputs import UNLOCATED, TopologyReader, paths_taken, plan_inputs
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import JobRecord, PlanEntry
from crux_torch.agreement.registry import Registry
from crux_torch.agreement.seen_network import (
    MAGIC,
    MAX_BYTES,
    SeenNetwork,
    contradicted,
    counted,
    decoded,
    encoded,
    is_seen,
)
from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.discover.seen_topology import SeenTopology
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.routes import routes_of
from crux_torch.network.topology import Topology

A, B, C = [[Host(0, k), Host(1, k)] for k in range(3)]
MINE = {"a": fragment(A), "b": fragment(B)}
RECORDS = [ring("a", A), ring("b", B)]


def network_of(fragments: Mapping[str, Fragment], records: Sequence[JobRecord]) -> Topology | None:
    raws = {job: msgspec.json.encode(one) for job, one in fragments.items()}
    return TopologyReader().read(SeenNetwork().bytes_of(raws, records))


def plan(
    fragments: Mapping[str, Fragment], records: Sequence[JobRecord], policy: str = "crux"
) -> tuple[PlanEntry, ...]:
    network = network_of(fragments, records)
    return compute_entries(records, network, policy=policy, levels=(0, 1, 2, 3))


def spines(entry: PlanEntry) -> set[str]:
    return {hop.router for path in entry.paths for hop in path.hops}


@pytest.mark.parametrize("policy", ["crux", "crux-paper", "taccl"])
def test_jobs_are_put_on_different_spines_as_with_a_file(policy: str) -> None:
    network = network_of(MINE, RECORDS)
    assert isinstance(network, SeenTopology)
    a, b = plan(MINE, RECORDS, policy)
    assert len(spines(a)) == len(spines(b)) == 1
    assert spines(a).isdisjoint(spines(b))
    assert spines(a) | spines(b) <= network.nodes.keys()


def test_levels_and_paths_are_those_of_the_same_network_in_a_file() -> None:
    links = [(f"h{leaf}-{k}", f"leaf{leaf}") for leaf in range(2) for k in range(3)]
    links += [(f"leaf{leaf}", f"spine{j}") for leaf in range(2) for j in range(2)]
    text = "version: 1\nhosts: {" + ", ".join(f"{h}: " for h, _ in links[:6]) + "}\n"
    text += "switches: {leaf0: tor, leaf1: tor, spine0: aggregation, spine1: aggregation}\nlinks:\n"
    text += "".join(f"  - {{between: [{u}, {v}], capacity_Bps: {LINK_Bps}}}\n" for u, v in links)
    given = parse_yaml(text)
    records = [*RECORDS, ring("c", C, 4e6)]
    fragments = {**MINE, "c": fragment(C)}
    for policy in ("crux", "crux-paper", "sincronia", "taccl"):
        expected = compute_entries(records, given, policy=policy, levels=(0, 1, 2, 3))
        found = plan(fragments, records, policy)
        assert [e.level for e in found] == [e.level for e in expected], policy
        apart = [[spines(x) == spines(y) for x in plan] for plan in (found, expected) for y in plan]
        assert apart[: len(found)] == apart[len(found) :], policy


def test_paths_that_nobody_saw_are_one_link_and_leave_a_component_on_one_level() -> None:
    unseen = {**MINE, "b": Fragment.of(MINE["b"].hosts, MINE["b"].pairs[:1])}
    network = network_of(unseen, RECORDS)
    cluster = plan_inputs(RECORDS, network)
    assert [len(f.candidates) for job in cluster.jobs for f in job.flows] == [2, 2, 2, 1]
    assert cluster.jobs[1].flows[1].candidates == ((UNLOCATED,),)
    heavy = [ring("a", A, 8e6), ring("b", B, 8e6), ring("c", C, 8e6)]
    whole = {**MINE, "c": fragment(C)}
    assert len({entry.level for entry in plan(whole, heavy, "crux-paper")}) > 1
    without_c = {**whole, "c": fragment(C, (0,))}
    without_c["c"] = Fragment.of(without_c["c"].hosts, without_c["c"].pairs[:1])
    assert len({entry.level for entry in plan(without_c, heavy)}) == 1


def test_the_networks_own_paths_are_known_among_those_that_were_seen() -> None:
    there, back = seen(*A, [1], 2), seen(*A[::-1], [0], 2)
    records = [ring("a", A, seen=(there, back)), RECORDS[1]]
    network = network_of(MINE, records)
    assert network is not None
    cluster = plan_inputs(records, network)
    (taken,) = paths_taken(cluster, records, network).values()
    crossed = [flow.candidates[c] for flow, c in zip(cluster.jobs[0].flows, taken, strict=True)]
    own = network.as_seen_by("a")
    assert [path in own.candidate_paths(f.src, f.dst) for path, f in zip(
        crossed, records[0].profile.flows, strict=True  # type: ignore[union-attr]
    )] == [True, True]  # fmt: skip
    routers = [
        {network.ends(link)[1] for link in path} & set(network.node_at.values()) for path in crossed
    ]
    assert network.node_at[hops(*A, 1)[1]] in routers[0]
    assert network.node_at[hops(*A[::-1], 0)[1]] in routers[1]


#: What somebody claims who wants others elsewhere. Each has hosts of its own below the same leaves.
EVIL = ring("evil", C)


def forged(*paths: tuple[str, ...], speed_Bps: float = LINK_Bps) -> Fragment:
    there = SeenPair(
        C[0].name, C[0].address, C[1].name, C[1].address, tuple(SeenPath(p) for p in paths), 0.99
    )
    back = SeenPair(
        C[1].name, C[1].address, C[0].name, C[0].address, tuple(SeenPath(p) for p in paths), 0.99
    )
    own = tuple(host(h, speed_Bps) for h in C)
    return Fragment.of(hosts=own, pairs=(there, back))


def of_others() -> Fragment:
    """Says that the hosts of a and b are below one switch."""
    everyone = [*A, *B, *C]
    pairs = tuple(
        SeenPair(x.name, x.address, y.name, y.address, (SeenPath(("10.7.7.7",)),), 0.99)
        for x in everyone
        for y in everyone
        if x != y
    )
    return Fragment.of(hosts=tuple(map(host, everyone)), pairs=pairs)


def with_addresses_of_others() -> Fragment:
    nic = SeenNic("eth0", (C[0].address, A[1].address, hops(*A, 0)[1]), LINK_Bps)
    own = (SeenHost(C[0].name, (nic,)), host(C[1]))
    return Fragment.of(hosts=own, pairs=fragment(C).pairs)


FORGERIES = {
    "a shortcut between leaves": forged(("10.0.2.1", "10.100.16.1")),
    "a link between spines": forged(("10.0.2.1", "10.100.0.2", "10.100.1.2", "10.100.16.1")),
    "spines that are one": forged(
        ("10.0.2.1", "10.100.0.2", "10.100.17.1"), ("10.0.2.1", "10.100.1.2", "10.100.16.1")
    ),
    "leaves that are spines": forged(("10.100.0.2", "10.0.0.1", "10.1.0.1")),
    "slow cables": forged(hops(*C, 0), hops(*C, 1), speed_Bps=1.0),
    "fast cables": forged(hops(*C, 0), hops(*C, 1), speed_Bps=1e15),
    "hosts of others": of_others(),
    "addresses of others": with_addresses_of_others(),
    "nothing of use": forged(()),
}


@pytest.mark.parametrize("claim", FORGERIES)
@pytest.mark.parametrize("claims_hosts", [False, True])
def test_a_forged_fragment_moves_nobody_elses_level_or_path(claim: str, claims_hosts: bool) -> None:
    """The liar takes no part in the traffic of a and b, or claims their hosts as well."""
    names = [h.name for h in (*A, *B, *C)] if claims_hosts else [h.name for h in C]
    liar = msgspec.structs.replace(EVIL, hosts=tuple(names), profile=EVIL.profile)
    quiet = msgspec.structs.replace(
        liar,
        profile=msgspec.structs.replace(EVIL.profile, flows=()),  # type: ignore[type-var]
    )
    heavy = [ring("a", A, 4e6), ring("b", B, 8e6), ring("d", A[::-1], 2e6)]
    mine = {**MINE, "d": fragment(A)}
    for policy in ("crux", "crux-paper", "taccl"):
        honest = plan(mine, [*heavy, quiet], policy)
        lied = plan({**mine, "evil": FORGERIES[claim]}, [*heavy, quiet], policy)
        assert [e.level for e in lied] == [e.level for e in honest]
        named = network_of({**mine, "evil": FORGERIES[claim]}, [*heavy, quiet])
        before = network_of(mine, [*heavy, quiet])
        assert named is not None
        assert before is not None
        for old, new in zip(honest, lied, strict=True):
            assert len(old.paths) == len(new.paths)
            for was, now in zip(old.paths, new.paths, strict=True):
                assert (was.src, was.dst) == (now.src, now.dst)
                assert [(h.there, h.back) for h in was.hops] == [
                    (h.there, h.back) for h in now.hops
                ]
                for x, y in zip(was.hops, now.hops, strict=True):
                    assert set(before.addresses[x.router]) & set(named.addresses[y.router])


def stored(store: MemoryStore, fragments: Mapping[str, Fragment]) -> None:
    for job, one in fragments.items():
        Registry(store, "c").publish_fragment(job, msgspec.json.encode(one))


def leader(store: MemoryStore, clock: FakeClock, own: JobRecord, **options: object) -> Leader:
    compute = partial(compute_entries, levels=(0, 1, 2, 3))
    return Leader(store, "c", own, compute, clock=clock, **options)  # type: ignore[arg-type]


def test_leaders_tell_what_their_jobs_saw_and_agree_on_paths(
    clock: FakeClock, store: MemoryStore
) -> None:
    leaders = [leader(store, clock, own) for own in RECORDS]
    run(leaders, clock, 3.0)
    assert leaders[0].plan is not None
    assert all(entry.paths == () for entry in leaders[0].plan.entries)
    assert not leaders[0].outcome.network.known
    for one, seen_by in zip(leaders, MINE.values(), strict=True):
        one.tell_network(msgspec.json.encode(seen_by))
    run(leaders, clock, 5.0)
    first, second = (one.plan for one in leaders)
    assert first == second
    assert first is not None
    a, b = first.entries
    assert spines(a).isdisjoint(spines(b))
    network = leaders[0].outcome.network
    assert (network.known, network.seen, network.addresses) == (True, True, True)
    routed = leaders[0].outcome.routed
    assert routed is not None
    assert [route.dst for route in routed.found.routes] == ["h1-0", "h0-0"]
    (why,) = [
        line for entry in Registry(store, "c").audit() for line in entry.why if "gives" in line
    ]
    assert why.startswith("nobody gives a topology: the network is as jobs saw it, ")
    # A job ends, and what it saw with it.
    leaders[0].close()
    assert list(Registry(store, "c").look().fragments) == ["b"]


def test_a_leader_warns_if_its_job_claims_too_large_a_network(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: FakeClock,
    store: MemoryStore,
) -> None:
    monkeypatch.setattr("crux_torch.network.discover.shares.MAX_COST", 100)
    leaders = [leader(store, clock, own) for own in RECORDS]
    for one, seen_by in zip(leaders, (MINE["a"], fragment(B, range(8))), strict=True):
        one.tell_network(msgspec.json.encode(seen_by))
    run(leaders, clock, 5.0)
    said = [line for line in caplog.messages if line.endswith("this job has no paths")]
    assert len(said) == 1
    topology = leaders[0].topology
    assert topology is not None
    assert topology.left_out == ("b",)


def test_a_given_topology_counts_and_what_contradicts_it_is_in_the_audit_log(
    clock: FakeClock, store: MemoryStore
) -> None:
    told = SeenPair("h0", "10.0.0.2", "h1", "10.1.0.2", (SeenPath((None, "10.9.9.9")),))
    own = record("a")
    one = leader(store, clock, own, published=LEAF_SPINE.encode())
    stored(store, {"a": fragment(A)})
    run([one], clock, 3.0)
    assert not isinstance(one.topology, SeenTopology)
    assert one.outcome.network == one.outcome.network._replace(known=True, seen=False)
    one.update(seen=(told,))
    run([one], clock, 3.0)
    said = "hop 2 from h0 to h1 is 10.9.9.9, where the topology has spine0, spine1"
    assert contradicted([one.record], one.topology) == {f"the topology does not fit: {said}": "a"}
    assert Registry(store, "c").audit()[-1].why == (
        f"the topology does not fit: {said} (a saw it)",
    )


def test_a_link_that_vanishes_is_named_in_the_audit_log_and_no_plan_uses_it(
    clock: FakeClock, store: MemoryStore
) -> None:
    leaders = [leader(store, clock, own) for own in RECORDS]
    for one, seen_by in zip(leaders, MINE.values(), strict=True):
        one.tell_network(msgspec.json.encode(seen_by))
    run(leaders, clock, 5.0)
    for one, hosts in zip(leaders, (A, B), strict=True):
        one.tell_network(msgspec.json.encode(fragment(hosts, [0])))
    run(leaders, clock, 8.0)
    plan_now = leaders[0].plan
    assert plan_now is not None
    assert all(entry.paths == () for entry in plan_now.entries), "no choice is left"
    lines = [line for entry in Registry(store, "c").audit() for line in entry.why]
    assert any(line.startswith("jobs saw another network: gone: ") for line in lines), lines


def test_links_that_another_job_lost_are_told_until_one_sees_them_again() -> None:
    network = SeenNetwork("a")

    def lost(**fragments: Fragment) -> set[tuple[str, ...]]:
        raws = {job: msgspec.json.encode(one) for job, one in fragments.items()}
        network.bytes_of(raws, RECORDS)
        return set(network.lost)

    own, both, one = MINE["a"], fragment(B), fragment(B, [1])
    ways = hops(*A, 0), hops(*reversed(A), 0)
    # Each job has first routers of its own.
    vanished = {link for way in ways for link in ((way[1],), (way[2],), way[1:])}
    assert lost(a=own, b=both) == set()
    assert lost(a=own, b=one) == vanished
    assert lost(a=own, b=one, c=fragment(C)) == vanished
    assert lost(a=own, b=both, c=fragment(C)) == set()
    # A job that has ended, or that goes on between other hosts, has lost nothing.
    assert lost(a=own, c=fragment(C)) == set()
    assert lost(a=own, c=one) == set()
    # One whose search failed for a while has.
    nothing = Fragment.of(hosts=both.hosts, pairs=both.pairs[:1])
    assert lost(a=own, b=both) == set()
    assert lost(a=own, b=nothing) == set()
    assert lost(a=own, b=one) == vanished
    assert lost(a=own, b=both) == set()
    # Of links that this job does not see it hears nothing.
    assert lost(a=fragment(A, [1]), b=both) == set()
    assert lost(a=fragment(A, [1]), b=one) == set()


def test_a_leader_hears_what_another_one_lost(clock: FakeClock, store: MemoryStore) -> None:
    leaders = [leader(store, clock, own) for own in RECORDS]
    for one, seen_by in zip(leaders, MINE.values(), strict=True):
        one.tell_network(msgspec.json.encode(seen_by))
    run(leaders, clock, 5.0)
    leaders[1].tell_network(msgspec.json.encode(fragment(B, [0])))
    run(leaders, clock, 8.0)
    assert hops(*A, 1)[1:] in leaders[0].outcome.lost
    assert leaders[1].outcome.lost == frozenset()


def test_a_fragment_counts_for_the_hosts_and_pairs_that_its_record_claims() -> None:
    everything = of_others()
    (kept,) = counted({"evil": everything}, [EVIL]).values()
    assert [h.name for h in kept.hosts] == [h.name for h in C]
    assert {(p.src, p.dst) for p in kept.pairs} == {
        (x.name, y.name) for x in C for y in C if x != y
    }
    assert counted({"evil": everything}, RECORDS) == {}, "of no live job"
    quiet = msgspec.structs.replace(EVIL, profile=None)
    assert counted({"evil": everything}, [quiet]) == {}
    elsewhere = msgspec.structs.replace(EVIL, hosts=("x",))
    assert counted({"evil": everything}, [elsewhere]) == {}


def test_of_a_contested_host_only_those_speak_whose_devices_count() -> None:
    small = [ring(f"j{n:03}", A, gpus=2) for n in range(256)]
    liar = ring("liar", A, gpus=1 << 20)
    claims = dict.fromkeys(("j000", "liar"), fragment(A))
    assert list(counted(claims, [*small, liar])) == ["j000"]
    assert list(counted(claims, [small[0], liar])) == ["j000", "liar"]


def test_fragments_are_bounded_the_smallest_first_and_have_one_form() -> None:
    small, large = fragment(A), fragment(B)
    assert encoded({}) is None
    both = encoded({"a": small, "b": large})
    assert both is not None
    assert is_seen(both)
    assert not is_seen(LEAF_SPINE.encode())
    padded = msgspec.structs.replace(large, seen=large.seen * (MAX_BYTES // 40))
    assert encoded({"a": small, "b": padded}) == encoded({"a": small})
    raws = {job: msgspec.json.encode(one) for job, one in MINE.items()}
    forms = {SeenNetwork().bytes_of(dict(order), RECORDS[::step]) for order, step in (
        (sorted(raws.items()), 1), (sorted(raws.items(), reverse=True), -1)
    )}  # fmt: skip
    assert len(forms) == 1


def test_who_does_not_fit_is_named_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {**MINE, "b": fragment(B, range(8))}
    raws = {job: msgspec.json.encode(one) for job, one in wide.items()}
    network = SeenNetwork()
    alone = SeenNetwork().bytes_of({"a": raws["a"]}, RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr("crux_torch.agreement.seen_network.MAX_BYTES", len(raws["b"]))
        assert network.bytes_of(raws, RECORDS) == alone
        assert network.left_out == ("b",)
        assert network.bytes_of({}, RECORDS) is None
        assert network.left_out == ()
    network.bytes_of(raws, RECORDS)
    assert network.left_out == ()


def test_what_5_000_jobs_see_in_three_layers_fits() -> None:
    # The ranks' side takes torch.
    discovery = pytest.importorskip("crux_torch.agent.discovery", exc_type=ImportError)
    network = AnsweringNetwork(clos3(8, 4, 4, 4, 32))
    chance = random.Random(1)
    size = 0
    for _ in range(10):
        ring = chance.sample(list(network.address.values()), 4)
        pairs = [(a, b) for a, b in permutations(ring, 2)][:8]
        found = network.fragment(pairs, range(50000, 50024))
        kept = [discovery.with_live(pair, None) for pair in found.pairs]
        size += len(msgspec.json.encode(Fragment.of(hosts=found.hosts, pairs=tuple(kept))))
    assert size / 10 * 5000 <= MAX_BYTES


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b"[" * 9999, b'{"version":1}', b'{"hosts":[{}]}', b"\xff",
    ],
)  # fmt: skip
def test_bytes_that_are_no_fragment_count_for_nothing(raw: bytes) -> None:
    alone = SeenNetwork().bytes_of({"a": msgspec.json.encode(MINE["a"])}, RECORDS)
    both = SeenNetwork().bytes_of({"a": msgspec.json.encode(MINE["a"]), "b": raw}, RECORDS)
    assert both == alone
    assert SeenNetwork().bytes_of({"b": raw}, RECORDS) is None
    assert TopologyReader().read(MAGIC + raw) is None


@pytest.mark.parametrize(
    "places",
    ["1,0,[],[]", "0,0,[2],[0,1]", "0,0,[1],[-2]", "-1,0,[],[]", "0,0,[1],[]", "0,0,[],[0]"],
)
def test_paths_that_the_table_of_addresses_does_not_explain_are_malformed(places: str) -> None:
    there = '{"version":2,"addresses":["10.0.0.2"],"seen":[[%s,0.9,false]]}'
    assert decoded((there % "0,0,[2],[0,-1]").encode()) is not None
    assert decoded((there % places).encode()) is None


hostile = st.builds(
    Fragment.of,
    hosts=st.lists(
        st.builds(
            SeenHost,
            st.sampled_from([h.name for h in (*A, *C)]),
            st.lists(
                st.builds(
                    SeenNic,
                    st.sampled_from(["eth0", "x"]),
                    st.lists(
                        st.sampled_from([*(h.address for h in (*A, *C)), "zz", "127.0.0.1"])
                    ).map(tuple),
                    st.sampled_from([0.0, 1.0, 1e15]),
                    st.sampled_from(["", "spine", "h0-0"]),
                ),
                max_size=2,
            ).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    pairs=st.lists(
        st.builds(
            SeenPair,
            st.sampled_from([h.name for h in (*A, *C)]),
            st.sampled_from([h.address for h in (*A, *C)]),
            st.sampled_from([h.name for h in (*A, *C)]),
            st.sampled_from([h.address for h in (*A, *C)]),
            st.lists(
                st.builds(
                    SeenPath,
                    st.lists(
                        st.sampled_from([None, *hops(*A, 0), *hops(*A, 1), *hops(*C, 0), "zz"]),
                        max_size=5,
                    ).map(tuple),
                ),
                max_size=3,
            ).map(tuple),
        ),
        max_size=4,
    ).map(tuple),
)


def test_liars_that_fill_the_network_leave_others_their_levels_and_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [ring("a", A, 4e6), ring("b", B, 8e6)]
    before = plan(MINE, records)
    liars = {}
    for n in range(8):
        hosts = [Host(20 + n, 0), Host(40 + n, 0)]
        paths = tuple(
            SeenPath(tuple(f"30.{n}.{i}.{place}" for place in range(3))) for i in range(200)
        )
        ends = hosts[0].name, hosts[0].address, hosts[1].name, hosts[1].address
        pairs = (SeenPair(*ends, paths, 0.99),)
        liars[f"{'_z'[n % 2]}{n}"] = Fragment.of(hosts=tuple(map(host, hosts)), pairs=pairs)
        records.append(ring(f"{'_z'[n % 2]}{n}", hosts))
    monkeypatch.setattr("crux_torch.network.discover.shares.MAX_COST", 5000)
    monkeypatch.setattr("crux_torch.network.topology.MAX_LINKS", 5000)
    network = network_of({**MINE, **liars}, records)
    assert network is not None
    assert len(network.left_out) > 4
    after = {entry.job: entry for entry in plan({**MINE, **liars}, records)}
    for entry in before:
        assert after[entry.job].level == entry.level
        assert after[entry.job].paths == entry.paths


@settings(max_examples=60)
@given(hostile, st.sampled_from(["crux", "crux-paper"]))
def test_whatever_somebody_says_of_the_network_others_keep_their_levels_and_paths(
    claim: Fragment, policy: str
) -> None:
    quiet = msgspec.structs.replace(EVIL.profile, flows=())  # type: ignore[type-var]
    liar = msgspec.structs.replace(EVIL, profile=quiet, hosts=tuple(h.name for h in (*A, *C)))
    records = [ring("a", A, 4e6), ring("b", B, 8e6), liar]
    before, after = network_of(MINE, records), network_of({**MINE, "evil": claim}, records)
    assert before is not None
    assert after is not None
    honest, lied = (
        compute_entries(records, network, policy=policy, levels=(0, 1, 2, 3))
        for network in (before, after)
    )
    for old, new in zip(honest, lied, strict=True):
        assert old.level == new.level
        ends = [
            [(network.host_of(p.src), network.host_of(p.dst)) for p in entry.paths]
            for network, entry in ((before, old), (after, new))
        ]
        assert ends[0] == ends[1]
        own = after.as_seen_by(old.job)
        told = routes_of(new.paths, [h.name for h in (*A, *B)], own)
        assert told.problems == ()
        assert {a for route in told.routes for a in route.destinations} <= {
            h.address for h in (*A, *B)
        }
        for was, now in zip(old.paths, new.paths, strict=True):
            for x, y in zip(was.hops, now.hops, strict=True):
                assert set(before.addresses[x.router]) & set(after.addresses[y.router])
