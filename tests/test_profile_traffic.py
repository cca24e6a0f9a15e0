"""Bytes from host to host, against the textbook and a simulation of every hop."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.profile import traffic
from crux_torch.profile.record import OPS
from crux_torch.profile.traffic import DEFAULT_ALGORITHM, SILENT_OPS, add_flows, flows

FOUR = ["a", "b", "c", "d"]
RANKS = (0, 1, 2, 3)


def test_every_operation_has_a_rule() -> None:
    assert set(DEFAULT_ALGORITHM) | SILENT_OPS == set(OPS)


@pytest.mark.parametrize(
    ("op", "hop"),
    [("allreduce", 1500.0), ("allgather_single", 750.0), ("reduce_scatter_single", 750.0)],
)
def test_ring(op: str, hop: float) -> None:
    ring = {("a", "b"): hop, ("b", "c"): hop, ("c", "d"): hop, ("d", "a"): hop}
    assert flows(op, 1000, RANKS, FOUR) == ring


def test_chains_of_broadcast_and_reduce_never_close_the_ring() -> None:
    assert flows("broadcast", 10, RANKS, FOUR, peer=2) == {
        ("c", "d"): 10.0,
        ("d", "a"): 10.0,
        ("a", "b"): 10.0,
    }
    assert flows("reduce", 10, RANKS, FOUR, peer=2) == {
        ("d", "a"): 10.0,
        ("a", "b"): 10.0,
        ("b", "c"): 10.0,
    }
    assert flows("reduce", 10, RANKS, FOUR, peer=2, algorithm="direct") == {
        ("a", "c"): 10.0,
        ("b", "c"): 10.0,
        ("d", "c"): 10.0,
    }


def test_root_and_all_to_all() -> None:
    assert flows("gather", 400, RANKS, FOUR, peer=0) == {
        ("b", "a"): 100.0,
        ("c", "a"): 100.0,
        ("d", "a"): 100.0,
    }
    assert flows("scatter", 400, RANKS, FOUR, peer=3) == {
        ("d", "a"): 100.0,
        ("d", "b"): 100.0,
        ("d", "c"): 100.0,
    }
    row = flows("alltoall_single", 400, RANKS, FOUR, my_rank=1)
    assert row == {("b", "a"): 100.0, ("b", "c"): 100.0, ("b", "d"): 100.0}
    assert flows("send", 7, RANKS, FOUR, my_rank=3, peer=0) == {("d", "a"): 7.0}
    assert flows("recv", 7, RANKS, FOUR, my_rank=0, peer=3) == {}
    assert flows("barrier", 0, RANKS, FOUR) == {}


def test_group_ranks_are_not_global_ranks() -> None:
    assert flows("send", 5, (1, 3), FOUR, my_rank=0, peer=1) == {("b", "d"): 5.0}
    assert flows("send", 5, (1, 3), {1: "b", 3: "d"}, my_rank=0, peer=1) == {("b", "d"): 5.0}


def test_bytes_within_a_host_are_dropped() -> None:
    hosts = ["a", "a", "b", "b"]
    assert flows("allreduce", 1000, RANKS, hosts) == {("a", "b"): 1500.0, ("b", "a"): 1500.0}
    assert flows("allreduce", 1000, RANKS, ["a"] * 4) == {}
    assert flows("allreduce", 1000, (0,), ["a"]) == {}


def test_what_is_missing_raises() -> None:
    with pytest.raises(ValueError, match="root"):
        flows("broadcast", 1, RANKS, FOUR)
    with pytest.raises(ValueError, match="tree"):
        flows("gather", 1, RANKS, FOUR, peer=0, algorithm="tree")
    with pytest.raises(KeyError):
        flows("allreduce", 1, (0, 9), {0: "a"})


@given(count=st.integers(2, 20), size=st.integers(1, 10**15), per_host=st.integers(1, 3))
def test_totals_are_exact(count: int, size: int, per_host: int) -> None:
    """Over all hops a ring moves 2(n-1) S; a tree over h hosts 2(h-1) S."""
    alone = [f"h{r}" for r in range(count)]
    ring = flows("allreduce", size, range(count), alone)
    assert sum(map(Fraction, ring.values())) == pytest.approx(2 * (count - 1) * size, rel=1e-14)
    assert len(set(ring.values())) == 1
    crowded = [f"h{r // per_host}" for r in range(count)]
    hosts = len(set(crowded))
    tree = flows("allreduce", size, range(count), crowded, algorithm="tree")
    assert sum(tree.values()) == pytest.approx(2 * (hosts - 1) * size, rel=1e-14)
    rows: dict[tuple[str, str], float] = {}
    for rank in range(count):
        add_flows(rows, flows("alltoall", size, range(count), alone, my_rank=rank))
    assert sum(rows.values()) == pytest.approx((count - 1) * size, rel=1e-12)
    assert len(rows) == count * (count - 1)


@given(count=st.integers(2, 200))
def test_trees_span_and_share_no_inner_node(count: int) -> None:
    inner = []
    for parents in traffic._tree_pair(count):
        assert len(parents) == count - 1
        children = Counter(parents.values())
        assert max(children.values()) <= 2
        for node in parents:
            at, steps = node, 0
            while at in parents:
                at, steps = parents[at], steps + 1
                assert steps <= count.bit_length() + 1, "the root is near"
        inner.append({node for node in children if node in parents})
    # With an odd number of hosts one host may be inner in both.
    assert len(inner[0] & inner[1]) <= count % 2


@pytest.mark.parametrize(
    ("count", "parents"),
    [(4, {1: 2, 2: 0, 3: 2}), (8, {1: 2, 2: 4, 3: 2, 4: 0, 5: 6, 6: 4, 7: 6}), (3, {1: 2, 2: 0})],
)
def test_nccls_binary_tree(count: int, parents: dict[int, int]) -> None:
    assert {n: traffic._tree_parent(n, count) for n in range(1, count)} == parents
    assert traffic._tree_parent(0, count) is None
