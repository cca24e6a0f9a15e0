"""Placements give free GPUs, each once; HiveD packs, Muri pairs complements."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_core import shared_core

from crux_torch.network.builders import GpuServer, double_sided, two_layer_clos
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.placement import (
    CANDIDATES,
    LEVELS,
    PLACEMENTS,
    Allocation,
    Cell,
    Request,
    candidates,
    cells,
    interleaving_efficiency,
    place_hived,
    place_hosts,
    place_muri,
    place_random,
    walk,
)

CLUSTER = two_layer_clos(hosts=6, tors=3, aggregations=2)
CELLS = cells(CLUSTER)


def hosts(gpus: tuple[str, ...] | None) -> Counter[str]:
    assert gpus is not None
    return Counter(gpu.split("/")[0] for gpu in gpus)


def test_whole_hosts_are_drawn_and_rests_fill_those_that_are_begun() -> None:
    drawn = set()
    for seed in range(200):
        allocation, rng = Allocation(CELLS), random.Random(seed)
        first = place_hosts(Request("a", 16), allocation, rng)
        assert sorted(hosts(first).values()) == [8, 8]
        drawn.add(tuple(hosts(first)))
        allocation.take(Request("a", 16), first or ())
        second = place_hosts(Request("b", 11), allocation, rng)
        assert sorted(hosts(second).values()) == [3, 8]
        allocation.take(Request("b", 11), second or ())
        (begun,) = (host for host, count in hosts(second).items() if count == 3)
        third = place_hosts(Request("c", 4), allocation, rng)
        assert hosts(third) == {begun: 4}
    assert len(drawn) == 15, "every two of six hosts"


def hived_in_turn(*sizes: int) -> list[tuple[str, ...]]:
    """The GPUs of jobs that arrive one after the other."""
    allocation, placed = Allocation(CELLS), []
    for i, size in enumerate(sizes):
        request = Request(f"j{i}", size)
        gpus = place_hived(request, allocation, random.Random(0))
        assert gpus is not None
        allocation.take(request, gpus)
        placed.append(gpus)
    return placed


def test_cells_follow_the_topology() -> None:
    count = Counter(LEVELS[c.level] for c in walk(CELLS))
    assert count == {"gpu": 48, "pcie": 24, "host": 6, "tor": 3, "pod": 1}
    assert all(
        cell.gpus == tuple(g for child in cell.children for g in child.gpus)
        for cell in walk(CELLS)
        if cell.children
    )


def test_cells_of_three_layers() -> None:
    server = GpuServer(gpus=1, nics=1, pcie_switches=1)
    root = cells(double_sided(hosts=12, cores=4, server=server))
    count = Counter(LEVELS[c.level] for c in walk(root))
    assert count == {"gpu": 12, "tor": 3, "cluster": 1}, "levels that repeat are left out"


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(PLACEMENTS)),
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=12),
    st.integers(0, 99),
)
def test_placements_are_sound(policy: str, steps: list[tuple[int, bool]], seed: int) -> None:
    allocation, rng = Allocation(CELLS), random.Random(seed)
    for i, (size, release) in enumerate(steps):
        request = Request(f"j{i}", size, rng.random(), rng.random())
        free = allocation.free()
        gpus = PLACEMENTS[policy](request, allocation, rng)
        assert (gpus is None) == (size > len(free)), "it fits where there is room, and only there"
        if gpus is not None:
            assert len(set(gpus)) == len(gpus) == size
            assert set(gpus) <= set(free)
            assert list(gpus) == [g for g in CELLS.gpus if g in set(gpus)], "host by host"
            allocation.take(request, gpus)
            assert len(allocation.free()) == len(free) - size
            if release:
                allocation.release(request.name)
                assert allocation.free() == free
        assert all(
            allocation.free_in(c) == len(set(c.gpus) & set(allocation.free())) for c in walk(CELLS)
        )


def test_random_is_seeded_and_scatters() -> None:
    request = Request("j", 8)
    first = place_random(request, Allocation(CELLS), random.Random(5))
    assert first == place_random(request, Allocation(CELLS), random.Random(5))
    assert len(hosts(first)) > 2


def test_hived_takes_the_narrowest_cell() -> None:
    assert hived_in_turn(2) == [("h0/gpu0", "h0/gpu1")], "two GPUs of one PCIe switch"
    assert len(hosts(hived_in_turn(8)[0])) == 1
    assert hosts(hived_in_turn(16)[0]) == {"h0": 8, "h1": 8}
    assert sorted(hosts(hived_in_turn(20)[0]).values()) == [4, 8, 8], "whole racks first"


def test_hived_keeps_hosts_whole() -> None:
    # First come small jobs, then wide ones: small ones share the first host.
    placed = hived_in_turn(1, 1, 2, 4, 8, 16, 8, 8)
    assert {h for gpus in placed[:4] for h in hosts(gpus)} == {"h0"}
    assert all(set(hosts(gpus).values()) == {8} for gpus in placed[4:])


@pytest.mark.parametrize("policy", ["hived", "muri"])
@pytest.mark.parametrize(("held", "size"), [(7, 1), (6, 2), (4, 4), (3, 1)])
def test_a_host_that_is_split_already_is_filled_first(policy: str, held: int, size: int) -> None:
    allocation = Allocation(CELLS)
    # It neither computes nor communicates, so that Muri has no reason to stay away.
    allocation.take(Request("a", held, 0, 0), CLUSTER.gpus("h4")[:held])
    gpus = PLACEMENTS[policy](Request("b", size, 0, 0), allocation, random.Random(0))
    assert hosts(gpus) == {"h4": size}


@settings(deadline=None, max_examples=60)
@given(st.sets(st.sampled_from(CELLS.gpus)), st.integers(0, 5))
def test_the_fullest_cells_come_first_and_of_equals_those_in_the_fullest_cells(held, level) -> None:
    allocation = Allocation(CELLS)
    allocation.take(Request("held", len(held)), tuple(held))
    level = min(level, CELLS.level)

    def room_around(cell: Cell) -> list[int]:
        around = [c for c in walk(CELLS) if set(c.gpus) >= set(cell.gpus)]
        by_level = sorted((c.level, c) for c in around if c.level >= cell.level)
        return [len(set(c.gpus) - held) for _, c in by_level]

    cells_there = allocation.levels[level]
    assert allocation.fullest_first(cells_there) == sorted(cells_there, key=room_around)
    assert allocation.fullest_first([]) == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), max_size=4), st.integers(1, 30), st.integers(0, 99))
def test_candidates_are_choices_as_near_as_hiveds_and_its_own_first(held, size, seed) -> None:
    allocation, rng = Allocation(CELLS), random.Random(seed)
    for i, gpus in enumerate(held):
        taken = place_random(Request(f"j{i}", gpus), allocation, rng)
        if taken:
            allocation.take(Request(f"j{i}", gpus), taken)
    request, free = Request("new", size), set(allocation.free())
    found = candidates(request, allocation, rng)
    first = place_hived(request, allocation, rng)
    assert found[:1] == ([first] if first else [])
    assert len(found) == len(set(found)) <= CANDIDATES
    lowest = allocation.fitting(size)
    for choice in found:
        assert len(set(choice)) == len(choice) == size
        assert set(choice) <= free
        assert any(set(choice) <= set(cell.gpus) for cell in lowest)
        assert list(choice) == [g for g in CELLS.gpus if g in set(choice)], "host by host"


def test_muri_prefers_an_empty_host_to_a_like_job_and_a_complement_to_both() -> None:
    allocation, rng = Allocation(CELLS), random.Random(0)
    request = Request("new", 4, compute_s=3, network_s=1)
    allocation.take(Request("like", 4, compute_s=3, network_s=1), CLUSTER.gpus("h0")[:4])
    assert "h0" not in hosts(place_muri(request, allocation, rng))
    allocation.take(Request("complement", 4, compute_s=1, network_s=3), CLUSTER.gpus("h1")[:4])
    for host in CLUSTER.hosts[2:]:
        allocation.take(Request(f"wall {host}", 8, 1, 0), CLUSTER.gpus(host))
    assert hosts(place_muri(request, allocation, rng)) == {"h1": 4}


def test_interleaving_efficiency() -> None:
    a, b = Request("a", 1, 3, 1), Request("b", 1, 1, 3)
    assert interleaving_efficiency(a, b) == 1.0, "perfect complements"
    # Two alike: max(3, 1) + max(1, 3) = 6 for 8 seconds of work on two resources.
    assert interleaving_efficiency(a, a) == pytest.approx(8 / 12)
    idle = Request("idle", 1, 0, 0)
    assert interleaving_efficiency(idle, idle) == 1.0


def test_a_network_without_gpus_has_none_to_give() -> None:
    with pytest.raises(WorkloadError, match="no GPUs"):
        cells(shared_core(["a", "b"], 1e9))
