"""Bytes from host to host, against the textbook and a simulation of every hop."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.measure.records import OPS
from crux_torch.measure.traffic import SILENT_OPS, add_flows, flows

FOUR = ["a", "b", "c", "d"]
RANKS = (0, 1, 2, 3)


def test_every_operation_has_a_rule() -> None:
    assert {op for op in OPS if not flows(op, 8, RANKS, FOUR, peer=1)} == SILENT_OPS


@pytest.mark.parametrize(
    ("op", "size", "ends", "hops", "each"),
    [
        ("allreduce", 1000, {}, "ab bc cd da", 1500.0),
        ("allgather_single", 1000, {}, "ab bc cd da", 750.0),
        ("reduce_scatter_single", 1000, {}, "ab bc cd da", 750.0),
        # Chains never close the ring.
        ("broadcast", 10, {"peer": 2}, "cd da ab", 10.0),
        ("reduce", 10, {"peer": 2}, "da ab bc", 10.0),
        ("gather", 400, {"peer": 0}, "ba ca da", 100.0),
        ("scatter", 400, {"peer": 3}, "da db dc", 100.0),
        ("alltoall_single", 400, {"my_rank": 1}, "ba bc bd", 100.0),
        ("send", 7, {"my_rank": 3, "peer": 0}, "da", 7.0),
        ("recv", 7, {"my_rank": 0, "peer": 3}, "", 0.0),
        ("barrier", 0, {}, "", 0.0),
    ],
)
def test_flows_by_hand(op: str, size: int, ends: dict[str, int], hops: str, each: float) -> None:
    expected = dict.fromkeys(map(tuple, hops.split()), each)
    assert flows(op, size, RANKS, FOUR, **ends) == expected


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
