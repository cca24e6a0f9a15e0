"""Fragments as large as the store takes: who claims a huge network leaves out itself."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_fabric import Host
from seen_fabric import fragment as seen_by
from test_join_hostile import NETWORKS, OWN, forged_fragments, honest_map, played, view

from crux_torch.network.discover import assembly, shares
from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.discover.join import join
from crux_torch.network.discover.seen_topology import SeenTopology
from crux_torch.network.topology import MAX_LINKS, MAX_NODES, TopologyError
from crux_torch.store import MAX_VALUE_BYTES

HONEST = {f"job{k}": seen_by([Host(0, k), Host(1, k)]) for k in range(2)}
Hops = tuple[str | None, ...]


def made_up(liar: int) -> Iterator[str]:
    """Addresses that nobody else claims."""
    return (f"{20 + liar}.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in itertools.count())


def between(hosts: Sequence[SeenHost], paths: Iterable[Hops]) -> tuple[SeenPair, ...]:
    (src, *_), (dst, *_) = (host.nics for host in hosts[:2])
    ends = hosts[0].name, src.addresses[0], hosts[1].name, dst.addresses[0]
    seen = iter(paths)
    parts = iter(lambda: tuple(map(SeenPath, itertools.islice(seen, 512))), ())
    return tuple(SeenPair(*ends, part, 0.99) for part in parts)


def two_hosts(liar: int) -> tuple[SeenHost, ...]:
    return tuple(SeenHost(f"x{liar}-{n}", (SeenNic("e", (f"10.9.{liar}.{n}",)),)) for n in range(2))


def routers(liar: int, count: int, length: int) -> Fragment:
    """Paths of so many routers each, of which no two are one."""
    hosts, new = two_hosts(liar), made_up(liar)
    paths = [tuple(itertools.islice(new, length)) for _ in range(count)]
    return Fragment.of(hosts=hosts, pairs=between(hosts, paths))


def interfaces(liar: int, count: int) -> Fragment:
    """Hosts of many interfaces, each below a router of its own."""
    new = made_up(liar)
    hosts = [
        SeenHost(f"x{liar}-{n}", tuple(SeenNic(f"{i}", (next(new),)) for i in range(64)))
        for n in range(count)
    ]
    pairs = (
        SeenPair(a.name, nic.addresses[0], b.name, b.nics[0].addresses[0], (SeenPath(()),))
        for a, b in zip(hosts, (*hosts[1:], hosts[0]), strict=True)
        for nic in a.nics
    )
    return Fragment.of(hosts=tuple(hosts), pairs=tuple(pairs))


def idle_hosts(liar: int, count: int) -> Fragment:
    """Hosts that no path leads to."""
    hosts = two_hosts(liar)
    more = (SeenHost(f"y{liar}-{n}", (SeenNic("e", ()),)) for n in range(count))
    return Fragment.of(hosts=(*hosts, *more), pairs=between(hosts, [("30.0.0.1",)]))


def addresses(liar: int, count: int) -> Fragment:
    """Interfaces of 64 addresses."""
    hosts, new = two_hosts(liar), made_up(liar)
    more = (
        SeenHost(f"y{liar}-{n}", (SeenNic("e", tuple(itertools.islice(new, 64))),))
        for n in range(count)
    )
    return Fragment.of(hosts=(*hosts, *more), pairs=between(hosts, [("30.0.0.1",)]))


def tails(liar: int, count: int) -> Fragment:
    """A few routers in many orders."""
    hosts, chance = two_hosts(liar), random.Random(liar)
    paths = [
        tuple(f"{20 + liar}.0.{place}.{chance.randrange(8)}" for place in range(15))
        for _ in range(count)
    ]
    return Fragment.of(hosts=hosts, pairs=between(hosts, paths))


def silent(liar: int, count: int) -> Fragment:
    """Routers that don't answer, each beside others."""
    hosts, new = two_hosts(liar), made_up(liar)
    paths = [(next(new), next(new), None, None, None, next(new)) for _ in range(count)]
    return Fragment.of(hosts=hosts, pairs=between(hosts, paths))


