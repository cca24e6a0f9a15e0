"""Forged fragments: what one owner claims moves nothing of what two others saw."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import pytest
from answering import AnsweringNetwork, clos2, clos3
from hypothesis import given, settings
from hypothesis import strategies as st
from map_score import paths_of

from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.discover.join import Discovered, join

PORTS = range(50000, 50040)
NETWORKS = {"two layers": clos2(3, 3, 3), "three layers": clos3(3, 1, 2, 2, 3)}
OWN = "forged"


@lru_cache
def played(case: str, mode: str) -> AnsweringNetwork:
    return AnsweringNetwork(NETWORKS[case], mode=mode)  # type: ignore[arg-type]


def addresses(network: AnsweringNetwork, index: int) -> list[str]:
    """Addresses of the hosts that stand ``index``-th below their leaf."""
    return [a for end, a in network.address.items() if end.endswith(f"-{index}")]


def honest(network: AnsweringNetwork) -> dict[str, Fragment]:
    fragments = {}
    for index in (0, 1):
        own = addresses(network, index)
        pairs = [(a, b) for a in own for b in own if a != b]
        fragments[f"honest{index}"] = network.fragment(pairs, PORTS)
    return fragments


@lru_cache
def honest_map(case: str, mode: str) -> tuple[dict[str, Fragment], Any]:
    fragments = honest(played(case, mode))
    return fragments, view(fragments, join(fragments))


def view(fragments: dict[str, Fragment], found: Discovered) -> Any:
    """All that the honest owners' plans depend on, by the names of the map."""
    topology = found.topology
    seen = [path for fragment in fragments.values() for path in paths_of(fragment, found)]
    pairs = [(p.src, p.dst) for fragment in fragments.values() for p in fragment.pairs]
    candidates = [topology.candidate_paths(*pair) for pair in pairs]
    used = {link for paths in candidates for path in paths for link in path}
    own = {host.name for fragment in fragments.values() for host in fragment.hosts}
    return (
        seen,
        candidates,
        {link: topology.capacity_Bps[link] for link in used},
        {host: topology.addresses[host] for host in own},
        {topology.ends(link)[0]: topology.nodes[topology.ends(link)[0]].kind for link in used},
    )


def forged_fragments(network: AnsweringNetwork) -> st.SearchStrategy[Fragment]:
    """Fragments of hosts of their own that claim anything of the network."""
    own = addresses(network, 2)
    real = sorted({*network.interface.values(), *network.loopback.values()})
    pool = st.sampled_from([*real, *network.address.values(), "10.0.0.200", "192.0.2.1"])
    hops = st.lists(st.none() | pool, max_size=6).map(tuple)
    true = st.builds(
        network.seen, st.tuples(st.sampled_from(own), st.sampled_from(own), st.sampled_from(PORTS))
    )

    @st.composite
    def bent(draw: st.DrawFn) -> tuple[str | None, ...]:
        """A true path with one hop changed."""
        path = list(draw(true))
        path[draw(st.integers(0, len(path) - 1))] = draw(st.none() | pool)
        return tuple(path)

    ends = st.sampled_from([(a, b) for a in own for b in own if a != b])
    paths = st.lists(st.builds(SeenPath, hops | bent() | bent()), min_size=1, max_size=6)
    confidence = st.sampled_from([0.0, 0.99])

    def pair(ends: tuple[str, str], paths: list[SeenPath], sure: float, sprays: bool) -> SeenPair:
        src, dst = (network.topology.host_of(network.end_at[a]) or "" for a in ends)
        return SeenPair(src, ends[0], dst, ends[1], tuple(paths), sure, sprays)

    @st.composite
    def fragment(draw: st.DrawFn) -> Fragment:
        speed = st.sampled_from([0.0, 1.0, 1e15])
        hosts = [
            SeenHost(
                h.name,
                tuple(
                    SeenNic(
                        n.name, n.addresses, draw(speed), draw(st.sampled_from(["", "evil"])), "p"
                    )
                    for n in h.nics
                ),
            )
            for h in network.hosts([network.end_at[a] for a in own])
        ]
        pairs = st.builds(pair, ends, paths, confidence, st.booleans())
        return Fragment.of(hosts=tuple(hosts), pairs=tuple(draw(st.lists(pairs, max_size=8))))

    return fragment()


@pytest.mark.parametrize("mode", ["inbound", "loopback"])
@pytest.mark.parametrize("case", NETWORKS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_forged_fragment_moves_nothing_that_two_others_saw(
    case: str, mode: str, data: st.DataObject
) -> None:
    fragments, before = honest_map(case, mode)
    forged = data.draw(forged_fragments(played(case, mode)))
    for name in ("a" + OWN, "z" + OWN):
        after = view(fragments, join({**fragments, name: forged}))
        assert after == before


def made_up(count: int) -> Fragment:
    """Paths from one host over ``count`` routers of which each is made up."""
    hosts = tuple(SeenHost(name, (SeenNic("e", (f"10.9.{name}.9",)),)) for name in ("1", "2"))
    paths = [
        SeenPath((f"11.{n >> 8}.{n & 255}.1", f"12.{n >> 8}.{n & 255}.1")) for n in range(count)
    ]
    pairs = tuple(
        SeenPair("1", "10.9.1.9", "2", "10.9.2.9", tuple(paths[n : n + 512]), 0.99)
        for n in range(0, count, 512)
    )
    return Fragment.of(hosts=hosts, pairs=pairs)


def test_made_up_routers_take_time_by_their_number_not_by_its_square() -> None:
    def cpu_s(count: int) -> float:
        fragments = {OWN: made_up(count)}
        times = []
        for _ in range(3):
            began = time.process_time()
            join(fragments)
            times.append(time.process_time() - began)
        return min(times)

    assert cpu_s(8192) < 9 * cpu_s(2048)
