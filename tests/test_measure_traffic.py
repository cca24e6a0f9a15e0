"""Bytes from host to host, against the textbook and a simulation of every hop."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.measure.record import OPS
from crux_torch.measure.traffic import SILENT_OPS, add_flows, flows

FOUR = ["a", "b", "c", "d"]
RANKS = (0, 1, 2, 3)


def test_every_operation_has_a_rule() -> None:
    assert {op for op in OPS if not flows(op, 8, RANKS, FOUR, peer=1)} == SILENT_OPS


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
    with pytest.raises(ValueError, match="no rule"):
        flows("allsplit", 1, RANKS, FOUR, peer=0)
    with pytest.raises(KeyError):
        flows("allreduce", 1, (0, 9), {0: "a"})


@given(count=st.integers(2, 20), size=st.integers(1, 10**15))
def test_totals_are_exact(count: int, size: int) -> None:
    """Over all hops a ring moves 2(n-1) S, and an all-to-all (n-1) S."""
    alone = [f"h{r}" for r in range(count)]
    ring = flows("allreduce", size, range(count), alone)
    assert sum(map(Fraction, ring.values())) == pytest.approx(2 * (count - 1) * size, rel=1e-14)
    assert len(set(ring.values())) == 1
    rows: dict[tuple[str, str], float] = {}
    for rank in range(count):
        add_flows(rows, flows("alltoall", size, range(count), alone, my_rank=rank))
    assert sum(rows.values()) == pytest.approx((count - 1) * size, rel=1e-12)
    assert len(rows) == count * (count - 1)