PART = 32
#: By what they are full of: what makes a fragment, and the size at which the store is full.
KINDS: dict[str, tuple[Callable[[int, int], Fragment], int]] = {
    "long paths": (lambda liar, count: routers(liar, count, 16), 3700),
    "short paths": (lambda liar, count: routers(liar, count, 3), 18500),
    "interfaces": (interfaces, 224),
    "idle hosts": (idle_hosts, 17500),
    "addresses": (addresses, 1150),
    "tails": (tails, 18600),
    "silent routers": (silent, 16000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_full_fragments_leave_others_their_map(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bounds are a part of the real ones, for time."""
    before = view(HONEST, join(HONEST))
    make, count = KINDS[kind]
    liars = {f"{'az'[n % 2]}{n}": make(n, count // PART) for n in range(16)}
    sizes = [PART * len(msgspec.json.encode(liar)) for liar in liars.values()]
    assert 0.75 * MAX_VALUE_BYTES < min(sizes) < 1.1 * MAX_VALUE_BYTES
    monkeypatch.setattr(shares, "MAX_COST", shares.MAX_COST // PART)
    monkeypatch.setattr("crux_torch.network.topology.MAX_LINKS", MAX_LINKS // PART)
    monkeypatch.setattr("crux_torch.network.topology.MAX_NODES", MAX_NODES // PART)
    found = join({**HONEST, **liars})
    assert view(HONEST, found) == before
    assert liars.keys() >= set(found.left_out)


def test_addresses_of_its_own_take_time_by_their_number_not_by_its_square() -> None:
    def cpu_s(count: int) -> float:
        hosts = [
            SeenHost(
                f"x{n}",
                tuple(
                    SeenNic(f"{i}", tuple(f"10.{n}.{i}.{j}" for j in range(64)))
                    for i in range(count)
                ),
            )
            for n in range(2)
        ]
        # A router that is there twice: each pair is looked at closely.
        paths: list[Hops] = [("30.0.0.1", "31.0.0.1", "31.0.0.1"), ("30.0.0.1", "31.0.0.2")]
        pairs = between(hosts, paths) + 16 * count * between(hosts, paths[1:])
        fragments = {"run": Fragment.of(hosts=tuple(hosts), pairs=pairs)}
        times = []
        for _ in range(3):
            began = time.process_time()
            join(fragments)
            times.append(time.process_time() - began)
        return min(times)

    assert cpu_s(80) < 9 * cpu_s(20)


def test_of_forty_liars_most_are_left_out_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_COST", 1 << 14)
    liars = {f"{'az'[n % 2]}{n}": routers(n, 400, 3) for n in range(40)}
    every = {**HONEST, **liars}
    kept = shares.within(every)
    assert list(kept)[:2] == list(HONEST)
    assert len(kept) < 6
    assert shares.within(dict(reversed(every.items()))) == kept
    network = SeenTopology(every)
    assert network.left_out == tuple(sorted(every.keys() - kept.keys()))
    ends = two_hosts(int(network.left_out[0][1:]))
    assert not network.as_seen_by(network.left_out[0]).sees(*(host.name for host in ends))
    assert all(network.as_seen_by(job).sees("h0-0", "h1-0") == (job == "job0") for job in HONEST)
    assert view(HONEST, join(every)) == view(HONEST, join(HONEST))


def test_who_says_much_of_a_few_routers_has_a_low_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_COST", 1 << 12)
    wide = seen_by([Host(leaf, k) for leaf in range(2) for k in range(8)], range(4))
    liars = {f"a{n}": routers(n, 120, 3) for n in range(8)}
    assert len(msgspec.json.encode(wide)) > len(msgspec.json.encode(liars["a0"]))
    found = join({**liars, "job": wide})
    assert set(found.left_out) < set(liars)
    assert found.left_out


def test_one_alone_is_bounded_by_the_topology_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_COST", 1)
    assert join({"run": HONEST["job0"]}).left_out == ()
    with pytest.raises(TopologyError, match="no host"):
        join(HONEST)


def test_leaves_that_two_agree_on_crowd_out_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = {**HONEST, "job2": seen_by([Host(0, 2), Host(1, 2)])}
    a, b = Host(0, 8), Host(1, 8)
    true = seen_by([a, b])
    past_spines = SeenPath((f"10.0.{a.k}.1", "10.100.16.1"))
    short = SeenPair(a.name, a.address, b.name, b.address, (past_spines,), 0.99)
    forged = Fragment.of(hosts=true.hosts, pairs=(*true.pairs, short))
    hosts = [SeenHost(f"a{n}", (SeenNic("e", (f"10.9.{n}.2",)),)) for n in range(40)]
    pairs = [
        between([src, dst], [(f"20.0.{n}.1", f"21.0.{n}.1", f"22.0.{n}.1")])[0]
        for n, (src, dst) in enumerate(itertools.pairwise(hosts))
    ]
    agreed = Fragment.of(hosts=tuple(hosts), pairs=tuple(pairs))
    before = view(honest, join({**honest, "a": agreed, "aa": agreed}))
    monkeypatch.setattr(assembly, "MAX_COMPARED", 1000)
    found = join({**honest, "a": agreed, "aa": agreed, "aaa": forged})
    assert view(honest, found) == before
    assert any("too many leaves" in note for note in found.notes)
    assert any("only one of several" in note for note in found.notes)


@pytest.mark.parametrize("case", NETWORKS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_network_has_more_links_than_it_costs(case: str, data: st.DataObject) -> None:
    forged = forged_fragments(played(case, "inbound"))
    fragments = {f"{OWN}{n}": data.draw(forged) for n in range(data.draw(st.integers(1, 3)))}
    fragments.update(data.draw(st.sampled_from([{}, honest_map(case, "inbound")[0]])))
    taken = shares._Claims(Fragment())
    assert all(taken.take(shares._Claims(each)) for each in fragments.values())
    topology = join(fragments).topology
    assert max(len(topology.nodes), len(topology.links)) <= taken.cost
